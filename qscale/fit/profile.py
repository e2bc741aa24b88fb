"""Profile likelihood of one parameter of a fit: a curve, and the interval that it gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from qscale.errors import FitError, did_you_mean
from qscale.fit import mixed
from qscale.fit.intervals import allowed_rise, deviance_rise, profile
from qscale.fit.options import check_level
from qscale.fit.point import Estimated, estimated

if TYPE_CHECKING:
    import pandas as pd

    from qscale.fit.result import Fit

_SAME = 1e-3  # standard errors by which a fit made again may differ
_BEYOND = 0.3  # of the interval's half width that the curve goes on


@dataclass(frozen=True, slots=True, eq=False)
class Profile:
    """How the deviance rises when one parameter is held away from its estimate.

    Parameters
    ----------
    parameter
        Its name.
    estimate, low, high
        Estimate and ends of the interval, on the natural scale.
    level
        Probability of the interval.
    values, rise
        Values that the parameter was held at, on the natural scale, and -2 times the fall of the
        penalised log likelihood there, shape (m,). All other parameters take their best values; the
        variances are held.
    allowed
        Rise at the ends: the square of Student's t quantile.
    log
        Whether the parameter is estimated on a logarithmic scale.
    """

    parameter: str
    estimate: float
    low: float
    high: float
    level: float
    values: np.ndarray
    rise: np.ndarray
    allowed: float
    log: bool


def profile_likelihood(
    fit: Fit, table: pd.DataFrame, parameter: str, *, level: float = 0.9, points: int = 41
) -> Profile:
    """Profile one parameter of a fit, whatever its own intervals are.

    Parameters
    ----------
    fit
        A fitted law.
    table
        The measurement table it was fitted to.
    parameter
        Name of a parameter that was estimated.
    level
        Probability of the interval.
    points
        Number of values, from a little below the interval to a little above it.

    Raises
    ------
    FitError
        If there is no such parameter, it was held, or the table does not give the fit again.
    """
    names = fit.law.names
    if parameter not in names:
        raise FitError(
            f"{fit.name} has no parameter {parameter!r}; its parameters are: {', '.join(names)}."
            f"{did_you_mean(parameter, names)}"
        )
    check_level(level)
    found, index = _again(fit, table), names.index(parameter)
    model, fitted = found.model, found.fitted
    if model.low[index] >= model.high[index]:
        raise FitError(f"{parameter} was held at {fit.values[parameter]:g}: it has no profile.")
    p = len(fitted.theta)
    own = np.einsum("kii->ik", fitted.cov_slopes)
    variance = np.diag(fitted.cov)[:p]
    dof = float(mixed.satterthwaite(variance, own, fitted.scales_cov)[index])
    ends = np.array(profile(model, fitted, index, level, dof))
    at, bounds = float(fitted.theta[index]), (model.low[index], model.high[index])
    reach = (1 + _BEYOND) * (np.where(np.isfinite(ends), ends, at) - at)
    first, last = np.clip(at + reach, *bounds)
    held = np.union1d(np.linspace(first, last, points), [at, *ends])
    held = held[np.isfinite(held)]
    rise = deviance_rise(model, fitted, index)
    scale = fit.law.parameters[index]
    natural = scale.natural(held)
    order = np.argsort(natural)
    low, high = np.sort(scale.natural(ends))
    return Profile(
        parameter=parameter,
        estimate=fit.values[parameter],
        low=float(low),
        high=float(high),
        level=level,
        values=natural[order],
        rise=np.array([rise(float(value)) for value in held])[order],
        allowed=allowed_rise(level, dof),
        log=scale.scale == "log",
    )


def _again(fit: Fit, table: pd.DataFrame) -> Estimated:
    """Estimate a fit once more, to have its likelihood."""
    data = fit.data
    found = estimated(table, fit.law.without_offsets(), data.options, data.cluster, data.name)
    p = len(fit.theta)
    se = np.sqrt(np.diag(found.fitted.cov)[: len(found.fitted.theta)])
    if found.law.names != fit.law.names or not np.all(
        np.abs(found.fitted.theta - fit.theta) <= _SAME * se[:p] + 1e-9
    ):
        raise FitError(
            f"{fit.name}: the table does not give this fit again. Give the one that it was fitted "
            "to; a fit updated with measured rows has no profile."
        )
    return found
