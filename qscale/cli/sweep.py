"""Run a plan of independent tasks on any number of workers, and collect their rows.

A plan is a TOML file. In this one, arm main measures two checkpoints under four settings in 7
tasks, and arm calibrated one of them again with another calibration text in 4:

```toml
task = "measure"

[fixed]
text = "heldout.txt"
features = ""         # losses alone

[grid]
checkpoint = ["runs/small", "runs/large"]
specs = ["rtn int3 g64", "rtn int4 g64", "gptq int3 g64", "gptq int4 g64"]

[[exclude]]           # what to leave out of the grid
checkpoint = "runs/large"
specs = "gptq int3 g64"

[[arms]]              # parts of the sweep; their tables go before the plan's
name = "main"

[[arms]]
name = "calibrated"
[arms.fixed]
calibration = "train.txt"
[arms.grid]
checkpoint = ["runs/small"]

[cost]                # of a task, for the first estimate
seconds = 60
gigabytes = 2
```

In place of measure, task names a function of your own, file.py:function or module:function. It is
called with the parameters, a dict that also holds a seed, and an empty folder whose content is
removed after the task. It returns a DataFrame of rows, or a dict of frames.

```sh
qscale sweep plan.toml --dry-run
qscale sweep plan.toml --workers 8
qscale sweep status plan.toml
qscale sweep collect plan.toml -o rows.parquet
```

Next: qscale fit rows.parquet reads what was collected.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter, validators

from qscale.cli import sweep_shown
from qscale.cli.console import console, pairs, refuse_existing, table
from qscale.errors import SweepError
from qscale.sweep import plan as plans
from qscale.sweep import store
from qscale.sweep.estimate import duration, expected

if TYPE_CHECKING:
    from collections.abc import Mapping

    from qscale.sweep.plan import Plan, Task

sweep = App(
    name="sweep",
    help=__doc__,
    help_epilogue="Exit status: 0 all tasks are done, 1 some failed, 2 a mistake in plan or "
    "options, 3 some are left: another sweep is at them, or a worker was lost or stopped.",
)

DONE, SOME_FAILED, SOME_LEFT = 0, 1, 3

_Folder = Annotated[Path | None, Parameter(name="--folder")]


@sweep.default
@sweep.command(name="run")
def run(
    plan: Path,
    /,
    *,
    folder: _Folder = None,
    engine: Literal["local", "submitit", "dask"] = "local",
    workers: Annotated[int, Parameter(validator=validators.Number(gte=1))] = 1,
    index: Annotated[int | None, Parameter(validator=validators.Number(gte=0))] = None,
    retries: Annotated[int, Parameter(validator=validators.Number(gte=0))] = 1,
    threads: Annotated[int | None, Parameter(validator=validators.Number(gte=1))] = None,
    setting: list[str] | None = None,
    keep_scratch: bool = False,
    dry_run: bool = False,
) -> None:
    r"""Run the tasks of a plan that are not done yet.

    Any number of calls may share a folder, on one machine or on several: each task is run once. A
    call that was stopped goes on where it was, and tries tasks that failed again. Exit status: 0
    all tasks are done, 1 some failed, 2 a mistake in plan or options, 3 some are left.

    ```sh
    qscale sweep run plan.toml --dry-run
    qscale sweep run plan.toml --workers 8 --folder on_scratch
    qscale sweep run plan.toml --engine submitit --workers 20 \
        --setting slurm_partition=gpu --setting timeout_min=600
    ```

    Next: qscale sweep status says how far it is, qscale sweep collect makes a table of it.

    Parameters
    ----------
    plan
        TOML file: task names a function, [fixed] its parameters, [grid] lists of values to cross,
        [[exclude]] what to leave out, and [[arms]] tables of the same names.
    folder
        Folder of the sweep; by default the plan's name ending in .sweep.
    engine
        Where workers run: local processes, jobs of submitit (Slurm), or Dask.
    workers
        Processes or jobs; each takes one task after the other.
    index
        Run this one task in this process, counted from 0 in the plan's order, as for a job array:
        --index $SLURM_ARRAY_TASK_ID.
    retries
        Further attempts at a task that fails or whose worker is lost.
    threads
        Threads of each worker; by default the processors divided by the workers. Sums differ in
        their last digits with the number of threads.
    setting
        NAME=VALUE for the engine, may be repeated: submitit takes slurm_partition=gpu,
        timeout_min=600, cluster=local and so on; dask takes address=tcp://host:8786.
    keep_scratch
        Keep what tasks write to their scratch folders.
    dry_run
        Print the number of tasks and the estimate, and run nothing.
    """
    from qscale.sweep import engine as engines  # noqa: PLC0415 - joblib takes a quarter of a second
    from qscale.sweep import tasks  # noqa: PLC0415
    from qscale.sweep.work import Job, work  # noqa: PLC0415

    read = plans.read(plan)
    tasks.check(read)
    out = _folder(plan, folder)
    chosen = _chosen(read, index)
    settings = _settings(setting)
    records, damaged = store.records(out, (task.hash for task in chosen))
    sweep_shown.print_damaged(damaged)
    left = [task for task in chosen if task.hash not in records]
    sweep_shown.print_estimate(read, chosen, left, records, workers)
    if dry_run:
        return
    store.prepare(out)
    for key in damaged:
        store.discard(out, key)
    job = Job(
        out=out,
        function=read.function,
        source=read.source,
        folder=read.path.parent.absolute(),
        tasks=tuple(left),
        retries=retries,
        since=time.time(),
        threads=threads or _threads(engine, settings, workers),
        keep_scratch=keep_scratch,
    )
    if not left:
        remarks = []
    elif index is not None:
        remarks = [remark] if (remark := work(job)) else []
    else:
        with sweep_shown.progress(out, chosen) as tick:
            remarks = engines.run(
                job, min(workers, len(left)), engine, settings=settings, on_tick=tick
            )
    _finish(out, read, chosen, job.since, remarks)


@sweep.command
def status(plan: Path, /, *, folder: _Folder = None) -> None:
    """Say how far a sweep is: done, failed, at work and left, by arm.

    Exit status: 0 all tasks are done, 1 some failed and none is left, 2 a mistake in plan or
    options, 3 some are left.

    ```sh
    qscale sweep status plan.toml
    qscale sweep status plan.toml --folder on_scratch
    ```

    Next: qscale sweep run goes on with what is left, qscale sweep collect makes a table of what is
    done.

    Parameters
    ----------
    plan
        The plan, as for qscale sweep run.
    folder
        Folder of the sweep; by default the plan's name ending in .sweep.
    """
    read = plans.read(plan)
    out = _folder(plan, folder)
    records, damaged = store.records(out, (task.hash for task in read.tasks))
    failed, at_work = store.failed(out), store.at_work(out)
    lines = []
    for arm in dict.fromkeys(task.arm for task in read.tasks):
        own = [task for task in read.tasks if task.arm == arm]
        counts = Counter(_state(task, records, failed, at_work) for task in own)
        cost = expected(read.tasks, [t for t in own if t.hash not in records], records)
        seconds = [float(records[t.hash]["seconds"]) for t in own if t.hash in records]
        lines.append(
            (
                arm,
                *(str(n) for n in (len(own), *(counts[s] for s in _STATES))),
                duration(sum(seconds) / len(seconds)) if seconds else "-",
                "-" if cost.seconds is None else duration(cost.seconds),
            )
        )
    console.print(table(str(plan), ("arm", "tasks", *_STATES, "time each", "time left"), lines))
    sweep_shown.print_damaged(damaged)
    sweep_shown.print_others(out, read, records)
    sweep_shown.print_failures(out, [t for t in read.tasks if t.hash in failed])
    states = [_state(task, records, failed, at_work) for task in read.tasks]
    if {"left", "at work"} & {*states}:
        sys.exit(SOME_LEFT)
    sys.exit(SOME_FAILED if "failed" in states else DONE)


@sweep.command
def collect(
    plan: Path,
    /,
    *,
    folder: _Folder = None,
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
    others: bool = False,
    force: bool = False,
) -> None:
    """Merge what finished tasks returned into one parquet table for each kind.

    Rows are checked as a measurement table; other kinds go to files beside it. A damaged part is
    named and left out, and counts as not done. Exit status: 0 all tasks are collected, 2 a mistake,
    3 some are not.

    ```sh
    qscale sweep collect plan.toml -o table.parquet
    qscale sweep collect plan.toml --others -o all.parquet --force
    ```

    Next: qscale fit table.parquet --law kumar; qscale plot table.parquet -o figures.

    Parameters
    ----------
    plan
        The plan, as for qscale sweep run.
    folder
        Folder of the sweep; by default the plan's name ending in .sweep.
    output
        Table to write, .parquet; by default rows.parquet in the sweep's folder, written anew.
    others
        Collect also what is in the folder and not in the plan, as tasks of an earlier plan.
    force
        Replace an output that is there.
    """
    from qscale.sweep import collect as collecting  # noqa: PLC0415 - half a second

    read = plans.read(plan)
    out = _folder(plan, folder)
    refuse_existing(output, force)
    keys = [task.hash for task in read.tasks]
    wanted = keys + (sorted(store.done(out) - {*keys}) if others else [])
    records, damaged = store.records(out, wanted)
    sweep_shown.print_damaged(damaged)
    if not records:
        raise SweepError(f"{out}: no task of {plan} is done; run the sweep first.")
    for path, rows in collecting.collect(out, records, output or out / "rows.parquet").items():
        console.print(f"{rows:,} rows written to {path}.", markup=False)
    if not others:
        sweep_shown.print_others(out, read, records)
    missing = sum(key not in records for key in keys)
    if missing:
        console.print(f"{missing} of {len(keys)} tasks are not done and not in it.", markup=False)
        sys.exit(SOME_LEFT)


_STATES = ("done", "failed", "at work", "left")


def _state(task: Task, records: Mapping[str, Any], failed: set[str], at_work: set[str]) -> str:
    """Say where a task is."""
    if task.hash in records:
        return "done"
    if task.hash in at_work:
        return "at work"
    return "failed" if task.hash in failed else "left"


def _folder(plan: Path, folder: Path | None) -> Path:
    """Return the sweep's folder."""
    return (folder or plan.with_suffix(".sweep")).absolute()


def _chosen(read: Plan, index: int | None) -> tuple[Task, ...]:
    """Return the tasks of a call."""
    if index is None:
        return read.tasks
    if index >= len(read.tasks):
        raise SweepError(
            f"--index must be from 0 to {len(read.tasks) - 1}, {read.path} has {len(read.tasks)} "
            f"tasks. Got {index} instead."
        )
    return read.tasks[index : index + 1]


def _settings(items: list[str] | None) -> dict[str, Any]:
    """Parse settings of an engine; whole numbers become numbers."""
    given = pairs(items or [], "--setting")
    return {name: int(value) if value.isdecimal() else value for name, value in given.items()}


def _threads(engine: str, settings: Mapping[str, Any], workers: int) -> int | None:
    """Share this machine's processors; workers elsewhere see for themselves what they have."""
    import joblib  # noqa: PLC0415 - a quarter of a second

    here = engine == "local" or settings.get("cluster") == "local"
    here = here or (engine == "dask" and "address" not in settings)
    return max(1, joblib.cpu_count() // workers) if here else None


def _finish(
    out: Path, read: Plan, chosen: tuple[Task, ...], since: float, remarks: list[str]
) -> None:
    """Print what came of a call and exit with its status."""
    keys = {task.hash for task in chosen}
    done = store.done(out) & keys
    tried = {key for key in keys - done if _fresh(out, key, since)}
    if remarks and not tried and all(_time(out, key) < since for key in done):
        raise SweepError(" ".join(remarks))
    failed = [task for task in chosen if task.hash in tried]
    left = len(keys) - len(done) - len(failed)
    elsewhere = "" if out == _folder(read.path, None) else f" --folder {out}"
    console.print(
        f"{len(done)} of {len(keys)} tasks done, {len(failed)} failed, {left} left. "
        f"Collect them with: qscale sweep collect {read.path}{elsewhere}",
        markup=False,
    )
    for remark in remarks:
        console.print(f"Note: {remark}", markup=False)
    sweep_shown.print_failures(out, failed)
    if left or failed:
        sys.exit(SOME_LEFT if left else SOME_FAILED)


def _fresh(out: Path, key: str, since: float) -> bool:
    """Whether the last attempt at a task failed in this call, or in one beside it."""
    return any(float(a.get("time", 0)) >= since for a in store.attempts(out, key))


def _time(out: Path, key: str) -> float:
    """Return when a part appeared."""
    return (out / store.PARTS / key).stat().st_mtime
