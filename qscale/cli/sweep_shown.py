"""What ``qscale sweep`` shows: the estimate, progress, and what went wrong."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qscale.cli.console import console
from qscale.sweep import store
from qscale.sweep.estimate import duration, expected

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from qscale.errors import SweepError
    from qscale.sweep.plan import Plan, Task

SHOWN = 10
"""Failures that are listed one by one."""


@contextmanager
def progress(out: Path, chosen: tuple[Task, ...]) -> Iterator[Callable[[], None]]:
    """Show how many tasks are done, failed and left, and the time left."""
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import (  # noqa: PLC0415
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    stderr = Console(stderr=True)
    keys = {task.hash for task in chosen}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=stderr, transient=True,
        disable=not stderr.is_terminal,
    ) as shown:  # fmt: skip
        bar = shown.add_task("starting", total=len(keys), completed=len(store.done(out) & keys))

        def tick() -> None:
            done, failed = len(store.done(out) & keys), len(store.failed(out) & keys)
            text = f"{done} done, {failed} failed, {len(keys) - done - failed} left"
            shown.update(bar, completed=done, description=text)

        yield tick


def print_estimate(
    read: Plan,
    chosen: tuple[Task, ...],
    left: list[Task],
    records: Mapping[str, Mapping[str, Any]],
    workers: int,
) -> None:
    """Print how many tasks there are and what they will take."""
    arms = len({task.arm for task in read.tasks})
    console.print(
        f"{read.path}: {len(chosen)} tasks of {read.function}"
        + (f" in {arms} arms" if arms > 1 else "")
        + f", {len(records)} done, {len(left)} to do."
        + (f" {read.repeated} more are repeated and run once." if read.repeated else ""),
        markup=False,
    )
    cost = expected(read.tasks, left, records)
    if not left:
        return
    if cost.seconds is None:
        console.print("Time left: unknown until a task is done; [cost] can state it.", markup=False)
        return
    took = f"{duration(cost.seconds / min(workers, len(left)))} with {workers} workers"
    rest = f", and {cost.unknown} tasks of unknown cost" if cost.unknown else ""
    memory = f" Memory: {workers} x {cost.gigabytes:.2g} GB." if cost.gigabytes else ""
    console.print(f"Time left: about {took}{rest}.{memory}", markup=False)


def print_damaged(damaged: Mapping[str, SweepError]) -> None:
    """Name the parts that do not count."""
    for error in damaged.values():
        console.print(f"Note: {error}; the task counts as not done.", markup=False)


def print_others(out: Path, read: Plan, records: Mapping[str, Mapping[str, Any]]) -> None:
    """Tell of parts that are not the plan's, and of those that another version of a file made."""
    others = store.done(out) - {task.hash for task in read.tasks}
    if others:
        console.print(
            f"Note: {len(others)} finished tasks in {out} are not in {read.path}; they are kept, "
            "and collected only with --others.",
            markup=False,
        )
    if read.source is not None:
        now = store.file_hash(read.source)
        older = sum(record.get("code") != now for record in records.values())
        if older:
            console.print(
                f"Note: {older} finished tasks were run by another version of {read.source.name}; "
                "change a parameter, or take another --folder, to run them again.",
                markup=False,
            )


def print_failures(out: Path, failed: list[Task]) -> None:
    """List tasks that failed and what their last attempt said."""
    for task in failed[:SHOWN]:
        attempts = store.attempts(out, task.hash)
        if attempts:
            console.print(
                f"Failed: {task.hash} after {len(attempts)} attempts: {attempts[-1]['error']}",
                markup=False,
            )
    if failed:
        more = f"{len(failed) - SHOWN} more failed. " if len(failed) > SHOWN else ""
        console.print(f"{more}Tracebacks are in {out / store.FAILED}.", markup=False)
