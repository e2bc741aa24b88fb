"""Compare two models on the same rows: interval and test of a mean difference, by cluster."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from qscale.errors import FitError
from qscale.fit.options import check_count, check_level

if TYPE_CHECKING:
    from collections.abc import Sequence

    Array = np.ndarray

_EXACT_CLUSTERS = 12  # up to 4096 sign patterns are all looked at
_DRAWS = 9999


@dataclass(frozen=True, slots=True)
class Paired:
    """A mean difference between two models over the same rows.

    Parameters
    ----------
    difference
        Mean over rows.
    low, high
        Percentile interval from resampling whole clusters; null with one cluster, too narrow with
        a few.
    p_value
        Of the sign-flip test: the share of sign patterns of the clusters that give a difference at
        least as large. With G clusters it cannot be below 2 / 2^G.
    rows, clusters
        Their numbers.
    """

    difference: float
    low: float
    high: float
    p_value: float
    rows: int
    clusters: int


def paired(
    differences: Array,
    clusters: Array,
    *,
    level: float = 0.9,
    n_boot: int = 2000,
    seed: int = 0,
) -> Paired:
    """Estimate and test a mean difference whose rows share errors within clusters.

    Parameters
    ----------
    differences
        Difference of each row, such as absolute log error of one model minus another's, shape (n,).
    clusters
        Label of each row's cluster, shape (n,).
    level
        Probability of the interval.
    n_boot
        Resamples of whole clusters for the interval.
    seed
        Of the resamples, and of the sign patterns where there are too many for all.

    Returns
    -------
    Paired
        The test asks whether the clusters' sums are symmetric about zero, as they are when which
        model is which does not matter; it is exact for any number of clusters (Canay, Romano and
        Shaikh 2017, https://doi.org/10.3982/ECTA13081).

    Raises
    ------
    FitError
        If the lengths differ, a difference is not finite, or an option is out of its range.
    """
    differences = np.asarray(differences, dtype=float)
    if len(differences) != len(clusters) or not len(differences):
        raise FitError(
            f"differences and clusters must be of one length, one or more. Got {len(differences)} "
            f"and {len(clusters)} instead."
        )
    if unknown := int((~np.isfinite(differences)).sum()):
        raise FitError(f"differences must be finite. {unknown} of {len(differences)} are not.")
    check_level(level)
    check_count("n_boot", n_boot)
    names, codes = np.unique(np.asarray(clusters).astype(str), return_inverse=True)
    sums = np.bincount(codes, weights=differences)
    sizes = np.bincount(codes)
    groups = len(names)
    rng = np.random.default_rng(seed)
    low = high = np.nan
    if groups > 1:
        counts = rng.multinomial(groups, np.full(groups, 1 / groups), size=n_boot)
        means = (counts @ sums) / (counts @ sizes)
        low, high = map(float, np.quantile(means, [(1 - level) / 2, (1 + level) / 2]))
    return Paired(
        float(np.mean(differences)), low, high, _sign_flip(sums, rng), len(differences), groups
    )


def _sign_flip(sums: Array, rng: np.random.Generator) -> float:
    """Share of sign patterns with an absolute total at least that of the sums themselves."""
    least = abs(sums.sum()) - 1e-12 * np.abs(sums).sum()  # ties must not be lost to rounding
    if len(sums) <= _EXACT_CLUSTERS:
        signs = np.array(list(itertools.product((-1.0, 1.0), repeat=len(sums))))
        return float(np.mean(np.abs(signs @ sums) >= least))
    signs = rng.integers(0, 2, size=(_DRAWS, len(sums))) * 2.0 - 1.0
    return float((1 + np.sum(np.abs(signs @ sums) >= least)) / (1 + _DRAWS))


def holm(p_values: Sequence[float]) -> Array:
    """Adjust p-values for their number (Holm 1979): a family is rejected at most at its level.

    Examples
    --------
    >>> holm([0.01, 0.04, 0.03])
    array([0.03, 0.06, 0.06])
    """
    p = np.asarray(p_values, dtype=float)
    order = np.argsort(p, kind="stable")
    stepped = np.maximum.accumulate(p[order] * (len(p) - np.arange(len(p))))
    adjusted = np.empty(len(p))
    adjusted[order] = np.minimum(stepped, 1.0)
    return adjusted
