"""Normal equations of mixed models, by every route, against one dense matrix."""

import numpy as np
import pytest
from scipy import sparse

from qscale.fit import normal
from qscale.fit.normal import Normal, Scaled

ROUTES = {  # what each route needs: rows times effects for a dense design, effects for a dense rest
    "dense design": (10**9, 800),
    "largest term eliminated": (0, 800),
    "sparse factorisation": (0, 0),
}


@pytest.fixture
def problem():
    rng = np.random.default_rng(0)
    families, runs = np.arange(90) // 30, np.arange(90) // 3
    slopes = rng.normal(size=90)
    blocks = [np.eye(3)[families], np.eye(30)[runs], np.eye(3)[families] * slopes[:, None]]
    x = np.column_stack([np.ones(90), rng.normal(20, 3, 90)])
    return x, np.hstack(blocks), (3, 30, 3), np.array([0.5, 2.0, 0.1]), rng.uniform(0.1, 9, 90)


@pytest.mark.parametrize("route", ROUTES)
def test_every_route_solves_the_same_equations(problem, route, monkeypatch) -> None:
    x, z, sizes, deviations, weight = problem
    elements, effects = ROUTES[route]
    monkeypatch.setattr(normal, "_DENSE_ELEMENTS", elements)
    monkeypatch.setattr(normal, "DENSE_EFFECTS", effects)
    found = Normal(x, Scaled(sparse.csr_array(z), sizes, deviations), weight)
    both = np.hstack([x, z * np.repeat(deviations, sizes)])
    whole = both.T @ (both * weight[:, None])
    whole[2:, 2:] += np.eye(36)
    right = np.random.default_rng(1).normal(size=(38, 2))
    np.testing.assert_allclose(found.solve(right), np.linalg.solve(whole, right), rtol=1e-8)
    np.testing.assert_allclose(
        found.solve(right[:, 0]), np.linalg.solve(whole, right[:, 0]), rtol=1e-8
    )
    assert found.log_determinant() == pytest.approx(np.linalg.slogdet(whole)[1], rel=1e-12)


def test_no_random_effects_leave_weighted_least_squares(problem) -> None:
    x, _, _, _, weight = problem
    found = Normal(x, Scaled(sparse.csr_array((90, 0)), (), np.zeros(0)), weight)
    right = np.array([1.0, -2.0])
    expected = np.linalg.solve(x.T @ (x * weight[:, None]), right)
    np.testing.assert_allclose(found.solve(right), expected, rtol=1e-9)
