"""Covariances and intervals of a fit's parameters: sandwich, cluster bootstrap and profile."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from scipy import sparse
from scipy.optimize import brentq
from scipy.stats import t as student

from qscale.fit.mixed import Components, Model, find_mode
from qscale.fit.solver import solve

if TYPE_CHECKING:
    from collections.abc import Callable

    from qscale.fit.solver import Problem

    Array = np.ndarray

_JACKKNIFE_CLUSTERS = 2000
_BATCH_ELEMENTS = 20_000_000  # 160 MB of row weights at a time


@dataclass(frozen=True, slots=True)
class Pieces:
    """What each cluster contributes to the estimating equations.

    Parameters
    ----------
    information
        ``X_g' V_g^-1 X_g`` of each cluster, shape (G, p, p).
    score
        ``X_g' V_g^-1 r_g`` of each cluster at the estimate, shape (G, p).
    """

    information: Array
    score: Array


def pieces(model: Model, fitted: Components, clusters: Array) -> Pieces:
    """Split the estimating equations by cluster; random effects are taken as nested in clusters."""
    mode = fitted.mode
    x = model.gradient(mode.theta) * mode.free
    weighted = x * mode.weight[:, None]
    groups, p = int(clusters.max()) + 1, x.shape[1]
    belongs = sparse.csr_array((np.ones(len(x)), (clusters, np.arange(len(x)))))
    information = np.empty((groups, p, p))
    for i in range(p):  # one column at a time: products of all columns of many rows take much room
        information[:, i] = belongs @ (x * weighted[:, [i]])
    parts = Pieces(information, belongs @ (x * mode.score[:, None]))
    if len(model.sizes) == 1:
        _without_one_term(parts, model, fitted, clusters, weighted)
    elif model.sizes:
        _without_effects(parts, model, fitted, clusters, weighted)
    return parts


def _without_one_term(
    parts: Pieces, model: Model, fitted: Components, clusters: Array, weighted: Array
) -> None:
    """Take away what a single term's effects absorb, level by level of each cluster."""
    z = model.effects.tocoo()
    scaled = z.data * np.sqrt(fitted.variances[0])
    rows, level = z.coords
    owner, pair = np.unique(clusters[rows] * z.shape[1] + level, return_inverse=True)
    sums = sparse.csr_array((scaled, (pair, rows)), shape=(len(owner), z.shape[0]))
    cross = sums @ weighted
    inner = 1.0 + np.bincount(pair, weights=scaled**2 * fitted.mode.weight[rows])
    home = sparse.csr_array((1.0 / inner, (owner // z.shape[1], np.arange(len(owner)))))
    for i in range(cross.shape[1]):
        parts.information[: home.shape[0], i] -= home @ (cross * cross[:, [i]])


def _without_effects(
    parts: Pieces, model: Model, fitted: Components, clusters: Array, weighted: Array
) -> None:
    """Take away what the effects of several terms absorb in each cluster."""
    deviations = np.repeat(np.sqrt(fitted.variances), model.sizes)
    z = sparse.csr_array(model.effects @ sparse.diags_array(deviations))
    order = np.argsort(clusters, kind="stable")
    edges = np.searchsorted(clusters[order], np.arange(len(parts.score) + 1))
    for g in range(len(parts.score)):
        rows = order[edges[g] : edges[g + 1]]
        own = z[rows]
        used = np.unique(own.indices)
        zg = own[:, used].toarray()
        cross = zg.T @ weighted[rows]
        inner = zg.T @ (fitted.mode.weight[rows, None] * zg) + np.eye(len(used))
        parts.information[g] -= cross.T @ np.linalg.solve(inner, cross)


def sandwich(parts: Pieces, cov: Array) -> Array:
    """Cluster-robust covariance, shape (p, p).

    The jackknife form (CR3; Bell and McCaffrey 2002) in one step from the estimate, which does not
    understate the variance with few clusters; with more than 2,000 clusters the plain form with
    the factor ``G / (G - 1)`` (CR1), which is then the same.
    """
    free = np.diag(cov) > 0
    groups = len(parts.score)
    score, information = parts.score[:, free], parts.information[:, free][:, :, free]
    if groups > _JACKKNIFE_CLUSTERS:
        moves = score @ cov[np.ix_(free, free)]
    else:
        rest = information.sum(axis=0) - information
        unit = 1.0 / np.sqrt(np.diag(information.sum(axis=0)))
        scaled = rest * np.outer(unit, unit)
        # Without one cluster a parameter may be undetermined; the pseudo-inverse leaves it be.
        moves = (np.linalg.pinv(scaled, hermitian=True) @ (score * unit)[:, :, None])[:, :, 0]
        moves = moves * unit
    result = np.zeros_like(cov)
    factor = groups / (groups - 1) if groups > _JACKKNIFE_CLUSTERS else (groups - 1) / groups
    result[np.ix_(free, free)] = factor * moves.T @ moves
    return result


def resampled(groups: int, n_boot: int, rng: np.random.Generator) -> Array:
    """Draw how often each cluster appears when whole clusters are resampled, shape (n_boot, G)."""
    return rng.multinomial(groups, np.full(groups, 1.0 / groups), size=n_boot).astype(float)


def bootstrap(
    problem: Problem, theta: Array, clusters: Array, n_boot: int, rng: np.random.Generator
) -> Array:
    """Refit a pooled fit to its own minimum on resampled clusters, starting from ``theta``.

    Returns
    -------
    numpy.ndarray
        Internal parameters of the refits that converged, shape (at most n_boot, p). The cluster
        bootstrap is that of Cameron, Gelbach and Miller (2008), section II.
    """
    groups = int(clusters.max()) + 1
    batch = max(1, _BATCH_ELEMENTS // len(clusters))
    draws = []
    for first in range(0, n_boot, batch):
        weights = resampled(groups, min(batch, n_boot - first), rng)[:, clusters]
        solution = solve(problem, np.repeat(theta[None], len(weights), axis=0), weights)
        draws.append(solution.theta[solution.converged])
    return np.concatenate(draws)


def one_step_bootstrap(
    parts: Pieces, theta: Array, free: Array, n_boot: int, rng: np.random.Generator
) -> Array:
    """Refit on resampled clusters with row weights and variances held, shape (n_boot, p).

    Holding them makes a refit one linear system, the one-step cluster bootstrap of Cameron,
    Gelbach and Miller (2008, section II) for the estimating equations of the fit.
    """
    groups = len(parts.score)
    counts = resampled(groups, n_boot, rng)
    keep = np.flatnonzero(free)
    information = parts.information[:, keep][:, :, keep]
    unit = 1.0 / np.sqrt(np.diag(information.sum(axis=0)))
    normal = np.tensordot(counts, information * np.outer(unit, unit), axes=1)
    right = counts @ (parts.score[:, keep] * unit)
    draws = np.repeat(theta[None], n_boot, axis=0)
    inverse = np.linalg.pinv(normal, rcond=1e-10, hermitian=True)
    draws[:, keep] += (inverse @ right[:, :, None])[:, :, 0] * unit
    return draws


def profile(
    model: Model, fitted: Components, index: int, level: float, dof: float
) -> tuple[float, float]:
    """Profile-likelihood interval of one internal parameter, variances held at their estimates.

    The interval ends where the penalised deviance has risen by the square of the t quantile. It is
    one-sided, ending at the bound, where a bound comes first or the estimate lies on it.
    """
    rise, threshold = deviance_rise(model, fitted, index), allowed_rise(level, dof)
    at = float(fitted.theta[index])

    def excess(value: float) -> float:
        return rise(value) - threshold

    width = float(np.sqrt(max(fitted.cov[index, index], 1e-12)))
    ends = []
    for side, bound in ((-1.0, model.low[index]), (1.0, model.high[index])):
        inner, reach = at, width * threshold**0.5
        for _ in range(30):
            outer = side * min(side * (at + side * reach), side * bound)
            if excess(outer) > 0:
                ends.append(float(brentq(excess, inner, outer, xtol=1e-6 * width)))
                break
            if outer == bound:
                ends.append(float(bound))
                break
            inner, reach = outer, 2 * reach
        else:
            ends.append(float(bound))
    return ends[0], ends[1]


def allowed_rise(level: float, dof: float) -> float:
    """Rise of the deviance at the ends of a profile interval of a level: the t quantile squared."""
    return float(student.ppf(0.5 + level / 2, dof)) ** 2


def deviance_rise(model: Model, fitted: Components, index: int) -> Callable[[float], float]:
    """Return the profile deviance of one internal parameter, less its minimum, as a function.

    All other parameters and the effects take their best values at each point; the variances are
    held at their estimates.
    """
    scales = np.concatenate([[fitted.sigma], np.sqrt(fitted.variances)])
    theta, scaled = fitted.mode.theta, fitted.mode.scaled
    best = _deviance(model, scales, theta, scaled)

    def rise(value: float) -> float:
        low, high = model.low.copy(), model.high.copy()
        low[index] = high[index] = value
        held = replace(model, low=low, high=high)
        mode = find_mode(held, scales, np.clip(theta, low, high), scaled)
        return _deviance(model, scales, mode.theta, mode.scaled) - best

    return rise


def _deviance(model: Model, scales: Array, theta: Array, scaled: Array) -> float:
    """-2 times the penalised log likelihood."""
    deviations = np.repeat(scales[1:], model.sizes)
    eta = model.value(theta) + model.effects @ (scaled * deviations)
    return float(-2 * model.rows.evaluate(eta, scales[0])[0].sum() + scaled @ scaled)
