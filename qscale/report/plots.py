"""Figures of a fit from its table, one call each, for notebooks and scripts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qscale.errors import FitError
from qscale.fit.profile import profile_likelihood
from qscale.fit.rows import select
from qscale.report import curves, figures
from qscale.report.evidence import fit_options
from qscale.table import require

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
    require(table, [column], fit.data.name)
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


class FitPlots:
    """Figures of a fit as ``fit.plot.fitted()`` and the like; each returns matplotlib axes.

    A fit that was just made holds its rows; one that was read from a file needs its table.

    Parameters
    ----------
    fit
        A fitted law.
    """

    def __init__(self, fit: Fit) -> None:
        self._fit = fit

    def fitted(self, table: pd.DataFrame | None = None, *, ax: Axes | None = None) -> Axes:
        """Draw observed against predicted target; see `predicted`."""
        return predicted(self._fit, self._rows(table), ax=ax)

    def residuals(
        self, column: str = "bits", table: pd.DataFrame | None = None, *, ax: Axes | None = None
    ) -> Axes:
        """Draw residuals against a column; see `qscale.report.plots.residuals`."""
        return residuals(self._fit, self._rows(table), column, ax=ax)

    def profile(
        self,
        parameter: str,
        table: pd.DataFrame | None = None,
        *,
        level: float = 0.9,
        ax: Axes | None = None,
    ) -> Axes:
        """Draw a parameter's profile likelihood; see `qscale.fit.profile.profile_likelihood`."""
        found = profile_likelihood(self._fit, self._rows(table), parameter, level=level)
        return curves.profile(found, ax=ax)

    def curves(
        self, column: str, /, *, level: float = 0.9, ax: Axes | None = None, **at: Any
    ) -> Axes:
        """Draw predictions along a column, others at given values; see `qscale.report.curves`.

        ``fit.plot.curves("tokens", bits=[3, 4], n_params=7e9)`` draws two curves.
        """
        return curves.curves(self._fit, column, at, level=level, ax=ax)

    def _rows(self, table: pd.DataFrame | None) -> pd.DataFrame:
        """Return the table, or the rows that the fit holds."""
        rows = self._fit.frame if table is None else table
        if rows is None:
            raise FitError(
                f"{self._fit.name} was read from a file, which does not hold its rows: give its "
                "table, as in fit.plot.fitted(table)."
            )
        return rows
