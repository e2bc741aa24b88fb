"""Held-out tests: splits hold out what they say, scores equal a hand computation."""

from functools import partial

import numpy as np
import pytest

from qscale.errors import FitError
from qscale.fit import fit
from qscale.laws import get
from qscale.predict import predict
from qscale.validate import largest, leave_one_out, score
from tests.simulations import simulate


@pytest.fixture
def table():
    frame = simulate(runs=20)
    frame["family"] = np.repeat(["A", "B", None, "C"], 15)
    return frame


def test_each_family_is_held_out_once_and_unknown_ones_only_train(table) -> None:
    splits = leave_one_out(table, "family")
    assert [s.name for s in splits] == ["family A", "family B", "family C"]
    assert np.sum([s.test for s in splits], axis=0).tolist() == table["family"].notna().tolist()


def test_the_largest_quarter_of_sizes_is_held_out(table) -> None:
    split = largest(table)
    assert table["n_params"][split.test].nunique() == 5
    assert table["n_params"][split.test].min() > table["n_params"][~split.test].max()


def test_scores_equal_a_hand_computation(table) -> None:
    law = get("ouyang")
    refit = partial(fit, law=law, n_boot=100)
    split = leave_one_out(table, "family")[0]
    scored = score(table, law, [split], refit).iloc[0]
    predicted = predict(refit(table[~split.test]), table[split.test])
    observed = table["delta_loss"][split.test].to_numpy()
    error = np.log(predicted["delta_loss"].to_numpy() / observed)
    assert scored["median_abs_log_error"] == pytest.approx(np.median(np.abs(error)))
    assert scored["bias"] == pytest.approx(np.median(error))
    inside = (predicted["low_90"] <= observed) & (observed <= predicted["high_90"])
    assert scored["coverage_90"] == pytest.approx(inside.mean())
    assert (scored["rows"], scored["clusters"]) == (15, 5)


def test_a_split_that_cannot_be_fitted_says_why(table) -> None:
    only = table.assign(bits=np.where(table["family"] == "A", 3.0, 4.0))
    scored = score(
        only, get("ouyang"), leave_one_out(only, "family"), partial(fit, law=get("ouyang"))
    )
    assert "'bits' has 1 distinct value" in scored["error"].iloc[0]


def test_coverage_without_intervals_is_null_and_not_zero(table) -> None:
    refit = partial(fit, law=get("ouyang"), interval="bootstrap", n_boot=0)
    scored = score(table, get("ouyang"), leave_one_out(table, "family"), refit)
    assert scored["coverage_90"].isna().all()
    assert scored["median_abs_log_error"].notna().all()


def test_too_few_groups_are_an_error(table) -> None:
    with pytest.raises(FitError, match="at least two"):
        leave_one_out(table, "protocol")
    with pytest.raises(FitError, match="three distinct"):
        largest(table.assign(n_params=1e9))
