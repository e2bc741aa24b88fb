"""Random terms: which rows share a deviation from the law, as a sparse design.

A term is written ``run`` (one deviation for each value of the column), ``run:bits`` (one for each
combination of values) or ``bits|run`` (one slope in the centred log of ``bits`` for each run).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from scipy import sparse

from qscale.errors import TableError

if TYPE_CHECKING:
    from collections.abc import Sequence

    Array = np.ndarray

THIS = "this one"  # the level of every row of a table that has no such column


@dataclass(frozen=True, slots=True)
class Term:
    """A random term and the levels that were fitted.

    Parameters
    ----------
    text
        As the user writes it, such as ``run:bits``.
    columns
        Columns whose values together name the level.
    slope
        Column whose centred logarithm multiplies the deviation; None for an intercept.
    center
        Log of the slope column at which the deviation is zero.
    levels
        Labels of the known levels, in the order of their effects.
    """

    text: str
    columns: tuple[str, ...]
    slope: str | None = None
    center: float = 0.0
    levels: tuple[str, ...] = ()

    def labels(self, frame: pd.DataFrame) -> Array:
        """Label of each row's level, shape (n,), dtype object."""
        parts = []
        for column in self.columns:
            values = frame[column] if column in frame.columns else pd.Series(THIS, frame.index)
            codes, levels = pd.factorize(values)
            # Fifteen digits tell apart any two identifiers, and 2 is the label of 2.0.
            numeric = pd.api.types.is_numeric_dtype(values)
            texts = np.array(
                [*map("{:.15g}".format if numeric else str, levels), None], dtype=object
            )
            parts.append(pd.Series(texts[codes], frame.index))
        joined = parts[0].astype(object)
        for part in parts[1:]:
            joined = joined.fillna(THIS).astype(str) + ":" + part.fillna(THIS).astype(str)
        missing = joined.isna().to_numpy()
        labels = joined.to_numpy(dtype=object).copy()
        # A row that does not say which group it is of shares its deviation with no other.
        labels[missing] = [f"unnamed {i + 1}" for i in range(missing.sum())]
        return labels

    def weights(self, frame: pd.DataFrame) -> Array:
        """Multiplier of the deviation in each row, shape (n,)."""
        if self.slope is None:
            return np.ones(len(frame))
        return np.log(frame[self.slope].to_numpy(dtype=float)) - self.center

    def design(self, frame: pd.DataFrame) -> sparse.csr_array:
        """Sparse design, shape (n, levels); a row of an unknown level is empty."""
        labels = pd.Index(self.labels(frame), dtype=object)
        codes = pd.Index(self.levels, dtype=object).get_indexer(labels)
        known = np.flatnonzero(codes >= 0)
        shape = (len(frame), len(self.levels))
        values = self.weights(frame)[known]
        return sparse.csr_array((values, (known, codes[known])), shape=shape)


def parse(text: str) -> Term:
    """Read a term without its levels.

    Raises
    ------
    TableError
        If the text is not a term.

    Examples
    --------
    >>> parse("bits|run").slope
    'bits'
    """
    slope, bar, group = text.rpartition("|")
    columns = tuple(part.strip() for part in group.split(":"))
    if not all(columns) or (bar and not slope.strip()):
        raise TableError(
            f"random term {text!r}: write a column (run), a combination (run:bits) or a slope by "
            "group (bits|run)."
        )
    return Term(text, columns, slope.strip() or None)


def with_levels(term: Term, frame: pd.DataFrame) -> Term:
    """Return the term with the levels, and the centre of the slope, of a table's rows."""
    levels = tuple(map(str, pd.unique(term.labels(frame))))
    center = 0.0 if term.slope is None else float(np.log(frame[term.slope].astype(float)).mean())
    return Term(term.text, term.columns, term.slope, center, levels)


def design(terms: Sequence[Term], frame: pd.DataFrame) -> sparse.csr_array:
    """Design of all terms side by side, shape (n, q)."""
    blocks = [term.design(frame) for term in terms]
    return sparse.csr_array(sparse.hstack(blocks) if blocks else sparse.csr_array((len(frame), 0)))


def estimable(term: Term, frame: pd.DataFrame) -> str:
    """Say why a term's variance cannot be estimated from these rows; empty if it can.

    A level seen once cannot be told from the row's own noise, and two levels say next to nothing
    about how levels vary.
    """
    counts = pd.Series(term.labels(frame)).value_counts()
    if len(counts) < 3:
        return f"{term.text} has only {len(counts)} distinct value{'s' * (len(counts) != 1)}"
    if counts.max() == 1:
        return f"no value of {term.text} has two rows"
    return ""
