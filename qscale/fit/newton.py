"""Huber regression by Newton's method for laws that are linear in what the solver searches.

The loss is piecewise quadratic, so that full Newton steps end at the exact minimum once they find
which rows lie within delta (Madsen and Nielsen 1990, BIT 30, 682-699). All replicates share one
design, and their normal matrices are one matrix product of row weights and products of columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    Array = np.ndarray

_CHUNK_ELEMENTS = 100_000  # what is computed of one chunk of replicates stays in the cache
_PRODUCT_ELEMENTS = 20_000_000  # 160 MB of products of columns; beyond, one replicate at a time
_ITERATIONS = 60
_RIDGE = 1e-14
_FAINT = 1e-12  # curvature of rows beyond delta, so that no direction is without


class Design:
    """A design matrix shared by all replicates, and the products of its columns.

    Parameters
    ----------
    x
        Design, shape (n, p).
    residuals
        Observed values minus their prediction at the common start, shape (n,).
    replicates
        How many sets of weights there are; few are not worth the products.
    """

    def __init__(self, x: Array, residuals: Array, replicates: int) -> None:
        n, p = x.shape
        self.x = np.ascontiguousarray(x)
        self.joined = np.vstack([-x.T, residuals])
        self.upper = np.triu_indices(p)
        small = n * len(self.upper[0]) <= _PRODUCT_ELEMENTS and replicates > 4
        self.products = x[:, self.upper[0]] * x[:, self.upper[1]] if small else None

    def residuals(self, move: Array) -> Array:
        """Return residuals (S, n) at moves from the start (S, p)."""
        return np.column_stack([move, np.ones(len(move))]) @ self.joined

    def normal(self, weights: Array) -> Array:
        """Return ``X' W X`` for each row of weights (S, n), shape (S, p, p)."""
        if self.products is None:
            return np.stack([self.x.T @ (self.x * w[:, None]) for w in weights])
        result = np.empty((len(weights), self.x.shape[1], self.x.shape[1]))
        rows, columns = self.upper
        result[:, rows, columns] = result[:, columns, rows] = weights @ self.products
        return result


def minimise(
    x: Array,
    observed: Array,
    bounds: tuple[Array, Array],
    delta: float,
    start: Array,
    weights: Array,
    tolerance: float,
    exact: float,
) -> tuple[Array, Array, Array]:
    """Minimise the weighted Huber loss of ``observed - X theta`` for every row of weights.

    Parameters
    ----------
    x
        Design, shape (n, p).
    observed
        Shape (n,).
    bounds
        Lower and upper bounds on ``theta``, shape (p,) each.
    delta
        Residual at which the loss turns linear.
    start, weights
        Shapes (p,) and (S, n).
    tolerance
        Newton decrement over the objective at which a replicate has converged.
    exact
        Share of the squared data below which an objective is rounding.

    Returns
    -------
    tuple of numpy.ndarray
        ``theta`` (S, p), the objective (S,) and the decrement (S,). A replicate whose decrement
        stays over the tolerance needs another method.
    """
    # With columns of one size the ridge that keeps the equations solvable suits them all.
    size = np.sqrt(np.mean(x**2, axis=0))
    size[size == 0] = 1.0
    design = Design(x / size, observed - x @ start, len(weights))
    away = (bounds[0] - start) * size, (bounds[1] - start) * size
    scale = exact * (1.0 + observed**2)
    chunk = max(1, _CHUNK_ELEMENTS // len(observed))
    parts = [
        _minimise(design, away, delta, part, tolerance, part @ scale)
        for part in (weights[i : i + chunk] for i in range(0, len(weights), chunk))
    ]
    move, objective, decrement = (np.concatenate(part) for part in zip(*parts, strict=True))
    return np.clip(start + move / size, *bounds), objective, decrement


def _minimise(
    design: Design,
    bounds: tuple[Array, Array],
    delta: float,
    weights: Array,
    tolerance: float,
    floor: Array,
) -> tuple[Array, Array, Array]:
    """Take Newton's steps, and where one fails reweighted ones, until each replicate is done."""
    count, p = len(weights), design.x.shape[1]
    ended, objectives, decrements = np.zeros((count, p)), np.zeros(count), np.zeros(count)
    move, rows, newton = np.zeros((count, p)), np.arange(count), np.ones(count, dtype=bool)
    residuals = design.residuals(move[:1])  # all start from the same place
    score, objective = _sums(design, delta, weights, residuals)
    above, below = residuals > delta, residuals < -delta
    pace, fixed = np.ones(count), bounds[0] >= bounds[1]
    for _ in range(_ITERATIONS):
        normal = design.normal(weights * _curvature(residuals, ~(above | below), newton, delta))
        free = movable(*bounds, move, score)
        step = _step(normal, score, free)
        gain = 0.5 * np.abs((step * score).sum(axis=1))
        step *= np.where(newton, pace, 1.0)[:, None]
        trial = np.clip(move + step, *bounds)
        ahead = design.residuals(trial)
        above_ahead, below_ahead = ahead > delta, ahead < -delta
        # A step on which no row crosses delta ends at the minimum of an exact quadratic.
        exact = (
            newton & (pace == 1) & (free | fixed).all(axis=1) & (trial == move + step).all(axis=1)
        )
        exact &= (above_ahead == above).all(axis=1) & (below_ahead == below).all(axis=1)
        exact &= gain < 0.5 * objective  # else the difference below is not the objective
        decrements[rows] = np.where(exact, 0.0, gain / (objective + floor))
        left = decrements[rows] > tolerance
        ended[rows] = np.where(left[:, None], move, trial)
        objectives[rows] = np.where(left, objective, objective - gain)
        if not left.any():
            break
        if not left.all():
            rows, floor, weights, trial = rows[left], floor[left], weights[left], trial[left]
            newton, pace = newton[left], pace[left]
            move, score, objective, ahead = move[left], score[left], objective[left], ahead[left]
            above_ahead, below_ahead = above_ahead[left], below_ahead[left]
        score_ahead, found = _sums(design, delta, weights, ahead)
        # Reweighted steps descend where no bound is near; after one, Newton's are tried, shorter.
        taken = found <= objective * (1 + 1e-15) + floor
        pace = np.where(newton, np.where(taken, np.minimum(4.0 * pace, 1.0), 0.25 * pace), pace)
        newton = taken
        if newton.all():
            move, score, objective = trial, score_ahead, found
            above, below = above_ahead, below_ahead
            continue
        move = np.where(newton[:, None], trial, move)
        score = np.where(newton[:, None], score_ahead, score)
        objective = np.where(newton, found, objective)
        residuals = design.residuals(move)
        above, below = residuals > delta, residuals < -delta
    return ended, objectives, decrements


def _sums(design: Design, delta: float, weights: Array, residuals: Array) -> tuple[Array, Array]:
    """Return the score (S, p) and the objective (S,) of weighted residuals (S, n) or (1, n)."""
    slope = np.clip(residuals, -delta, delta)
    if len(residuals) == 1:
        return weights @ (design.x * slope.T), weights @ (slope * (residuals - 0.5 * slope))[0]
    pull = weights * slope
    slope *= -0.5
    slope += residuals  # the loss is slope * (residual - slope / 2)
    return pull @ design.x, np.einsum("sn,sn->s", pull, slope)


def _curvature(residuals: Array, inside: Array, newton: Array, delta: float) -> Array:
    """Second derivative of the loss, or slope over residual where Newton's step failed."""
    share = inside + _FAINT
    if newton.all():
        return share
    secant = np.minimum(1.0, delta / np.maximum(np.abs(residuals), 1e-300))
    return np.where(newton[:, None], share, secant)


def _step(normal: Array, score: Array, free: Array) -> Array:
    """Solve the normal equations in the free parameters; the others stay."""
    if not free.all():
        normal = normal * (free[:, :, None] & free[:, None, :])
        score = score * free
    diagonal = np.einsum("sii->si", normal)
    diagonal += np.where(free, _RIDGE * diagonal.max(axis=1, keepdims=True), 1.0)
    return np.linalg.solve(normal, score[:, :, None])[:, :, 0]


def movable(low: Array, high: Array, theta: Array, score: Array) -> Array:
    """Which parameters may move: those not held at a bound that the score pushes against."""
    return ~(((theta <= low) & (score <= 0)) | ((theta >= high) & (score >= 0)))


def damped_step(normal: Array, score: Array, free: Array, damping: Array | float) -> Array:
    """Solve the scaled normal equations plus ``damping``, (S, p), in the free parameters."""
    diagonal = np.einsum("sii->si", normal)
    scale = 1.0 / np.sqrt(np.where(diagonal > 0, diagonal, 1.0))
    mask = free & (diagonal > 0)
    unit = scale * mask
    scaled = normal * unit[:, :, None] * unit[:, None, :]
    p = range(scaled.shape[1])
    # An exactly collinear pair would make the matrix singular at the lowest damping.
    scaled[:, p, p] += np.where(mask, damping * scale**2, 1.0) + 1e-14
    return np.linalg.solve(scaled, (score * unit)[:, :, None])[:, :, 0] * unit
