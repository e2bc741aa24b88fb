"""Cost of scheduling tasks that do nothing, and of collecting, beside plain loops that do the same.

A sweep of many tasks is run by one worker in this process and by several processes. Beside it, a
bare loop writes the same files, and pandas reads and joins the same parts. Linux only::

    OMP_NUM_THREADS=1 python benchmarks/sweep_overhead.py
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from qscale.sweep import plan, store
from qscale.sweep.collect import collect
from qscale.sweep.engine import run
from qscale.sweep.work import Job, work

if TYPE_CHECKING:
    from collections.abc import Callable

NOTHING = """
import pandas as pd
FRAME = pd.DataFrame({"x": [1.0]})
def nothing(params, scratch):
    return {}
def one_frame(params, scratch):
    return {"found": FRAME}
"""
BITS = (2.0, 3.0, 4.0, 5.0, 6.0)


def job(folder: Path, function: str, count: int) -> Job:
    """Plan a sweep in a folder of its own."""
    (folder / "tasks.py").write_text(NOTHING, encoding="utf-8")
    text = f'task = "tasks.py:{function}"\n[grid]\nx = {list(range(count))}\n'
    path = folder / f"{function}-{count}-{time.time_ns()}.toml"
    path.write_text(text, encoding="utf-8")
    read = plan.read(path)
    return Job(
        out=path.with_suffix(".sweep"),
        function=read.function,
        source=read.source,
        folder=folder,
        tasks=read.tasks,
        retries=0,
        since=time.time(),
        threads=1,
        keep_scratch=False,
    )


def seconds(act: Callable[[], Any]) -> tuple[float, float]:
    """Return how long something takes, and how long this process's processor works on it."""
    clock, cpu = time.perf_counter(), time.process_time()
    act()
    return time.perf_counter() - clock, time.process_time() - cpu


def bare(folder: Path, count: int, *, frame: bool) -> None:
    """Call a function that does nothing and write what a part holds, without any care."""
    folder.mkdir()
    row = pd.DataFrame({"x": [1.0]})
    for i in range(count):
        part = folder / str(i)
        part.mkdir()
        if frame:
            row.to_parquet(part / "found.parquet")
        (part / "task.json").write_text(json.dumps({"x": i}), encoding="utf-8")


def scheduling(folder: Path, count: int, workers: int) -> None:
    """Print milliseconds a task of sweeps and of bare loops."""
    print(f"{count} tasks{'':28}ms a task  CPU ms   of bare loop")
    for function, text in (("nothing", "no frame"), ("one_frame", "one frame of one row")):
        plain = seconds(lambda f=function: bare(folder / f, count, frame=f == "one_frame"))
        alone, shared = job(folder, function, count), job(folder, function, count)
        store.prepare(alone.out)
        times = {
            "bare loop": plain,
            "sweep, one worker": seconds(lambda j=alone: work(j)),
            f"sweep, {workers} processes": seconds(lambda j=shared: run(j, workers)),
        }
        times["to verify what is done"] = seconds(
            lambda j=alone: store.records(j.out, [task.hash for task in j.tasks])
        )
        for name, (took, cpu) in times.items():
            each = f"{took / count * 1e3:8.3f}{cpu / count * 1e3:8.3f}"
            print(f"{text + ', ' + name:44}{each}{took / plain[0]:12.2f}")
        if len(store.done(shared.out)) != count or len(store.done(alone.out)) != count:
            raise RuntimeError("tasks are missing")


def make_parts(folder: Path, rows: int, parts: int) -> tuple[Path, list[str]]:
    """Write parts of measured rows with all numeric columns that a row of qscale measure has."""
    from qscale import table  # noqa: PLC0415

    names = [c.name for c in table.COLUMNS.values() if c.kind == "number" and (c.low or 0) < 0.7]
    out = folder / "collected"
    keys = [f"{i:016x}" for i in range(parts)]
    store.prepare(out)
    frame = pd.DataFrame({name: [0.7] * (rows // parts) for name in names}).assign(family="one")
    frame = table.check(frame.assign(bits=3.0, weight_grid_bits=4.0))
    for key in keys:
        store.write_part(out, key, {"rows": frame}, {})
    return out, keys


def collected(out: Path, keys: list[str], how: str) -> tuple[float, float, int]:
    """Collect in a process of its own; return seconds, peak MB above the start, and rows."""
    before = peak_mb()
    clock = time.perf_counter()
    if how == "qscale":
        records, _ = store.records(out, keys)
        rows = sum(collect(out, records, out / "rows.parquet").values())
    else:
        found = [pd.read_parquet(out / store.PARTS / key / "rows.parquet") for key in keys]
        joined = pd.concat(found)
        joined.to_parquet(out / "plain.parquet")
        rows = len(joined)
    return time.perf_counter() - clock, peak_mb() - before, rows


def peak_mb() -> float:
    """Return the peak memory of this process."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def collecting(folder: Path, rows: int, parts: int) -> None:
    """Print seconds and memory of collecting, beside pandas."""
    out, keys = make_parts(folder, rows, parts)
    columns = len(pd.read_parquet(out / store.PARTS / keys[0] / "rows.parquet").columns)
    print(f"\n{rows} rows of {columns} columns in {parts} parts{'':8}seconds  ratio  peak MB")
    spawn = get_context("spawn")
    plain = 0.0
    for how, text in (("pandas", "pandas: read, concat, write"), ("qscale", "sweep collect")):
        with ProcessPoolExecutor(1, spawn) as fresh:
            fresh.submit(collected, out, keys[:1], how).result()  # imports are not part of it
            took, memory, found = fresh.submit(collected, out, keys, how).result()
        plain = plain or took
        if found != rows // parts * parts:
            raise RuntimeError("rows are missing")
        print(f"{text:44}{took:8.2f}{took / plain:7.2f}{memory:9.0f}")


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--parts", type=int, default=1000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        scheduling(Path(folder), given.tasks, given.workers)
        collecting(Path(folder), given.rows, given.parts)


if __name__ == "__main__":
    main()
