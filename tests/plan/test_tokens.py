"""Critical tokens against their closed form."""

import numpy as np
import pandas as pd
import pytest

from qscale.errors import QscaleError
from qscale.plan.tokens import critical_tokens, minimum
from tests.plan.laws import increase_fit, loss_fit

SETTINGS = pd.DataFrame({"n_params": 1e9, "bits": [2.0, 3.0, 4.0]})


def closed(loss: dict[str, float], delta: dict[str, float], bits: np.ndarray) -> np.ndarray:
    """Where B D^-b + k N^-alpha P^-gamma D^a has its minimum, for 1e9 parameters."""
    k = delta["k"] * 1e9 ** -delta["alpha"] * bits ** -delta["gamma"]
    a, b = delta["beta"], loss["beta"]
    return (b * loss["B"] / (a * k)) ** (1 / (a + b))


def test_the_minimum_is_that_of_the_closed_form() -> None:
    loss, delta = loss_fit(), increase_fit()
    found = critical_tokens(loss, delta, SETTINGS, count=200)
    exact = closed(loss.values, delta.values, SETTINGS["bits"].to_numpy())
    np.testing.assert_allclose(found["critical_tokens"], exact, rtol=1e-3)
    rows = SETTINGS.assign(tokens=exact)
    at = loss.center(rows) + delta.center(rows)
    np.testing.assert_allclose(found["lowest_loss"], at, rtol=1e-6)
    assert (found["low"] < exact).all()
    assert (found["high"] > exact).all()


def test_the_interval_is_that_of_the_delta_method() -> None:
    """With the loss known, log D* is linear in the deviation and nearly so in the parameters."""
    loss, delta = loss_fit(1e-7), increase_fit(between=0.3, within=0.05, runs=60)
    found = critical_tokens(loss, delta, SETTINGS, count=4000)
    step = 1e-5
    names, theta = delta.law.names, delta.theta
    gradient = []
    for i in range(len(theta)):
        edges = []
        for sign in (-1, 1):
            moved = theta.copy()
            moved[i] += sign * step
            values = dict(zip(names, delta.law.to_natural(moved), strict=True))
            edges.append(np.log(closed(loss.values, values, SETTINGS["bits"].to_numpy())))
        gradient.append((edges[1] - edges[0]) / (2 * step))
    gradient = np.array(gradient).T
    shared = delta.effects.variances[0] / (delta.values["beta"] + loss.values["beta"]) ** 2
    p = len(theta)
    variance = np.einsum("ni,ij,nj->n", gradient, delta.effects.cov[:p, :p], gradient) + shared
    width = np.log(found["high"] / found["low"]).to_numpy()
    np.testing.assert_allclose(width, 2 * 1.645 * np.sqrt(variance), rtol=0.12)


def test_an_increase_that_falls_with_tokens_has_no_critical_tokens() -> None:
    found = critical_tokens(loss_fit(), increase_fit(beta=-0.2), SETTINGS, count=100)
    assert np.isinf(found[["critical_tokens", "low", "high"]]).all(axis=None)
    assert (found["share_without"] == 1.0).all()
    assert found["lowest_loss"].isna().all()


def test_a_minimum_between_points_and_at_either_end() -> None:
    grid = np.geomspace(1.0, 1e4, 81)
    x = np.log(grid)
    curves = np.stack([(x - 3.21) ** 2 + 1, x, -x])
    place, value = minimum(grid, curves)
    assert np.log(place[0]) == pytest.approx(3.21, abs=1e-9)
    assert value[0] == pytest.approx(1.0, abs=1e-12)
    assert place[1:].tolist() == [1.0, np.inf]
    assert np.isnan(value[2])


def test_fits_in_the_wrong_place() -> None:
    delta = increase_fit()
    with pytest.raises(QscaleError, match="must predict loss_fp"):
        critical_tokens(delta, delta, SETTINGS)
    with pytest.raises(QscaleError, match="must predict delta_loss"):
        critical_tokens(loss_fit(), loss_fit(), SETTINGS)
