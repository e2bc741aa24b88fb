"""Figures of a fit from its table, one call each, for notebooks and scripts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qscale.fit.rows import select
from qscale.report import figures
from qscale.report.evidence import fit_options

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from qscale.fit import Fit


def predicted(fit: Fit, table: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Draw observed against predicted target; see `qscale.report.figures.predicted_observed`.

    Parameters
    ----------
    fit
        A fitted law.
    table
        The measurement table it was fitted to; the rows it used are taken.
    ax
        Axes to draw on; new ones by default.

    Raises
    ------
    QscaleError
        If the table lacks a column or has no usable row.
    """
    return figures.predicted_observed(fit, used(fit, table), ax=ax)


def residuals(fit: Fit, table: pd.DataFrame, column: str, *, ax: Axes | None = None) -> Axes:
    """Draw residuals against a column; see `qscale.report.figures.residuals_against`.

    Parameters
    ----------
    fit, table, ax
        See `predicted`.
    column
        Number or text of the table.

    Raises
    ------
    QscaleError
        If the table lacks a column or has no usable row.
    """
    return figures.residuals_against(fit, used(fit, table), column, ax=ax)


def used(fit: Fit, table: pd.DataFrame) -> pd.DataFrame:
    """Return the measured rows of a table that a fit used, censored ones left out."""
    options = fit_options(fit)
    found = select(
        table,
        fit.law,
        where=options["where"],
        cluster=options["cluster"],
        name=fit.data.name,
        floor=options["floor"],
        ceiling=options["ceiling"],
    )
    return found.frame[found.censored == 0]
