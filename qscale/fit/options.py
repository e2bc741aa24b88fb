"""Options of a fit that cannot be right, refused with what to do instead."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from qscale.errors import FitError, TableError
from qscale.fit.grouping import parse
from qscale.table import require, require_numbers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from qscale.laws import Law

FINEST_DELTA = 1e-5  # of the residuals' scale; below it the Huber loss has no scale of its own


def check_options(options: Mapping[str, Any]) -> None:
    """Raise if a number is out of its range or a name is given twice.

    Raises
    ------
    FitError
        Naming the option and its value.
    """
    ranges = {"floor": "zero or more", "ceiling": "finite", "huber_delta": "above zero"}
    for name, wanted in ranges.items():
        value = 1.0 if options[name] is None else options[name]
        right = {"floor": value >= 0, "ceiling": True, "huber_delta": value > 0}[name]
        if not (right and np.isfinite(value)):
            option = f"--{name.replace('_', '-')}"
            raise FitError(
                f"{option} must be a number, {wanted}. Got {value:g}; leave it out for the default."
            )
    for name in ("random", "offset"):
        given = options[name] or ()
        twice = [text for i, text in enumerate(given) if text in given[:i]]
        if twice:
            raise FitError(f"--{name} {twice[0]} is given twice; give it once.")


def check_ceiling(ceiling: float | None, law: Law) -> None:
    """Raise if no target of a law with the log link can lie under the ceiling."""
    if ceiling is not None and law.link == "log" and ceiling <= 0:
        raise FitError(
            f"--ceiling must be above zero for law {law.name!r}, whose target has a logarithm. "
            f"Got {ceiling:g}."
        )


def check_fixed(law: Law, fixed: Mapping[str, float]) -> None:
    """Raise if a fixed parameter is not one of the law's or out of its bounds, or none is free."""
    by_name = {p.name: p for p in law.parameters}
    for parameter, value in fixed.items():
        if parameter not in by_name:
            raise FitError(
                f"--fix {parameter}: law {law.name!r} has no such parameter. "
                f"Its parameters are: {', '.join(by_name)}."
            )
        low, high = by_name[parameter].low, by_name[parameter].high
        if not low <= value <= high:
            raise FitError(
                f"--fix {parameter}: must be between {low:g} and {high:g}. Got {value:g}."
            )
    if len(fixed) == len(by_name):
        raise FitError(f"--fix holds every parameter of law {law.name!r}; leave one to estimate.")


def check_offsets(frame: pd.DataFrame, offset: Sequence[str], name: str) -> None:
    """Raise unless the columns of offsets hold text.

    Raises
    ------
    TableError
        Naming a column that is missing, empty or holds numbers.
    """
    require(frame, offset, name)
    for column in offset:
        if pd.api.types.is_numeric_dtype(frame[column]):
            raise TableError(
                f"{name}: --offset {column}: the column holds numbers, and an offset needs text. "
                f"Use --random {column}, or a text column."
            )


def check_random(frame: pd.DataFrame, random: Sequence[str] | None, target: str, name: str) -> None:
    """Raise unless random terms name columns of the usable rows, and slopes positive numbers.

    Raises
    ------
    TableError
        Naming the term, the column and the first row that cannot be used.
    """
    for text in random or ():
        term = parse(text)
        slopes = (term.slope,) if term.slope else ()
        require(frame, (*term.columns, *slopes), f"{name}: --random {text}")
        if target in (*term.columns, *slopes):
            raise TableError(f"{name}: --random {text}: {target!r} is what the law predicts.")
        for column in slopes:
            require_numbers(frame, [column], f"{name}: --random {text}")
            values = frame[column].to_numpy(dtype=float, na_value=np.nan)
            bad = np.flatnonzero(~(np.isfinite(values) & (values > 0)))
            if len(bad):
                raise TableError(
                    f"{name}: --random {text}: column {column!r} must be above zero in every row "
                    f"that is used. Got {values[bad[0]]:g} in {len(bad)} of them; choose rows "
                    "with --where."
                )


def check_delta(huber_delta: float | None, scale: float) -> None:
    """Raise if the Huber loss would be linear practically everywhere."""
    if huber_delta is not None and huber_delta < FINEST_DELTA * scale:
        raise FitError(
            f"--huber-delta {huber_delta:g} is far below the residuals' scale, "
            f"{scale:.2g}; give one nearer to it, or leave it out."
        )
