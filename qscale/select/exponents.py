"""Exponents within runs: what a column seems to do while all else of a run moves along with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from qscale.table import require

if TYPE_CHECKING:
    from collections.abc import Sequence

CONSTANT, DECAYED, DECAYING, UNKNOWN = (
    "constant rate",
    "after decay",
    "while decaying",
    "rate not known",
)
_FEWEST = 4


def exponents_within(
    rows: pd.DataFrame,
    target: str,
    column: str = "tokens",
    cluster: str = "run",
    settings: Sequence[str] = ("method", "bits", "group_size", "figure", "averaging"),
) -> pd.DataFrame:
    """Slope of the log target in a log column within each run and quantizer setting.

    Along a run whose learning rate decays, the slope in tokens mixes the effect of tokens with that
    of the decay; where the rate is constant, or has decayed in every row, it is the tokens' own.

    Parameters
    ----------
    rows
        Rows with a positive target; ``lr`` and ``lr_peak`` tell the learning rate's part.
    target, column, cluster
        Names of columns.
    settings
        Columns that must not vary within a slope, as far as the rows have them.

    Returns
    -------
    pandas.DataFrame
        One row per run, setting and part with at least four distinct values of the column:
        ``cluster``, ``part`` (constant rate, after decay, while decaying, rate not known),
        ``rows``, ``exponent`` and its least-squares standard error ``se``, which takes rows as
        independent and is too small for that. Rows whose target or column is unknown or not above
        zero take no part.

    Raises
    ------
    TableError
        If a column is missing.
    """
    require(rows, (cluster, column, target), "exponents within runs")
    rows = rows[(rows[column] > 0) & (rows[target] > 0)]
    keys = [cluster, *(name for name in settings if name in rows.columns)]
    rows = rows.assign(_part=_part(rows))
    found = []
    for key, group in rows.groupby([*keys, "_part"], dropna=False):
        x, y = np.log(group[column].to_numpy(dtype=float)), np.log(group[target].to_numpy())
        if len(np.unique(x)) < _FEWEST:
            continue
        (slope, _), cov = np.polyfit(x, y, 1, cov=True)
        found.append((str(key[0]), str(key[-1]), len(group), slope, float(np.sqrt(cov[0, 0]))))
    table = pd.DataFrame(found, columns=["cluster", "part", "rows", "exponent", "se"])
    return table.sort_values(["part", "exponent"], ignore_index=True)


def _part(rows: pd.DataFrame) -> pd.Series:
    """Say where on its schedule each row is."""
    if not {"lr", "lr_peak"} <= set(rows.columns):
        return pd.Series(UNKNOWN, index=rows.index)
    share = rows["lr"] / rows["lr_peak"]
    part = pd.Series(DECAYING, index=rows.index).where(share < 1 - 1e-6, CONSTANT)
    return part.where(share > 1e-6, DECAYED).where(share.notna(), UNKNOWN)
