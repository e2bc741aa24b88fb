"""Batched robust least squares: many starts, or many bootstrap replicates, as one problem.

Minimises ``sum_i w_i rho(r_i(theta))`` with the Huber loss for every row of a batch at once by
Levenberg-Marquardt on iteratively reweighted residuals, with the scaling of More (1978) and the
damping of Nielsen (1999, IMM-REP-1999-05). Objectives are sums, never means, and convergence is
judged by the projected Newton decrement relative to the objective, which does not depend on the
units of parameters or data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from qscale.fit.newton import damped_step, minimise, movable

if TYPE_CHECKING:
    from collections.abc import Callable

    Array = np.ndarray

DECREMENT_TOLERANCE = 1e-12
_EXACT = 1e-17  # residuals under 3e-9 of the data are rounding, not misfit
_FIRST_DAMPING = {True: 1e-3, False: 1e4}  # by whether the model is linear; small steps if not
_DAMPING_FLOOR, _DAMPING_CEILING = 1e-20, 1e20
_MEMORY = 0.9  # of each parameter's largest curvature so far, which scales its damping
_WORTHWHILE = 1e-3  # share of the predicted gain that a step must bring
_STUCK, _PATIENCE = 1e-6, 30  # share of the full step's gain, and steps under it to give up after
# Rows beyond delta have no curvature; this share of the reweighted one keeps steps in bounds.
_BEYOND = 0.1
_CHUNK_ELEMENTS = 4_000_000  # keeps one batch of Jacobians near 32 MB


@dataclass(frozen=True, slots=True)
class Problem:
    """A weighted nonlinear regression of ``observed`` on a model, both on the law's scale.

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
    design
        Where the model is ``design @ theta``, that matrix, shape (n, p): such a problem is convex
        and solved by Newton's method (`qscale.fit.newton`), whatever the start.
    """

    value: Callable[[Array], Array]
    gradient: Callable[[Array], Array]
    observed: Array
    low: Array
    high: Array
    huber_delta: float
    design: Array | None = None


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
    problem, weights
        What was minimised, and the row weights, shape (S, n).
    """

    theta: Array
    objective: Array
    decrement: Array
    problem: Problem
    weights: Array

    @property
    def converged(self) -> Array:
        """Whether each row's decrement is under `DECREMENT_TOLERANCE`, shape (S,)."""
        return self.decrement <= DECREMENT_TOLERANCE

    def information(self, row: int) -> Array:
        """Gauss-Newton matrix ``J' W J`` where one row of the batch ended, shape (p, p)."""
        theta, weights = self.theta[[row]], self.weights[[row]]
        residuals = self.problem.observed - self.problem.value(theta)
        return _normal_equations(self.problem, theta, residuals, weights)[0][0]


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


def solve(problem: Problem, starts: Array, weights: Array, max_iterations: int = 2000) -> Solution:
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
    if problem.design is None:
        return Solution(*_search(problem, starts, weights, max_iterations), problem, weights)
    theta, objective, decrement = minimise(
        problem.design,
        problem.observed,
        (problem.low, problem.high),
        problem.huber_delta,
        starts[0],
        weights,
        DECREMENT_TOLERANCE,
        _EXACT,
    )
    left = np.flatnonzero(decrement > DECREMENT_TOLERANCE)
    if len(left):
        found = _search(problem, starts[left], weights[left], max_iterations)
        theta[left], objective[left], decrement[left] = found
    return Solution(theta, objective, decrement, problem, weights)


def _search(
    problem: Problem, starts: Array, weights: Array, max_iterations: int
) -> tuple[Array, Array, Array]:
    """Run the general search, as many rows at a time as memory allows."""
    chunk = max(1, _CHUNK_ELEMENTS // (len(problem.observed) * max(1, starts.shape[1])))
    parts = [
        _search_chunk(problem, starts[i : i + chunk], weights[i : i + chunk], max_iterations)
        for i in range(0, len(starts), chunk)
    ]
    theta, objective, decrement = (np.concatenate(part) for part in zip(*parts, strict=True))
    return theta, objective, decrement


class _Pace:
    """How bold each row's next step is: its damping, and what that is scaled by, shape (S, p)."""

    def __init__(self, shape: tuple[int, int], linear: bool) -> None:
        self.damping = np.full(shape[0], _FIRST_DAMPING[linear])
        self.growth = np.full(shape[0], 2.0)
        self.idle = np.zeros(shape[0], dtype=int)
        self.curvature = np.zeros(shape)

    def scaled_damping(self, rows: Array, normal: Array) -> Array:
        """Return what to add to the diagonal of the normal equations, shape (S, p)."""
        seen = np.maximum(_MEMORY * self.curvature[rows], np.einsum("sii->si", normal))
        self.curvature[rows] = seen
        return self.damping[rows, None] * seen

    def judge(self, rows: Array, better: Array, ratio: Array, moved: Array) -> Array:
        """Adapt to whether steps were taken, and return which rows should go on."""
        shrink = np.maximum(0.2, 1 - (2 * np.clip(ratio, 0.0, 1.0) - 1) ** 3)
        damping = self.damping[rows] * np.where(better, shrink, self.growth[rows])
        self.damping[rows] = np.maximum(damping, _DAMPING_FLOOR)
        self.growth[rows] = np.where(better, 2.0, 2.0 * self.growth[rows])
        self.idle[rows] = np.where(moved, 0, self.idle[rows] + 1)
        return (damping < _DAMPING_CEILING) & (self.idle[rows] < _PATIENCE)


def _search_chunk(
    problem: Problem, starts: Array, weights: Array, max_iterations: int
) -> tuple[Array, Array, Array]:
    """Run damped Gauss-Newton on one chunk; rows drop out as they converge."""
    theta = starts.copy()
    residuals, objective = _objective(problem, theta, weights)
    decrement = np.full(len(theta), np.inf)
    pace = _Pace(theta.shape, problem.design is not None)
    active = np.isfinite(objective)
    floor = _EXACT * (weights @ (1.0 + problem.observed**2))
    for _ in range(max_iterations):
        rows = np.flatnonzero(active)
        if not len(rows):
            break
        normal, score = _normal_equations(
            problem, theta[rows], residuals[rows], weights[rows], _BEYOND
        )
        finite = np.isfinite(normal).all(axis=(1, 2)) & np.isfinite(score).all(axis=1)
        active[rows[~finite]] = False
        rows, normal, score = rows[finite], normal[finite], score[finite]
        free = movable(problem.low, problem.high, theta[rows], score)
        damping = np.concatenate([np.zeros_like(score), pace.scaled_damping(rows, normal)])
        both = [np.concatenate([part, part]) for part in (normal, score, free)]
        full_step, step = np.split(damped_step(both[0], both[1], both[2], damping), 2)
        gain = 0.5 * np.abs((full_step * score).sum(axis=1))
        decrement[rows] = gain / (objective[rows] + floor[rows])
        still = decrement[rows] > DECREMENT_TOLERANCE
        done = rows[~still]
        # The last, undamped step costs nothing and ends linear problems at their closed form.
        theta[done] = np.clip(theta[done] + full_step[~still], problem.low, problem.high)
        active[done] = False
        rows, normal, score, step = rows[still], normal[still], score[still], step[still]
        if not len(rows):
            continue
        trial = np.clip(theta[rows] + step, problem.low, problem.high)
        trial_residuals, trial_objective = _objective(problem, trial, weights[rows])
        gained = objective[rows] - trial_objective
        ratio = _gain_ratio(normal, score, trial - theta[rows], gained)
        # At the rounding of the objective the ratio means nothing.
        level = np.abs(gained) <= 1e-12 * objective[rows]
        better = (gained >= -1e-15 * objective[rows]) & (level | (ratio > _WORTHWHILE))
        moved = better & (gained > _STUCK * gain[still])
        taken = rows[better]
        theta[taken], objective[taken] = trial[better], trial_objective[better]
        residuals[taken] = trial_residuals[better]
        active[rows] = pace.judge(rows, better, ratio, moved)
    return theta, objective, decrement


def _gain_ratio(normal: Array, score: Array, move: Array, gained: Array) -> Array:
    """Gain of the objective over what its quadratic model predicts, shape (S,)."""
    predicted = (move * (score - 0.5 * (normal @ move[:, :, None])[:, :, 0])).sum(axis=1)
    return gained / np.maximum(np.abs(predicted), 1e-300)


def _objective(problem: Problem, theta: Array, weights: Array) -> tuple[Array, Array]:
    """Residuals (S, n) and the sum of losses (S,); overflow in a wild trial makes it infinite."""
    with np.errstate(over="ignore", invalid="ignore"):
        residuals = problem.observed - problem.value(theta)
        total = (weights * huber(residuals, problem.huber_delta)).sum(axis=1)
    return residuals, np.where(np.isfinite(total), total, np.inf)


def _normal_equations(
    problem: Problem, theta: Array, residuals: Array, weights: Array, beyond: float = 1.0
) -> tuple[Array, Array]:
    """Return ``J' W J``, shape (S, p, p), and ``J' W r``, shape (S, p), W reweighted for Huber.

    Weights of rows beyond delta count ``beyond`` times in the matrix.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # a wild trial; its row is given up
        size = np.maximum(np.abs(residuals), 1e-300)
        share = np.minimum(1.0, problem.huber_delta / size)
        jacobian = np.broadcast_to(problem.gradient(theta), (*residuals.shape, theta.shape[1]))
        transposed = jacobian.transpose(0, 2, 1)
        score = transposed @ (weights * share * residuals)[:, :, None]
        share[share < 1.0] *= beyond
        return transposed @ (jacobian * (weights * share)[:, :, None]), score[:, :, 0]
