"""Which measurements to make next: those that say most about a prediction or the parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
import pandas as pd
from scipy.stats import t as student

from qscale.errors import QscaleError
from qscale.fit.options import check_choice, check_count, check_level
from qscale.plan.joint import joint

if TYPE_CHECKING:
    from qscale.fit import Fit

    Array = np.ndarray

Criterion = Literal["target", "parameters"]


def choose(
    fit: Fit,
    candidates: pd.DataFrame,
    targets: pd.DataFrame,
    count: int,
    *,
    criterion: Criterion = "target",
    level: float = 0.9,
) -> pd.DataFrame:
    """Order candidates by what each would add to those before it.

    Parameters and random effects are Gaussian with the covariance of the fit and the law is
    linearised at its estimates, so that what a measurement will teach does not depend on its
    outcome. One after the other, the candidate is taken that most lowers the mean variance of the
    targets' predictions (Bayesian I-optimal; MacKay 1992, Neural Computation 4, 590), or the
    determinant of the parameters' covariance (D-optimal; Chaloner and Verdinelli 1995, Statistical
    Science 10, 273). Greedy choice is not the best set of that size, and near it in practice.

    Parameters
    ----------
    fit
        A fitted law, from a table large enough for its variances to be trusted: they are held.
    candidates
        Settings that can be measured, each once: the law's columns and the fit's grouping columns,
        such as ``run``. Rows of one run share its deviation, which is part of what they cannot
        tell of others. Without a grouping column, they are of the targets' own checkpoint.
    targets
        Settings to be predicted.
    count
        Number of measurements.
    criterion
        ``target`` or ``parameters``.
    level
        Probability of the interval that is reported.

    Returns
    -------
    pandas.DataFrame
        ``count`` rows of the candidates in order, with ``candidate`` (position), ``sd`` (of the
        targets' new-checkpoint predictions after this and all earlier measurements, root mean
        square, on the link's scale) and ``width`` (the mean width of their intervals on that scale;
        log of high over low for a law with a logarithm). The attribute ``attrs["before"]`` holds
        ``(sd, width)`` before any.

    Raises
    ------
    QscaleError
        If there are fewer candidates than measurements, or an option is not one.
    TableError
        If a column is missing.
    """
    check_level(level)
    check_choice("criterion", criterion, get_args(Criterion))
    check_count("count", count, 0)
    if not 1 <= count <= len(candidates):
        raise QscaleError(
            f"count must be between 1 and the number of candidates, {len(candidates)}. Got {count} "
            "instead."
        )
    aims = len(targets)
    rows = pd.concat([targets, candidates], ignore_index=True)
    known = joint(fit, rows)
    aim, design = known.design[:aims], known.design[aims:]
    noise = known.residual + _measurement_variance(fit, candidates)
    reach = 2 * student.ppf(0.5 + level / 2, fit.predictive(targets).dof)

    def told(cov: Array) -> tuple[float, float]:
        variance = np.einsum("ti,ij,tj->t", aim, cov, aim) + known.residual
        return float(np.sqrt(variance.mean())), float((reach * np.sqrt(variance)).mean())

    cov, left, found = known.cov, np.ones(len(candidates), dtype=bool), []
    for _ in range(count):
        gain = _gain(cov, aim, design, noise, len(fit.theta), criterion)
        best = int(np.where(left, gain, -np.inf).argmax())
        left[best] = False
        cov = updated(cov, design[best], noise[best])
        found.append((best, *told(cov)))
    order = pd.DataFrame(found, columns=["candidate", "sd", "width"])
    chosen = candidates.reset_index(drop=True).iloc[order["candidate"]].reset_index(drop=True)
    result = pd.concat([chosen, order], axis=1)
    result.attrs["before"] = told(known.cov)
    return result


def updated(cov: Array, design: Array, noise: float) -> Array:
    """Covariance after one measurement, by the Kalman update, shape (m, m).

    Parameters
    ----------
    cov
        Covariance of the errors before, shape (m, m).
    design
        How they enter the measurement, shape (m,).
    noise
        Variance of the measurement around them.
    """
    to = cov @ design
    return cov - np.outer(to, to) / (design @ to + noise)


def _gain(
    cov: Array, aim: Array, design: Array, noise: Array, p: int, criterion: Criterion
) -> Array:
    """Return what each candidate would add, shape (c,): variance or log determinant taken off."""
    to = cov @ design.T
    variance = np.einsum("ci,ic->c", design, to) + noise
    if criterion == "target":
        return ((aim @ to) ** 2).mean(axis=0) / variance
    inner = to[:p]
    explained = np.einsum("pc,pq,qc->c", inner, _inverse(cov[:p, :p]), inner) / variance
    return -np.log1p(-np.minimum(explained, 1.0 - 1e-15))


def _inverse(cov: Array) -> Array:
    """Inverse of a covariance in which parameters may be held, by correlations."""
    sd = np.sqrt(np.maximum(np.diag(cov), 0.0))
    unit = np.divide(1.0, sd, out=np.zeros_like(sd), where=sd > 0)
    scale = np.outer(unit, unit)
    return np.linalg.pinv(cov * scale, rcond=1e-12, hermitian=True) * scale


def _measurement_variance(fit: Fit, candidates: pd.DataFrame) -> Array:
    """Variance of a measurement's own error on the log scale, where the candidates tell it."""
    if fit.target != "delta_loss" or "delta_loss_se" not in candidates.columns:
        return np.zeros(len(candidates))
    se = candidates["delta_loss_se"].fillna(0.0).to_numpy(dtype=float)
    return (se / fit.center(candidates)) ** 2
