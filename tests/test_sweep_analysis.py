"""The controlled sweep's analysis: its pairs, its noise floor and what it finds in the table."""

import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

FOLDER = Path(__file__).resolve().parent.parent / "examples" / "controlled_sweep"
sys.path.insert(0, str(FOLDER))

import analysis  # noqa: E402
import comparisons  # noqa: E402

SETTING = {"method": "rtn", "bits": 4, "group": "g32", "evaluation": "books", "n_params": 100}


def row(run="a-seed0", schedule="constant", step=100, **more):
    """One checkpoint at one setting."""
    seen = {"averaging": "none", "weight_decay": 0.1, "lr_peak": 1e-3, "delta_loss": 1.0}
    ends = {"decay_fraction": float(schedule == "wsd"), "decay_share": 0.2}
    if schedule != "wsd":
        ends["decay_share"] = 0.0
    return {**SETTING, **seen, **ends, "run": run, "lr_schedule": schedule, "step": step, **more}


@pytest.fixture(scope="module")
def table():
    return analysis.read()


def test_a_decay_is_compared_with_where_it_began() -> None:
    frame = pd.DataFrame([
        row(step=80, delta_loss=2.0), row(step=100, delta_loss=3.0),
        row(schedule="wsd", step=100, delta_loss=5.0),
        row(schedule="wsd", step=100, delta_loss=4.0, decay_fraction=0.5),
    ])  # fmt: skip
    (pair,) = comparisons.decays(frame).to_dict("records")
    assert (pair["delta_loss"], pair["delta_loss_other"]) == (5.0, 2.0)
    change = comparisons.changes(pd.DataFrame([pair] * 3).assign(run=list("abc")), ["delta_loss"])
    assert change.loc["delta_loss", "difference"] == pytest.approx(np.log(2.5))


def test_an_average_is_compared_with_its_last_checkpoint() -> None:
    frame = pd.DataFrame([row(), row(averaging="lawa", delta_loss=0.5), row(step=50)])
    (pair,) = comparisons.averages(frame).to_dict("records")
    assert (pair["step"], pair["delta_loss"], pair["delta_loss_other"]) == (100, 0.5, 1.0)


def test_weight_decays_are_compared_at_one_seed_and_all_else_equal() -> None:
    frame = pd.DataFrame([
        row(run="a-seed0"), row(run="a-seed1", delta_loss=9.0),
        row(run="b-seed0", weight_decay=0.01, delta_loss=7.0),
        row(run="c-seed0", weight_decay=0.01, lr_peak=2e-3),
    ])  # fmt: skip
    (pair,) = comparisons.weight_decays(frame).to_dict("records")
    assert (pair["delta_loss"], pair["delta_loss_other"]) == (7.0, 1.0)


def test_the_noise_floor_is_the_error_of_a_law_that_is_right_for_every_cell() -> None:
    rng = np.random.default_rng(0)
    noise = 0.1 * rng.normal(size=(2, 4000))
    frame = pd.DataFrame([
        row(run=f"{i}-seed{s}", step=i, delta_loss=np.exp(noise[s, i]))
        for i in range(4000) for s in (0, 1)
    ])  # fmt: skip
    floor, pairs = comparisons.noise_floor(frame, "delta_loss")
    assert pairs == 4000
    assert floor == pytest.approx(np.median(np.abs(noise)), rel=0.05)


def test_held_out_tests_leave_out_what_they_say(table) -> None:
    rows = analysis.usable(table)
    tests = analysis.splits(rows)
    folds = np.array([split.test for split in tests["other runs"]])
    assert (folds.sum(axis=0) == 1).all()
    for fold in folds:  # both seeds of a cell are in one fold
        assert not set(rows["cell"][fold]) & set(rows["cell"][~fold])
    (late,) = tests["late tokens"]
    for _, part in rows.assign(late=late.test).groupby("n_params"):
        if part["late"].all():
            continue
        early = part.loc[~part["late"], "tokens"].max()
        assert early < part.loc[part["late"], "tokens"].min()
    assert rows["bits"][tests["3 bits"][0].test].eq(3).all()


def test_settings_are_unique_and_counted_once(table) -> None:
    rows = analysis.usable(table)
    assert not rows.duplicated(["checkpoint", "run", "bits", "group"]).any()
    counted = analysis.cells(table)
    assert counted["rows"].sum() == len(table)
    assert counted["checkpoints"].sum() == len(table.drop_duplicates(["run", "checkpoint"]))


@pytest.mark.slow
def test_predictions_that_know_the_errors_direction_hold_for_gptq(table) -> None:
    found = analysis.directions(table)
    assert found.loc[("gptq", "gauss_newton_delta"), "median |log error|"] < 0.1
    assert found.loc[("gptq", "quadratic_delta"), "median |log error|"] > 1.0


@pytest.mark.slow
def test_what_the_documents_say_of_the_sweep(table) -> None:
    rows = analysis.usable(table)
    medians = analysis.medians(analysis.scores(rows, "rtn", "delta_loss"))
    floor, _ = comparisons.noise_floor(rows, "delta_loss")
    assert medians.loc["other runs", "q"] < 1.5 * floor
    assert medians.loc["late tokens", "q"] < medians.loc["late tokens", "lr_anneal"] / 2
    held = analysis.planned(rows)
    assert held.loc["ggn_trace", "other runs"] < 0.25
