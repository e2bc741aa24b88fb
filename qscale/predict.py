"""Predict the loss increase of an unseen checkpoint from a fit, with intervals and warnings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from qscale.table import COLUMNS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from qscale.fit import Fitted
    from qscale.fit.effects import Kind


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
        The frame's rows with the fit's target (median prediction), ``low_50``, ``high_50``,
        ``low_90``, ``high_90`` in the target's unit, and for ``delta_loss`` the
        ``perplexity_ratio`` exp(delta_loss). Intervals are null if the fit has none.

    Raises
    ------
    TableError
        If a column of the fit is missing or null.
    """
    result = frame.reset_index(drop=True)
    edges = [side * level / 2 for level in levels for side in (-1, 1)]
    quantiles = fit.quantiles(result, np.array([0.5, *(0.5 + e for e in edges)]), kind, seed)
    result = result.copy()
    without = np.isnan(quantiles[0])
    result[fit.target] = np.where(without, fit.center(frame), quantiles[0])
    names = [f"{side}_{100 * level:g}" for level in levels for side in ("low", "high")]
    for name, values in zip(names, quantiles[1:], strict=True):
        result[name] = values
    if fit.target == "delta_loss":
        with np.errstate(over="ignore"):
            result["perplexity_ratio"] = np.exp(result[fit.target])
    return result


def outside(fit: Fitted, frame: pd.DataFrame) -> list[str]:
    """Say in plain sentences where a described checkpoint lies outside what was fitted.

    Parameters
    ----------
    fit
        A fitted law or regression with the ranges of its data.
    frame
        The rows to be predicted.

    Returns
    -------
    list of str
        One sentence for each column of the fit beyond its fitted range and each column of labels,
        such as ``method``, with a value that was not in the data. Empty if all is inside.
    """
    sentences = []
    for column, (low, high) in fit.data.ranges.items():
        if column not in fit.columns or column not in frame.columns:
            continue
        values = frame[column].dropna()
        for beyond, edge, side in (
            (values[values < low], low, "below"),
            (values[values > high], high, "above"),
        ):
            if len(beyond):
                extreme = beyond.min() if side == "below" else beyond.max()
                factor = max(extreme / edge, edge / extreme) if extreme > 0 and edge > 0 else np.inf
                span = f", {factor:.3g} times beyond" if np.isfinite(factor) else ""
                sentences.append(
                    f"{COLUMNS[column].meaning} ({column} = {extreme:g}) is {side} the fitted "
                    f"range {low:g} to {high:g}{span}: this is an extrapolation."
                )
    for column, known in (fit.data.levels | fit.categories).items():
        if column in frame.columns:
            values = frame[column].dropna()
            numbers = pd.api.types.is_float_dtype(values)
            labels = values.map("{:g}".format) if numbers else values.astype(str)
            new = sorted(set(labels) - set(known) - {""})
            if new:
                sentences.append(
                    f"{column} {', '.join(new)} was not among the fitted rows ({', '.join(known)})."
                )
    return sentences
