"""Which rows of a table a law can be fitted to, and why the others are set aside."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from qscale.columns import COLUMNS
from qscale.errors import FitError, TableError
from qscale.laws import columns_of
from qscale.table import require, require_numbers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from qscale.laws import Law


@dataclass(frozen=True, slots=True)
class SetAside:
    """Rows that took no part in a fit, and the reason in words."""

    reason: str
    rows: int


@dataclass(frozen=True, slots=True)
class Selection:
    """The rows a law is fitted to.

    Parameters
    ----------
    frame
        Usable rows, index reset.
    clusters
        Integer cluster of each row, shape (n,); rows of one cluster share their noise.
    set_aside
        Why the other rows were left out, in the order of the checks.
    observed
        Target on the law's scale, or the bound where it is only known to lie beyond one, shape
        (n,).
    censored
        -1 where the target is at or under its noise floor, +1 where the row collapsed, else 0.
    noise
        Standard error of the target in its own unit, 0 where not known, shape (n,).
    """

    frame: pd.DataFrame
    clusters: np.ndarray
    set_aside: tuple[SetAside, ...]
    observed: np.ndarray
    censored: np.ndarray
    noise: np.ndarray


_UNKNOWN = {"group_size": "group_size is one scale per row or not known"}


STANDARD_ERRORS = {"delta_loss": "delta_loss_se", "kl": "kl_se"}
_COLLAPSED = ("collapsed", "nonfinite")


def select(
    frame: pd.DataFrame,
    law: Law,
    *,
    where: str | None,
    cluster: str,
    name: str = "table",
    needed: Sequence[str] = (),
    floor: float | None = None,
    ceiling: float | None = None,
) -> Selection:
    """Keep the rows with status ok, all columns of the law and a usable target.

    Parameters
    ----------
    frame
        A measurement table.
    law
        The law to be fitted; its columns and target must be present.
    where
        A pandas query such as ``"method == 'gptq' and bits >= 3"``.
    cluster
        Column whose values mark rows with shared noise; rows without a value stand alone.
    name
        Name of the table for messages.
    needed
        Further columns that must have a value.
    floor
        Multiple of the target's standard error at or under which a row is only known to be below
        that value. None, or a table without standard errors, sets targets that are not above zero
        aside.
    ceiling
        Value of the target above which, or if it collapsed, a row is only known to be above it.
        None keeps high targets as they are and sets collapsed rows aside.

    Raises
    ------
    TableError
        If a column is missing or empty, or the query cannot be evaluated.
    FitError
        If no usable row is left.
    """
    require(frame, (*law.columns, law.target), name)
    require_numbers(frame, [law.target], name)
    if law.target in law.columns:
        raise FitError(f"{name}: law {law.name!r} reads {law.target!r}, which it is to predict.")
    if cluster not in frame.columns:
        raise TableError(
            f"{name}: no column {cluster!r} to cluster by; give another as cluster, or "
            f"rename one to it (--map {cluster}=THEIR_NAME). Where each row is a run of its own, "
            "add a column that numbers the rows. Columns are: "
            f"{', '.join(map(str, frame.columns))}."
        )
    reasons: list[SetAside] = []

    def keep(rows: pd.DataFrame, mask: np.ndarray, reason: str) -> pd.DataFrame:
        dropped = int((~mask).sum())
        if dropped:
            reasons.append(SetAside(reason, dropped))
        return rows[mask]

    if where:
        frame = keep(frame, matches(frame, where, name), f"not {where}")
    if "status" in frame.columns:
        for status in sorted(set(frame["status"].dropna()) - {"ok"}):
            if not (ceiling is not None and status in _COLLAPSED):
                frame = keep(frame, (frame["status"] != status).to_numpy(), f"status is {status}")
    for column in dict.fromkeys((*law.columns, *needed)):
        frame = keep(
            frame, frame[column].notna().to_numpy(), _UNKNOWN.get(column, f"{column} is not known")
        )
    observed, censored, noise = _observed(frame, law, floor, ceiling)
    known = frame[law.target].notna().to_numpy() | (censored != 0)
    frame = frame.assign(_observed=observed, _censored=censored, _noise=noise)
    frame = keep(frame, known, f"{law.target} is not known")
    usable = np.isfinite(frame["_observed"].to_numpy())
    frame = keep(frame, usable, f"{law.target} is not above zero and has no logarithm")
    frame = keep(frame, _in_domain(frame, law, name), "a column is outside the law's domain")
    frame = keep(frame, _has_value(frame, law), f"law {law.name!r} gives no number at any start")
    if frame.empty:
        raise FitError(f"{name}: no row is left to fit {law.name!r} to. {explain(reasons)}")
    frame = frame.reset_index(drop=True)
    extra = ["_observed", "_censored", "_noise"]
    arrays = [frame[column].to_numpy() for column in extra]
    return Selection(
        frame.drop(columns=extra), _cluster_codes(frame[cluster]), tuple(reasons), *arrays
    )


def _observed(
    frame: pd.DataFrame, law: Law, floor: float | None, ceiling: float | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Target or bound on the law's scale, which of them it is, and the target's standard error."""
    target = frame[law.target].to_numpy(dtype=float)
    noise, censored = np.zeros(len(frame)), np.zeros(len(frame), dtype=int)
    errors = STANDARD_ERRORS.get(law.target, "")
    if floor is not None and law.link == "log" and errors in frame.columns:
        noise = frame[errors].fillna(0.0).to_numpy(dtype=float)
        under = (noise > 0) & (target <= floor * noise)
        censored[under] = -1
        target = np.where(under, floor * noise, target)
    if ceiling is not None:
        over = target > ceiling
        if "status" in frame.columns:
            over |= frame["status"].isin(_COLLAPSED).to_numpy()
        censored[over] = 1
        target = np.where(over, ceiling, target)
    return law.linked(target), censored, noise


def explain(set_aside: list[SetAside] | tuple[SetAside, ...]) -> str:
    """Say in one sentence which rows were set aside and why."""
    if not set_aside:
        return "No row was set aside."
    return f"Set aside: {'; '.join(f'{s.rows} rows because {s.reason}' for s in set_aside)}."


def copies(frame: pd.DataFrame, law: Law, cluster: str) -> tuple[str, ...]:
    """Say in a sentence how many rows repeat another row of their cluster; nothing if none does.

    Two settings that a law cannot tell apart may cost the same: all known columns count.
    """
    known = [column for column in frame.columns if column in COLUMNS]
    compared = [*dict.fromkeys((*law.columns, law.target, cluster, *known))]
    found = int(frame.loc[frame[cluster].notna(), compared].duplicated().sum())
    subject = "1 row repeats" if found == 1 else f"{found} rows repeat"
    text = (
        f"{subject} another row of the same {cluster} exactly, target included: drop copies, which "
        "would count as measured again."
    )
    return (text,) if found else ()


def matches(frame: pd.DataFrame, where: str, name: str) -> np.ndarray:
    """Evaluate a query to a boolean mask, shape (n,).

    Raises
    ------
    TableError
        If it cannot be evaluated or is not true or false for each row.
    """
    try:
        mask = frame.eval(where, engine="python")
    except Exception as error:  # pandas raises many types for a query that cannot be evaluated
        raise TableError(f"{name}: where {where!r} cannot be evaluated ({error}).") from error
    if isinstance(mask, pd.DataFrame):
        raise TableError(f"{name}: where {where!r} assigns; write == to compare.")
    mask = np.asarray(pd.Series(mask, index=frame.index).fillna(False))
    if mask.dtype != bool:
        raise TableError(f"{name}: where {where!r} must be true or false for each row.")
    return mask


def _in_domain(frame: pd.DataFrame, law: Law, name: str) -> np.ndarray:
    """Rows at which every factor has a finite gradient, as with the log of a positive number."""
    if frame.empty:
        return np.ones(0, dtype=bool)
    start = np.array([[p.internal(p.starts[0]) for p in law.parameters]])
    try:
        with np.errstate(divide="ignore", invalid="ignore"):
            gradient = law.gradient(start, columns_of(law, frame))[0]
    except TypeError as error:
        texts = [c for c in law.columns if not pd.api.types.is_numeric_dtype(frame[c])]
        raise TableError(
            f"{name}: law {law.name!r} needs numbers, but column "
            f"{' or '.join(map(repr, texts))} holds text."
        ) from error
    return np.broadcast_to(np.isfinite(gradient).all(axis=1), len(frame))


def _has_value(frame: pd.DataFrame, law: Law) -> np.ndarray:
    """Rows at which the law has a finite value from at least one of its starts."""
    found = np.zeros(len(frame), dtype=bool)
    # A linear law is finite wherever its gradient is.
    starts = [] if law.linear else itertools.product(*(p.starts for p in law.parameters))
    data = columns_of(law, frame)
    for start in starts:
        theta = [[p.internal(x) for p, x in zip(law.parameters, start, strict=True)]]
        with np.errstate(all="ignore"):
            found |= np.isfinite(law.location(np.array(theta), data)[0])
        if found.all():
            break
    return found | law.linear


def _cluster_codes(values: pd.Series) -> np.ndarray:
    """Return cluster numbers from zero; a row without a value gets a number of its own."""
    codes, levels = pd.factorize(values)
    missing = codes < 0
    codes[missing] = len(levels) + np.arange(missing.sum())
    return codes


def check_levels(law: Law, frame: pd.DataFrame, fixed: set[str], name: str) -> None:
    """Raise if a column has too few distinct values to tell a factor's parameters.

    Raises
    ------
    FitError
        Naming the column, its values and what to do.
    """
    for factor in law.factors:
        free = [p.name for p in factor.parameters if p.name not in fixed]
        for column, needed in factor.levels_needed.items():
            found = np.unique(frame[column])
            if free and len(found) < needed:
                values = ", ".join(f"{value:g}" for value in found)
                raise FitError(
                    f"{name}: column {column!r} has {len(found)} distinct value ({values}) in the "
                    f"{len(frame)} usable rows, but {', '.join(free)} of law {law.name!r} needs at "
                    f"least {needed}. Add rows, or hold it with --fix {free[0]}=VALUE, in Python "
                    f"fixed={{{free[0]!r}: VALUE}}."
                )
    free_total = len([n for n in law.names if n not in fixed])
    if len(frame) <= free_total:
        raise FitError(
            f"{name}: {len(frame)} usable rows cannot determine the {free_total} parameters of law "
            f"{law.name!r}; at least {free_total + 1} are needed."
        )


def check_measured(law: Law, selection: Selection, fixed: set[str], name: str) -> None:
    """Raise if too few rows are more than a bound for the parameters to be estimated.

    Raises
    ------
    FitError
        Counting the rows under the noise floor and over the ceiling.
    """
    measured = int((selection.censored == 0).sum())
    free = len([n for n in law.names if n not in fixed])
    if measured <= free:
        below, above = int((selection.censored < 0).sum()), int((selection.censored > 0).sum())
        raise FitError(
            f"{name}: {measured} of {len(selection.frame)} usable rows are measured ({below} lie "
            f"under their noise floor, {above} over the ceiling), too few for the {free} "
            f"parameters of law {law.name!r}. Measure on more tokens, lower the floor or raise "
            "the ceiling."
        )
