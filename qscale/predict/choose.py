"""Choose among the shipped fits the one that covers a described checkpoint best, and say why."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd

from qscale.columns import COLUMNS
from qscale.errors import FitError, did_you_mean
from qscale.fit.shipped import load_all

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from qscale.fit import Fit

TARGETS = ("delta_loss", "relative_delta")
"""Targets that say what quantization costs."""

_LABELS = ("method", "fmt")
_MEASURED = ("quadratic_delta",)  # what nobody can look up


@dataclass(frozen=True, slots=True)
class Candidate:
    """A fit, and how it covers a described checkpoint.

    Parameters
    ----------
    name
        Name of the shipped fit.
    fit
        The fit.
    missing
        Columns that it needs and the description lacks: it cannot be used.
    unseen
        Labels asked for that are not among its rows, such as ``method awq``.
    beyond
        ``{column: factor}`` by which what is known lies beyond the range of its rows, whether or
        not its law reads the column; infinite where there is no ratio.
    read
        Columns of the description that it reads.
    """

    name: str
    fit: Fit
    missing: tuple[str, ...]
    unseen: tuple[str, ...]
    beyond: dict[str, float]
    read: tuple[str, ...]

    @property
    def usable(self) -> bool:
        """Whether all that the fit needs is known."""
        return not self.missing

    @property
    def distance(self) -> float:
        """Sum of the logs of the factors beyond the range."""
        return sum(math.log(factor) for factor in self.beyond.values())

    @property
    def spread(self) -> float:
        """Standard deviation of a row of a new run around the law, on the log scale."""
        return float(self.fit.effects.residual + self.fit.effects.variances.sum()) ** 0.5

    @property
    def rank(self) -> tuple[float, ...]:
        """What decides, in this order; the lowest is the best. See `candidates`."""
        return (
            any(column in _MEASURED for column in self.missing),
            len(self.missing),
            len(self.unseen),
            len(self.beyond),
            -len(self.read),
            self.distance,
            -self.fit.data.clusters,
            self.spread,
        )


def candidates(
    known: Mapping[str, Any], fits: Mapping[str, Fit] | None = None
) -> tuple[Candidate, ...]:
    """Rank fits by how well they cover a described checkpoint.

    First comes whether all that a fit needs is known, then the fewest methods and formats it has
    not seen, the fewest columns beyond the range of its rows, the most of what is known that it
    reads, the least distance beyond the range, the most runs, and the least scatter.

    Parameters
    ----------
    known
        Columns of the measurement table with a value or a list of values, such as
        ``{"n_params": 13e9, "tokens": 2e12, "bits": [3, 4], "method": "gptq"}``.
    fits
        Fits by name; those shipped by default.

    Returns
    -------
    tuple of Candidate
        Those that predict what quantization costs, the best first.

    Raises
    ------
    FitError
        If a name is no column, or a number is a text.
    """
    fits = load_all() if fits is None else fits
    _check(known, fits)
    listed = {column: _listed(values) for column, values in known.items()}
    listed = {column: values for column, values in listed.items() if values}
    found = [_covering(name, fit, listed) for name, fit in fits.items() if fit.target in TARGETS]
    return tuple(sorted(found, key=lambda candidate: (candidate.rank, candidate.name)))


def _check(known: Mapping[str, Any], fits: Mapping[str, Fit]) -> None:
    """Raise naming what no table or fit has, and texts where there must be numbers."""
    own = {column for fit in fits.values() for column in (*fit.columns, *fit.categories)}
    for name, values in known.items():
        if name not in COLUMNS and name not in own:
            raise FitError(
                f"{name!r} is no column of a measurement table.{did_you_mean(name, COLUMNS)}"
            )
        texts = [value for value in _listed(values) if isinstance(value, str)]
        if texts and name in COLUMNS and COLUMNS[name].kind == "number":
            raise FitError(f"{name} must be a number. Got {texts[0]!r} instead.")


def reasons(ranked: Sequence[Candidate]) -> list[str]:
    """Say why the first candidate was taken and what speaks against each of the others.

    Parameters
    ----------
    ranked
        What `candidates` returned.

    Returns
    -------
    list of str
        One sentence about the first, then one clause for each other, led by its name.
    """
    first, *others = ranked
    against = [f"{other.name} {_against(first, other)}" for other in others]
    if not first.usable:
        return [f"{first.name} is the nearest, but needs {' and '.join(first.missing)}.", *against]
    data = first.fit.data
    unseen = f", has not seen {' or '.join(first.unseen)}" if first.unseen else ""
    said = (
        f"{first.name} covers this best of {len(ranked)} fit{'s' * (len(ranked) > 1)}: it reads "
        f"{', '.join(first.read)}{unseen} and {_further(first)}, "
        f"from {data.rows} rows of {data.clusters} {data.cluster}s."
    )
    return [said, *against]


def _covering(name: str, fit: Fit, known: Mapping[str, list[Any]]) -> Candidate:
    """Compare a fit with what is known."""
    unseen = [
        f"{column} {value}"
        for column in _LABELS
        for value in known.get(column, [])
        if column in fit.data.levels and str(value) not in fit.data.levels[column]
    ]
    beyond = {}
    for column, (low, high) in fit.data.ranges.items():
        factors = [_factor(float(value), low, high) for value in known.get(column, [])]
        if max(factors, default=1.0) > 1.0:
            beyond[column] = max(factors)
    return Candidate(
        name=name,
        fit=fit,
        missing=tuple(column for column in fit.columns if column not in known),
        unseen=tuple(unseen),
        beyond=beyond,
        read=tuple(column for column in fit.columns if column in known),
    )


def _listed(values: Any) -> list[Any]:
    """Return what is known of a column as a list without nulls."""
    several = isinstance(values, list | tuple)
    return [value for value in (values if several else [values]) if not pd.isna(value)]


def _factor(value: float, low: float, high: float) -> float:
    """Factor by which a value lies beyond a range; 1 inside."""
    if low <= value <= high:
        return 1.0
    edge = low if value < low else high
    return max(value / edge, edge / value) if value > 0 and edge > 0 else math.inf


def _further(candidate: Candidate) -> str:
    """Say which columns lie beyond the range of the rows."""
    if not candidate.beyond:
        return "has no column beyond its range"
    parts = [
        f"{column} ({factor:.3g} times)" if math.isfinite(factor) else column
        for column, factor in candidate.beyond.items()
    ]
    return f"is beyond its range in {', '.join(parts)}"


def _against(first: Candidate, other: Candidate) -> str:
    """Name the first criterion at which a fit falls behind the best."""
    position = next(
        (
            i
            for i, pair in enumerate(zip(first.rank, other.rank, strict=True))
            if pair[0] != pair[1]
        ),
        len(first.rank),
    )
    unused = [column for column in first.read if column not in other.read]
    words = (
        lambda: f"needs {' and '.join(other.missing)}, which is measured",
        lambda: f"needs {' and '.join(other.missing)}",
        lambda: f"has not seen {' or '.join(other.unseen)}",
        lambda: _further(other),
        lambda: f"does not read {' or '.join(unused) or 'as much of what is known'}",
        lambda: _further(other),
        lambda: f"rests on {other.fit.data.clusters} {other.fit.data.cluster}s",
        lambda: f"has more scatter ({other.spread:.2f} against {first.spread:.2f} in the log)",
        lambda: "is no better",
    )
    return words[position]()
