"""Frontiers of size and precision."""

import numpy as np
import pandas as pd
import pytest

from qscale import datasets
from qscale.errors import QscaleError
from qscale.plan.pareto import best_within, frontier, largest_models, measured, predicted
from tests.plan.laws import increase_fit, loss_fit

SETTINGS = pd.DataFrame({"bits": [2.0, 3.0, 4.0, 5.0, 6.0, 8.0], "tokens": 1e12}).assign(
    bits_per_weight=lambda t: t["bits"] + 0.125
)


@pytest.mark.parametrize("seed", range(5))
def test_the_frontier_is_what_nothing_dominates(seed) -> None:
    rng = np.random.default_rng(seed)
    size, loss = rng.integers(1, 12, 60).astype(float), rng.integers(1, 12, 60).astype(float)
    on = frontier(size, loss)
    for i in range(60):
        others = np.arange(60) != i
        matched = (size[others] <= size[i]) & (loss[others] <= loss[i])
        better = matched & ((size[others] < size[i]) | (loss[others] < loss[i]))
        assert not (on[i] and better.any())
        assert on[i] or matched.any()
    points = set(zip(size[on], loss[on], strict=True))
    assert len(points) == on.sum()


def test_each_budget_is_filled_and_its_best_found() -> None:
    loss, delta = loss_fit(), increase_fit()
    frame = largest_models(SETTINGS, [1e9, 8e9])
    np.testing.assert_allclose(frame["n_params"] * frame["bits_per_weight"] / 8, frame["memory"])
    found = predicted(loss, delta, frame, count=400)
    for budget, rows in found.groupby("memory"):
        v, w = loss.values, delta.values
        n = 8 * budget / rows["bits_per_weight"]
        by_hand = v["E"] + v["A"] * n ** -v["alpha"] + v["B"] * 1e12 ** -v["beta"]
        by_hand += w["k"] * 1e12 ** w["beta"] * n ** -w["alpha"] * rows["bits"] ** -w["gamma"]
        np.testing.assert_allclose(rows["loss_q"], by_hand, rtol=1e-9)
        assert rows["on_frontier"].tolist() == (by_hand == by_hand.min()).tolist()
        assert rows["share_on_frontier"].sum() == pytest.approx(1.0)
        assert (
            best_within(found[found["memory"] == budget], budget)["bits"]
            == (rows["bits"][by_hand.idxmin()])
        )
    assert (found["low"] < found["loss_q"]).all()
    assert (found["loss_q"] < found["high"]).all()


def test_a_family_of_sizes_shares_no_deviation_between_sizes() -> None:
    loss, delta = loss_fit(), increase_fit(between=0.4)
    frame = pd.concat([SETTINGS.assign(n_params=n) for n in (1e9, 1.02e9)], ignore_index=True)
    found = predicted(loss, delta, frame, count=2000)
    # The larger of two nearly equal models at the same bits is on the frontier only by luck: where
    # their increases differ by what runs differ by.
    low = found[(found["bits"] == 2) & (found["n_params"] == 1.02e9)].iloc[0]
    assert 0.3 < low["share_on_frontier"] < 0.7
    same = found[(found["bits"] == 3) & (found["n_params"] == 1e9)].iloc[0]
    assert same["share_on_frontier"] > 0.95


def test_a_measured_family() -> None:
    table = datasets.load("published_ptq").query(
        "method == 'gptq' and source == 'GPTQ paper' and protocol == 'wikitext2/ctx2048' "
        "and family == 'OPT'"
    )
    found = measured(table)
    on = found[found["on_frontier"]]
    assert on["bytes"].is_monotonic_increasing
    assert on["loss_q"].is_monotonic_decreasing
    assert (found["status"] == "ok").all()
    assert "OPT-125M" in on["run"].tolist()
    assert best_within(found, 1.0) is None


def test_losses_that_do_not_compare() -> None:
    table = datasets.load("published_ptq")
    with pytest.raises(QscaleError, match="several protocols do not compare"):
        measured(table)
    with pytest.raises(QscaleError, match="no row has"):
        measured(table.assign(loss_q=np.nan, status="degraded").assign(loss_q=1.0))
