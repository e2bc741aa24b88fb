"""The measurement table: one row for one checkpoint under one quantizer setting and protocol.

It is all that the measuring and the modelling side share. This module reads and checks files, and
writes them atomically; `qscale.columns` says what the columns are.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from qscale.atomic import replacing
from qscale.columns import COLUMNS, Column
from qscale.errors import TableError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pandera.pandas as pa

_SUFFIXES = (".csv", ".csv.gz", ".csv.xz", ".parquet")


def read(path: str | Path, mapping: Mapping[str, str] | None = None) -> pd.DataFrame:
    """Read a measurement table from CSV or parquet, rename columns and check every value.

    Parameters
    ----------
    path
        ``.csv`` (also ``.gz``, ``.xz``) or ``.parquet``.
    mapping
        ``{"tokens": "D"}`` reads the file's column ``D`` as ``tokens``.

    Returns
    -------
    pandas.DataFrame
        The rows in file order. Known columns have the dtype their kind asks for; unknown columns
        are kept as they are.

    Raises
    ------
    TableError
        If the file cannot be read, is empty, lacks a mapped column or holds an implausible value.
    """
    path = Path(path)
    if not path.is_file():
        raise TableError(
            f"{path}: no such file. Give a .csv or .parquet table or a dataset's name."
        )
    check_path(path)
    try:
        if path.suffix == ".parquet":
            frame = pd.read_parquet(path)
        else:
            frame = _read_csv(path, mapping or {})
    except (ValueError, OSError, EOFError) as error:
        reason = str(error).splitlines()[0]
        raise TableError(f"{path}: cannot be read as a table ({reason}).") from error
    return check(rename(frame, mapping or {}, str(path)), str(path))


def _read_csv(path: Path, mapping: Mapping[str, str]) -> pd.DataFrame:
    """Read a CSV, refusing what pandas would quietly turn into a frame of one text column."""
    written = pd.read_csv(path, header=None, nrows=1, dtype=str).iloc[0]
    header = written.str.strip()
    if header.dropna().duplicated().any():  # pandas would rename the second
        raise ValueError(f"column {header[header.duplicated()].iloc[0]!r} appears twice")
    # A hash such as 0050950e7685 would be read as the number that it also is.
    texts = {mapping.get(c.name, c.name) for c in COLUMNS.values() if c.kind == "text"}
    dtypes = dict.fromkeys(written[header.isin(texts)], str)
    frame = pd.read_csv(path, low_memory=False, dtype=dtypes).rename(columns=str.strip)
    if len(frame.columns) < 2:
        raise ValueError(f"only one column, {str(frame.columns[0])[:40]!r}; is this a CSV table?")
    return frame


def rename(frame: pd.DataFrame, mapping: Mapping[str, str], where: str) -> pd.DataFrame:
    """Rename the user's columns to the table's; ``{"tokens": "D"}`` reads ``D`` as ``tokens``.

    Raises
    ------
    TableError
        If a mapped column is missing or its new name is already taken.
    """
    taken: dict[str, str] = {}
    for name, theirs in mapping.items():
        if taken.setdefault(theirs, name) != name:
            raise TableError(
                f"{where}: column {theirs!r} is read as {taken[theirs]!r} and {name!r}."
            )
        if theirs not in frame.columns:
            raise TableError(
                f"{where}: no column {theirs!r} to read {name!r} from. "
                f"Columns are: {', '.join(map(str, frame.columns))}."
            )
        if name in frame.columns and name != theirs:
            raise TableError(
                f"{where}: cannot read {theirs!r} as {name!r}, the table has a column {name!r} too."
            )
    return frame.rename(columns={theirs: name for name, theirs in mapping.items()})


def check(frame: pd.DataFrame, where: str = "table") -> pd.DataFrame:
    """Give known columns their dtype and check their values.

    Parameters
    ----------
    frame
        A candidate measurement table; not modified.
    where
        Name of the table for messages.

    Returns
    -------
    pandas.DataFrame
        A copy with numbers as float64, flags as nullable booleans and text as strings.

    Raises
    ------
    TableError
        If the table has no rows, a value is of the wrong kind, infinite or out of its range. The
        message names the table, the row (counted from 1, header not counted) and the column.
    """
    if frame.empty:
        raise TableError(f"{where}: the table has no rows.")
    duplicated = frame.columns[frame.columns.duplicated()]
    if len(duplicated):
        raise TableError(f"{where}: column {duplicated[0]!r} appears twice.")
    checked = pd.DataFrame(
        {
            name: _as_kind(values, COLUMNS[name], where) if name in COLUMNS else values
            for name, values in frame.items()
        },
        index=frame.index,
    )
    if suspects := _suspects(checked):
        _check_ranges(checked[suspects], where)
    return checked


def _as_kind(values: pd.Series, column: Column, where: str) -> pd.Series:
    """Convert one column to the dtype of its kind or raise naming the first bad row."""
    if column.kind == "text":
        strings = pd.api.types.infer_dtype(values, skipna=True) == "string"
        texts = values if strings else values.astype("string")
        return texts.astype(object).where(values.notna(), None)
    converted: pd.Series
    if column.kind == "flag":
        flags = {"true": True, "false": False, "1": True, "0": False, "1.0": True, "0.0": False}
        converted = values.astype("string").str.strip().str.lower().map(flags).astype("boolean")
    else:
        plain = values.dtype == np.dtype("float64")
        converted = values if plain else pd.to_numeric(values, errors="coerce").astype("float64")
        infinite = np.isinf(converted.to_numpy())
        if infinite.any():
            row = int(np.flatnonzero(infinite)[0])
            raise TableError(
                f"{where}: row {row + 1}, column {column.name!r} is infinite. "
                "Leave it empty and set status to nonfinite."
            )
        if plain:
            return converted
    bad = (converted.isna() & values.notna()).to_numpy(dtype=bool)
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        expected = (
            "true or false" if column.kind == "flag" else f"a number ({column.unit or 'no unit'})"
        )
        raise TableError(
            f"{where}: row {row + 1}, column {column.name!r} must be {expected}. "
            f"Got {values.iloc[row]!r} instead."
        )
    return converted


def _suspects(frame: pd.DataFrame) -> list[str]:
    """Name the columns that hold a value out of range, quickly; the schema says what is wrong."""
    known = [COLUMNS[name] for name in frame.columns if name in COLUMNS]
    numbers = [column for column in known if column.kind == "number"]
    values = frame[[column.name for column in numbers]].to_numpy(float)
    low = [-np.inf if column.low is None else column.low for column in numbers]
    high = [np.inf if column.high is None else column.high for column in numbers]
    outside = np.any((values < low) | (values > high), axis=0)
    closed = [column for column in known if column.allowed]
    return [
        column.name for column, bad in zip(numbers, np.atleast_1d(outside), strict=True) if bad
    ] + [c.name for c in closed if not frame[c.name].dropna().isin(c.allowed).all()]


def _check_ranges(frame: pd.DataFrame, where: str) -> None:
    """Check values against the schema and report the first failure in one sentence."""
    import pandera.errors  # noqa: PLC0415 - half a second, needed only when a table is read

    try:
        schema().validate(frame, lazy=True)
    except pandera.errors.SchemaErrors as error:
        first = error.failure_cases.iloc[0]
        column = COLUMNS[str(first["column"])]
        row = list(frame.index).index(first["index"]) + 1
        expected = _expected(column)
        raise TableError(
            f"{where}: row {row}, column {column.name!r} must be {expected}. "
            f"Got {first['failure_case']} instead"
            + (
                f" (and {len(error.failure_cases) - 1} more)."
                if len(error.failure_cases) > 1
                else "."
            )
            + (f" {column.hint}" if column.hint else "")
        ) from None


def _expected(column: Column) -> str:
    """Say in words what a column may hold."""
    if column.allowed:
        return f"one of {', '.join(column.allowed)}"
    unit = f" {column.unit}" if column.unit else ""
    if column.low is not None and column.high is not None:
        return f"between {column.low:g} and {column.high:g}{unit}"
    return f"at least {column.low:g}{unit}"


def schema() -> pa.DataFrameSchema:
    """Return the table's pandera schema: every column optional and nullable, values in range."""
    import pandera.pandas as pa  # noqa: PLC0415 - half a second, needed only when a table is read

    def checks(column: Column) -> list[pa.Check]:
        found = []
        if column.low is not None:
            found.append(pa.Check.ge(column.low))
        if column.high is not None:
            found.append(pa.Check.le(column.high))
        if column.allowed:
            found.append(pa.Check.isin(column.allowed))
        return found

    return pa.DataFrameSchema(
        {
            name: pa.Column(
                None, checks(column), nullable=True, required=False, description=column.meaning
            )
            for name, column in COLUMNS.items()
        }
    )


def side_path(path: str | Path, kind: str) -> Path:
    """Return where a side table lies: ``rows.csv.gz`` has ``rows.matrices.parquet``.

    Parameters
    ----------
    path
        A measurement table.
    kind
        What the side table is about: ``matrices``, ``blocks``, ``density``, ...
    """
    path = Path(path)
    stem = next((path.name.removesuffix(s) for s in _SUFFIXES if path.name.endswith(s)), path.name)
    return path.with_name(f"{stem}.{kind}.parquet")


def require(frame: pd.DataFrame, columns: Sequence[str], where: str) -> None:
    """Raise unless every column is present and holds at least one value.

    Raises
    ------
    TableError
        Naming the columns that are missing and how to map others to them, or the first that is
        empty.
    """
    missing = [name for name in dict.fromkeys(columns) if name not in frame.columns]
    if missing:
        raise TableError(
            f"{where}: no column {' and no column '.join(map(_with_meaning, missing))}. Columns "
            f"are: {', '.join(map(str, frame.columns))}. If it has another name, rename it; "
            f"commands that fit read it with --map {missing[0]}=THEIR_NAME."
        )
    for name in columns:
        if frame[name].isna().all():
            raise TableError(f"{where}: column {_with_meaning(name)} is empty in every row.")


def _with_meaning(name: str) -> str:
    """Quote a column, with what it means if the schema knows."""
    return f"{name!r} ({COLUMNS[name].meaning})" if name in COLUMNS else repr(name)


def require_numbers(frame: pd.DataFrame, columns: Sequence[str], where: str) -> None:
    """Raise unless every column is present, not empty and holds numbers.

    Raises
    ------
    TableError
        Naming the first column that does not.
    """
    require(frame, columns, where)
    for name in columns:
        kind = frame[name].dtype
        if not pd.api.types.is_numeric_dtype(kind) or pd.api.types.is_bool_dtype(kind):
            raise TableError(
                f"{where}: column {name!r} must hold numbers, but holds text or flags."
            )


def check_path(path: Path) -> None:
    """Raise unless a file's name ends as a table's.

    Raises
    ------
    TableError
        Naming the endings.
    """
    if not path.name.endswith(_SUFFIXES):
        raise TableError(f"{path}: a table must end in one of {', '.join(_SUFFIXES)}.")


def write(frame: pd.DataFrame, path: str | Path) -> None:
    """Write a table to ``.csv`` or ``.parquet``; readers see the old file or the new, never a part.

    Raises
    ------
    TableError
        If the suffix is neither.
    """
    path = Path(path)
    check_path(path)
    with replacing(path) as partial:
        if path.suffix == ".parquet":
            frame.to_parquet(partial, index=False)
        else:
            frame.to_csv(partial, index=False)


def from_rows(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Build a table from row mappings, known columns first and in the schema's order."""
    return in_order(pd.DataFrame(list(rows)))


def in_order(frame: pd.DataFrame) -> pd.DataFrame:
    """Put known columns first and in the schema's order."""
    known = [name for name in COLUMNS if name in frame.columns]
    return frame[known + [name for name in frame.columns if name not in COLUMNS]]
