"""Search for a law's minimum from its starts, and judge where the search ended."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from qscale.fit.likelihood import HUBER_EFFICIENT
from qscale.fit.record import Search
from qscale.fit.solver import Problem, Solution, solve
from qscale.laws import Law, columns_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from qscale.fit.likelihood import Family
    from qscale.fit.rows import Selection

    Array = np.ndarray

NOT_IDENTIFIED = 1e8
_WORST = 1e18  # condition number beyond what rounding shows
_MOSTLY_ABSOLUTE = 1e-3


def from_starts(
    law: Law,
    selection: Selection,
    fixed: Mapping[str, float],
    huber_delta: float | None,
    likelihood: Family,
) -> tuple[Problem, Solution]:
    """Robust pooled fit from every start; censored rows count as being at their bound."""
    weights = np.ones(len(selection.frame))
    first = huber_delta or (_MOSTLY_ABSOLUTE if law.link == "log" else np.inf)
    problem = problem_of(law, selection, fixed, first)
    solution = solve(problem, starts_of(law, problem), weights)
    if huber_delta is None and law.link == "log":
        best = solution.theta[np.argmin(solution.objective)]
        wide = np.inf if likelihood == "gaussian" else HUBER_EFFICIENT
        problem = problem_of(law, selection, fixed, wide * robust_scale(law, problem, best))
        solution = solve(problem, solution.theta, weights)
    return problem, solution


def problem_of(law: Law, selection: Selection, fixed: Mapping[str, float], delta: float) -> Problem:
    """State the regression on the law's scale."""
    data = columns_of(law, selection.frame)
    held = {p.name: (p.internal(fixed[p.name]),) * 2 for p in law.parameters if p.name in fixed}
    low, high = np.array([held.get(p.name, p.bounds) for p in law.parameters]).T
    x = None
    if law.linear:
        shape = (len(selection.frame), len(low))
        x = np.array(np.broadcast_to(law.gradient(low[None], data)[0], shape))
    return Problem(
        value=lambda theta: law.location(theta, data),
        gradient=lambda theta: law.gradient(theta, data),
        observed=selection.observed,
        low=low,
        high=high,
        huber_delta=delta,
        design=x,
    )


def starts_of(law: Law, problem: Problem) -> Array:
    """Every combination of the parameters' starting values, shape (S, p).

    A linear law's objective is convex: one start finds its minimum.
    """
    values = [[p.internal(start) for start in p.starts] for p in law.parameters]
    if law.linear:
        values = [starts[:1] for starts in values]
    return np.clip(np.array(list(itertools.product(*values))), problem.low, problem.high)


def robust_scale(law: Law, problem: Problem, theta: Array) -> float:
    """Normalised median absolute residual; positive even for data that fit exactly."""
    residuals = problem.observed - problem.value(theta[None])[0]
    exact = 1e-6 if law.link == "log" else 1e-14 * float(np.abs(problem.observed).max())
    return max(float(np.median(np.abs(residuals))) / 0.6745, exact, 1e-300)


def judge(
    law: Law, problem: Problem, solution: Solution, theta: Array, notes: tuple[str, ...]
) -> Search:
    """Judge where the starts ended, and the parameters ``theta`` that the fit went on to."""
    best = int(np.argmin(solution.objective))
    objective = float(solution.objective[best])
    agreeing = int((solution.objective <= objective * (1 + 1e-6) + 1e-15).sum())
    free = problem.low < problem.high
    condition, weakest = _conditioning(solution.information(best)[np.ix_(free, free)])
    names = np.array(law.names)
    undetermined: tuple[str, ...] = ()
    at_bound = names[free & ((theta <= problem.low) | (theta >= problem.high))]
    if not solution.converged[best]:
        status, detail = "failed", f"the best of {len(solution.theta)} starts did not converge"
    elif condition > NOT_IDENTIFIED:
        status, undetermined = "not_identified", tuple(map(str, names[free][weakest]))
        apart = "cannot be told apart" if len(undetermined) > 1 else "changes no prediction"
        detail = f"{' and '.join(undetermined)} {apart} on these rows"
    elif len(at_bound):
        status, detail = "bound_hit", f"{', '.join(at_bound)} ended on a bound"
    else:
        status = "converged"
        detail = (
            "a convex problem, which has one minimum"
            if law.linear
            else f"{agreeing} of {len(solution.theta)} starts agree"
        )
    return Search(
        status=status,
        detail=detail,
        starts=len(solution.theta),
        agreeing=agreeing,
        objective=objective,
        huber_delta=problem.huber_delta,
        condition_number=condition,
        boots=0,
        boots_converged=0,
        notes=notes,
        undetermined=undetermined,
    )


def _conditioning(information: Array) -> tuple[float, Array]:
    """Condition number of the unit-diagonal information and the parameters of its weakest mode.

    Parameters that change nothing, whose information is zero, are such a mode together.
    """
    nothing = np.flatnonzero(np.diag(information) <= 1e-300)
    if len(nothing):
        return _WORST, nothing
    diagonal = np.sqrt(np.diag(information))
    values, vectors = np.linalg.eigh(information / np.outer(diagonal, diagonal))
    condition = float(values[-1] / max(values[0], values[-1] / _WORST))
    return condition, np.flatnonzero(np.abs(vectors[:, 0]) > 0.3)
