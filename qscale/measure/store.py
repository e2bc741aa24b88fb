"""Keep measured rows and per-matrix curvature on disk, safe against kills and other processes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from filelock import FileLock

from qscale import table
from qscale.errors import TableError
from qscale.measure.curvature import TraceEstimate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

KEY = (
    "checkpoint",
    "protocol",
    "spec",
    "calibration",
)
"""Columns that tell one measured row from another."""

_SUFFIX = re.compile(r"\.(csv(\.gz|\.xz)?|parquet)$")


@dataclass(frozen=True, slots=True)
class Curvature:
    """Curvature of the full-precision model at its block matrices, on the probe windows.

    Parameters
    ----------
    ggn, hessian
        Trace of each matrix's block of the Gauss-Newton matrix and of the Hessian.
    grad_norm
        Norm of the mean loss's gradient with respect to all the matrices together.
    """

    ggn: TraceEstimate
    hessian: TraceEstimate
    grad_norm: float


def row_key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what identifies a row, nulls as None; a column that a table lacks is null."""
    values = [row.get(name) for name in KEY]
    return tuple(None if pd.isna(value) else value for value in values)


def read_rows(out: Path) -> list[dict[str, Any]]:
    """Read the rows measured so far; none if there is no file.

    Raises
    ------
    TableError
        If the name does not end as a table's, or the file exists but is not a table that
        :func:`append` wrote.
    """
    frame = _read(out)
    if frame is None:
        return []
    rows = frame.astype(object).where(frame.notna(), None).to_dict("records")
    return [{str(name): value for name, value in row.items()} for row in rows]


def append(out: Path, row: Mapping[str, Any]) -> None:
    """Add a row to the table, in place of one with the same key; other processes may do so too.

    The file is replaced in one step, so whoever reads it, or whatever kills this process, finds
    it whole.
    """
    added = table.check(table.from_rows([row]), f"new row of {out}")
    with _lock(out):
        old = _read(out)
        if old is not None:
            kept = old[~_matches(old, dict(zip(KEY, row_key(row), strict=True)))]
            added = table.in_order(pd.concat([kept, added], ignore_index=True))
        table.write(added, out)


def _read(out: Path) -> pd.DataFrame | None:
    """Read the table; None if there is no file."""
    if not _SUFFIX.search(out.name):
        raise TableError(f"{out}: a table must end in .csv, .csv.gz, .csv.xz or .parquet.")
    if not out.exists():
        return None
    frame = table.read(out)
    missing = [name for name in KEY[:-1] if name not in frame.columns]
    if missing:
        raise TableError(
            f"{out}: exists and is not a table of qscale measure (no column {missing[0]!r}). "
            "Choose another output."
        )
    return frame


def save_side(out: Path, kind: str, frame: pd.DataFrame, key: Mapping[str, Any]) -> None:
    """Put rows into a side table, in place of those that have the same key.

    Parameters
    ----------
    out
        The measurement table.
    kind
        Name of the side table, such as ``blocks``.
    frame
        The rows, without the columns of the key.
    key
        What the rows are about: columns that are equal for all of them.
    """
    path = table.side_path(out, kind)
    frame = frame.assign(**key)
    with _lock(out):
        if path.exists():
            old = _read_side(path)
            same = _matches(old, key) if set(key) <= set(old) else old.index != old.index
            frame = pd.concat([old[~same], frame], ignore_index=True) if len(old) else frame
        table.write(frame, path)


def save_curvature(
    out: Path, found: Curvature, shared: Mapping[str, Any], columns: Mapping[str, Sequence[Any]]
) -> None:
    """Write the per-matrix table beside the rows.

    Parameters
    ----------
    out
        The measurement table.
    found
        Curvature, with the value of every probe: sums over matrices need them for their errors.
    shared
        Columns equal for all matrices: ``checkpoint``, ``protocol`` and the options of the
        estimate. Earlier rows of this checkpoint and protocol are replaced.
    columns
        Further columns, one value for each matrix.
    """
    ggn, hessian = found.ggn, found.hessian
    frame = pd.DataFrame(
        {
            "matrix": list(ggn.names),
            **columns,
            "ggn_trace": ggn.per_matrix.values(),
            "ggn_trace_se": ggn.per_matrix_se.values(),
            "hessian_trace": hessian.per_matrix.values(),
            "hessian_trace_se": hessian.per_matrix_se.values(),
            "ggn_probes": list(np.transpose(ggn.values)),
            "hessian_probes": list(np.transpose(hessian.values)),
            "curvature_tokens": ggn.tokens,
            "microbatches": ggn.microbatches,
            "backward_passes": ggn.backward_passes,
            "hessian_passes": hessian.backward_passes,
            "grad_norm": found.grad_norm,
            **shared,
        }
    )
    key = {k: shared[k] for k in ("checkpoint", "protocol")}
    save_side(out, "matrices", frame.drop(columns=list(key)), key)


def load_curvature(out: Path, names: Sequence[str], shared: Mapping[str, Any]) -> Curvature | None:
    """Read back what :func:`save_curvature` wrote; None unless all of it matches ``shared``."""
    path = table.side_path(out, "matrices")
    if not path.exists():
        return None
    frame = _read_side(path)
    if not {"matrix", "ggn_probes", "hessian_probes", "microbatches"} <= set(frame):
        raise TableError(f"{path}: exists and is not a per-matrix table of qscale measure.")
    found = frame[_matches(frame, shared)] if set(shared) <= set(frame.columns) else frame[:0]
    if found["matrix"].tolist() != list(names):
        return None
    first = found.iloc[0]
    ggn, hessian = (
        TraceEstimate(
            names=tuple(names),
            values=np.stack(found[f"{kind}_probes"].to_list()).T,
            tokens=int(first["curvature_tokens"]),
            backward_passes=int(first[passes]),
            microbatches=int(first["microbatches"]),
        )
        for kind, passes in (("ggn", "backward_passes"), ("hessian", "hessian_passes"))
    )
    return Curvature(ggn, hessian, float(first["grad_norm"]))


def save_columns(out: Path, columns: Mapping[str, float | None], key: Mapping[str, Any]) -> None:
    """Keep what a feature found of a checkpoint, to complete further rows with."""
    frame = pd.DataFrame({"column": list(columns), "value": list(columns.values())})
    save_side(out, "checkpoints", frame.astype({"value": float}), key)


def load_columns(out: Path, key: Mapping[str, Any]) -> dict[str, float | None] | None:
    """Read back what :func:`save_columns` wrote; None if it is not there."""
    path = table.side_path(out, "checkpoints")
    if not path.exists():
        return None
    frame = _read_side(path)
    found = frame[_matches(frame, key)]
    values = found["value"].astype(object).where(found["value"].notna(), None)
    return dict(zip(found["column"], values, strict=True)) if len(found) else None


def _read_side(path: Path) -> pd.DataFrame:
    """Read a side table."""
    try:
        frame = pd.read_parquet(path)
    except (ValueError, OSError) as error:
        raise TableError(f"{path}: cannot be read. Remove it to measure again.") from error
    if not {"checkpoint", "protocol"} <= set(frame):
        raise TableError(f"{path}: exists and is not a side table of qscale measure.")
    return frame


def _matches(frame: pd.DataFrame, values: Mapping[str, Any]) -> pd.Series:
    """Tell which rows hold all the values; a column that the frame lacks is null."""
    found = pd.Series(data=True, index=frame.index)
    for name, value in values.items():
        if value is not None:
            found &= frame[name] == value if name in frame else False
        elif name in frame:
            found &= frame[name].isna()
    return found


def _lock(path: Path) -> FileLock:
    """Return a lock that processes writing the same file share."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(path.with_name(f".{path.name}.lock"))
