"""Merge the parts of a sweep into one parquet table for each kind, in bounded memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from qscale import table
from qscale.atomic import replacing
from qscale.columns import COLUMNS
from qscale.errors import SweepError, TableError
from qscale.sweep import store
from qscale.sweep.tasks import ROWS, TASK

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ROW_GROUP = 5_000
"""Rows held in memory at once."""
OPEN = 100
"""Parts held open at once."""

_ARROW = {"number": pa.float64(), "text": pa.string(), "flag": pa.bool_()}


def collect(out: Path, records: Mapping[str, Mapping[str, Any]], target: Path) -> dict[Path, int]:
    """Write the frames of tasks, one table for each kind.

    Parameters
    ----------
    out
        Folder of the sweep.
    records
        Records of the tasks to collect by hash, in the order of the rows.
    target
        Where rows go, ``.parquet``; other kinds go beside it, see `qscale.table.side_path`. Each
        table has a column ``task`` with the hash.

    Returns
    -------
    dict
        The number of rows in each file.

    Raises
    ------
    SweepError, TableError
        If columns of two tasks are of types that do not go together, or rows are no measurement
        table; the message names the part.
    """
    if target.suffix != ".parquet":
        raise SweepError(f"{target}: collected tables are parquet; choose a name in .parquet.")
    kinds = sorted({kind for record in records.values() for kind in record["kinds"]})
    counts = {}
    for kind in kinds:
        having = {key: r["kinds"][kind] for key, r in records.items() if kind in r["kinds"]}
        path = target if kind == ROWS else table.side_path(target, kind)
        counts[path] = _merge(out, kind, having, path)
    return counts


def _merge(out: Path, kind: str, having: Mapping[str, Mapping[str, Any]], path: Path) -> int:
    """Write one kind and return its number of rows."""
    schema = _schema(out, kind, having)
    written = schema if kind != ROWS else _measured(schema)
    with replacing(path) as partial, pq.ParquetWriter(partial, written) as writer:
        total = 0
        for chunk in _chunks(_batches(out, kind, list(having), schema)):
            checked = chunk if kind != ROWS else _checked(out, chunk, written)
            writer.write_table(checked, row_group_size=ROW_GROUP)
            total += len(checked)
    return total


def _schema(out: Path, kind: str, having: Mapping[str, Mapping[str, Any]]) -> pa.Schema:
    """Unite the columns of all parts; one file of each make is opened."""
    makes = {tuple(facts["columns"].items()): key for key, facts in having.items()}
    paths = [_part(out, key, kind) for key in makes.values()]
    schemas = [pq.read_schema(path) for path in paths]
    try:
        united = pa.unify_schemas(schemas, promote_options="permissive")
    except pa.ArrowException as error:
        raise SweepError(
            f"{kind}: columns of these parts do not go together ({error}): "
            f"{', '.join(map(str, paths))}."
        ) from error
    return united.append(pa.field(TASK, pa.string()))


def _measured(schema: pa.Schema) -> pa.Schema:
    """Return the schema of a measurement table: known columns first and of their kind."""
    known = [pa.field(n, _ARROW[c.kind]) for n, c in COLUMNS.items() if n in schema.names]
    return pa.schema([*known, *(field for field in schema if field.name not in COLUMNS)])


def _batches(out: Path, kind: str, keys: list[str], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield rows part by part, with the task that they are of."""
    stored = schema.remove(schema.get_field_index(TASK))
    for first in range(0, len(keys), OPEN):  # a dataset keeps the metadata of every file it read
        paths = [str(_part(out, key, kind)) for key in keys[first : first + OPEN]]
        scanner = ds.dataset(paths, stored, format="parquet").scanner(
            columns=[*stored.names, "__filename"], batch_size=ROW_GROUP, fragment_readahead=16
        )
        for batch in scanner.to_batches():
            if len(batch):
                *columns, files = batch.columns
                task = Path(files[0].as_py()).parent.name
                names = pa.array([task] * len(batch), pa.string())
                yield pa.RecordBatch.from_arrays([*columns, names], schema=schema)


def _chunks(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Join batches to tables of about a row group each."""
    held: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        held.append(batch)
        rows += len(batch)
        if rows >= ROW_GROUP:
            yield pa.Table.from_batches(held).combine_chunks()
            held, rows = [], 0
    if held:
        yield pa.Table.from_batches(held).combine_chunks()


def _checked(out: Path, chunk: pa.Table, schema: pa.Schema) -> pa.Table:
    """Check rows as a measurement table; a mistake is reported with the part that has it."""
    frame = chunk.to_pandas()
    try:
        frame = table.check(frame, ROWS)
    except TableError:
        for key, rows in frame.groupby(TASK, sort=False):
            table.check(rows.reset_index(drop=True), str(_part(out, str(key), ROWS)))
        raise
    return pa.Table.from_pandas(frame, schema=schema, preserve_index=False)


def _part(out: Path, key: str, kind: str) -> Path:
    """Return where a task's frame lies."""
    return out / store.PARTS / key / f"{kind}.parquet"
