"""Fit a law to a measurement table: select rows, search from many starts, resample clusters."""

from __future__ import annotations

import hashlib
import itertools
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from qscale.errors import FitError
from qscale.fit.inference import bootstrap, scatter
from qscale.fit.result import Data, Fit, Search
from qscale.fit.rows import Selection, check_levels, select
from qscale.fit.solver import Problem, Solution, solve
from qscale.laws import Law, columns_of
from qscale.laws.factors import offset as offset_factor
from qscale.table import require

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Array = np.ndarray

NOT_IDENTIFIED = 1e8
HUBER_EFFICIENT = 1.345  # times sigma: 95 % efficient for Gaussian errors (Huber 1981, section 4.5)
_MOSTLY_ABSOLUTE = 1e-3


def fit(
    frame: pd.DataFrame,
    law: Law,
    *,
    where: str | None = None,
    offset: Sequence[str] = (),
    fixed: Mapping[str, float] | None = None,
    cluster: str = "run",
    huber_delta: float | None = None,
    n_boot: int = 1000,
    seed: int = 0,
    name: str = "table",
    mapping: Mapping[str, str] | None = None,
) -> Fit:
    """Fit a law by robust regression of the log target, with cluster-bootstrap uncertainty.

    Parameters
    ----------
    frame
        A measurement table, see `qscale.table`.
    law
        The law; its target must be positive in the rows used.
    where
        A pandas query that rows must satisfy.
    offset
        Text columns, such as ``source``, each level of which gets a multiplier of its own.
    fixed
        Natural-scale values of parameters that are held rather than estimated.
    cluster
        Column whose values mark rows with shared noise.
    huber_delta
        Log residual at which the loss turns from quadratic to linear. None takes 1.345 times the
        normalised median absolute residual of a nearly absolute-loss fit.
    n_boot
        Bootstrap refits; 0 gives no intervals.
    seed
        Of the bootstrap.
    name
        Name of the table for messages and the record.
    mapping
        How the table's columns were renamed when it was read, for the record.

    Returns
    -------
    Fit
        Check ``search.status`` before using it.

    Raises
    ------
    FitError
        If too few rows or levels are left, or a fixed parameter is unknown.
    TableError
        If a column is missing.
    """
    fixed = dict(fixed or {})
    selection, law = _prepare(frame, law, where, offset, cluster, name)
    _check_fixed(law, fixed)
    check_levels(law, selection.frame, set(fixed), name)
    problem = _problem(law, selection.frame, fixed, huber_delta or _MOSTLY_ABSOLUTE)
    weights = np.ones(len(selection.frame))
    solution = solve(problem, _starts(law, problem), weights)
    if huber_delta is None:
        best = solution.theta[np.argmin(solution.objective)]
        delta = HUBER_EFFICIENT * _robust_scale(problem, best)
        problem = _problem(law, selection.frame, fixed, delta)
        solution = solve(problem, solution.theta, weights)
    theta = solution.theta[np.argmin(solution.objective)]
    rng = np.random.default_rng(seed)
    draws = (
        bootstrap(problem, theta, selection.clusters, n_boot, rng) if n_boot else theta[None][:0]
    )
    residuals = problem.observed - problem.value(theta[None])[0]
    free = int((problem.low < problem.high).sum())
    options = {
        "mapping": dict(mapping or {}),
        "where": where,
        "offset": list(offset),
        "fixed": fixed,
        "huber_delta": huber_delta,
        "n_boot": n_boot,
        "seed": seed,
    }
    return Fit(
        law=law,
        theta=theta,
        draws=draws,
        scatter=scatter(residuals, selection.clusters, free),
        search=_search(law, problem, solution, n_boot, len(draws)),
        data=_data(selection, law, name, cluster, options),
        versions={package: version(package) for package in ("qscale", "numpy", "pandas")},
    )


def _prepare(
    frame: pd.DataFrame,
    law: Law,
    where: str | None,
    offset: Sequence[str],
    cluster: str,
    name: str,
) -> tuple[Selection, Law]:
    """Select usable rows and add one offset factor per column with more than one level."""
    require(frame, offset, name)
    if offset:
        frame = frame.assign(**{column: frame[column].fillna("unknown") for column in offset})
    selection = select(frame, law, where=where, cluster=cluster, name=name)
    extra = []
    for column in offset:
        levels = selection.frame[column].value_counts().sort_index().sort_values(kind="stable")
        if len(levels) > 1:
            # The most frequent level last: it is the one that the others are coded against.
            extra.append(offset_factor(column, tuple(map(str, levels.index))))
    return selection, law.with_factors(*extra)


def _check_fixed(law: Law, fixed: Mapping[str, float]) -> None:
    """Raise if a fixed parameter is not one of the law's or is out of its bounds."""
    by_name = {p.name: p for p in law.parameters}
    for parameter, value in fixed.items():
        if parameter not in by_name:
            raise FitError(
                f"--fix {parameter}: law {law.name!r} has no such parameter. "
                f"Its parameters are: {', '.join(by_name)}."
            )
        low, high = by_name[parameter].low, by_name[parameter].high
        if not low <= value <= high:
            raise FitError(
                f"--fix {parameter}: must be between {low:g} and {high:g}. Got {value:g}."
            )


def _problem(law: Law, frame: pd.DataFrame, fixed: Mapping[str, float], delta: float) -> Problem:
    """State the regression on the log scale."""
    data = columns_of(law, frame)
    held = {p.name: (p.internal(fixed[p.name]),) * 2 for p in law.parameters if p.name in fixed}
    low, high = np.array([held.get(p.name, p.bounds) for p in law.parameters]).T
    return Problem(
        value=lambda theta: law.location(theta, data),
        gradient=lambda theta: law.gradient(theta, data),
        observed=np.log(frame[law.target].to_numpy()),
        low=low,
        high=high,
        huber_delta=delta,
    )


def _starts(law: Law, problem: Problem) -> Array:
    """Every combination of the parameters' starting values, shape (S, p)."""
    values = [[p.internal(start) for start in p.starts] for p in law.parameters]
    return np.clip(np.array(list(itertools.product(*values))), problem.low, problem.high)


def _robust_scale(problem: Problem, theta: Array) -> float:
    """Normalised median absolute residual; positive even for data that fit exactly."""
    residuals = problem.observed - problem.value(theta[None])[0]
    return max(float(np.median(np.abs(residuals))) / 0.6745, 1e-6)


def _search(
    law: Law, problem: Problem, solution: Solution, n_boot: int, boots_converged: int
) -> Search:
    """Judge where the starts ended."""
    best = int(np.argmin(solution.objective))
    objective = float(solution.objective[best])
    agreeing = int((solution.objective <= objective * (1 + 1e-6) + 1e-15).sum())
    free = problem.low < problem.high
    condition, weakest = _conditioning(solution.information[best][np.ix_(free, free)])
    names = np.array(law.names)
    theta = solution.theta[best]
    at_bound = names[free & ((theta <= problem.low) | (theta >= problem.high))]
    if not solution.converged[best]:
        status, detail = "failed", f"the best of {len(solution.theta)} starts did not converge"
    elif condition > NOT_IDENTIFIED:
        status = "not_identified"
        detail = f"{' and '.join(names[free][weakest])} cannot be told apart on these rows"
    elif len(at_bound):
        status, detail = "bound_hit", f"{', '.join(at_bound)} ended on a bound"
    else:
        status, detail = "converged", f"{agreeing} of {len(solution.theta)} starts agree"
    return Search(
        status=status,
        detail=detail,
        starts=len(solution.theta),
        agreeing=agreeing,
        objective=objective,
        huber_delta=problem.huber_delta,
        condition_number=condition,
        boots=n_boot,
        boots_converged=boots_converged,
    )


def _conditioning(information: Array) -> tuple[float, Array]:
    """Condition number of the unit-diagonal information and the parameters of its weakest mode."""
    diagonal = np.sqrt(np.maximum(np.diag(information), 1e-300))
    values, vectors = np.linalg.eigh(information / np.outer(diagonal, diagonal))
    condition = float(values[-1] / max(values[0], 1e-18 * values[-1]))
    return condition, np.flatnonzero(np.abs(vectors[:, 0]) > 0.3)


def _data(selection: Selection, law: Law, name: str, cluster: str, options: dict[str, Any]) -> Data:
    """Record what was fitted on."""
    frame = selection.frame
    used = frame[list(dict.fromkeys((*law.columns, law.target)))]
    numeric = [c for c in frame.columns if c in _RANGED and frame[c].notna().any()]
    texts = [c for c in frame.columns if c in _LEVELLED and frame[c].notna().any()]
    return Data(
        name=name,
        sha256=_hash(used),
        rows=len(frame),
        clusters=int(selection.clusters.max()) + 1,
        cluster=cluster,
        set_aside=selection.set_aside,
        ranges={c: (float(frame[c].min()), float(frame[c].max())) for c in numeric},
        levels={c: tuple(sorted(map(str, frame[c].dropna().unique()))) for c in texts},
        options=options,
    )


def _hash(frame: pd.DataFrame) -> str:
    """Hash the values of a frame, row order included."""
    rows = pd.util.hash_pandas_object(frame, index=False).to_numpy()
    return hashlib.sha256(rows.tobytes()).hexdigest()


_RANGED = ("n_params", "tokens", "bits", "group_size", "bits_per_weight", "lr_peak", "lr")
_LEVELLED = ("method", "method_kind", "fmt", "family", "source", "protocol", "lr_schedule")
