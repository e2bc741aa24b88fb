"""The studies in examples/: what their tables must show."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from qscale.validate import leave_one_out, surprises

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def rates():
    return load("learning_rate_transfer")


@pytest.fixture(scope="module")
def runs(rates):
    return rates.measurements()


def test_a_law_with_the_learning_rate_predicts_the_13b_where_size_and_tokens_do_not(
    rates, runs
) -> None:
    made = rates.transfer(runs)
    assert abs(np.median(made.log_error("lr_anneal"))) <= 0.10
    assert 0.85 <= made.coverage("lr_anneal") <= 1.0
    for law in ("ouyang", "kumar"):
        assert np.median(made.log_error(law)) > 0.25
        assert made.tests[law].low > 0


def test_each_peak_rate_is_predicted_from_the_other_three(rates, runs) -> None:
    found = rates.peak_rates(runs)
    found["size"] = found["log_error"].abs()
    medians = found.groupby(["law", "lr_peak"])["size"].median()
    assert (medians["lr_anneal"] <= 0.10).all()
    assert (medians["ouyang"] >= 0.27).all()
    wide = found.pivot_table(index=["lr_peak", "row"], columns="law", values="size")
    difference = (wide["ouyang"] - wide["lr_anneal"]).to_numpy()
    assert rates.paired(difference, wide.index.get_level_values(0)).low > 0


def test_a_mistaken_peak_rate_stands_out(rates, runs) -> None:
    wrong = surprises(rates.mistaken(runs), rates.with_learning_rate)
    assert wrong["cluster"][0] == "OLMo-2-13B"
    assert wrong["p_holm"][0] < 0.05
    assert (wrong["p_holm"][1:] > 0.5).all()
    right = surprises(runs, rates.with_learning_rate)
    assert (right["p_holm"] > 0.1).all()


def test_at_fixed_tokens_the_error_falls_with_the_peak_rate(runs) -> None:
    stable = runs[runs["figure"].str.startswith("fig6a") & (runs["phase"] == "stable")]
    for tokens in (20e9, 40e9, 60e9, 78e9):
        points = [
            (np.log(peak), np.interp(np.log(tokens), np.log(g["tokens"]), np.log(g["error"])))
            for peak, g in stable.sort_values("tokens").groupby("lr_peak")
        ]
        slope = np.polyfit(*np.transpose(points), 1)[0]
        assert slope == pytest.approx(-0.29, abs=0.05)


def test_the_tokens_exponent_depends_on_the_schedule(rates, runs) -> None:
    exponents = rates.tokens_exponents(runs).groupby("part")["exponent"]
    assert exponents.median()["constant rate"] == pytest.approx(0.10, abs=0.05)
    assert exponents.max()["after decay"] < 0.1
    assert exponents.min()["while decaying"] > 0.2  # the cosine runs
    assert exponents.max()["while decaying"] < 0.5
    assert rates.with_learning_rate(runs).values["beta"] == pytest.approx(0.10, abs=0.05)


def test_families_left_out_are_predicted_and_one_row_helps() -> None:
    family = load("new_family")
    table = family.measurements()
    splits = leave_one_out(table, "family")
    blind, told = (
        pd.concat([family.held_out(table, split, given) for split in splits])
        for given in (False, True)
    )
    naive = pd.concat([family.naive(table, split) for split in splits])
    assert blind["log_error"].abs().median() <= 0.35
    assert told["log_error"].abs().median() <= 0.25
    assert naive.abs().median() > 1.5 * told["log_error"].abs().median()
    for errors in (blind, told):
        assert 0.80 <= errors["inside_90"].mean() <= 0.97


@pytest.mark.parametrize(
    ("name", "shape", "value"), [("size_exponential", "g", 0.81), ("size_power", "gamma", 4.84)]
)
def test_gguf_formats_follow_either_law_and_cannot_tell_them_apart(name, shape, value) -> None:
    formats = load("gguf_formats")
    rows = formats.measurements()
    assert rows["run"].nunique() == 4
    made, share = formats.r_squared(rows, name)
    assert share >= 0.96
    assert made.values["alpha"] == pytest.approx(0.47, abs=0.02)
    assert made.values[shape] == pytest.approx(value, rel=0.02)
    assert "cannot tell them apart" in formats.told_apart(rows, "fmt")


def test_curvature_along_the_error_predicts_what_seven_models_lose() -> None:
    study = load("zero_fit")
    rows = study.usable(study.table.read(study.ROWS))
    assert rows["run"].nunique() == 7
    part = rows[rows["bits"].between(3, 4)].groupby("method")
    measured = part["delta_loss"].sum()
    along = part["gauss_newton_delta"].sum() / measured
    assert along.between(0.8, 1.2).all()
    # Without direction the prediction holds for rounding to nearest only.
    isotropic = part["quadratic_delta"].sum() / measured
    assert 0.8 < isotropic["rtn"] < 1.2
    assert isotropic["gptq"] > 4


def test_one_parameter_for_large_increases_holds_on_models_it_was_not_fitted_on() -> None:
    study = load("zero_fit")
    rows = study.usable(study.table.read(study.ROWS))
    found = study.left_out(rows[rows["method"] == "rtn"], "gauss_newton_delta")
    linked = found["3 to 6, link"].astype(float)
    plain = found["3 to 6, nothing fitted"].astype(float)
    assert linked.between(0.88, 1.12).all()
    assert np.abs(np.log(linked)).mean() < np.abs(np.log(plain)).mean()
