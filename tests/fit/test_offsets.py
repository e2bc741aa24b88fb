"""Levels of an offset that were not fitted: their spread, shared by the rows that have them."""

import numpy as np
import pandas as pd
import pytest

from qscale.fit import fit
from qscale.fit.shipped import find
from qscale.laws import get
from qscale.plan.joint import joint
from tests.simulations import simulate

ROWS = pd.DataFrame({"n_params": 13e9, "tokens": 2e12, "bits": [4.0, 2.0, 3.0]})


def sourced(sources: int, seed: int, spread: float = 0.5):
    """Rows of several sources, each with a multiplier of its own, and the logs of those."""
    rng = np.random.default_rng(seed)
    logs = rng.normal(0, spread, sources)
    parts = [
        simulate(runs=8, between=0.1, within=0.05, seed=100 * seed + i, prefix=f"s{i}-").assign(
            source=f"s{i}", delta_loss=lambda t, x=x: t["delta_loss"] * np.exp(x)
        )
        for i, x in enumerate(logs)
    ]
    return parts, logs


@pytest.mark.parametrize("name", ["published_gptq_kumar", "published_rtn_kumar"])
def test_given_rows_of_an_unseen_source_condition_exactly(name) -> None:
    fitted = find(name)
    found = joint(fitted, ROWS)
    own = found.covariance + found.residual * np.eye(3)
    gain = own[:2, :2]
    expected = own[2, 2] - own[2, :2] @ np.linalg.solve(gain, own[:2, 2])
    measured = ROWS[:2].assign(delta_loss=[0.1, 0.9])
    informed = fitted.given(measured)
    single = informed.predictive(ROWS[2:])
    assert single.sd[0] ** 2 == pytest.approx(expected, rel=1e-6)
    surprise = np.log(measured["delta_loss"].to_numpy()) - found.location[:2]
    moved = found.location[2] + own[2, :2] @ np.linalg.solve(gain, surprise)
    assert single.mean[0] == pytest.approx(moved, rel=1e-6)
    # Told more, a source is told apart; a row of a fitted one is not of it.
    assert informed.given(measured).predictive(ROWS[2:]).sd[0] < single.sd[0]
    known = ROWS[2:].assign(**{c: levels[0] for c, levels in fitted.categories.items()})
    alone = fitted.given(measured.assign(**known.iloc[0][list(fitted.categories)]))
    assert alone.predictive(known).sd[0] < single.sd[0]


def test_the_mean_is_of_the_law_and_a_new_checkpoint_of_a_new_source() -> None:
    parts, _ = sourced(5, 0)
    fitted = fit(pd.concat(parts), get("ouyang"), offset=["source"], interval="model")
    (offset,) = fitted.offsets
    logs = [fitted.values[f"source[s{i}]"] for i in range(4)]
    assert offset.variance == pytest.approx(np.var([*logs, -sum(logs)], ddof=1) * 6 / 5)
    new, seen = (fitted.predictive(ROWS.assign(source=s)) for s in ("another", "s0"))
    average = fitted.predictive(ROWS, "mean")
    scatter = fitted.effects.residual + fitted.effects.variances.sum()
    np.testing.assert_allclose(new.sd**2, average.sd**2 + scatter + offset.variance)
    assert (seen.sd < new.sd).all()
    assert (new.dof < 6).all()  # five sources say little of how sources vary
    assert (seen.dof > 10).all()


def test_intervals_after_two_rows_of_a_new_source_hold_what_follows() -> None:
    inside, widths = [], []
    for seed in range(30):
        parts, _ = sourced(7, seed)
        fitted = fit(pd.concat(parts[:6]), get("ouyang"), offset=["source"], interval="model")
        one = parts[6].head(3).drop(columns="run")  # one run of a source that was not fitted
        low, high = fitted.given(one[:2]).quantiles(one[2:], np.array([0.05, 0.95]))
        value = one["delta_loss"].iloc[2]
        inside.append(low[0] <= value <= high[0])
        widths.append(np.log(high[0] / low[0]))
    assert np.mean(inside) >= 0.8
    assert np.median(widths) < 0.5  # the spread of sources alone would make it above 1.6
