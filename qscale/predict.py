"""Predict the loss increase of an unseen checkpoint from a fit, with intervals and warnings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from qscale.laws import columns_of
from qscale.table import COLUMNS, require

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

    from qscale.fit import Fit

Kind = Literal["mean", "new_checkpoint"]

_MIN_DRAWS = 400


def predict(
    fit: Fit,
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
        A fitted law.
    frame
        One row per setting with the law's columns. A text column with an offset may be absent or
        hold a level the fit has not seen: the average level is used and its spread is added.
    kind
        ``mean`` is the uncertainty of the law itself; ``new_checkpoint`` adds the scatter of runs
        around the law and of rows around their run, as a new measurement would show it.
    levels
        Probabilities of the central intervals.
    seed
        Of the draws.

    Returns
    -------
    pandas.DataFrame
        The frame's rows with the fit's target (the law at its estimates), ``low_50``, ``high_50``,
        ``low_90``, ``high_90`` in the target's unit, and for ``delta_loss`` the
        ``perplexity_ratio`` exp(delta_loss). Intervals are null if the fit has no bootstrap draws.

    Raises
    ------
    TableError
        If a column of the law is missing or null.
    """
    frame = _with_offsets(fit, frame)
    data = columns_of(fit.law, frame)
    rng = np.random.default_rng(seed)
    result = frame.copy()
    target = fit.law.target
    result[target] = np.exp(fit.law.location(fit.theta[None], data)[0])
    logs = _draws(fit, data, len(frame), kind, rng) if len(fit.draws) >= 20 else None
    for level in levels:
        edges = ((1 - level) / 2, (1 + level) / 2)
        for side, edge in zip(("low", "high"), edges, strict=True):
            name = f"{side}_{100 * level:g}"
            result[name] = np.nan if logs is None else np.exp(np.quantile(logs, edge, axis=0))
    if target == "delta_loss":
        with np.errstate(over="ignore"):
            result["perplexity_ratio"] = np.exp(result[target])
    return result


def _with_offsets(fit: Fit, frame: pd.DataFrame) -> pd.DataFrame:
    """Check the law's columns; offset columns may be absent and are filled with no level."""
    offsets = [f.options["column"] for f in fit.law.factors if f.kind == "offset"]
    absent = {column: "" for column in offsets if column not in frame.columns}
    frame = frame.assign(**absent).reset_index(drop=True)
    needed = [column for column in fit.law.columns if column not in offsets]
    require(frame, needed, "prediction")
    return frame


def _draws(
    fit: Fit, data: dict[str, np.ndarray], rows: int, kind: Kind, rng: np.random.Generator
) -> np.ndarray:
    """Draw log predictions, shape (draws, rows)."""
    repeats = -(-_MIN_DRAWS // len(fit.draws))
    theta = np.tile(fit.draws, (repeats, 1))
    logs = fit.law.location(theta, data) + np.zeros((1, rows))
    for factor in fit.law.factors:
        if factor.kind == "offset":
            logs = logs + _unseen_level(fit, factor.options, theta, data, rng)
    if kind == "mean":
        return logs
    return logs + np.stack([fit.scatter.draw(len(theta), rng) for _ in range(rows)], axis=1)


def _unseen_level(
    fit: Fit,
    options: dict[str, object],
    theta: np.ndarray,
    data: dict[str, np.ndarray],
    rng: np.random.Generator,
) -> np.ndarray:
    """Log multiplier of a random known level for each draw and row whose level is not known."""
    column, levels = str(options["column"]), list(options["levels"])  # type: ignore[call-overload]
    names = [f"{column}[{level}]" for level in levels[:-1]]
    effects = theta[:, [fit.law.names.index(name) for name in names]]
    effects = np.concatenate([effects, -effects.sum(axis=1, keepdims=True)], axis=1)
    chosen = effects[np.arange(len(theta)), rng.integers(len(levels), size=len(theta))]
    unseen = ~np.isin(data[column].astype(str), levels)
    return chosen[:, None] * unseen[None, :]


def outside(fit: Fit, frame: pd.DataFrame) -> list[str]:
    """Say in plain sentences where a described checkpoint lies outside what was fitted.

    Parameters
    ----------
    fit
        A fitted law with the ranges of its data.
    frame
        The rows to be predicted.

    Returns
    -------
    list of str
        One sentence for each column of the law beyond its fitted range and each text column, such
        as ``method``, with a value that was not in the data. Empty if all is inside.
    """
    sentences = []
    for column, (low, high) in fit.data.ranges.items():
        if column not in fit.law.columns or column not in frame.columns:
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
    for column, known in fit.data.levels.items():
        if column in frame.columns:
            new = sorted(set(frame[column].dropna().astype(str)) - set(known) - {""})
            if new:
                sentences.append(
                    f"{column} {', '.join(new)} was not among the fitted rows ({', '.join(known)})."
                )
    return sentences
