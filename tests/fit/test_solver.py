"""The batched solver against scipy, closed forms and its own invariances."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import least_squares

from qscale.fit.solver import Problem, huber, solve


def linear_problem(
    design, observed, delta=np.inf, low=-np.inf, high=np.inf, newton=True
) -> Problem:
    p = design.shape[1]
    return Problem(
        value=lambda theta: theta @ design.T,
        gradient=lambda theta: np.broadcast_to(design, (len(theta), *design.shape)),
        observed=observed,
        low=np.broadcast_to(low, p).astype(float),
        high=np.broadcast_to(high, p).astype(float),
        huber_delta=delta,
        design=design if newton else None,
    )


def decay_problem(x, observed, delta) -> Problem:
    """y = a exp(-x / g): nonlinear in the second parameter."""
    return Problem(
        value=lambda t: t[:, :1] - x / np.exp(t[:, 1:]),
        gradient=lambda t: np.stack([np.ones((len(t), len(x))), x / np.exp(t[:, 1:])], axis=-1),
        observed=observed,
        low=np.array([-20.0, -4.0]),
        high=np.array([20.0, 4.0]),
        huber_delta=delta,
    )


@pytest.fixture
def design():
    rng = np.random.default_rng(1)
    return np.column_stack([np.ones(40), rng.normal(20, 2, 40), rng.normal(-5, 1, 40)])


def test_least_squares_equals_the_closed_form_in_one_batch(design) -> None:
    rng = np.random.default_rng(2)
    observed = design @ [1.0, 0.5, -2.0] + rng.normal(0, 0.3, 40)
    weights = rng.uniform(0.0, 2.0, (5, 40))
    found = solve(linear_problem(design, observed), np.zeros((5, 3)), weights)
    assert found.converged.all()
    for theta, w in zip(found.theta, weights, strict=True):
        root = np.sqrt(w)
        exact = np.linalg.lstsq(design * root[:, None], observed * root, rcond=None)[0]
        np.testing.assert_allclose(theta, exact, rtol=1e-7)


@pytest.mark.parametrize("delta", [0.01, 0.1, 1.0])
def test_huber_fit_is_no_worse_than_scipy(delta: float) -> None:
    rng = np.random.default_rng(3)
    x = rng.uniform(2, 8, 80)
    observed = 1.0 - x / 0.7 + rng.standard_t(2, 80) * 0.2
    problem = decay_problem(x, observed, delta)
    found = solve(problem, np.array([[0.0, 0.0], [2.0, 1.0]]), np.ones(80))
    peer = least_squares(
        lambda t: observed - problem.value(t[None])[0],
        [0.0, 0.0],
        loss="huber",
        f_scale=delta,
        xtol=1e-15,
        ftol=1e-15,
        gtol=1e-15,
    )
    assert found.converged.all()
    assert found.objective.min() <= peer.cost * (1 + 1e-9)
    np.testing.assert_allclose(found.theta[0], peer.x, rtol=1e-4)


def test_huber_loss_is_continuous_with_a_unit_slope_change_at_delta() -> None:
    r = np.array([-3.0, -1.0, 0.0, 0.5, 1.0, 3.0])
    np.testing.assert_allclose(huber(r, 1.0), [2.5, 0.5, 0.0, 0.125, 0.5, 2.5])


def test_a_bound_holds_and_the_rest_is_optimal(design) -> None:
    observed = design @ [1.0, 0.5, -2.0]
    low = np.array([-np.inf, 0.6, -np.inf])
    found = solve(linear_problem(design, observed, low=low), np.zeros((1, 3)), np.ones(40))
    others = design[:, [0, 2]]
    exact = np.linalg.lstsq(others, observed - 0.6 * design[:, 1], rcond=None)[0]
    assert found.converged.all()
    np.testing.assert_allclose(found.theta[0], [exact[0], 0.6, exact[1]], rtol=1e-6)


def test_equal_bounds_hold_a_parameter_fixed(design) -> None:
    observed = design @ [1.0, 0.5, -2.0]
    low, high = np.array([-9.0, -9.0, -1.5]), np.array([9.0, 9.0, -1.5])
    problem = linear_problem(design, observed, low=low, high=high)
    found = solve(problem, np.zeros((1, 3)), np.ones(40))
    assert found.theta[0, 2] == -1.5
    assert found.converged.all()


def test_batch_rows_do_not_influence_each_other(design) -> None:
    rng = np.random.default_rng(4)
    observed = design @ [1.0, 0.5, -2.0] + rng.standard_t(2, 40)
    problem = linear_problem(design, observed, delta=0.2)
    weights = rng.multinomial(40, np.full(40, 1 / 40), size=6).astype(float)
    together = solve(problem, np.zeros((6, 3)), weights)
    alone = [solve(problem, np.zeros((1, 3)), w[None]).theta[0] for w in weights]
    np.testing.assert_allclose(together.theta, alone, rtol=1e-8)


@given(scale=st.floats(1e-2, 1e3), shift=st.floats(-30, 30))
@settings(max_examples=40, deadline=None)
def test_solution_follows_a_change_of_units(scale: float, shift: float) -> None:
    rng = np.random.default_rng(5)
    x = rng.normal(0, 1, 30)
    observed = 2.0 + 0.7 * x + rng.standard_t(3, 30) * 0.1
    plain = np.column_stack([np.ones(30), x])
    other = np.column_stack([np.ones(30), scale * x + shift])
    a = solve(linear_problem(plain, observed, 0.1), np.zeros((1, 2)), np.ones(30))
    b = solve(linear_problem(other, observed, 0.1), np.zeros((1, 2)), np.ones(30))
    assert b.converged.all()
    assert b.theta[0, 1] * scale == pytest.approx(a.theta[0, 1], rel=1e-4)
    assert b.objective[0] == pytest.approx(a.objective[0], rel=1e-8)


def test_a_start_that_overflows_is_not_called_converged() -> None:
    x = np.linspace(1, 5, 10)
    problem = Problem(
        value=lambda t: np.exp(t[:, :1] * x),
        gradient=lambda t: (x * np.exp(t[:, :1] * x))[:, :, None],
        observed=np.ones(10),
        low=np.array([-1e4]),
        high=np.array([1e4]),
        huber_delta=1.0,
    )
    found = solve(problem, np.array([[9e3], [0.1]]), np.ones(10))
    assert found.converged.tolist() == [False, True]


@pytest.mark.parametrize("delta", [0.1, 1.0, np.inf])
def test_newton_ends_where_the_general_search_does(design, delta, monkeypatch) -> None:
    fast, general = both_ways(design, delta, -np.inf, 1e-18, monkeypatch)
    assert fast.converged.all()
    done = general.converged  # it stalls on some at this tolerance
    assert done.sum() > 30
    np.testing.assert_allclose(fast.theta[done], general.theta[done], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(("delta", "low"), [(1e-3, -np.inf), (1e-3, 0.6), (0.1, 0.6), (1.0, 0.6)])
def test_newton_with_bounds_or_kinks_is_no_worse(design, delta, low, monkeypatch) -> None:
    fast, general = both_ways(design, delta, low, 1e-12, monkeypatch)
    assert fast.converged.sum() >= general.converged.sum()
    assert (fast.objective <= general.objective * (1 + 1e-9)).all()


def both_ways(design, delta, low, tolerance, monkeypatch):
    """Fifty bootstrap replicates by Newton's method and by the general search."""
    rng = np.random.default_rng(6)
    observed = design @ [1.0, 0.5, -2.0] + rng.standard_t(3, 40) * 0.2
    weights = rng.multinomial(40, np.full(40, 1 / 40), size=50).astype(float)
    monkeypatch.setattr("qscale.fit.solver.DECREMENT_TOLERANCE", tolerance)
    low = np.array([-np.inf, low, -np.inf])
    problems = [linear_problem(design, observed, delta, low, np.inf, way) for way in (True, False)]
    return [solve(problem, np.zeros((50, 3)), weights) for problem in problems]


def test_newton_never_stops_for_want_of_rows_within_delta(design) -> None:
    # From a far start no row has curvature of its own: only the loss itself can say what is best.
    observed = design @ [1.0, 0.5, -2.0]
    observed[:3] += 50.0
    found = solve(linear_problem(design, observed, 1e-6), np.full((1, 3), 100.0), np.ones(40))
    assert found.converged.all()
    np.testing.assert_allclose(found.theta[0], [1.0, 0.5, -2.0], rtol=1e-5)
