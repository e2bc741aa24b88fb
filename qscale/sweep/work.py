"""What a worker does: take tasks that no other worker has until none is left."""

from __future__ import annotations

import functools
import os
import platform
import resource
import sys
import time
import traceback
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import joblib

from qscale import __version__
from qscale.errors import QscaleError, SweepError
from qscale.sweep import store, tasks

if TYPE_CHECKING:
    from qscale.sweep.plan import Task

_THREADS = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """What every worker of a sweep is told.

    Parameters
    ----------
    out
        Folder of the sweep.
    function, source, folder
        What to call; see `qscale.sweep.tasks.load`.
    tasks
        In the order to take them.
    retries
        Further attempts at a task that failed.
    since
        Attempts that began before this time do not count, in seconds since 1970.
    threads
        Threads of a worker; None for the processors that it may use.
    keep_scratch
        Whether what tasks leave in their scratch folders is kept.
    """

    out: Path
    function: str
    source: Path | None
    folder: Path
    tasks: tuple[Task, ...]
    retries: int
    since: float
    threads: int | None
    keep_scratch: bool


class Outcome(Enum):
    """How one visit to a task ended."""

    DONE = "done"
    FAILED = "failed"
    AGAIN = "failed, to be tried again"
    HELD = "held by another worker"


def work(job: Job) -> str:
    """Go through the tasks until each is done, has failed too often or is another worker's.

    A worker whose parent process is gone stops before the next task.

    Returns
    -------
    str
        Why the worker had to stop: the function cannot be loaded, or the folder cannot be written
        to. Empty if it went through.
    """
    try:
        _work(job)
    except QscaleError as error:
        return str(error)
    finally:
        store.leave(job.out)
    return ""


def _work(job: Job) -> None:
    """Go through the tasks."""
    parent = os.getppid()
    function = start(job)
    left = job.tasks
    while left:
        again = []
        for task in left:
            if os.getppid() != parent:
                return
            if attempt(job, function, task) is Outcome.AGAIN:
                again.append(task)
        left = tuple(again)


def start(job: Job) -> tasks.Function:
    """Set the threads of this process and load the function."""
    threads = job.threads or joblib.cpu_count()
    if "torch" not in sys.modules:
        os.environ.update(dict.fromkeys(_THREADS, str(threads)))
    function = tasks.load(job.function, job.source, job.folder)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(threads)
    code_hash(job.function, job.source)  # of the code that is loaded, whatever becomes of the file
    return function


def attempt(job: Job, function: tasks.Function, task: Task) -> Outcome:
    """Run a task unless it is done, another worker's, or has failed too often.

    Raises
    ------
    SweepError
        If the folder cannot be written to, so that no task can be kept.
    """
    if store.is_done(job.out, task.hash):
        return Outcome.DONE
    try:
        return _claimed(job, function, task)
    except OSError as error:  # of the folder: those of the function are its failures
        raise SweepError(
            f"{job.out}: cannot be written ({error.strerror or error}); free some space, then run "
            "the sweep again."
        ) from error


def _claimed(job: Job, function: tasks.Function, task: Task) -> Outcome:
    """Claim a task and run it."""
    out, key = job.out, task.hash
    with store.claim(out, key) as held:
        if not held:
            return Outcome.HELD
        if store.is_done(out, key):
            return Outcome.DONE
        store.settle(out, key)
        if _failures(job, key) > job.retries:
            return Outcome.FAILED
        if _run(job, function, task):
            return Outcome.DONE
        return Outcome.FAILED if _failures(job, key) > job.retries else Outcome.AGAIN


@functools.cache
def code_hash(function: str, source: Path | None) -> str:
    """Return what tells one version of the function's code from another."""
    if source is not None:
        return store.file_hash(source)
    module = sys.modules.get(function.partition(":")[0])
    path = getattr(module, "__file__", None)
    return store.file_hash(Path(path)) if path else __version__


def _failures(job: Job, key: str) -> int:
    """Count the failed attempts that count."""
    return sum(float(a.get("time", 0)) >= job.since for a in store.attempts(job.out, key))


def _run(job: Job, function: tasks.Function, task: Task) -> bool:
    """Run a task whose lock is held, and keep what it returns or how it failed."""
    out, key = job.out, task.hash
    began = {"time": time.time(), "function": job.function, "params": task.params}
    clock = time.perf_counter()
    with store.running(out, key, keep=job.keep_scratch) as scratch:
        try:
            frames = tasks.call(function, task.params, key, scratch)
        except (Exception, SystemExit) as error:  # whatever a user's function raises
            store.record_failure(out, key, began, _sentence(error), traceback.format_exc())
            return False
        try:
            store.write_part(out, key, frames, _facts(job, task, time.perf_counter() - clock))
        except QscaleError as error:
            store.record_failure(out, key, began, _sentence(error), "")
            raise
        except Exception as error:  # a column that parquet cannot hold
            store.record_failure(out, key, began, _sentence(error), traceback.format_exc())
            return False
    return True


def _facts(job: Job, task: Task, seconds: float) -> dict[str, Any]:
    """Return what the record of a part tells of the task."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )
    return {
        "function": job.function,
        "params": task.params,
        "seconds": seconds,
        "peak_bytes": peak,
        "code": code_hash(job.function, job.source),
        "qscale": __version__,
        "python": platform.python_version(),
    }


def _sentence(error: BaseException) -> str:
    """Return one line that says what was raised."""
    text = " ".join(str(error).split())
    return text if isinstance(error, QscaleError) else f"{type(error).__name__}: {text}"
