"""Start workers: processes on this machine, jobs of a scheduler through submitit, or Dask.

An engine only starts workers and waits; who does which task is settled in the sweep's folder.
"""

from __future__ import annotations

import concurrent.futures
import time
from typing import TYPE_CHECKING, Any, Literal

import joblib
from joblib.externals.loky import ProcessPoolExecutor

from qscale.errors import SweepError
from qscale.sweep import store
from qscale.sweep.work import work

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from qscale.sweep.work import Job

Engine = Literal["local", "submitit", "dask"]
POLL = 0.5
"""Seconds between two looks at the workers."""
DAY = 24 * 60


def run(
    job: Job,
    workers: int,
    engine: Engine = "local",
    *,
    settings: Mapping[str, Any] | None = None,
    on_tick: Callable[[], None] = lambda: None,
) -> list[str]:
    """Run a sweep's tasks with a number of workers and wait until they end.

    Parameters
    ----------
    job
        What to do.
    workers
        Number of processes, or of jobs.
    engine
        ``local``, ``submitit`` or ``dask``.
    settings
        For submitit, what `submitit.AutoExecutor.update_parameters` takes, and ``cluster``; for
        Dask, ``address`` of a scheduler in place of workers on this machine.
    on_tick
        Called while the workers are at work.

    Returns
    -------
    list of str
        Why workers had to stop, where they had to.

    Raises
    ------
    SweepError
        If the engine's library is missing or refuses the settings.
    """
    store.prepare(job.out)
    started = {"local": _local, "submitit": _submitit, "dask": _dask}[engine]
    remarks = []
    for remark in started(job, workers, dict(settings or {})):
        if remark:
            remarks.append(remark)
        on_tick()
    store.settle_all(job.out)
    return list(dict.fromkeys(remarks))


def _local(job: Job, workers: int, settings: dict[str, Any]) -> Iterator[str]:
    """Run workers in processes of their own; a lost one is replaced."""
    if settings:
        raise SweepError(f"Engine local has no setting {next(iter(settings))!r}.")

    def begin() -> tuple[concurrent.futures.Future[str], ProcessPoolExecutor]:
        # One pool each: loky ends all processes of a pool that loses one.
        pool = ProcessPoolExecutor(max_workers=1, env=_environment(job))
        return pool.submit(work, job), pool

    at_work = dict(begin() for _ in range(workers))
    try:
        while at_work:
            ended, _ = concurrent.futures.wait(
                at_work, timeout=POLL, return_when=concurrent.futures.FIRST_COMPLETED
            )
            for future in ended:
                at_work.pop(future).shutdown()
                if not isinstance(future.exception(), concurrent.futures.BrokenExecutor):
                    yield future.result()
                elif store.settle_all(job.out):
                    at_work |= [begin()]
                else:
                    yield f"A worker was lost before it began a task ({future.exception()})."
            yield ""
    finally:
        for pool in at_work.values():
            pool.shutdown(wait=False, kill_workers=True)


def _environment(job: Job) -> dict[str, str]:
    """Limit threads before a library is imported."""
    return {"OMP_NUM_THREADS": str(job.threads or joblib.cpu_count())}


class _Requeued:
    """A worker that a scheduler may stop and start again, as submitit does at a time limit."""

    def __call__(self, job: Job) -> str:
        """Work."""
        return work(job)

    def checkpoint(self, job: Job) -> Any:
        """Return what to submit anew; finished tasks are not done again."""
        from submitit.helpers import DelayedSubmission  # noqa: PLC0415 - an extra

        return DelayedSubmission(self, job)


def _submitit(job: Job, workers: int, settings: dict[str, Any]) -> Iterator[str]:
    """Submit workers as jobs to Slurm, or to this machine where there is none."""
    try:
        import submitit  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise SweepError(
            "Engine submitit needs submitit: install it with pip install 'qscale[slurm]'."
        ) from error
    try:
        executor = submitit.AutoExecutor(
            folder=job.out / "submitit", cluster=settings.pop("cluster", None)
        )
        executor.update_parameters(**{"name": "qscale", "timeout_min": DAY} | settings)
        with executor.batch():
            jobs = [executor.submit(_Requeued(), job) for _ in range(workers)]
    except (NameError, TypeError, ValueError, AssertionError, RuntimeError) as error:
        raise SweepError(f"submitit: {error}") from error
    yield from _wait(jobs)


def _dask(job: Job, workers: int, settings: dict[str, Any]) -> Iterator[str]:
    """Run workers on a Dask cluster."""
    try:
        from distributed import Client, LocalCluster  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise SweepError(
            "Engine dask needs distributed: install it with pip install 'qscale[dask]'."
        ) from error
    address = settings.pop("address", None)
    if settings:
        raise SweepError(f"Engine dask has no setting {next(iter(settings))!r}. It has: address.")
    try:
        cluster = address or LocalCluster(
            n_workers=workers, threads_per_worker=1, dashboard_address=None
        )
        with Client(cluster) as client:
            yield from _wait([client.submit(work, job, pure=False) for _ in range(workers)])
    except OSError as error:
        raise SweepError(f"dask: no scheduler at {address} ({error}).") from error
    finally:
        if not address:
            cluster.close()


def _wait(futures: list[Any]) -> Iterator[str]:
    """Yield what workers return as they end."""
    while futures:
        ended = [future for future in futures if future.done()]
        for future in ended:
            error = future.exception()
            yield f"A worker was lost ({_line(error)})." if error else future.result()
        futures = [future for future in futures if future not in ended]
        if futures:
            time.sleep(POLL)
        yield ""


def _line(error: BaseException) -> str:
    """Return the last line of what went wrong."""
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__
