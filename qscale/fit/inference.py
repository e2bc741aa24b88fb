"""Cluster bootstrap of a pooled fit: every replicate is refitted to its own minimum."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from qscale.fit.solver import solve

if TYPE_CHECKING:
    from qscale.fit.solver import Problem

    Array = np.ndarray


_BATCH_ELEMENTS = 20_000_000  # 160 MB of row weights at a time


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
    batch = max(1, _BATCH_ELEMENTS // len(clusters))
    draws = []
    for first in range(0, n_boot, batch):
        weights = cluster_weights(clusters, min(batch, n_boot - first), rng)
        solution = solve(problem, np.repeat(theta[None], len(weights), axis=0), weights)
        draws.append(solution.theta[solution.converged])
    return np.concatenate(draws)
