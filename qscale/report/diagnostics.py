"""Diagnostics of a fit that need its residuals or further fits, each with what to do about it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from scipy.stats import spearmanr

from qscale.errors import QscaleError
from qscale.report.evidence import MOST_RUNS
from qscale.report.tables import number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from qscale.report.evidence import Evidence, Refit

TREND = 0.3
TREND_P = 0.01
LARGE_MOVE = 2.0  # standard errors; a single cluster of many moves an estimate by far less


def ranks(evidence: Evidence, values: np.ndarray, columns: Sequence[str]) -> dict[str, float]:
    """Return rank correlations of values of rows with columns, where they are clear.

    Values are first averaged within clusters at each value of the column, because rows of one
    cluster share their noise. The p-value is Bonferroni's over the columns tried.

    Parameters
    ----------
    evidence
        A fit beside its rows.
    values
        One for each row, such as its residual, shape (n,).
    columns
        Columns of the rows to try.
    """
    rows = evidence.rows
    tried = [column for column in columns if column in rows and rows[column].nunique() >= 3]
    found = {}
    for column in tried:
        table = pd.DataFrame(
            {"cluster": evidence.clusters, "x": rows[column], "value": values}
        ).dropna()
        means = table.groupby(["cluster", "x"], as_index=False)["value"].mean()
        if len(means) < 5 or means["value"].nunique() < 2:
            continue
        rho, p = spearmanr(means["x"], means["value"])
        if abs(rho) > TREND and p * len(tried) < TREND_P:
            found[column] = float(rho)
    return found


def uneven_scatter(evidence: Evidence) -> str | None:
    """Warn that residuals scatter more at one end of a column, and say what to do."""
    numbers = [c for c in evidence.law.columns if _is_number(evidence, c)]
    size = np.abs(evidence.residuals - np.median(evidence.residuals))
    found = ranks(evidence, size, numbers)
    if not found:
        return None
    column, rho = max(found.items(), key=lambda pair: abs(pair[1]))
    end = "high" if rho > 0 else "low"
    rows = evidence.rows[column]
    upper = rows >= rows.median()
    spreads = [float(np.median(size[(upper == side).to_numpy()])) for side in (rho > 0, rho < 0)]
    ratio = number(spreads[0] / spreads[1], 2) if spreads[1] > 0 else "many"
    return (
        f"Residuals scatter more at {end} {column} (rank correlation of their size {rho:.2f}; "
        f"{ratio} times as far from the law in that half of the rows). Intervals have one width, "
        f"so that they are too narrow at {end} {column} and too wide at the other end. Give "
        "delta_loss_se where it was measured, fit the range of interest alone with --where, or "
        "read the intervals of qscale fit --interval conformal."
    )


def _is_number(evidence: Evidence, column: str) -> bool:
    """Whether a column of the rows holds numbers."""
    return column in evidence.rows and pd.api.types.is_numeric_dtype(evidence.rows[column])


def influence(evidence: Evidence, refit: Refit) -> pd.DataFrame | None:
    """Return how far each parameter moves when one cluster is left out.

    Parameters
    ----------
    evidence
        A fit and its rows.
    refit
        From `qscale.report.evidence.refitter`.

    Returns
    -------
    pandas.DataFrame or None
        One row for each cluster, the most influential first: for each parameter of the law the
        estimate without the cluster minus that with it, in standard errors of the latter, on the
        solver's scale (Belsley, Kuh and Welsch 1980, section 2.1, with clusters for rows). None
        for fewer than four or more than thirty clusters.
    """
    fit, rows = evidence.fit, evidence.rows
    column = fit.data.cluster
    if column not in rows or not 4 <= rows[column].nunique() <= MOST_RUNS:
        return None
    names = list(evidence.law.names)
    slots = [fit.law.names.index(name) for name in names]
    variance = np.diag(evidence.refitted.cov)[slots]
    se = np.sqrt(np.where(variance > 0, variance, np.nan))
    full = evidence.refitted.theta[slots]
    moves = {}
    for cluster in rows[column].dropna().unique():
        try:
            again = refit(rows[rows[column] != cluster])
        except QscaleError:
            continue  # without it the law cannot be fitted: the check of clusters says so
        theta = again.theta[[again.law.names.index(name) for name in names]]
        moves[cluster] = (theta - full) / se
    if not moves:
        return None
    table = pd.DataFrame.from_dict(moves, orient="index", columns=names).rename_axis(column)
    order = table.abs().max(axis=1).sort_values(ascending=False, kind="stable").index
    return table.loc[order].dropna(axis="columns", how="all")


def influence_in_words(table: pd.DataFrame) -> str:
    """Say which cluster moves the estimates most, and what to do about it.

    Parameters
    ----------
    table
        From `influence`.
    """
    worst = table.iloc[0]
    parameter = str(worst.abs().idxmax())
    move = float(worst[parameter])
    said = (
        f"Left out, {table.index[0]} moves the estimates most: {parameter} by "
        f"{number(abs(move), 2)} standard errors {'up' if move > 0 else 'down'}."
    )
    if abs(move) < LARGE_MOVE:
        return f"{said} No single {table.index.name} decides the fit."
    return (
        f"{said} The fit hangs on this {table.index.name}: check how it was measured, report the "
        f"estimates with and without it, and measure more like it before {parameter} is used."
    )
