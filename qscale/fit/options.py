"""Options of a fit that cannot be right, refused with what to do instead."""

from __future__ import annotations

from numbers import Real
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import pandas as pd

from qscale.columns import COLUMNS
from qscale.errors import FitError, TableError
from qscale.fit.effects import Kind
from qscale.fit.grouping import parse
from qscale.fit.likelihood import Family
from qscale.laws import Law
from qscale.table import require, require_numbers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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
        right = isinstance(value, Real) and bool(np.isfinite(float(value)))
        if right and name != "ceiling":
            right = value > 0 or (name == "floor" and value == 0)
        if not right:
            raise FitError(
                f"{name} must be a number, {wanted}. Got {value}; leave it out for the default."
            )
    for name in ("random", "offset"):
        given = options[name] or ()
        twice = [text for i, text in enumerate(given) if text in given[:i]]
        if twice:
            raise FitError(f"{name} {twice[0]!r} is given twice; give it once.")
    check_choice("likelihood", options["likelihood"], get_args(Family))
    if options["huber_delta"] is not None and options["likelihood"] != "huber":
        raise FitError(
            f"huber_delta is about the Huber loss, and likelihood is {options['likelihood']!r}; "
            "leave one of them out."
        )
    n_boot = options["n_boot"]
    if not isinstance(n_boot, (int, np.integer)) or n_boot < 0:
        raise FitError(f"n_boot must be a whole number, zero or more. Got {n_boot!r} instead.")


def check_choice(name: str, value: object, known: Sequence[str]) -> None:
    """Raise a `FitError` unless an option has one of the known values."""
    if value not in known:
        raise FitError(f"{name} must be one of {', '.join(known)}. Got {value!r} instead.")


def check_level(level: object, name: str = "level") -> None:
    """Raise a `FitError` unless a probability lies between 0 and 1."""
    if not isinstance(level, Real) or not 0 < float(level) < 1:
        raise FitError(f"{name} must be between 0 and 1. Got {level!r} instead.")


def check_count(name: str, value: object, least: int = 1) -> None:
    """Raise a `FitError` unless a number is whole and not below the least."""
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < least:
        raise FitError(f"{name} must be a whole number, {least} or more. Got {value!r} instead.")


def checked_probabilities(probabilities: object, kind: object) -> np.ndarray:
    """Return probabilities as an array, each between 0 and 1, and check the kind of prediction.

    Raises
    ------
    FitError
        Naming what is wrong.
    """
    check_choice("kind", kind, get_args(Kind))
    try:
        found = np.asarray(probabilities, dtype=float)
    except (TypeError, ValueError):
        found = np.array([np.nan])
    if found.ndim != 1 or not ((found > 0) & (found < 1)).all():
        raise FitError(
            "probabilities must be a list of numbers between 0 and 1. "
            f"Got {probabilities!r} instead."
        )
    return found


def check_frame(frame: object, name: str) -> None:
    """Raise a `TableError` unless a table is a frame."""
    if not isinstance(frame, pd.DataFrame):
        got = repr(frame) if isinstance(frame, str) or frame is None else type(frame).__name__
        raise TableError(
            f"{name} must be a pandas.DataFrame. Got {got} instead; read a file with "
            "qscale.table.read, a shipped dataset with qscale.datasets.load."
        )


def check_law(law: object) -> None:
    """Raise a `FitError` unless a law is one."""
    if not isinstance(law, Law):
        raise FitError(f"law must be a Law, such as qscale.laws.get('kumar'). Got {law!r} instead.")


def as_list(names: str | Sequence[str]) -> list[str]:
    """Return names as a list, of one for a text."""
    return [names] if isinstance(names, str) else list(names)


def check_kinds(frame: pd.DataFrame, law: Law, name: str) -> None:
    """Raise if a column that a law reads is given twice, or holds what is no plain number or text.

    Raises
    ------
    TableError
        Naming the column.
    """
    for column in (*law.columns, law.target):
        found = frame.loc[:, frame.columns == column]
        if found.shape[1] > 1:
            raise TableError(f"{name}: column {column!r} appears twice.")
        if found.shape[1] == 0:
            continue  # missing columns are said elsewhere, with what to do
        kind = found.dtypes.iloc[0]
        if isinstance(kind, pd.CategoricalDtype) or pd.api.types.is_complex_dtype(kind):
            raise TableError(
                f"{name}: column {column!r} must hold plain numbers or text. Got {kind} instead; "
                "convert it with astype(float) or astype(str)."
            )
        number = column in COLUMNS and COLUMNS[column].kind == "number"
        if number and pd.api.types.is_bool_dtype(kind):
            raise TableError(f"{name}: column {column!r} must hold numbers. Got true and false.")


def check_ceiling(ceiling: float | None, law: Law) -> None:
    """Raise if no target of a law with the log link can lie under the ceiling."""
    if ceiling is not None and law.link == "log" and ceiling <= 0:
        raise FitError(
            f"ceiling must be above zero for law {law.name!r}, whose target has a logarithm. "
            f"Got {ceiling:g}."
        )


def check_fixed(law: Law, fixed: Mapping[str, float]) -> None:
    """Raise if a fixed parameter is not one of the law's or out of its bounds, or none is free."""
    by_name = {p.name: p for p in law.parameters}
    for parameter, value in fixed.items():
        if parameter not in by_name:
            raise FitError(
                f"parameter {parameter!r} cannot be held: law {law.name!r} has no such parameter. "
                f"Its parameters are: {', '.join(by_name)}."
            )
        low, high = by_name[parameter].low, by_name[parameter].high
        if not isinstance(value, Real) or not low <= float(value) <= high:
            raise FitError(
                f"parameter {parameter!r} must be held between {low:g} and {high:g}. "
                f"Got {value} instead."
            )
    if len(fixed) == len(by_name):
        raise FitError(f"every parameter of law {law.name!r} is held; leave one to estimate.")


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
                f"{name}: offset {column!r}: the column holds numbers, and an offset needs text. "
                f"Give {column!r} as a random effect, or a text column."
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
        require(frame, (*term.columns, *slopes), f"{name}: random {text!r}")
        if target in (*term.columns, *slopes):
            raise TableError(f"{name}: random {text!r}: {target!r} is what the law predicts.")
        for column in slopes:
            require_numbers(frame, [column], f"{name}: random {text!r}")
            values = frame[column].to_numpy(dtype=float, na_value=np.nan)
            bad = np.flatnonzero(~(np.isfinite(values) & (values > 0)))
            if len(bad):
                raise TableError(
                    f"{name}: random {text!r}: column {column!r} must be above zero in every row "
                    f"that is used. Got {values[bad[0]]:g} in {len(bad)} of them; choose rows "
                    "with where."
                )


def check_delta(huber_delta: float | None, scale: float) -> None:
    """Raise if the Huber loss would be linear practically everywhere."""
    if huber_delta is not None and huber_delta < FINEST_DELTA * scale:
        raise FitError(
            f"huber_delta {huber_delta:g} is far below the residuals' scale, "
            f"{scale:.2g}; give one nearer to it, or leave it out."
        )
