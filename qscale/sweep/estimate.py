"""What is left of a sweep will take: time and memory from finished tasks, or as the plan says."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from qscale.sweep.plan import Task


@dataclass(frozen=True, slots=True)
class Cost:
    """Expected cost of tasks.

    Parameters
    ----------
    seconds
        Of all of them one after the other; None if nothing is known.
    gigabytes
        Peak memory of the worker of the largest; None if nothing is known.
    unknown
        Tasks that nothing is known of, which ``seconds`` leaves out.
    """

    seconds: float | None
    gigabytes: float | None
    unknown: int


def expected(
    tasks: Iterable[Task], left: Iterable[Task], records: Mapping[str, Mapping[str, Any]]
) -> Cost:
    """Estimate the cost of tasks from those of their arm that are done, or else from the plan.

    Parameters
    ----------
    tasks
        All tasks of the plan.
    left
        Those to estimate.
    records
        Records of the finished ones by hash.
    """
    spent: dict[str, list[float]] = {}
    for task in tasks:
        if task.hash in records:
            spent.setdefault(task.arm, []).append(float(records[task.hash]["seconds"]))
    left = list(left)
    each = [fmean(spent[t.arm]) if t.arm in spent else t.seconds for t in left]
    known = [seconds for seconds in each if seconds is not None]
    peaks = [float(record["peak_bytes"]) / 1e9 for record in records.values()]
    memory = peaks or [task.gigabytes for task in left if task.gigabytes is not None]
    return Cost(
        seconds=sum(known) if known or not left else None,
        gigabytes=max(memory, default=None),
        unknown=len(each) - len(known),
    )


def duration(seconds: float) -> str:
    """Say how long something takes, in two units at most.

    Examples
    --------
    >>> duration(0.4), duration(75), duration(7300), duration(200000)
    ('0.4 s', '1 min 15 s', '2 h 2 min', '2 d 8 h')
    """
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    for unit, size, smaller, part in (("d", 86400, "h", 3600), ("h", 3600, "min", 60)):
        if seconds >= size:
            parts = round(seconds / part)
            return f"{parts * part // size} {unit} {parts * part % size // part} {smaller}"
    whole = round(seconds)
    return f"{whole // 60} min {whole % 60} s" if whole >= 60 else f"{whole} s"
