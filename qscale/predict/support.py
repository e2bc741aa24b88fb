"""Where a described checkpoint lies against the data of a fit, in sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from qscale.columns import COLUMNS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from qscale.fit import Fitted


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
    sentences = [
        f"{_meaning(column)} ({column} = {extreme:g}) is {side} the fitted range "
        f"{low:g} to {high:g}{_times(extreme, edge)}: this is an extrapolation."
        for column, extreme, side, edge, (low, high) in _beyond(fit, frame)
        if column in fit.columns
    ]
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


def unread(fit: Fitted, frame: pd.DataFrame) -> list[str]:
    """Say what is known of a checkpoint that differs from the data and that the fit cannot use.

    Parameters
    ----------
    fit
        A fitted law or regression with the ranges of its data.
    frame
        The rows to be predicted.

    Returns
    -------
    list of str
        One sentence for each column beyond its range that is not among the fit's columns, so that
        nothing in the prediction answers for it.
    """
    return [
        f"{_meaning(column)} ({column} = {extreme:g}) is {side} the {low:g} to {high:g} of the "
        "fitted rows, and the fit does not read it: nothing corrects for it."
        for column, extreme, side, _, (low, high) in _beyond(fit, frame)
        if column not in fit.columns
    ]


FAR = 10.0
"""Factor beyond the fitted range from which a law is not joined with a measurement."""


def furthest(fit: Fitted, frame: pd.DataFrame) -> list[tuple[str, float]]:
    """Say how far each row lies beyond the ranges of the columns that a fit reads.

    Parameters
    ----------
    fit
        A fitted law or regression with the ranges of its data.
    frame
        The rows to be predicted.

    Returns
    -------
    list of (str, float)
        For each row the column that is furthest beyond its range, and the factor by which it is;
        no column and 1 where all are inside or have no ratio.
    """
    found = []
    for i in range(len(frame)):
        factors = {
            column: _ratio(extreme, edge)
            for column, extreme, _, edge, _ in _beyond(fit, frame.iloc[[i]])
            if column in fit.columns
        }
        finite = {column: factor for column, factor in factors.items() if np.isfinite(factor)}
        found.append(max(finite.items(), key=lambda item: item[1], default=("", 1.0)))
    return found


def _beyond(
    fit: Fitted, frame: pd.DataFrame
) -> Iterator[tuple[str, float, str, float, tuple[float, float]]]:
    """Columns beyond their range: name, extreme value, side, edge and range."""
    for column, (low, high) in fit.data.ranges.items():
        if column not in frame.columns:
            continue
        values = frame[column].dropna()
        for beyond, edge, side in (
            (values[values < low], low, "below"),
            (values[values > high], high, "above"),
        ):
            if len(beyond):
                extreme = float(beyond.min() if side == "below" else beyond.max())
                yield column, extreme, side, edge, (low, high)


def _meaning(column: str) -> str:
    """Say what a column holds; its name where the table does not know it."""
    return COLUMNS[column].meaning if column in COLUMNS else column


def _ratio(extreme: float, edge: float) -> float:
    """Factor of a value beyond an edge; infinite where there is no ratio."""
    return max(extreme / edge, edge / extreme) if extreme > 0 and edge > 0 else np.inf


def _times(extreme: float, edge: float) -> str:
    """Say how many times beyond the edge, where both have a ratio."""
    factor = _ratio(extreme, edge)
    return f", {factor:.3g} times beyond" if np.isfinite(factor) else ""
