"""Splits of a table into training and held-out rows that ask a model to extrapolate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from qscale.errors import FitError
from qscale.fit.options import check_count

if TYPE_CHECKING:
    import pandas as pd

_KINDS = ("largest", "latest", "lowest", "expanding")


@dataclass(frozen=True, slots=True)
class Split:
    """One held-out test.

    Parameters
    ----------
    name
        What is held out, such as ``family OPT``.
    test
        Boolean mask of the held-out rows, shape (n,).
    train
        Boolean mask of the training rows, shape (n,), if they are not all the others.
    """

    name: str
    test: np.ndarray
    train: np.ndarray | None = None

    @property
    def training(self) -> np.ndarray:
        """Boolean mask of the training rows, shape (n,)."""
        return ~self.test if self.train is None else self.train


def leave_one_out(frame: pd.DataFrame, column: str) -> list[Split]:
    """Return one split per value of a column, such as ``family``; rows without a value only train.

    Raises
    ------
    FitError
        If the column has fewer than two values.
    """
    values = sorted(frame[column].dropna().unique()) if column in frame.columns else []
    if len(values) < 2:
        raise FitError(f"leaving one {column} out needs at least two of them; found {len(values)}.")
    return [Split(f"{column} {value}", (frame[column] == value).to_numpy()) for value in values]


def largest(frame: pd.DataFrame, column: str = "n_params", share: float = 0.25) -> Split:
    """Return the split that holds out the highest quarter of a column's distinct values.

    With ``tokens`` these are the latest checkpoints of the table. Rows without a value only train.

    Raises
    ------
    FitError
        If the column is missing or has fewer than three distinct values, or the share is not
        between 0 and 1.
    """
    _check_share(share)
    values = _distinct(frame, column, f"holding out the largest {column}")
    cut = values[-max(1, int(share * len(values)))]
    return Split(f"{column} >= {cut:.3g}", (frame[column] >= cut).to_numpy())


def lowest(frame: pd.DataFrame, column: str = "bits", share: float = 0.25) -> Split:
    """Return the split that holds out the lowest quarter of a column's distinct values.

    Rows without a value only train.

    Raises
    ------
    FitError
        If the column is missing or has fewer than three distinct values, or the share is not
        between 0 and 1.
    """
    _check_share(share)
    values = _distinct(frame, column, f"holding out the lowest {column}")
    cut = values[max(1, int(share * len(values))) - 1]
    return Split(f"{column} <= {cut:.3g}", (frame[column] <= cut).to_numpy())


def expanding(frame: pd.DataFrame, column: str = "tokens", windows: int = 4) -> list[Split]:
    """Return a back-test: train up to a value of a column, test on the window that follows.

    The distinct values are cut into ``windows + 1`` runs of nearly equal length; the first only
    trains, and each later one is tested by a model that has seen all before it and nothing after.
    With fewer distinct values there are as many windows as they allow. Rows without a value take
    no part.

    Raises
    ------
    FitError
        If the column is missing or has fewer than three distinct values, or windows is no whole
        number above zero.
    """
    check_count("windows", windows)
    values = _distinct(frame, column, f"an expanding window over {column}")
    parts = np.array_split(values, min(windows + 1, len(values)))
    column_values = frame[column].to_numpy(dtype=float, na_value=np.nan)
    return [
        Split(
            f"{column} {window[0]:.3g} to {window[-1]:.3g}",
            test=(column_values >= window[0]) & (column_values <= window[-1]),
            train=column_values < window[0],
        )
        for window in parts[1:]
    ]


def parse(text: str, frame: pd.DataFrame) -> list[Split]:
    """Return the splits that a word such as ``family`` or ``largest:n_params`` asks for.

    Parameters
    ----------
    text
        A column, each value of which is left out in turn, or one of ``largest``, ``latest``,
        ``lowest`` and ``expanding``, a colon and a column of numbers.
    frame
        The table to be split.

    Raises
    ------
    FitError
        If the word or the column is not known, or the column has too few values.
    """
    kind, colon, column = text.partition(":")
    kind, column = (kind.strip(), column.strip()) if colon else ("", kind.strip())
    if kind not in ("", *_KINDS):
        raise FitError(
            f"--split {text}: unknown kind {kind!r}. Give a column such as family, or one of "
            f"{', '.join(f'{name}:COLUMN' for name in _KINDS)}."
        )
    if column not in frame.columns:
        raise FitError(
            f"--split {text}: the table has no column {column!r}. "
            f"Columns are: {', '.join(map(str, frame.columns))}."
        )
    if not kind:
        return leave_one_out(frame, column)
    if kind == "expanding":
        return expanding(frame, column)
    return [lowest(frame, column) if kind == "lowest" else largest(frame, column)]


def _check_share(share: float) -> None:
    """Raise unless a share of values lies between none and all of them."""
    if not 0 < share < 1:
        raise FitError(f"share must be between 0 and 1. Got {share!r} instead.")


def _distinct(frame: pd.DataFrame, column: str, purpose: str) -> np.ndarray:
    """Return the distinct numbers of a column, at least three of them, in order."""
    if column not in frame.columns:
        raise FitError(f"{purpose}: the table has no column {column!r}.")
    if frame[column].dtype.kind not in "fiu":
        raise FitError(f"{purpose} needs numbers; column {column!r} holds text.")
    values = np.unique(frame[column].dropna().to_numpy(dtype=float))
    if len(values) < 3:
        raise FitError(f"{purpose} needs three distinct values; found {len(values)}.")
    return values
