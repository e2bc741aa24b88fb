"""Random effects: variance components by Laplace-approximate restricted maximum likelihood.

A law's prediction plus random deviations of runs, families and the like is fitted to rows with any
likelihood of `qscale.fit.likelihood`. For Gaussian rows and a law that is linear on its scale the
criterion is the exact REML of Patterson and Thompson (1971), computed as in Bates et al. (2015, J.
Stat. Softw. 67, section 3); for other rows it is its Laplace approximation.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.optimize import OptimizeResult, minimize

from qscale.fit.normal import DENSE_EFFECTS, Normal, Scaled

if TYPE_CHECKING:
    from collections.abc import Callable

    from scipy import sparse

    from qscale.fit.likelihood import Rows

    Array = np.ndarray

_INNER_TOLERANCE = 1e-14
_NEAR = 1e-2  # decrement over the log likelihood from which few rows still pass delta
_IMMATERIAL = 1e-4  # decrement left by the rounding of exact data: a hundredth standard error
_POLISHED = 1e-20  # leaves parameters within 1e-10 of a standard error


@dataclass(frozen=True, slots=True)
class Model:
    """What is fitted: a law, random terms and the rows' likelihood.

    Parameters
    ----------
    value, gradient
        Functions of ``theta`` (p,) that return the law on its link's scale (n,) and its gradient
        (n, p).
    low, high
        Bounds on ``theta``, shape (p,); equal bounds hold a parameter fixed.
    effects
        Sparse design of all random terms side by side, shape (n, q).
    sizes
        Number of levels of each term; they add up to q.
    rows
        Likelihood of the rows.
    """

    value: Callable[[Array], Array]
    gradient: Callable[[Array], Array]
    low: Array
    high: Array
    effects: sparse.csr_array
    sizes: tuple[int, ...]
    rows: Rows


@dataclass(frozen=True, slots=True)
class Mode:
    """Parameters and effects that maximise the penalised likelihood at given scales.

    Parameters
    ----------
    theta, scaled
        Parameters (p,) and effects over their standard deviation (q,).
    criterion
        -2 log of the Laplace-approximate restricted likelihood.
    score, weight
        Per row, its score and its information, see `qscale.fit.likelihood`.
    free
        Which parameters are neither fixed nor at a bound that the score pushes against, shape (p,).
    settled
        Whether the search ended within a hundredth standard error of where no step gains.
    """

    theta: Array
    scaled: Array
    criterion: float
    score: Array
    weight: Array
    free: Array
    settled: bool


@dataclass(frozen=True, slots=True)
class Components:
    """A fitted mixed model.

    Parameters
    ----------
    theta
        Parameters, shape (p,).
    effects
        Best linear unbiased predictions of the random effects, shape (q,).
    sigma
        Scale of the rows' likelihood.
    variances
        Variance of each random term, shape (K,).
    cov
        Joint covariance of errors in ``theta`` and ``effects``, shape (p + q, p + q), or (p, p) if
        there are more than `DENSE_EFFECTS` effects. Rows of fixed parameters are zero.
    scales_cov
        Covariance of (log sigma^2, log of the variances), shape (K + 1, K + 1); zero for a variance
        estimated as zero.
    cov_slopes
        Derivatives of the parameters' covariance in those logs, shape (K + 1, p, p).
    mode
        Where the search ended.
    converged
        Whether the searches over the scales and at them ended at a stationary point.
    """

    theta: Array
    effects: Array
    sigma: float
    variances: Array
    cov: Array
    scales_cov: Array
    cov_slopes: Array
    mode: Mode
    converged: bool


def estimate(model: Model, theta: Array, sigma: float) -> Components:
    """Estimate parameters, effects and variances, starting from a fit without random effects.

    Parameters
    ----------
    model
        Law, random terms and rows.
    theta, sigma
        Start: parameters, shape (p,), and residual scale, of a pooled fit.
    """
    terms = len(model.sizes)
    warm: dict[str, Any] = {
        "theta": theta,
        "scaled": np.zeros(sum(model.sizes)),
        "criterion": np.inf,
    }

    # The criterion's curvature is of the order of one in these units, whatever the number of rows.
    unit = 2.0 * np.sqrt([1 + len(model.rows.observed), *model.sizes])

    def criterion(point: Array) -> float:
        mode = find_mode(model, _scales(point / unit), warm["theta"], warm["scaled"])
        # From the best place so far, since a wild trial may end where no step leads back from.
        if mode.settled and mode.criterion < warm["criterion"]:
            warm.update(theta=mode.theta, scaled=mode.scaled, criterion=mode.criterion)
        return mode.criterion

    low, high = np.log(sigma) - 12.0, np.log(sigma) + 6.0
    bounds = np.array([(low, high)] + [(0.0, 1e3)] * terms) * unit[:, None]

    def search(ratio: float, shrink: float) -> OptimizeResult:
        start: Any = np.array([np.log(sigma) - shrink, *[ratio] * terms]) * unit
        options: Any = {"ftol": 1e-14, "gtol": 1e-6}
        found = minimize(
            criterion, start, method="L-BFGS-B", jac="3-point", bounds=list(bounds), options=options
        )
        found.x = found.x / unit
        return found

    plain = not terms and model.rows.plain
    best = _closed_form(model, theta, sigma, warm) if plain else search(1.0, 0.5 if terms else 0.0)
    if terms and (not best.success or (best.x[1:] < 1e-4).any()):
        # A variance at zero, where the criterion is flat, may be a place where the search stalled.
        best = min(best, search(0.1, 0.0), key=lambda result: (not result.success, result.fun))
    point = np.where(best.x < 1e-4, 0.0, best.x) if terms else best.x
    point[0] = best.x[0]
    mode = find_mode(model, _scales(point), warm["theta"], warm["scaled"])
    scales_cov, slopes = _scale_uncertainty(model, point, mode)
    deviations = _scales(point)[1:]
    return Components(
        theta=mode.theta,
        effects=mode.scaled * np.repeat(deviations, model.sizes),
        sigma=float(np.exp(point[0])),
        variances=deviations**2,
        cov=covariance(model, _scales(point), mode),
        scales_cov=scales_cov,
        cov_slopes=slopes,
        mode=mode,
        converged=bool(best.success) and mode.settled,
    )


def _closed_form(model: Model, theta: Array, sigma: float, warm: dict[str, Any]) -> Any:
    """Least squares, whose restricted likelihood has its maximum at the unbiased variance."""
    mode = find_mode(model, np.array([sigma]), theta, np.zeros(0), _POLISHED)
    warm["theta"] = mode.theta
    squares = np.sum((mode.score * sigma**2) ** 2) / (len(mode.score) - mode.free.sum())
    lowest = np.finfo(float).eps ** 2 * np.mean(model.rows.observed**2)  # for an exact fit
    x = np.array([0.5 * np.log(max(squares, lowest, 1e-300))])
    return SimpleNamespace(x=x, success=True)


def _scales(point: Array) -> Array:
    """Return sigma and the terms' standard deviations from (log sigma, ratios to sigma)."""
    sigma = np.exp(point[0])
    return np.concatenate([[sigma], sigma * point[1:]])


def find_mode(
    model: Model,
    scales: Array,
    theta: Array,
    scaled: Array,
    tolerance: float = _INNER_TOLERANCE,
) -> Mode:
    """Maximise the penalised likelihood at given scales by damped Newton steps.

    Parameters
    ----------
    model
        Law, random terms and rows.
    scales
        Sigma and the standard deviation of each term, shape (K + 1,).
    theta, scaled
        Start, shapes (p,) and (q,).
    tolerance
        Newton decrement at which to stop, relative to one plus the size of the log likelihood.
    """
    design = Scaled(model.effects, model.sizes, scales[1:])
    state = _evaluate(model, scales, design, theta, scaled)
    newton, settled = True, False
    for _ in range(100):
        log_p, score, weight = state
        x = model.gradient(theta)
        pull = x.T @ score
        free = _free(model, theta, pull)
        if newton:
            weight = model.rows.curvature(weight, scales[0])
        normal = Normal(x if free.all() else x[:, free], design, weight)
        right = np.concatenate([pull[free], design.z.T @ score - scaled])
        step = normal.solve(right)
        decrement = float(right @ step)
        settled = decrement <= _IMMATERIAL
        if decrement <= tolerance * (1.0 + abs(log_p)):
            break
        for damping in 0.5 ** np.arange(3 if newton else 12):
            move = damping * step
            trial = theta.copy()
            trial[free] += move[: free.sum()]
            trial = np.clip(trial, model.low, model.high)
            trial_scaled = scaled + move[free.sum() :]
            found = _evaluate(model, scales, design, trial, trial_scaled)
            if found[0] >= log_p - 1e-12 * abs(log_p):
                break
        else:
            if newton:  # many rows would pass delta: the secant weights bring them nearer first
                newton = False
                continue
            break  # rounding, or the quadrature of measurement errors, hides what is left to gain
        newton = decrement < _NEAR * (1.0 + abs(log_p))
        theta, scaled, state = trial, trial_scaled, found
    log_p, score, weight = state
    weight = model.rows.information(weight, scales[0])
    x = model.gradient(theta)
    free = _free(model, theta, x.T @ score)
    normal = Normal(x if free.all() else x[:, free], design, weight)
    return Mode(
        theta, scaled, -2.0 * log_p + normal.log_determinant(), score, weight, free, settled
    )


def _evaluate(
    model: Model, scales: Array, design: Scaled, theta: Array, scaled: Array
) -> tuple[float, Array, Array]:
    """Penalised log likelihood and the rows' scores and weights."""
    with np.errstate(over="ignore", invalid="ignore"):  # a wild trial
        eta = model.value(theta) + design.z @ scaled
        log_p, score, weight = model.rows.evaluate(eta, scales[0])
    total = float(log_p.sum() - 0.5 * scaled @ scaled)
    return (total if np.isfinite(total) else -np.inf), score, weight


def _free(model: Model, theta: Array, pull: Array) -> Array:
    """Parameters that may move."""
    at_low = (theta <= model.low) & (pull <= 0)
    at_high = (theta >= model.high) & (pull >= 0)
    return ~(at_low | at_high | (model.low >= model.high))


def covariance(model: Model, scales: Array, mode: Mode) -> Array:
    """Joint covariance of parameters and effects; see `Components`."""
    p, q = len(mode.theta), len(mode.scaled)
    free = np.flatnonzero(mode.free)
    effects = Scaled(model.effects, model.sizes, scales[1:])
    normal = Normal(model.gradient(mode.theta)[:, free], effects, mode.weight)
    keep = q if q <= DENSE_EFFECTS else 0
    right = np.zeros((len(free) + q, len(free) + keep))
    right[: len(free) + keep] = np.eye(len(free) + keep)
    inverse = normal.solve(right)[: len(free) + keep]
    positions = np.concatenate([free, p + np.arange(keep)]).astype(int)
    result = np.zeros((p + keep, p + keep))
    result[np.ix_(positions, positions)] = inverse
    deviations = np.concatenate([np.ones(p), np.repeat(scales[1:], model.sizes)[:keep]])
    return result * np.outer(deviations, deviations)


def _scale_uncertainty(model: Model, point: Array, mode: Mode) -> tuple[Array, Array]:
    """Covariance of the log variances and how the parameters' covariance changes with them."""
    p, count = len(mode.theta), len(point)
    active = np.flatnonzero(np.concatenate([[True], point[1:] > 0]))
    scales = _scales(point)
    step = 0.05

    def at(shift: Array) -> tuple[float, Array]:
        moved = scales * np.exp(0.5 * shift)
        there = find_mode(model, moved, mode.theta, mode.scaled)
        return there.criterion, covariance(model, moved, there)[:p, :p]

    unit = np.eye(count) * step
    center = mode.criterion
    up, down = {i: at(unit[i]) for i in active}, {i: at(-unit[i]) for i in active}
    hessian = np.zeros((len(active), len(active)))
    for a, i in enumerate(active):
        hessian[a, a] = (up[i][0] - 2 * center + down[i][0]) / step**2
        for b, j in enumerate(active[:a]):
            both = at(unit[i] + unit[j])[0]
            hessian[a, b] = hessian[b, a] = (both - up[i][0] - up[j][0] + center) / step**2
    slopes = np.zeros((count, p, p))
    for i in active:
        with np.errstate(invalid="ignore"):  # the variance of what no row informs is infinite
            slopes[i] = (up[i][1] - down[i][1]) / (2 * step)
    values, vectors = np.linalg.eigh(hessian)
    # A flat direction means that nothing is known: keep it wide instead of negative.
    inverse = (vectors / np.maximum(values, 1e-2)) @ vectors.T
    result = np.zeros((count, count))
    result[np.ix_(active, active)] = 2.0 * inverse
    return result, slopes


def satterthwaite(variance: Array, slopes: Array, scales_cov: Array) -> Array:
    """Degrees of freedom of estimated variances (Satterthwaite 1946; Fai and Cornelius 1996).

    Parameters
    ----------
    variance
        Estimated variances, shape (m,).
    slopes
        Their derivatives in the logs of the variance components, shape (m, K + 1).
    scales_cov
        Covariance of those logs, shape (K + 1, K + 1).
    """
    spread = np.einsum("mi,ij,mj->m", slopes, scales_cov, slopes)
    with np.errstate(divide="ignore"):
        return np.clip(2.0 * variance**2 / np.maximum(spread, 1e-300), 1.0, 1e6)
