"""Fit a law to a measurement table: rows, search from many starts, random effects, intervals."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np
from pandas.api.types import is_numeric_dtype

from qscale.errors import FitError
from qscale.fit import mixed
from qscale.fit.calibration import calibrate, check_clusters
from qscale.fit.effects import Effects
from qscale.fit.grouping import design, estimable, parse, with_levels
from qscale.fit.identify import trade_offs
from qscale.fit.intervals import bootstrap, one_step_bootstrap, pieces, profile, sandwich
from qscale.fit.likelihood import Rows
from qscale.fit.options import (
    check_ceiling,
    check_delta,
    check_fixed,
    check_offsets,
    check_options,
    check_random,
)
from qscale.fit.record import Data, hash_of
from qscale.fit.result import Fit
from qscale.fit.rows import Selection, check_levels, check_measured, copies, select
from qscale.fit.search import from_starts, judge, robust_scale
from qscale.laws.factors import offset as offset_factor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pandas as pd

    from qscale.fit.grouping import Term
    from qscale.fit.likelihood import Family
    from qscale.fit.record import Interval
    from qscale.fit.solver import Problem, Solution
    from qscale.laws import Law

    Array = np.ndarray

_FOLDS = 20
_MANY_CLUSTERS = 20_000


def fit(
    frame: pd.DataFrame,
    law: Law,
    *,
    where: str | None = None,
    offset: Sequence[str] = (),
    random: Sequence[str] | None = None,
    fixed: Mapping[str, float] | None = None,
    cluster: str = "run",
    likelihood: Family = "huber",
    huber_delta: float | None = None,
    floor: float | None = 2.0,
    ceiling: float | None = None,
    interval: Interval | None = None,
    n_boot: int = 1000,
    seed: int = 0,
    name: str = "table",
    mapping: Mapping[str, str] | None = None,
) -> Fit:
    """Fit a law to a measurement table, with random effects and honest uncertainty.

    On the law's scale, an observation is the law plus one random deviation for each level of each
    random term plus the row's own residual. Exponents come from a search over many starts, then
    everything is estimated together by restricted maximum likelihood (`qscale.fit.mixed`).

    Parameters
    ----------
    frame
        A measurement table, see `qscale.table`.
    law
        The law; with the log link its target must be positive, or under a known noise floor.
    where
        A pandas query that rows must satisfy.
    offset
        Text columns, such as ``source``, each level of which gets a multiplier of its own.
    random
        Random terms (`qscale.fit.grouping`), such as ``("family", "run", "run:bits")``. None takes
        the cluster column. Terms whose variance these rows cannot tell are left out with a note.
    fixed
        Natural-scale values of parameters that are held rather than estimated.
    cluster
        Column whose values mark rows with shared noise, for sandwich, bootstrap and conformal.
    likelihood
        Distribution of residuals: ``gaussian``, ``student_t`` (4 degrees of freedom) or ``huber``.
        Rows with a known standard error are Gaussian around the law whichever is chosen.
    huber_delta
        Log residual at which the Huber loss turns from quadratic to linear. None takes 1.345
        residual standard deviations.
    floor
        Where the target's standard error is in the table, rows at or under this multiple of it
        count as below it (left-censored) and all others as measured with that error. None ignores
        standard errors.
    ceiling
        Target above which rows, collapsed ones included, count as above it (right-censored). None
        takes high targets as they are and sets collapsed rows aside.
    interval
        Where intervals come from, see `Fit`. None is ``model`` where a random term is estimated,
        else ``bootstrap``; but ``model`` for a single cluster, and from 20,000 clusters
        ``sandwich``, which is then the same.
    n_boot
        Refits of a bootstrap; 0 gives no intervals.
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
        If too few rows or levels are left, a fixed parameter is unknown, or conformal intervals
        are asked for with too few clusters.
    TableError
        If a column is missing.
    """
    options: dict[str, Any] = {
        "mapping": dict(mapping or {}),
        "where": where,
        "offset": list(offset),
        "random": None if random is None else list(random),
        "fixed": dict(fixed or {}),
        "likelihood": likelihood,
        "huber_delta": huber_delta,
        "floor": floor,
        "ceiling": ceiling,
        "n_boot": n_boot,
        "seed": seed,
    }
    found = estimated(frame, law, options, cluster, name)
    law, selection, fitted, p = found.law, found.selection, found.fitted, len(found.fitted.theta)
    chosen: Interval = interval or ("model" if found.terms else _pooled_interval(selection))
    notes = (*found.notes, *copies(selection.frame, law, cluster))
    if not law.linear:
        information = found.solution.information(int(np.argmin(found.solution.objective)))
        notes += trade_offs(law, fitted.theta, information, fitted.cov[:p, :p])
    search = judge(law, found.problem, found.solution, fitted.theta, notes)
    if not fitted.converged and search.status == "converged":
        search = replace(
            search, status="failed", detail="the search over variances did not converge"
        )
    made = Fit(
        law=law,
        theta=fitted.theta,
        interval=chosen,
        cov=fitted.cov[:p, :p],
        dof=np.full(p, np.inf),
        effects=_effects(fitted, found.terms, found.model),
        draws=fitted.theta[None][:0],
        profiles=None,
        calibration=None,
        search=search,
        data=_data(selection, law, name, cluster, options),
        versions={package: version(package) for package in ("qscale", "numpy", "pandas")},
        frame=selection.frame,
    )
    return _with_uncertainty(made, found.model, fitted, found.problem, selection)


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
    selection, law = _prepare(frame, law, options["offset"], cluster, name, options)
    check_fixed(law, fixed)
    check_levels(law, selection.frame, set(fixed), name)
    check_measured(law, selection, set(fixed), name)
    check_random(selection.frame, random, law.target, name)
    problem, solution = from_starts(law, selection, fixed, huber_delta, options["likelihood"])
    terms, notes = _terms((cluster,) if random is None else random, selection.frame)
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


def _pooled_interval(selection: Selection) -> Interval:
    """Return how a fit without random effects gets its intervals unless told."""
    clusters = int(selection.clusters.max()) + 1
    if clusters == 1:
        return "model"
    return "bootstrap" if clusters < _MANY_CLUSTERS else "sandwich"


def _effects(fitted: mixed.Components, terms: tuple[Term, ...], model: mixed.Model) -> Effects:
    """Collect the random part of a fit."""
    keep = len(fitted.cov) == len(fitted.theta) + len(fitted.effects)
    return Effects(
        terms=terms if keep else tuple(replace(term, levels=()) for term in terms),
        values=fitted.effects if keep else fitted.effects[:0],
        variances=fitted.variances,
        residual=model.rows.spread(fitted.sigma) ** 2,
        cov=fitted.cov,
        scales_cov=fitted.scales_cov,
        cov_slopes=fitted.cov_slopes,
    )


def _with_uncertainty(
    made: Fit,
    model: mixed.Model,
    fitted: mixed.Components,
    problem: Problem,
    selection: Selection,
) -> Fit:
    """Add the covariance and the intervals that were asked for."""
    options, clusters = made.data.options, selection.clusters
    groups = int(clusters.max()) + 1
    drawn = made.interval == "bootstrap" and options["n_boot"]
    if groups == 1 and (drawn or made.interval == "sandwich"):
        raise FitError(
            f"{made.data.name}: --interval {made.interval} compares clusters, and all rows have "
            f"the same {made.data.cluster}. Use --interval model, or choose with --cluster."
        )
    variance = np.diag(made.cov)
    own = np.einsum("kii->ik", fitted.cov_slopes)
    made = replace(made, dof=mixed.satterthwaite(variance, own, fitted.scales_cov))
    if made.interval == "model":
        return made
    if made.interval == "profile":
        ends = np.full((len(made.theta), 2), np.nan)
        for index in np.flatnonzero(problem.low < problem.high):
            ends[index] = profile(model, fitted, int(index), 0.9, float(made.dof[index]))
        return replace(made, profiles=ends)
    if made.interval == "bootstrap" and not options["n_boot"]:
        return made
    rng = np.random.default_rng(options["seed"])
    if made.interval == "bootstrap" and not made.effects.terms and not selection.censored.any():
        draws = bootstrap(problem, made.theta, clusters, options["n_boot"], rng)
    else:
        parts = pieces(model, fitted, clusters)
        if made.interval != "bootstrap":
            made = replace(
                made, cov=sandwich(parts, made.cov), dof=np.full(len(made.theta), groups - 1.0)
            )
            return _calibrated(made, selection) if made.interval == "conformal" else made
        draws = one_step_bootstrap(parts, made.theta, fitted.mode.free, options["n_boot"], rng)
        draws = np.clip(draws, problem.low, problem.high)  # one step can leave the bounds
    cov = np.cov(draws, rowvar=False).reshape(made.cov.shape) if len(draws) > 1 else made.cov
    search = replace(made.search, boots=options["n_boot"], boots_converged=len(draws))
    return replace(made, draws=draws, cov=cov, search=search)


def _calibrated(made: Fit, selection: Selection) -> Fit:
    """Score left-out clusters by refitting without each, or each of twenty folds."""
    options = made.data.options
    groups = int(selection.clusters.max()) + 1
    check_clusters(groups)
    folds = np.arange(groups) % min(groups, _FOLDS)
    scores = np.full(len(selection.frame), np.nan)
    arguments = {k: v for k, v in options.items() if k not in ("where", "mapping")}
    for fold in range(int(folds.max()) + 1):
        out = folds[selection.clusters] == fold
        rest = fit(
            selection.frame[~out],
            made.law.without_offsets(),
            **arguments,
            cluster=made.data.cluster,
            interval="model",
            name=f"{made.data.name} without a part of its clusters",
        )
        found = rest.predictive(selection.frame[out])
        scores[out] = np.abs(selection.observed[out] - found.mean) / found.sd
    measured = selection.censored == 0
    return replace(made, calibration=calibrate(scores[measured], selection.clusters[measured]))


def _prepare(
    frame: pd.DataFrame,
    law: Law,
    offset: Sequence[str],
    cluster: str,
    name: str,
    options: Mapping[str, Any],
) -> tuple[Selection, Law]:
    """Select usable rows and add one offset factor per column with more than one level."""
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
    extra = []
    for column in offset:
        levels = selection.frame[column].value_counts().sort_index().sort_values(kind="stable")
        if len(levels) > 1:
            # The most frequent level last: it is the one that the others are coded against.
            extra.append(offset_factor(column, tuple(map(str, levels.index))))
    return selection, law.with_factors(*extra)


def _data(selection: Selection, law: Law, name: str, cluster: str, options: dict[str, Any]) -> Data:
    """Record what was fitted on."""
    frame = selection.frame
    used = frame[list(dict.fromkeys((*law.columns, law.target)))]
    numeric = [
        c
        for c in frame.columns
        if (c in _RANGED or (c in law.columns and is_numeric_dtype(frame[c])))
        and frame[c].notna().any()
    ]
    texts = [c for c in frame.columns if c in _LEVELLED and frame[c].notna().any()]
    return Data(
        name=name,
        sha256=hash_of(used),
        rows=len(frame),
        clusters=int(selection.clusters.max()) + 1,
        cluster=cluster,
        set_aside=selection.set_aside,
        ranges={c: (float(frame[c].min()), float(frame[c].max())) for c in numeric},
        levels={c: tuple(sorted(map(str, frame[c].dropna().unique()))) for c in texts},
        options=options,
        medians={c: float(frame[c].median()) for c in numeric},
    )


_RANGED = ("n_params", "tokens", "bits", "group_size", "bits_per_weight", "lr_peak", "lr")
_LEVELLED = ("method", "method_kind", "fmt", "family", "source", "protocol", "lr_schedule")
