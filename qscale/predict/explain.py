"""What drives a prediction, factor by factor, against the median checkpoint of the fit's data."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from qscale.errors import FitError
from qscale.fit.result import Fit
from qscale.laws.compose import product

if TYPE_CHECKING:
    from qscale.fit import Fitted
    from qscale.laws.factors import Factor


def contributions(fit: Fitted, frame: pd.DataFrame) -> pd.DataFrame:
    """Split the log of a prediction over the median checkpoint's into one part for each factor.

    For a law, a part is the difference of a factor between the row and the median of each column
    over the fitted rows; the parts add up to the last, ``all``. For a regression it is what
    setting one column back to its median, or to the average of its labels, does on its own; such
    parts need not add up.

    Parameters
    ----------
    fit
        A fitted law or regression.
    frame
        One row with the fit's columns.

    Returns
    -------
    pandas.DataFrame
        ``term``, the factor or column; ``here`` and ``median``, its columns' values in words;
        ``log_ratio`` (nats of the target, or its unit under an identity link) with
        ``log_ratio_se`` by the delta method, null for regressions; ``ratio``, its exponential.

    Raises
    ------
    FitError
        If the frame does not have one row, or the fit holds no medians (it was made by an earlier
        version).
    """
    if len(frame) != 1:
        raise FitError(f"contributions are those of one setting. Got {len(frame)} rows instead.")
    if not fit.data.medians:
        raise FitError("the fit holds no medians of its data; make it again with qscale fit.")
    frame = frame.reset_index(drop=True)
    rows = _of_law(fit, frame) if isinstance(fit, Fit) else _of_columns(fit, frame)
    found = pd.DataFrame(rows, columns=["term", "here", "median", "log_ratio", "log_ratio_se"])
    with np.errstate(over="ignore"):
        return found.assign(ratio=np.exp(found["log_ratio"]))


def _of_law(fit: Fit, frame: pd.DataFrame) -> list[tuple[str, str, str, float, float]]:
    """Parts of a law: factors, what is known of the run, and all together."""
    law, size = fit.law, len(fit.theta)
    labels = {c: [frame[c].iloc[0] if c in frame else ""] for c in fit.categories}
    here = frame.assign(**labels)
    there = _at_medians(fit, frame).assign(**dict.fromkeys(fit.categories, ""))
    parts = product(law.factors)
    rows, total = [], np.zeros(size)
    for factor, slots in zip(law.factors, parts.slots, strict=True):
        if not factor.columns:
            continue
        value, slope = _change(factor, fit.theta[list(slots)], here, there)
        total[list(slots)] += slope
        cov = fit.cov[np.ix_(slots, slots)]
        name = replace(law, factors=(factor,)).formula.split(" = ", 1)[1]
        rows.append((name, _said(factor, here), _said(factor, there), value, _sd(slope, cov)))
    design = fit.effects.known(fit.completed(frame))[0]
    known = float(design @ fit.effects.values)
    cov = fit.effects.cov.copy()
    cov[:size, :size] = fit.cov
    if known:
        names = ", ".join(term.text for term in fit.effects.terms)
        sd = _sd(design, cov[size:, size:])
        rows.append((f"known deviation of {names}", "", "", known, sd))
    everything = sum(row[3] for row in rows)
    return [*rows, ("all", "", "", everything, _sd(np.concatenate([total, design]), cov))]


def _change(
    factor: Factor, theta: np.ndarray, here: pd.DataFrame, there: pd.DataFrame
) -> tuple[float, np.ndarray]:
    """Difference of a factor and of its gradient between two rows, shapes () and (p,)."""
    ends = [{c: row[c].to_numpy() for c in factor.columns} for row in (here, there)]
    values = [float(factor.value(theta[None], data)[0, 0]) for data in ends]
    slopes = [factor.gradient(theta[None], data)[0, 0] for data in ends]
    return values[0] - values[1], slopes[0] - slopes[1]


def _of_columns(fit: Fitted, frame: pd.DataFrame) -> list[tuple[str, str, str, float, float]]:
    """Parts of a regression: one column at a time set back to its median or average label."""
    rows = []
    now = float(np.log(fit.center(frame)[0]))
    for column in dict.fromkeys((*fit.columns, *fit.categories)):
        if column in fit.categories:
            if column not in frame.columns:
                continue
            changed, typical = frame.drop(columns=column), "average"
        else:
            changed, typical = _at_medians(fit, frame, (column,)), None
        back = float(np.log(fit.center(changed)[0]))
        there = typical or f"{column} {changed[column].iloc[0]:.4g}"
        rows.append((column, f"{column} {_text(frame[column].iloc[0])}", there, now - back, np.nan))
    changed = _at_medians(fit, frame).drop(columns=list(fit.categories), errors="ignore")
    back = float(np.log(fit.center(changed)[0]))
    return [*rows, ("all", "", "", now - back, np.nan)]


def _at_medians(
    fit: Fitted, frame: pd.DataFrame, columns: tuple[str, ...] | None = None
) -> pd.DataFrame:
    """Return the row with columns, by default all that the fit needs, at their medians."""
    wanted = fit.columns if columns is None else columns
    medians = {c: [fit.data.medians[c]] for c in wanted if c in fit.data.medians}
    return frame.assign(**medians)


def _said(factor: Factor, row: pd.DataFrame) -> str:
    """Values of a factor's columns in words; no label is the average."""
    return ", ".join(f"{c} {_text(row[c].iloc[0])}" for c in factor.columns)


def _text(value: object) -> str:
    """Format a number or a label."""
    if isinstance(value, int | float | np.number):
        return f"{float(value):.4g}"
    return str(value) or "average"


def _sd(slope: np.ndarray, cov: np.ndarray) -> float:
    """Return the standard error of a difference by the delta method."""
    return float(np.sqrt(max(slope @ cov @ slope, 0.0)))
