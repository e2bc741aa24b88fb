"""Uncertainty of a fit: cluster bootstrap of the parameters, and the scatter around the law."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from qscale.fit.solver import solve

if TYPE_CHECKING:
    from qscale.fit.solver import Problem

    Array = np.ndarray


@dataclass(frozen=True, slots=True)
class Scatter:
    """Log residuals split into a part shared by a cluster and a part of the single row.

    Parameters
    ----------
    between
        Mean log residual of each cluster, centred and rescaled for degrees of freedom, shape (G,).
    within
        Quantiles of the rows' deviations from their cluster's mean, at even probabilities.
    """

    between: Array
    within: Array

    def draw(self, size: int, rng: np.random.Generator) -> Array:
        """Draw log residuals of new rows of new clusters, shape (size,)."""
        return rng.choice(self.between, size) + rng.choice(self.within, size)


def cluster_weights(clusters: Array, n_boot: int, rng: np.random.Generator) -> Array:
    """Draw how often each row appears when whole clusters are resampled, shape (n_boot, n)."""
    groups = int(clusters.max()) + 1
    counts = rng.multinomial(groups, np.full(groups, 1.0 / groups), size=n_boot)
    return counts[:, clusters].astype(float)


def bootstrap(
    problem: Problem, theta: Array, clusters: Array, n_boot: int, rng: np.random.Generator
) -> Array:
    """Refit on resampled clusters, starting from ``theta``; only converged refits are returned.

    Returns
    -------
    numpy.ndarray
        Internal parameters of shape (at most n_boot, p). The cluster bootstrap is that of Cameron,
        Gelbach and Miller (2008), section II.
    """
    weights = cluster_weights(clusters, n_boot, rng)
    solution = solve(problem, np.repeat(theta[None], n_boot, axis=0), weights)
    return solution.theta[solution.converged]


def scatter(residuals: Array, clusters: Array, n_parameters: int) -> Scatter:
    """Split log residuals, shape (n,), into cluster means and deviations from them.

    Both parts are scaled up by the square root of ``n / (n - parameters)`` of the clusters, or of
    the rows where rows outnumber clusters, because residuals of a fit are smaller than errors.
    """
    groups = int(clusters.max()) + 1
    sizes = np.bincount(clusters, minlength=groups)
    means = np.bincount(clusters, weights=residuals, minlength=groups) / sizes
    deviations = (residuals - means[clusters]) * np.sqrt(
        np.where(sizes > 1, sizes / np.maximum(sizes - 1, 1), 0.0)
    )[clusters]
    freedom = max(len(residuals) - n_parameters, 1)
    inflation = np.sqrt(groups / max(groups - 1, 1)) * np.sqrt(len(residuals) / freedom)
    several = deviations[sizes[clusters] > 1]
    probabilities = (np.arange(199) + 0.5) / 199
    within = np.quantile(several, probabilities) if len(several) else np.zeros(1)
    return Scatter(means * inflation, within)
