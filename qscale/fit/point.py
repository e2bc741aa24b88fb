"""A law's estimates before their uncertainty: rows, search from many starts, random effects."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from qscale.fit import mixed
from qscale.fit.grouping import design, estimable, parse, with_levels
from qscale.fit.likelihood import Rows
from qscale.fit.options import (
    check_ceiling,
    check_delta,
    check_fixed,
    check_offsets,
    check_options,
    check_random,
)
from qscale.fit.rows import Selection, check_levels, check_measured, select
from qscale.fit.search import from_starts, robust_scale
from qscale.laws.factors import offset as offset_factor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pandas as pd

    from qscale.fit.grouping import Term
    from qscale.fit.likelihood import Family
    from qscale.fit.solver import Problem, Solution
    from qscale.laws import Law


@dataclass(frozen=True, slots=True, eq=False)
class Estimated:
    """A law's estimates before their uncertainty, with all that led to them."""

    selection: Selection
    law: Law
    problem: Problem
    solution: Solution
    terms: tuple[Term, ...]
    notes: tuple[str, ...]
    model: mixed.Model
    fitted: mixed.Components


def estimated(
    frame: pd.DataFrame, law: Law, options: Mapping[str, Any], cluster: str, name: str
) -> Estimated:
    """Select rows, search from every start and estimate all together; arguments as of `fit`."""
    fixed, random, huber_delta = options["fixed"], options["random"], options["huber_delta"]
    check_options(options)
    check_ceiling(options["ceiling"], law)
    selection, law, single = _prepare(frame, law, options["offset"], cluster, name, options)
    check_fixed(law, fixed)
    check_levels(law, selection.frame, set(fixed), name)
    check_measured(law, selection, set(fixed), name)
    check_random(selection.frame, random, law.target, name)
    problem, solution = from_starts(law, selection, fixed, huber_delta, options["likelihood"])
    terms, notes = _terms((cluster,) if random is None else random, selection.frame)
    notes = (*single, *notes)
    model = _model(selection, problem, terms, options["likelihood"], huber_delta)
    pooled = solution.theta[np.argmin(solution.objective)]
    scale = robust_scale(law, problem, pooled)
    check_delta(huber_delta, scale)
    fitted = mixed.estimate(model, pooled, scale)
    absolute = options["likelihood"] == "huber" and huber_delta
    if absolute and not terms and not selection.censored.any():
        # The scale does not move the minimum of a Huber loss with a given delta.
        fitted = replace(fitted, theta=pooled)
    return Estimated(selection, law, problem, solution, terms, notes, model, fitted)


def _terms(texts: Sequence[str], frame: pd.DataFrame) -> tuple[tuple[Term, ...], tuple[str, ...]]:
    """Random terms that these rows can estimate, and why the others are left out."""
    terms, notes = [], []
    for term in map(parse, texts):
        why_not = estimable(term, frame)
        if why_not:
            notes.append(f"No random effect of {term.text}: {why_not}.")
        else:
            terms.append(with_levels(term, frame))
    return tuple(terms), tuple(notes)


def _model(
    selection: Selection,
    problem: Problem,
    terms: tuple[Term, ...],
    likelihood: Family,
    huber_delta: float | None,
) -> mixed.Model:
    """State the mixed model."""
    x = problem.design
    if x is not None:
        value, gradient = (lambda theta: x @ theta), (lambda _: x)
    else:
        value = lambda theta: problem.value(theta[None])[0]  # noqa: E731
        gradient = lambda theta: problem.gradient(theta[None])[0]  # noqa: E731
    return mixed.Model(
        value=value,
        gradient=gradient,
        low=problem.low,
        high=problem.high,
        effects=design(terms, selection.frame),
        sizes=tuple(len(term.levels) for term in terms),
        rows=Rows(selection.observed, selection.censored, selection.noise, likelihood, huber_delta),
    )


def _prepare(
    frame: pd.DataFrame,
    law: Law,
    offset: Sequence[str],
    cluster: str,
    name: str,
    options: Mapping[str, Any],
) -> tuple[Selection, Law, tuple[str, ...]]:
    """Select usable rows, add one offset factor per column of several levels, note the others."""
    check_offsets(frame, offset, name)
    if offset:
        frame = frame.assign(**{column: frame[column].fillna("unknown") for column in offset})
    selection = select(
        frame,
        law,
        where=options["where"],
        cluster=cluster,
        name=name,
        floor=options["floor"],
        ceiling=options["ceiling"],
    )
    extra, single = [], []
    for column in offset:
        levels = selection.frame[column].value_counts().sort_index().sort_values(kind="stable")
        if len(levels) > 1:
            # The most frequent level last: it is the one that the others are coded against.
            extra.append(offset_factor(column, tuple(map(str, levels.index))))
        else:
            single.append(f"No offset of {column}: it is {levels.index[0]} in every row.")
    return selection, law.with_factors(*extra), tuple(single)
