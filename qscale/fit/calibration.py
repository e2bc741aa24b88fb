"""Conformal calibration of predictions on left-out clusters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from qscale.errors import FitError

Array = np.ndarray

_FEWEST = 9  # a share of 9 / (9 + 1) of clusters is 90 %


@dataclass(frozen=True, slots=True)
class Calibration:
    """Absolute standardised errors of rows whose whole cluster was left out of the fit.

    Each cluster has the same weight, shared by its rows, and a further cluster counts as having an
    infinite error, so that intervals hold a row of a new exchangeable cluster with at least the
    stated probability (hierarchical conformal prediction; Dunn, Wasserman and Ramdas 2022, and Lee,
    Barber and Willett 2023).

    Parameters
    ----------
    scores
        ``|observed - predicted| / sd`` on the link's scale, ascending, shape (m,).
    weights
        Weight of each score; they add up to G / (G + 1), shape (m,).
    """

    scores: Array
    weights: Array

    def reach(self, probabilities: Array) -> Array:
        """Return how many standard deviations from the mean central intervals of a new row end.

        Parameters
        ----------
        probabilities
            Probabilities of quantiles, shape (k,); 0.05 and 0.95 end the 90 % interval.

        Returns
        -------
        numpy.ndarray
            Signed, shape (k,); infinite where there are too few clusters for the level.
        """
        levels = np.abs(2 * np.asarray(probabilities) - 1)
        position = np.searchsorted(np.cumsum(self.weights), levels - 1e-12)
        padded = np.append(self.scores, np.inf)
        return np.sign(np.asarray(probabilities) - 0.5) * np.where(
            levels > 0, padded[np.minimum(position, len(self.scores))], 0.0
        )

    def to_json(self) -> dict[str, Any]:
        """Return JSON-able values."""
        return {name: getattr(self, name).tolist() for name in ("scores", "weights")}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Calibration:
        """Rebuild from `to_json`."""
        return cls(np.array(content["scores"]), np.array(content["weights"]))


def calibrate(scores: Array, clusters: Array) -> Calibration:
    """Calibrate on left-out standardised errors.

    Parameters
    ----------
    scores
        Absolute standardised errors, shape (m,).
    clusters
        Cluster number of each, shape (m,).

    Raises
    ------
    FitError
        If there are too few clusters for a finite 90 % interval.
    """
    sizes = np.bincount(clusters)
    groups = int((sizes > 0).sum())
    check_clusters(groups)
    order = np.argsort(scores, kind="stable")
    weights = 1.0 / (sizes[clusters] * (groups + 1))
    return Calibration(np.asarray(scores)[order], weights[order])


def check_clusters(groups: int) -> None:
    """Raise if there are too few clusters for a finite 90 % interval.

    Raises
    ------
    FitError
        Saying how many are needed.
    """
    if groups < _FEWEST:
        raise FitError(
            f"conformal intervals at 90 % need at least {_FEWEST} clusters; there are "
            f"{groups}. Choose interval model or sandwich."
        )
