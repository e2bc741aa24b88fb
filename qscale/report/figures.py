"""Figures of a fit: functions that take results and rows, draw on axes and return them."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.mathtext import MathTextParser
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter
from scipy.stats import norm

from qscale.columns import COLUMNS
from qscale.report.evidence import predicted
from qscale.report.svg import INK, STYLE
from qscale.report.tables import count

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

    from qscale.fit import Fit
    from qscale.laws import Law

P = ParamSpec("P")
T = TypeVar("T")

# Okabe and Ito's colours, told apart with any common colour blindness, less yellow and black.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#8C6D46")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def styled(draw: Callable[P, T]) -> Callable[P, T]:
    """Run a drawing function under `STYLE` without touching the global settings."""

    @functools.wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> T:
        with mpl.rc_context(STYLE):
            return draw(*args, **kwargs)

    return drawn


def new_axes(ax: Axes | None, width: float, height: float) -> Axes:
    """Return the given axes or those of a new figure of a size in inches."""
    if ax is not None:
        return ax
    return Figure(figsize=(width, height), layout="constrained").subplots()


def label(column: str) -> str:
    """Return a column's axis label: its name, with its unit where it has one."""
    unit = COLUMNS[column].unit if column in COLUMNS else ""
    return column if unit in {"", column} else f"{column} ({unit})"


@styled
def equation(law: Law, *, ax: Axes | None = None) -> Axes:
    """Typeset a law; one whose LaTeX matplotlib cannot read is shown as plain text.

    Parameters
    ----------
    law
        The law.
    ax
        Axes to draw on; new ones by default.

    Returns
    -------
    matplotlib.axes.Axes
        Axes with nothing but the equation.
    """
    ax = Figure(figsize=(5.0, 0.6)).subplots() if ax is None else ax
    ax.set_axis_off()
    text = ax.text(0, 0.5, f"${law.latex}$", ha="left", va="center", fontsize=17)
    try:
        MathTextParser("path").parse(text.get_text())
    except ValueError:
        text.set(text=law.formula, parse_math=False, fontsize=12)
    return ax


@styled
def predicted_observed(fit: Fit, rows: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Draw observed against predicted target on logarithmic axes.

    Parameters
    ----------
    fit
        A fitted law.
    rows
        Usable rows with the law's columns and its target.
    ax
        Axes to draw on; new ones by default.

    Returns
    -------
    matplotlib.axes.Axes
        Points coloured by family, else by bits; the identity; and bands that hold 50 % and 90 % of
        new rows of new clusters by the scatter around the law.
    """
    ax = new_axes(ax, 4.6, 4.1)
    x, y = predicted(fit, rows), rows[fit.law.target].to_numpy()
    low, high = min(x.min(), y.min()) / 1.3, max(x.max(), y.max()) * 1.3
    line = np.array([low, high])
    spread = np.sqrt(fit.effects.residual + fit.effects.variances.sum())
    for name, mask, colour, marker in _groups(rows):
        points: dict[str, Any] = {"s": 20, "color": colour, "marker": marker, "alpha": 0.8, "lw": 0}
        ax.scatter(x[mask], y[mask], **points, label=_short(name), zorder=3)
    ax.plot(line, line, color=INK, lw=1)
    for level, alpha in ((50, 0.16), (90, 0.09)):
        edges = np.exp(spread * norm.ppf([0.5 - level / 200, 0.5 + level / 200]))
        band: dict[str, Any] = {"color": INK, "alpha": alpha, "lw": 0, "label": f"{level} % band"}
        ax.fill_between(line, line * edges[0], line * edges[1], **band)
    ax.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
    for axis in (ax.xaxis, ax.yaxis):
        log_ticks(axis, np.array([low, high]), "{:g}".format)
    ax.set(xlabel=f"predicted {label(fit.law.target)}", ylabel=f"observed {label(fit.law.target)}")
    legend_above(ax)
    return ax


def _groups(rows: pd.DataFrame) -> list[tuple[str, np.ndarray, str, str]]:
    """Tell points apart by family or bits: name, mask, colour and marker of each group."""
    for column in ("family", "bits"):
        if column not in rows.columns:
            continue
        values = rows[column].dropna().unique()
        if 1 < len(values) <= len(COLOURS):
            names = [(v, str(v) if column == "family" else f"{v:g} bits") for v in sorted(values)]
            groups = [(name, (rows[column] == value).to_numpy()) for value, name in names]
            unknown = rows[column].isna().to_numpy()
            found = [(name, mask, COLOURS[i], MARKERS[i]) for i, (name, mask) in enumerate(groups)]
            return found + ([("unknown", unknown, INK, ".")] if unknown.any() else [])
    return [("rows", np.ones(len(rows), dtype=bool), COLOURS[0], MARKERS[0])]


@styled
def residuals_against(fit: Fit, rows: pd.DataFrame, column: str, *, ax: Axes | None = None) -> Axes:
    """Draw observed over predicted against one column, with the median along it.

    Parameters
    ----------
    fit
        A fitted law.
    rows
        Usable rows with the law's columns, its target and ``column``.
    column
        A column of numbers or text.
    ax
        Axes to draw on; new ones by default.

    Returns
    -------
    matplotlib.axes.Axes
        One point a row; the line joins medians, of each value where there are few and of bins with
        equally many rows otherwise. Above one, the law predicted too little.
    """
    known = rows[column].notna().to_numpy()
    ratio = (rows[fit.law.target] / predicted(fit, rows)).to_numpy()[known]
    values = rows.loc[known, column]
    if pd.api.types.is_numeric_dtype(values):
        ax = new_axes(ax, 3.3, 2.5)
        _number_panel(ax, column, values.to_numpy(dtype=float), ratio)
    else:
        levels = sorted(values.astype(str).unique())
        ax = new_axes(ax, 3.3, max(2.5, 0.9 + 0.24 * len(levels)))
        _text_panel(ax, values.astype(str).to_numpy(), levels, ratio)
    ax.set_title(label(column), loc="left", parse_math=False)
    return ax


def _number_panel(ax: Axes, column: str, values: np.ndarray, ratio: np.ndarray) -> None:
    """Draw ratios against numbers, logarithmic where they span more than a factor of three."""
    ax.axhline(1, color=INK, lw=0.9)
    ax.scatter(values, ratio, s=12, color=COLOURS[0], alpha=0.5, lw=0)
    centres, medians = binned_median(values, ratio)
    ax.plot(centres, medians, color=COLOURS[4], lw=1.8, marker="o", ms=3.5)
    ax.set_yscale("log")
    log_ticks(ax.yaxis, ratio, "×{:g}".format)
    unique = np.unique(values)
    if column == "bits" and len(unique) <= 8:
        ax.xaxis.set_major_locator(FixedLocator(unique.tolist()))
    elif unique[0] > 0 and unique[-1] > 3 * unique[0]:
        ax.set_xscale("log")
        text = count if unique[-1] >= 1e3 else "{:g}".format
        log_ticks(ax.xaxis, values, text, most=5)
    elif unique[-1] >= 1e3:
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: count(value)))
    ax.set_ylabel("observed / predicted")


def _text_panel(ax: Axes, values: np.ndarray, levels: Sequence[str], ratio: np.ndarray) -> None:
    """Draw ratios as one strip a level, its median as a bar."""
    ax.axvline(1, color=INK, lw=0.9)
    for i, level in enumerate(levels):
        here = ratio[values == level]
        ax.scatter(here, np.full(len(here), i), s=12, color=COLOURS[0], alpha=0.5, lw=0)
        middle = float(np.median(here))
        ax.plot([middle, middle], [i - 0.3, i + 0.3], color=COLOURS[4], lw=2.2)
    ax.set_xscale("log")
    log_ticks(ax.xaxis, ratio, "×{:g}".format, most=4)
    ax.set_yticks(range(len(levels)), [_short(level) for level in levels])
    for text in ax.get_yticklabels():
        text.set_parse_math(False)
    ax.set_ylim(len(levels) - 0.4, -0.6)
    ax.set_xlabel("observed / predicted")


def binned_median(
    values: np.ndarray, ratio: np.ndarray, bins: int = 8
) -> tuple[np.ndarray, np.ndarray]:
    """Return medians along a column: at each value if there are few, else in equally full bins.

    Parameters
    ----------
    values, ratio
        Column and quantity, shape (n,).
    bins
        Number of bins, and the number of values up to which there are few.

    Returns
    -------
    tuple of numpy.ndarray
        Median of the column and of the quantity in each bin.
    """
    unique = np.unique(values)
    if len(unique) <= bins:
        return unique, np.array([np.median(ratio[values == value]) for value in unique])
    order = np.argsort(values, kind="stable")
    parts = np.array_split(order, bins)
    return (
        np.array([np.median(values[part]) for part in parts]),
        np.array([np.median(ratio[part]) for part in parts]),
    )


_NAMED = 30
"""Lines up to which each has its name."""


@styled
def run_exponents(table: pd.DataFrame, estimate: float, *, ax: Axes | None = None) -> Axes:
    """Draw the tokens exponent of each run, by the part of its learning-rate schedule.

    Parameters
    ----------
    table
        As `qscale.select.exponents_within` returns it.
    estimate
        The fit's own exponent, drawn as a line.
    ax
        Axes to draw on; new ones by default.

    Returns
    -------
    matplotlib.axes.Axes
        One point a run and setting, with 90 % intervals that take rows as independent; beyond 30
        of them they stand closer and without names.
    """
    named = len(table) <= _NAMED
    ax = new_axes(ax, 5.2, 1.2 + (0.2 if named else 0.07) * len(table))
    for i, (part, group) in enumerate(table.groupby("part", sort=False)):
        bar: dict[str, Any] = {
            "fmt": MARKERS[i],
            "ms": 4.5 if named else 3,
            "color": COLOURS[i],
            "lw": 1.2,
        }
        ax.errorbar(group["exponent"], group.index, xerr=1.645 * group["se"], label=part, **bar)
    ax.axvline(estimate, color=INK, lw=0.9, label="the fit")
    if named:
        ax.set_yticks(range(len(table)), [_short(name, 34) for name in table["cluster"]])
    else:
        ax.set_yticks([])
        ax.set_ylabel(f"{table['cluster'].nunique()} runs, a line for each setting")
    for text in ax.get_yticklabels():
        text.set_parse_math(False)
    ax.set_ylim(len(table) - 0.4, -0.6)
    ax.set_xlabel("exponent of tokens within the run")
    legend_above(ax)
    return ax


@styled
def held_out_error(scores: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Draw the typical error on each held-out split, one marker a fit.

    Parameters
    ----------
    scores
        As in `qscale.report.evidence.HeldOut`.
    ax
        Axes to draw on; new ones by default.

    Returns
    -------
    matplotlib.axes.Axes
        Median error as a factor, one being a perfect prediction.
    """
    ax = _score_panel(scores, np.exp(scores["median_abs_log_error"]), ax)
    ax.set_xscale("log")
    ax.axvline(1, color=INK, lw=0.9)
    seen = np.exp(scores["median_abs_log_error"].dropna().to_numpy())
    log_ticks(ax.xaxis, np.append(seen, [1.0, 1.5]), "×{:g}".format)
    ax.set_xlabel("typical error, as a factor")
    return ax


@styled
def held_out_coverage(scores: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Draw the share of held-out rows inside their 90 % interval, one marker a fit.

    Parameters
    ----------
    scores
        As in `qscale.report.evidence.HeldOut`.
    ax
        Axes to draw on; new ones by default.

    Returns
    -------
    matplotlib.axes.Axes
        Shares from 0 to 100 %, with a line at the nominal 90 %.
    """
    ax = _score_panel(scores, 100 * scores["coverage_90"], ax)
    ax.axvline(90, color=INK, lw=0.9)
    ax.set(xlim=(-4, 104), xlabel="rows inside their 90 % interval (%)")
    return ax


def _score_panel(scores: pd.DataFrame, values: pd.Series, ax: Axes | None) -> Axes:
    """Draw one strip a split and one marker a fit, a little apart."""
    splits = scores["held_out"].drop_duplicates().tolist()
    fits = scores["fit"].drop_duplicates().tolist()
    legend = 0.2 * len(fits) if len(fits) > 1 else 0.0
    ax = new_axes(ax, 3.9, 1.1 + (0.26 + 0.08 * len(fits)) * len(splits) + legend)
    places = {split: i for i, split in enumerate(splits)}
    apart = 0.6 / max(len(fits), 2)
    for i, name in enumerate(fits):
        mine = (scores["fit"] == name).to_numpy()
        height = scores.loc[mine, "held_out"].map(places) + apart * (i - (len(fits) - 1) / 2)
        colour, marker = COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]
        ax.scatter(
            values[mine], height, s=34, color=colour, marker=marker, lw=0, label=_short(name, 40)
        )
    ax.set_yticks(range(len(splits)), [_short(split) for split in splits])
    ax.set_ylim(len(splits) - 0.4, -0.6)
    for text in ax.get_yticklabels():
        text.set_parse_math(False)
    if len(fits) > 1:
        legend_above(ax)
    return ax


def _short(text: str, most: int = 24) -> str:
    """Shorten a label so that it leaves room for the drawing."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def legend_above(ax: Axes) -> None:
    """Put the legend over the axes, where it covers no point."""
    longest = max(len(str(text)) for text in ax.get_legend_handles_labels()[1])
    legend = ax.legend(
        loc="lower left",
        bbox_to_anchor=(-0.02, 1.0),
        ncols=3 if longest <= 12 else 2 if longest <= 20 else 1,
        handletextpad=0.3,
        columnspacing=1.2,
        borderaxespad=0.2,
    )
    for text in legend.get_texts():
        text.set_parse_math(False)


def log_ticks(
    axis: Axis, values: np.ndarray, text: Callable[[float], str], *, most: int = 7
) -> None:
    """Put plain numbers on a logarithmic axis: the finest steps that give few enough of them."""
    low, high = np.log10(values.min()), np.log10(values.max())
    steps: tuple[float, ...] = (1.0,)
    for finer in ((1.0, 3.0), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)):
        ticks = np.add.outer(np.arange(np.floor(low), high + 1), np.log10(finer))
        if ((ticks >= low - 0.05) & (ticks <= high + 0.05)).sum() <= most:
            steps = finer
    axis.set_major_locator(LogLocator(subs=steps, numticks=most + 2))
    axis.set_major_formatter(FuncFormatter(lambda value, _: text(float(f"{value:.6g}"))))
    axis.set_minor_formatter(NullFormatter())
