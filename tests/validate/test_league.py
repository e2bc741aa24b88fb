"""The league finds the law that made the data, and says what it could not score."""

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import pytest

from qscale.errors import FitError
from qscale.fit import fit
from qscale.laws import get
from qscale.validate import compare, leave_one_out
from qscale.validate.league import BASELINE, mean_by_setting
from tests.simulations import simulate

OUYANG = get("ouyang")
WITHOUT_TOKENS = replace(
    OUYANG,
    name="without tokens",
    factors=tuple(f for f in OUYANG.factors if f.columns != ("tokens",)),
)


def models():
    return {
        law.name: partial(fit, law=law, interval="model", name="training rows")
        for law in (WITHOUT_TOKENS, OUYANG)
    }


@pytest.fixture(scope="module")
def table():
    frame = simulate(runs=24, between=0.1, within=0.05, seed=1)
    frame["family"] = np.repeat(np.arange(24) % 4, 3).astype(str)
    return frame


@pytest.fixture(scope="module")
def league(table):
    return compare(table, models(), leave_one_out(table, "family"))


def test_the_true_law_is_first_and_the_test_tells_it_from_a_wrong_one(league) -> None:
    assert league.table["model"].iloc[0] == "ouyang"
    tests = league.tests.set_index("model")
    assert set(tests.index) == {"without tokens", BASELINE}
    assert (tests["p_holm"] < 0.01).all()
    assert (tests["low"] > 0).all()
    assert (tests["clusters"] == 24).all()


def test_differences_and_scores_follow_from_the_held_out_rows(league) -> None:
    means = (
        league.errors.assign(size=league.errors["log_error"].abs()).groupby("model")["size"].mean()
    )
    for _, row in league.table.iterrows():
        assert row["mean_abs_log_error"] == pytest.approx(means[row["model"]])
    for _, row in league.tests.iterrows():
        assert row["difference"] == pytest.approx(means[row["model"]] - means["ouyang"])
    by_split = league.by_split[league.by_split["model"] == "ouyang"]
    assert np.average(by_split["mean_abs_log_error"], weights=by_split["rows"]) == pytest.approx(
        means["ouyang"]
    )


def test_coverage_of_the_true_law_is_near_its_level(league) -> None:
    row = league.table.set_index("model").loc["ouyang"]
    assert row["coverage_90_low"] <= 0.9 <= row["coverage_90_high"] + 0.05
    assert row["coverage_50_low"] <= 0.5 <= row["coverage_50_high"]


def test_the_baseline_is_the_mean_log_of_each_setting() -> None:
    train = pd.DataFrame(
        {
            "run": list("abcdef"),
            "_setting": ["rtn 3", "rtn 3", "rtn 3", "rtn 4", "rtn 4", "gptq 4"],
            "delta_loss": [0.5, 0.7, 0.2, 0.1, 0.3, 0.05],
        }
    )
    fitted = mean_by_setting("delta_loss")(train)
    means = np.log(train["delta_loss"]).groupby(train["_setting"]).mean()
    asked = pd.DataFrame({"_setting": ["rtn 3", "rtn 4", "gptq 4", "awq 2"], "run": "new"})
    expected = [means["rtn 3"], means["rtn 4"], means["gptq 4"], means.mean()]
    assert np.log(fitted.center(asked)) == pytest.approx(expected, abs=1e-6)


def test_few_shot_league_gives_the_baseline_its_row_too(table) -> None:
    deviating = simulate(runs=24, between=0.6, within=0.02, seed=1).assign(family=table["family"])
    splits = leave_one_out(deviating, "family")[:2]
    blind, told = (
        compare(deviating, {"ouyang": models()["ouyang"]}, splits, given_rows=given)
        .table.set_index("model")["mean_abs_log_error"]
        .sort_index()
        for given in (0, 1)
    )
    assert (told < 0.25 * blind).all()


def test_what_cannot_be_scored_is_noted_once(table) -> None:
    frame = table.assign(method="rtn", status="ok")
    frame.loc[frame["family"].isin(["1", "2"]), "tokens"] = np.nan
    frame.loc[0, "status"] = "collapsed"
    frame.loc[1, "bits"] = np.nan
    league = compare(frame, {"ouyang": models()["ouyang"]}, leave_one_out(frame, "family"))
    notes = "\n".join(league.notes)
    assert (
        "ouyang has no score for family 1, family 2: it has no row with a value in each of tokens"
        in notes
    )
    assert "1 held-out rows are not scored because" in notes
    assert "Scores are of the 34 held-out rows that every model predicts; of 71 in all" in notes
    assert set(league.table["rows"]) == {34}


def test_a_league_without_models_rows_or_column_is_an_error(table) -> None:
    splits = leave_one_out(table, "family")
    with pytest.raises(FitError, match="at least one model"):
        compare(table, {}, splits)
    with pytest.raises(FitError, match="no column 'kl'"):
        compare(table, models(), splits, target="kl")
    with pytest.raises(FitError, match="no held-out row can be scored"):
        compare(table.assign(delta_loss=-1.0), models(), splits)


def test_files_hold_what_was_computed(league, tmp_path) -> None:
    for suffix in ("json", "csv", "md"):
        league.save(tmp_path / f"league.{suffix}")
    content = json.loads((tmp_path / "league.json").read_text())
    assert [row["model"] for row in content["table"]] == list(league.table["model"])
    assert len(content["errors"]) == len(league.errors)
    csv = pd.read_csv(tmp_path / "league.csv")
    assert csv["pinball"].tolist() == pytest.approx(league.table["pinball"].tolist())
    assert (
        f"| ouyang | 72 | 24 | {league.table['mean_abs_log_error'][0]:.4g} |"
        in (tmp_path / "league.md").read_text()
    )
    with pytest.raises(FitError, match="must end in one of"):
        league.save(tmp_path / "league.txt")
