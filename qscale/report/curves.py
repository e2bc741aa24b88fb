"""Curves of a fit: a parameter's profile likelihood, and predictions along one column."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from matplotlib.ticker import FuncFormatter

from qscale.errors import FitError
from qscale.fit.prediction import predict
from qscale.report.figures import COLOURS, label, legend_above, log_ticks, new_axes, styled
from qscale.report.svg import INK
from qscale.report.tables import count

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes

    from qscale.fit import Fitted
    from qscale.fit.profile import Profile

_POINTS = 101


@styled
def profile(profile: Profile, *, ax: Axes | None = None) -> Axes:
    """Draw how the deviance rises around a parameter's estimate, with the ends of its interval.

    Parameters
    ----------
    profile
        A parameter's profile likelihood.
    ax
        Axes to draw on; new ones by default.

    Returns
    -------
    matplotlib.axes.Axes
        The curve, the rise that the level allows, and vertical lines at the estimate and, dotted,
        at the ends.
    """
    ax = new_axes(ax, 4.2, 3.0)
    ax.plot(profile.values, profile.rise, color=COLOURS[0], lw=1.8)
    ax.axhline(profile.allowed, color=INK, lw=0.9, ls="--")
    ax.axvline(profile.estimate, color=INK, lw=0.9)
    for end in (profile.low, profile.high):
        if np.isfinite(end):
            ax.axvline(end, color=COLOURS[4], lw=1.2, ls=":")
    if profile.log and profile.values[-1] > 10 * profile.values[0]:
        ax.set_xscale("log")
    ax.set_ylim(bottom=0)
    ax.set(xlabel=profile.parameter, ylabel="rise of the deviance")
    ax.xaxis.label.set_parse_math(False)
    ax.set_title(
        f"{profile.estimate:.4g}, {100 * profile.level:g} % interval "
        f"{profile.low:.4g} to {profile.high:.4g}",
        loc="left",
    )
    return ax


@styled
def curves(
    fit: Fitted,
    column: str,
    at: Mapping[str, float | str | Sequence[Any]] | None = None,
    *,
    level: float = 0.9,
    points: int = _POINTS,
    ax: Axes | None = None,
) -> Axes:
    """Draw what a fit predicts along one column, within the values that it was fitted on.

    Parameters
    ----------
    fit
        A fitted law or regression.
    column
        A column of numbers, such as ``tokens``.
    at
        Values of the other columns; a list of values of one of them gives a curve each. Numbers
        that are not given have their median over the fitted rows.
    level
        Probability of the band, of predictions for a new checkpoint.
    points
        Number of values along the column.
    ax
        Axes to draw on; new ones by default.

    Raises
    ------
    FitError
        If the fit does not use a column, a value is missing, or several columns have lists.
    """
    if not 0 < level < 1:
        raise FitError(f"level must be between 0 and 1. Got {level} instead.")
    frame, by = _grid(fit, column, dict(at or {}), points)
    ax = new_axes(ax, 4.6, 3.4)
    found = predict(fit, frame, levels=(level,))
    edges = [f"low_{100 * level:g}", f"high_{100 * level:g}"]
    groups = [(None, found)] if by is None else list(found.groupby(by, sort=False))
    for i, (value, part) in enumerate(groups):
        colour = COLOURS[i % len(COLOURS)]
        name = None if value is None else f"{by} {_text(value)}"
        ax.plot(part[column], part[fit.target], color=colour, lw=1.8, label=name)
        band = part[edges].to_numpy().T
        ax.fill_between(part[column], *band, color=colour, alpha=0.14, lw=0)
    x = frame[column].to_numpy()
    y = found[[fit.target, *edges]].to_numpy(dtype=float)
    large = x[-1] >= 1e3
    if _spread(x[0], x[-1]):
        ax.set_xscale("log")
        log_ticks(ax.xaxis, x, count if large else "{:g}".format, most=5)
    elif large:
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: count(value)))
    if np.nanmin(y) > 0:
        ax.set_yscale("log")
        log_ticks(ax.yaxis, y[np.isfinite(y)], "{:g}".format)
    held = ", ".join(f"{n} {_text(frame[n].iloc[0])}" for n in frame if n not in (column, by))
    ax.set_xlabel(f"{label(column)}\n{held}".strip(), parse_math=False)
    ax.set_ylabel(label(fit.target))
    if by is not None:
        legend_above(ax)
    return ax


def _grid(
    fit: Fitted, column: str, at: dict[str, Any], points: int
) -> tuple[pd.DataFrame, str | None]:
    """Rows to predict, and the column with a curve for each of its values."""
    known = (*fit.columns, *fit.categories)
    for name in (column, *at):
        if name not in known:
            raise FitError(
                f"{fit.name} does not use the column {name!r}; it uses: {', '.join(known)}."
            )
    if column not in fit.data.ranges:
        raise FitError(f"{column} is not a column of numbers of this fit; choose another.")
    lists = [name for name, value in at.items() if np.ndim(value) > 0]
    if len(lists) > 1 or column in at:
        raise FitError(
            "curves takes a list of values for one column beside the one that is drawn. "
            f"Got {', '.join(at)} instead."
        )
    low, high = fit.data.ranges[column]
    space = np.geomspace if _spread(low, high) else np.linspace
    x = space(low, high, points)
    fixed = {}
    for name in fit.columns:
        if name not in (column, *at):
            if name not in fit.data.medians:
                raise FitError(f"{fit.name} needs a value of {name}: give {name}=...")
            fixed[name] = fit.data.medians[name]
    by = lists[0] if lists else None
    single = fixed | {name: value for name, value in at.items() if name != by}
    values = [None] if by is None else list(at[by])
    parts = [
        pd.DataFrame({column: x, **single, **({} if by is None else {by: value})})
        for value in values
    ]
    return pd.concat(parts, ignore_index=True), by


def _spread(low: float, high: float) -> bool:
    """Tell whether a column asks for a logarithmic axis."""
    return low > 0 and high > 3 * low


def _text(value: Any) -> str:
    """Write a value of a column."""
    if isinstance(value, str):
        return value
    return count(value) if abs(value) >= 1e4 else f"{value:.3g}"
