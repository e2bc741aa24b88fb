"""Inputs of a regression: a small formula of logs, numbers and categories, and its design matrix.

The formula is a language of its own rather than Python, so that a saved regression can be opened
without running what is written in it.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from qscale.errors import FitError, TableError
from qscale.table import require

if TYPE_CHECKING:
    from collections.abc import Sequence

    Array = np.ndarray

INTERCEPT = "Intercept"
_FACTOR = re.compile(r"(?:(log|C)\(\s*([A-Za-z_]\w*)\s*\)|([A-Za-z_]\w*))")
_DEPENDENT = 1e-7  # share of a column that those before it leave unexplained
_MOSTLY_KNOWN = 0.9
_HELP = "Write columns, log(column) or C(column), joined by +, : and *, such as log(tokens) + bits."


@dataclass(frozen=True, slots=True)
class Factor:
    """One column in a term: as it is, its log, or its values as categories."""

    column: str
    wrap: str = ""

    @property
    def text(self) -> str:
        """As the formula writes it."""
        return f"{self.wrap}({self.column})" if self.wrap else self.column


@dataclass(frozen=True, slots=True)
class Inputs:
    """Design matrix of a regression.

    Parameters
    ----------
    terms
        Products of factors, such as ``log(tokens)`` or ``bits:method``.
    levels
        Levels of each column of categories; the first is the one the others are coded against.
    names
        Columns of the design, the intercept first.
    """

    terms: tuple[str, ...]
    levels: dict[str, tuple[str, ...]]
    names: tuple[str, ...]

    @property
    def columns(self) -> tuple[str, ...]:
        """Numeric columns; columns of categories may be absent, see `design`."""
        every = [factor.column for term in self.terms for factor in _factors(term)]
        return tuple(dict.fromkeys(c for c in every if c not in self.levels))

    def design(self, frame: pd.DataFrame, name: str = "prediction") -> tuple[Array, Array]:
        """Return the design matrix, shape (m, p), and the frame's row of each line, shape (m,).

        A row whose level of a category is unknown or absent has a line for each known level: what
        is predicted for it is their average.

        Raises
        ------
        TableError
            If a numeric column is missing, or a row has no value or no logarithm in it.
        """
        check_numbers(frame, self.columns, name)
        frame, owner = self._spread_out(frame)
        encoded = {INTERCEPT: np.ones(len(frame))}
        for term in self.terms:
            encoded |= self._block(term, frame, name)
        return np.stack([encoded[column] for column in self.names], axis=1), owner

    def _block(self, term: str, frame: pd.DataFrame, name: str) -> dict[str, Array]:
        """Encode one term."""
        block = {"": np.ones(len(frame))}
        for factor in _factors(term):
            if factor.column in self.levels:
                labels = labels_of(frame, factor.column)
                pieces = {
                    f"{factor.column}[{level}]": (labels == level).astype(float)
                    for level in self.levels[factor.column][1:]
                }
            else:
                pieces = {factor.text: _numbers(frame, factor, name)}
            block = {
                f"{left}:{right}" if left else right: u * v
                for (left, u), (right, v) in itertools.product(block.items(), pieces.items())
            }
        return block

    def _spread_out(self, frame: pd.DataFrame) -> tuple[pd.DataFrame, Array]:
        """Repeat rows of an unknown level once for each known level."""
        frame = frame.reset_index(drop=True)
        owner = np.arange(len(frame))
        for column, levels in self.levels.items():
            labels = labels_of(frame, column)
            known = np.isin(labels, levels)
            unknown = np.flatnonzero(~known)
            rows = np.concatenate([np.flatnonzero(known), np.repeat(unknown, len(levels))])
            filled = np.concatenate([labels[known], np.tile(levels, len(unknown))])
            frame = frame.iloc[rows].reset_index(drop=True)
            frame[column] = filled.astype(object)
            owner = owner[rows]
        return frame, owner


def learn(
    terms: Sequence[str], frame: pd.DataFrame, *, independent: bool, name: str = "table"
) -> tuple[Inputs, tuple[str, ...]]:
    """Take levels from a table's rows and keep the columns of the design that say something new.

    Parameters
    ----------
    terms
        As `parse` returns them.
    frame
        Rows in which all columns are known.
    independent
        Whether to leave out columns that are linear combinations of those before them, as linear
        models need.
    name
        Name of the table for messages.

    Returns
    -------
    Inputs, tuple of str
        The design, and the names of the columns left out.
    """
    levels: dict[str, tuple[str, ...]] = {}
    for factor in (factor for term in terms for factor in _factors(term)):
        if factor.wrap == "C" or _is_category(frame[factor.column]):
            found = np.unique(labels_of(frame, factor.column).astype(str))
            levels[factor.column] = tuple(map(str, found))
    whole = Inputs(tuple(terms), levels, (INTERCEPT,))
    names = [INTERCEPT]
    for term in terms:
        names += whole._block(term, frame, name)
    whole = Inputs(whole.terms, levels, tuple(dict.fromkeys(names)))
    if not independent:
        return whole, ()
    x, _ = whole.design(frame, name)
    kept = _independent(x)
    out = tuple(n for i, n in enumerate(whole.names) if i not in kept)
    return Inputs(whole.terms, levels, tuple(whole.names[i] for i in kept)), out


def parse(formula: str, target: str) -> tuple[str, ...]:
    """Read the terms of a formula.

    Parameters
    ----------
    formula
        Such as ``log(n_params) + log(tokens) * method``; ``a * b`` is ``a + b + a:b``. A left side,
        if any, must be ``log(target)``.
    target
        Column that is predicted.

    Raises
    ------
    FitError
        If it cannot be read.

    Examples
    --------
    >>> parse("log(delta_loss) ~ log(tokens) * method", "delta_loss")
    ('log(tokens)', 'method', 'log(tokens):method')
    """
    left, tilde, right = formula.replace("np.log(", "log(").rpartition("~")
    if tilde and left.replace(" ", "") != f"log({target})":
        raise FitError(f"formula {formula!r}: the left side is always log({target}).")
    terms: list[str] = []
    for piece in right.split("+"):
        if piece.strip() == "1":
            continue
        parts = piece.split("*")
        for size in range(1, len(parts) + 1):
            for chosen in itertools.combinations(parts, size):
                joined = ":".join(chosen)
                if not all(_FACTOR.fullmatch(text.strip()) for text in joined.split(":")):
                    raise FitError(f"formula {formula!r}: cannot read {piece.strip()!r}. {_HELP}")
                terms.append(":".join(factor.text for factor in _factors(joined)))
    if not terms:
        raise FitError(f"formula {formula!r} has no term. {_HELP}")
    return tuple(dict.fromkeys(terms))


def columns_in(terms: Sequence[str]) -> tuple[str, ...]:
    """Every column that the terms name."""
    return tuple(dict.fromkeys(factor.column for term in terms for factor in _factors(term)))


def default_terms(frame: pd.DataFrame, numbers: Sequence[str], texts: Sequence[str]) -> list[str]:
    """Choose terms of the candidates that vary and are known in nine of ten rows.

    A number enters as its log where all its values are above zero, and decibels as they are.
    """
    terms = []
    for column in (*numbers, *texts):
        if column not in frame.columns or why_not(frame[column]):
            continue
        positive = column in numbers and bool((frame[column].dropna() > 0).all())
        terms.append(f"log({column})" if positive and not column.endswith("_db") else column)
    return terms


def why_not(values: pd.Series) -> str:
    """Say why a column is no default input; empty if it varies and is known in nine of ten rows."""
    known = values.dropna()
    if len(known) < _MOSTLY_KNOWN * len(values):
        return f"known in {len(known)} of {len(values)} rows"
    return "does not vary" if known.nunique() < 2 else ""


def labels_of(frame: pd.DataFrame, column: str) -> Array:
    """Label of each row's category, shape (n,), dtype object; None where there is none."""
    if column not in frame.columns:
        return np.full(len(frame), None, dtype=object)
    values = frame[column]
    text = values.map("{:g}".format) if not _is_category(values) else values.astype("string")
    return text.astype(object).where(values.notna(), None).to_numpy(dtype=object)


def check_numbers(frame: pd.DataFrame, columns: Sequence[str], name: str) -> None:
    """Raise unless every row has a number in every column.

    Raises
    ------
    TableError
        Naming the column, and the first row without a value.
    """
    require(frame, columns, name)
    for column in columns:
        if not pd.api.types.is_numeric_dtype(frame[column]):
            raise TableError(f"{name}: column {column!r} must hold numbers.")
        infinite = np.isinf(frame[column].to_numpy(dtype=float, na_value=np.nan))
        if infinite.any():
            row = int(np.flatnonzero(infinite)[0]) + 1
            raise TableError(f"{name}: row {row}, column {column!r} is infinite; leave it empty.")
        if frame[column].isna().any():
            row = int(np.flatnonzero(frame[column].isna())[0]) + 1
            raise TableError(f"{name}: row {row} has no value in column {column!r}.")


def _factors(term: str) -> list[Factor]:
    """Factors of one term."""
    found = []
    for text in term.split(":"):
        match = _FACTOR.fullmatch(text.strip())
        if match is None:  # only in a file that was not written by this package
            raise ValueError(f"term {term!r} cannot be read")
        wrap, wrapped, plain = match.groups()
        found.append(Factor(wrapped or plain, wrap or ""))
    return found


def _is_category(values: pd.Series) -> bool:
    """Whether a column holds text or flags."""
    return pd.api.types.is_bool_dtype(values) or not pd.api.types.is_numeric_dtype(values)


def _numbers(frame: pd.DataFrame, factor: Factor, name: str) -> Array:
    """Values of a numeric factor."""
    values = frame[factor.column].to_numpy(dtype=float)
    if factor.wrap != "log":
        return values
    if (values <= 0).any():
        raise TableError(
            f"{name}: column {factor.column!r} has the value {values[values <= 0][0]:g}, which has "
            f"no logarithm; write {factor.column} instead of {factor.text} in the formula."
        )
    return np.log(values)


def _independent(x: Array) -> list[int]:
    """Positions of columns that are not linear combinations of those before them."""
    basis: list[Array] = []
    kept = []
    for i, column in enumerate(x.T):
        rest = column / max(float(np.linalg.norm(column)), 1e-300)
        for _ in range(2):  # once more removes what rounding left
            for direction in basis:
                rest = rest - direction * (direction @ rest)
        size = float(np.linalg.norm(rest))
        if size > _DEPENDENT:
            basis.append(rest / size)
            kept.append(i)
    return kept
