"""What a report says about a fit's rows, and held-out scores against those computed by hand."""

from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import pytest

from qscale.fit import fit
from qscale.laws import get, is_named, published
from qscale.predict import predict
from qscale.report import words
from qscale.report.comparison import against_baseline
from qscale.report.evidence import (
    LARGEST,
    LEAVE_ONE_OUT,
    Group,
    comparable,
    gather,
    held_out,
    summarize,
)
from qscale.validate import largest, leave_one_out, score
from tests.report.conftest import rows


def silent(_: str) -> None:
    """Report nothing."""


@pytest.fixture(scope="module")
def frame() -> pd.DataFrame:
    return rows().assign(source=lambda t: t["source"].where(t.index % 5 > 0))


@pytest.fixture(scope="module")
def evidence(frame):
    made = fit(frame, get("ouyang"), where="bits < 4", offset=["source"], n_boot=60)
    return gather("x", made, frame)


@pytest.fixture(scope="module")
def scored(evidence):
    return held_out([evidence], n_boot=30, progress=silent)


def test_rows_are_those_of_the_fit(evidence, frame) -> None:
    fitted = evidence.fit
    assert len(evidence.rows) == fitted.data.rows == 48
    np.testing.assert_array_equal(evidence.row_numbers, np.flatnonzero(frame["bits"] < 4))
    assert set(evidence.rows["source"]) == {*frame["source"].dropna(), "unknown"}
    assert evidence.refitted.data.sha256 == fitted.data.sha256
    np.testing.assert_array_equal(evidence.refitted.theta, fitted.theta)


def test_residuals_are_logs_of_observed_over_predicted(evidence) -> None:
    # Around the law itself: a known run's own deviation is not part of what it predicts here.
    expected = predict(evidence.fit, evidence.rows.drop(columns="run"))["delta_loss"]
    observed = evidence.rows["delta_loss"]
    np.testing.assert_allclose(np.exp(evidence.residuals), observed / expected)


def test_the_law_is_known_without_its_offsets(evidence) -> None:
    assert evidence.fit.law.names != get("ouyang").names == evidence.law.names
    assert is_named(evidence.law)
    assert published(evidence.law) == get("ouyang").published
    assert published(replace(evidence.law, target="kl")) == ()
    changed = replace(evidence.law, factors=evidence.law.factors[:-1])
    assert not is_named(changed)
    assert published(changed) == ()


def test_scores_are_those_of_validate(evidence, scored, frame) -> None:
    law, where = get("ouyang"), "bits < 4"
    usable = frame[frame["bits"] < 4].reset_index(drop=True)
    refit = partial(fit, law=law, where=where, offset=["source"], n_boot=30)
    splits = [*leave_one_out(usable, "family"), largest(usable)]
    expected = score(usable, law, splits, refit, where=where)
    columns = ["held_out", "rows", "median_abs_log_error", "bias", "coverage_90", "width_90"]
    pd.testing.assert_frame_equal(scored.scores[columns], expected[columns])
    assert scored.scores["protocol"].tolist() == [LEAVE_ONE_OUT] * 3 + [LARGEST]
    assert (scored.left_out, scored.rows, scored.notes) == ("family", 48, ())


def test_the_naive_rule_is_the_mean_of_the_known_rows_of_each_bit_width(evidence, scored) -> None:
    usable, target = evidence.rows, np.log(evidence.rows["delta_loss"])
    for name, family in enumerate(sorted(usable["family"].unique())):
        left = usable["family"] == family
        means = target[~left].groupby(usable["bits"]).mean()
        error = (target[left] - usable["bits"][left].map(means)).abs().median()
        row = scored.baseline.iloc[name]
        assert row["held_out"] == f"family {family}"
        assert row["median_abs_log_error"] == pytest.approx(error, rel=1e-6)
    (sentence,) = against_baseline(Group((evidence,), scored))
    both = scored.scores["median_abs_log_error"] < scored.baseline["median_abs_log_error"]
    assert f"closer on {both.sum()} of 4" in sentence
    assert "no better" not in sentence
    (sentence,) = against_baseline(Group((evidence,), replace(scored, baseline=scored.scores)))
    assert "closer on 0 of 4. On such rows the law is no better" in sentence


def test_summary_weighs_rows_and_passes_over_failures() -> None:
    scores = pd.DataFrame(
        {
            "fit": "x",
            "protocol": LEAVE_ONE_OUT,
            "rows": [10, 30, 5],
            "median_abs_log_error": [0.1, 0.3, np.nan],
            "coverage_50": [0.5, 0.1, np.nan],
            "coverage_90": [1.0, 0.8, np.nan],
        }
    )
    found = summarize(scores)["x", LEAVE_ONE_OUT]
    assert (found.splits, found.lowest, found.highest) == (2, 0.1, 0.3)
    assert found.error == pytest.approx(0.2)
    assert found.coverage == pytest.approx({50: 0.2, 90: 0.85})


def test_fits_are_comparable_on_one_table_and_target(evidence) -> None:
    other_target = replace(evidence, law=replace(evidence.law, target="kl"))
    other_table = replace(evidence, table=evidence.table.copy())
    groups = comparable([evidence, other_target, evidence, other_table])
    assert [len(group) for group in groups] == [2, 1, 1]


def test_few_clusters_are_left_out_one_by_one(frame) -> None:
    one_family = frame.assign(family="A", lab=frame.index % 6).astype({"lab": str})
    made = fit(one_family, get("ouyang"), cluster="lab", n_boot=0)
    found = held_out([gather("x", made, one_family)], n_boot=25, progress=silent)
    assert found.left_out == "lab"
    names = found.scores.loc[found.scores["protocol"] == LEAVE_ONE_OUT, "held_out"]
    assert names.tolist() == [f"lab {i}" for i in range(6)]


def test_one_size_cannot_be_extrapolated_from(frame) -> None:
    one_size = frame.assign(n_params=1e9)
    made = fit(one_size, get("ouyang"), fixed={"alpha": 0.3}, n_boot=0)
    found = held_out([gather("x", made, one_size)], n_boot=25, progress=silent)
    assert LARGEST not in set(found.scores["protocol"])
    assert "largest sizes were not held out (holding out the largest n_params" in found.notes[0]


def test_a_law_that_cannot_be_fitted_without_a_group_says_so(frame) -> None:
    tied = frame.assign(bits=frame["family"].map({"Ash": 2.0, "Birch": 2.0, "Cedar": 3.0}))
    made = fit(tied, get("ouyang"), n_boot=0)
    found = held_out([gather("x", made, tied)], n_boot=25, progress=silent).scores
    failed = found[found["error"] != ""]
    assert failed["held_out"].tolist() == ["family Cedar"]
    assert "'bits' has 1 distinct value" in failed["error"].iloc[0]


def test_the_headline_is_built_from_the_numbers(evidence, scored) -> None:
    text = words.headline(evidence, scored, Group((evidence,), scored).summary)
    settings = words.middle_settings(evidence)
    assert settings["bits"].tolist() == [3.0, 2.0]
    sizes = np.sort(evidence.rows["n_params"])
    assert settings["n_params"].unique() == [sizes[(len(sizes) - 1) // 2]]
    result = predict(evidence.fit, settings)
    for bits, row in zip((3, 2), result.itertuples(), strict=True):
        low, high = row.low_90, row.high_90
        assert f"{row.delta_loss:.2g} at {bits} bits" in text
        assert f"{low:.2g} to {high:.2g})" in text
    assert "the average source" in text
    error = scored.scores["median_abs_log_error"][:3].mean()
    assert f"On each family left out, its typical error was {words.off_by(error)} (" in text
    inside = scored.scores[:3]
    share = np.average(inside["coverage_90"], weights=inside["rows"])
    assert f"{100 * share:.0f} % of the measured values" in text


def test_a_failed_fit_is_not_quoted(evidence, scored) -> None:
    search = replace(evidence.fit.search, status="failed", detail="nothing converged")
    failed = replace(evidence, fit=replace(evidence.fit, search=search))
    text = words.headline(failed, scored, {})
    assert "failed (nothing converged)" in text
    assert "nats" not in text


def test_a_fit_without_intervals_says_so(frame) -> None:
    each = gather("x", fit(frame, get("ouyang"), interval="bootstrap", n_boot=0), frame)
    found = held_out([each], n_boot=25, progress=silent)
    assert "at 4 bits (no interval)" in words.headline(each, found, {})
    assert "could not be tested" in words.headline(each, found, {})


def test_multipliers_have_a_geometric_mean_of_one(evidence) -> None:
    (sentence,) = words.multipliers(evidence.fit)
    shown = sentence.count(" × ")
    assert shown == 3
    logs = evidence.fit.parameters()["estimate"].filter(like="source[")
    expected = np.exp([*logs, -logs.sum()])
    assert np.prod(expected) == pytest.approx(1)
    for factor in expected:
        assert f" × {factor:.3g}" in sentence
