"""Batched robust least squares: many starts, or many bootstrap replicates, as one problem.

Minimises ``sum_i w_i rho(r_i(theta))`` with the Huber loss for every row of a batch at once by
Levenberg-Marquardt on iteratively reweighted residuals. Objectives are sums, never means, and
convergence is judged by the projected Newton decrement relative to the objective, which does not
depend on the units of parameters or data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    Array = np.ndarray

DECREMENT_TOLERANCE = 1e-12
_EXACT = 1e-17  # residuals under 3e-9 of the data are rounding, not misfit
_DAMPING_FLOOR, _DAMPING_CEILING = 1e-12, 1e12
_CHUNK_ELEMENTS = 4_000_000  # keeps one batch of Jacobians near 32 MB


@dataclass(frozen=True, slots=True)
class Problem:
    """A weighted nonlinear regression of ``observed`` on a model, both on the log scale.

    Parameters
    ----------
    value
        ``value(theta)`` of shape (S, n) for ``theta`` of shape (S, p).
    gradient
        ``gradient(theta)`` of shape (S, n, p).
    observed
        Observed values, shape (n,).
    low, high
        Bounds on ``theta``, shape (p,); equal bounds hold a parameter fixed.
    huber_delta
        Residual size at which the loss turns from quadratic to linear; infinite is least squares.
    """

    value: Callable[[Array], Array]
    gradient: Callable[[Array], Array]
    observed: Array
    low: Array
    high: Array
    huber_delta: float


@dataclass(frozen=True, slots=True)
class Solution:
    """Where each row of the batch ended.

    Parameters
    ----------
    theta
        Parameters, shape (S, p).
    objective
        Sum of weighted losses, shape (S,).
    decrement
        Projected Newton decrement over the objective, shape (S,); small means converged.
    information
        Gauss-Newton matrix ``J' W J`` at the end, shape (S, p, p).
    """

    theta: Array
    objective: Array
    decrement: Array
    information: Array

    @property
    def converged(self) -> Array:
        """Whether each row's decrement is under `DECREMENT_TOLERANCE`, shape (S,)."""
        return self.decrement <= DECREMENT_TOLERANCE


def huber(residuals: Array, delta: float) -> Array:
    """Huber loss ``r^2/2`` inside ``delta`` and ``delta (|r| - delta/2)`` outside.

    Examples
    --------
    >>> huber(np.array([0.5, 2.0]), 1.0)
    array([0.125, 1.5  ])
    """
    size = np.abs(residuals)
    inner = np.minimum(size, delta)
    return 0.5 * inner**2 + np.where(size > delta, inner * (size - inner), 0.0)


def solve(problem: Problem, starts: Array, weights: Array, max_iterations: int = 500) -> Solution:
    """Minimise the problem from every start under its own row weights.

    Parameters
    ----------
    problem
        Model, data, bounds and loss.
    starts
        Initial parameters, shape (S, p); moved into the bounds.
    weights
        Non-negative row weights, shape (S, n) or (n,).
    max_iterations
        Limit on Levenberg-Marquardt steps.

    Returns
    -------
    Solution
        One entry per start, in order; check `Solution.converged`.
    """
    starts = np.clip(np.atleast_2d(starts), problem.low, problem.high)
    weights = np.broadcast_to(weights, (len(starts), len(problem.observed)))
    per_start = len(problem.observed) * max(1, starts.shape[1])
    chunk = max(1, _CHUNK_ELEMENTS // per_start)
    parts = [
        _solve_chunk(problem, starts[i : i + chunk], weights[i : i + chunk], max_iterations)
        for i in range(0, len(starts), chunk)
    ]
    names = ("theta", "objective", "decrement", "information")
    return Solution(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def _solve_chunk(problem: Problem, starts: Array, weights: Array, max_iterations: int) -> Solution:
    """Run damped Gauss-Newton on one chunk; rows drop out as they converge."""
    theta = starts.copy()
    objective = _objective(problem, theta, weights)
    damping = np.full(len(theta), 1e-3)
    decrement = np.full(len(theta), np.inf)
    information = np.zeros((len(theta), theta.shape[1], theta.shape[1]))
    active = np.isfinite(objective)
    floor = _EXACT * (weights @ (1.0 + problem.observed**2))
    for _ in range(max_iterations):
        rows = np.flatnonzero(active)
        if not len(rows):
            break
        normal, score = _normal_equations(problem, theta[rows], weights[rows])
        free = _free(problem, theta[rows], score)
        information[rows] = normal
        full_step = _damped_step(normal, score, free, np.full(len(rows), 1e-12))
        gain = 0.5 * np.abs((full_step * score).sum(axis=1))
        decrement[rows] = gain / (objective[rows] + floor[rows])
        still = decrement[rows] > DECREMENT_TOLERANCE
        done = rows[~still]
        # The last, undamped step costs nothing and ends linear problems at their closed form.
        theta[done] = np.clip(theta[done] + full_step[~still], problem.low, problem.high)
        active[done] = False
        rows, normal, score, free = rows[still], normal[still], score[still], free[still]
        if not len(rows):
            break
        step = _damped_step(normal, score, free, damping[rows])
        trial = np.clip(theta[rows] + step, problem.low, problem.high)
        trial_objective = _objective(problem, trial, weights[rows])
        better = trial_objective <= objective[rows] * (1 + 1e-15)
        theta[rows[better]], objective[rows[better]] = trial[better], trial_objective[better]
        damping[rows] = np.clip(
            np.where(better, damping[rows] / 5.0, damping[rows] * 4.0),
            _DAMPING_FLOOR,
            _DAMPING_CEILING,
        )
        active[rows[damping[rows] >= _DAMPING_CEILING]] = False
    return Solution(theta, objective, decrement, information)


def _objective(problem: Problem, theta: Array, weights: Array) -> Array:
    """Weighted sum of losses, shape (S,); overflow in a wild trial counts as infinite."""
    with np.errstate(over="ignore", invalid="ignore"):
        residuals = problem.observed - problem.value(theta)
        total = (weights * huber(residuals, problem.huber_delta)).sum(axis=1)
    return np.where(np.isfinite(total), total, np.inf)


def _normal_equations(problem: Problem, theta: Array, weights: Array) -> tuple[Array, Array]:
    """Return ``J' W J``, shape (S, p, p), and ``J' W r``, shape (S, p), W reweighted for Huber."""
    residuals = problem.observed - problem.value(theta)
    size = np.maximum(np.abs(residuals), 1e-300)
    reweighted = weights * np.minimum(1.0, problem.huber_delta / size)
    jacobian = np.broadcast_to(problem.gradient(theta), (*residuals.shape, theta.shape[1]))
    weighted = (jacobian * reweighted[:, :, None]).transpose(0, 2, 1)
    return weighted @ jacobian, (weighted @ residuals[:, :, None])[:, :, 0]


def _free(problem: Problem, theta: Array, score: Array) -> Array:
    """Which parameters may move: those not held at a bound that the score pushes against."""
    at_low = (theta <= problem.low) & (score <= 0)
    at_high = (theta >= problem.high) & (score >= 0)
    return ~(at_low | at_high)


def _damped_step(normal: Array, score: Array, free: Array, damping: Array) -> Array:
    """Solve the scaled, damped normal equations in the free parameters; the others stay."""
    diagonal = np.einsum("sii->si", normal)
    scale = 1.0 / np.sqrt(np.where(diagonal > 0, diagonal, 1.0))
    mask = free & (diagonal > 0)
    scaled = normal * scale[:, :, None] * scale[:, None, :] * mask[:, :, None] * mask[:, None, :]
    p = scaled.shape[1]
    scaled[:, range(p), range(p)] += np.where(mask, damping[:, None], 1.0)
    # An exactly collinear pair would make the matrix singular at the lowest damping.
    scaled[:, range(p), range(p)] += 1e-13
    return np.linalg.solve(scaled, (score * scale * mask)[:, :, None])[:, :, 0] * scale * mask
