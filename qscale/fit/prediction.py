"""Predicted rows of whatever was fitted, with central intervals."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

    from qscale.fit.effects import Kind
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
