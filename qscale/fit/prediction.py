"""Predicted rows of whatever was fitted, with central intervals."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

import numpy as np

from qscale.columns import COLUMNS
from qscale.fit.effects import Kind
from qscale.fit.options import check_choice, check_frame, check_level
from qscale.table import check, require_numbers

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

    from qscale.fit.record import Fitted


def predict(
    fit: Fitted,
    frame: pd.DataFrame,
    *,
    kind: Kind = "new_checkpoint",
    levels: Sequence[float] = (0.5, 0.9),
    seed: int = 0,
) -> pd.DataFrame:
    """Predict a fit's target for described checkpoints.

    Parameters
    ----------
    fit
        A fitted law or regression.
    frame
        One row per setting with the fit's columns. Grouping columns, such as ``run`` or an offset's
        ``source``, may be absent or hold a level the fit has not seen: the average level is used
        and the spread of levels is added.
    kind
        ``mean`` is the uncertainty of the law itself; ``new_checkpoint`` adds the scatter of runs
        around the law and of rows around their run, as a new measurement would show it.
    levels
        Probabilities of the central intervals.
    seed
        Of the draws of a bootstrap fit.

    Returns
    -------
    pandas.DataFrame
        The frame's rows, under its index, with the fit's target (median prediction), ``low_50``,
        ``high_50``, ``low_90``, ``high_90`` in the target's unit, and for ``delta_loss`` the
        ``perplexity_ratio`` exp(delta_loss). Intervals are null if the fit has none.

    Raises
    ------
    TableError
        If a column of the fit is missing, null, of the wrong kind or out of its range; the message
        names the row, counted from 1.
    FitError
        If the kind or a level is not one.
    """
    check_choice("kind", kind, get_args(Kind))
    for level in levels:
        check_level(level, "levels")
    rows = _checked(fit, frame)
    edges = [side * level / 2 for level in levels for side in (-1, 1)]
    quantiles = fit.quantiles(rows, np.array([0.5, *(0.5 + e for e in edges)]), kind, seed)
    without = np.isnan(quantiles[0])
    result = frame.copy()
    result[fit.target] = np.where(without, fit.center(rows), quantiles[0])
    names = [f"{side}_{100 * level:g}" for level in levels for side in ("low", "high")]
    for name, values in zip(names, quantiles[1:], strict=True):
        result[name] = values
    if fit.target == "delta_loss":
        with np.errstate(over="ignore"):
            result["perplexity_ratio"] = np.exp(result[fit.target])
    return result


def _checked(fit: Fitted, frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows with the fit's columns checked as `qscale.table` does."""
    check_frame(frame, "what is predicted")
    result = frame.reset_index(drop=True)
    given = [column for column in fit.columns if column in frame.columns]
    if given and len(frame):
        checked = check(result[given], "prediction")
        result = result.assign(**{str(column): checked[column] for column in given})
    # Of columns that the table does not know, the fit has ranges of those that held numbers.
    other = [c for c in given if c not in COLUMNS and c in fit.data.ranges]
    require_numbers(result, other, "prediction")
    return result
