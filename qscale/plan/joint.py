"""Joint uncertainty of a fitted law at several rows: covariances and draws."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from qscale.errors import QscaleError
from qscale.fit import Fit
from qscale.fit.effects import with_new_levels
from qscale.fit.options import check_count
from qscale.laws import columns_of

if TYPE_CHECKING:
    import pandas as pd

    from qscale.fit.effects import Kind

    Array = np.ndarray

_FEWEST_REFITS = 20


@dataclass(frozen=True, slots=True, eq=False)
class Joint:
    """A law linearised at its estimates, with all that rows share.

    Parameters
    ----------
    location
        The law at its estimates plus known effects, on the link's scale, shape (n,).
    design
        How errors in parameters and in effects, those of unseen levels of offsets among them,
        enter each row, shape (n, p + q).
    cov
        Covariance of those errors, shape (p + q, p + q).
    residual
        Variance of a single measured row, on the link's scale.
    """

    location: Array
    design: Array
    cov: Array
    residual: float

    @property
    def covariance(self) -> Array:
        """Covariance of the rows without their own residuals, shape (n, n)."""
        return self.design @ self.cov @ self.design.T


def joint(fit: Fit, frame: pd.DataFrame, kind: Kind = "new_checkpoint") -> Joint:
    """Linearise a fitted law at rows; those of one new checkpoint share its deviation.

    Rows are told apart by the fit's grouping columns, such as ``run``; one that is absent counts as
    a single level.

    Parameters
    ----------
    fit
        A fitted law.
    frame
        Rows with the law's columns.
    kind
        ``mean`` leaves the deviations of unknown levels out.

    Raises
    ------
    TableError
        If a column is missing.
    """
    frame = fit.completed(frame)
    p = len(fit.theta)
    x = fit.law.gradient(fit.theta[None], columns_of(fit.law, frame))[0]
    x = np.broadcast_to(x, (len(frame), p))
    effects = fit.all_effects
    if kind == "new_checkpoint":
        effects = with_new_levels(effects, frame, p)
    z = effects.known(frame)
    cov = effects.cov.copy()
    if fit.interval in ("sandwich", "conformal", "bootstrap") and fit.cov.any():
        cov[:p, :p] = fit.cov
    location = fit.law.location(fit.theta[None], columns_of(fit.law, frame))[0]
    return Joint(
        location=np.broadcast_to(location, len(frame)) + z @ effects.values,
        design=np.concatenate([x, z], axis=1),
        cov=cov,
        residual=float(effects.residual),
    )


def draws(fit: Fit, frame: pd.DataFrame, count: int, rng: np.random.Generator, kind: Kind) -> Array:
    """Draw the law at all rows together, shape (count, n), in the target's unit.

    Parameters come from the bootstrap's refits, or from a multivariate Student's t with the
    covariance of the fit and the fewest degrees of freedom among the rows; the law is evaluated at
    each draw. Deviations of a new checkpoint are shared by its rows; the scatter of single
    measurements is left out.

    Parameters
    ----------
    fit
        A fitted law.
    frame
        Rows with the law's columns.
    count
        Number of draws.
    rng
        Random generator.
    kind
        ``mean`` for the law alone, ``new_checkpoint`` with the deviations of unknown levels.

    Raises
    ------
    QscaleError
        If the count is no whole number above zero, or a bootstrap has too few refits.
    """
    check_count("draws", count)
    found = joint(fit, frame, kind)
    p = len(fit.theta)
    values, vectors = np.linalg.eigh(found.cov)
    root = vectors * np.sqrt(np.maximum(values, 0.0))
    dof = float(fit.predictive(frame, "mean").dof.min())
    normal = rng.standard_normal((count, len(root))) @ root.T
    errors = normal * np.sqrt(dof / rng.chisquare(dof, (count, 1)))
    theta = fit.theta + errors[:, :p]
    if fit.interval == "bootstrap":
        if len(fit.draws) < _FEWEST_REFITS:
            raise QscaleError(
                f"{fit.name}: the fit has fewer than {_FEWEST_REFITS} refits to draw from. Fit "
                "again with more --boots, or with --interval model."
            )
        theta = fit.draws[rng.integers(len(fit.draws), size=count)]
    low, high = np.array([parameter.bounds for parameter in fit.law.parameters]).T
    frame = fit.completed(frame)
    law = fit.law.location(np.clip(theta, low, high), columns_of(fit.law, frame))
    at_estimate = fit.law.location(fit.theta[None], columns_of(fit.law, frame))
    shared = found.location - at_estimate + errors[:, p:] @ found.design[:, p:].T
    return fit.law.unlinked(np.broadcast_to(law, (count, len(frame))) + shared)


def require_law(fit: object, role: str) -> Fit:
    """Return a fit of a law.

    Raises
    ------
    QscaleError
        If it is a regression.
    """
    if not isinstance(fit, Fit):
        raise QscaleError(f"{role} must be the fit of a law. Got a regression instead.")
    return fit
