"""Fit a law to a measurement table: rows, search from many starts, random effects, intervals."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
from pandas.api.types import is_numeric_dtype

from qscale.errors import FitError
from qscale.fit import mixed
from qscale.fit.calibration import calibrate, check_clusters
from qscale.fit.effects import Effects
from qscale.fit.identify import trade_offs
from qscale.fit.intervals import bootstrap, one_step_bootstrap, pieces, profile, sandwich
from qscale.fit.options import as_list, check_choice, check_frame, check_kinds, check_law
from qscale.fit.point import estimated
from qscale.fit.record import FEWEST_RESAMPLED, Data, Interval, hash_of
from qscale.fit.result import Fit
from qscale.fit.rows import copies
from qscale.fit.search import judge

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pandas as pd

    from qscale.fit.grouping import Term
    from qscale.fit.likelihood import Family
    from qscale.fit.rows import Selection
    from qscale.fit.solver import Problem
    from qscale.laws import Law

    Array = np.ndarray

_FOLDS = 20
_MANY_CLUSTERS = 20_000


def fit(
    frame: pd.DataFrame,
    law: Law,
    *,
    where: str | None = None,
    offset: str | Sequence[str] = (),
    random: str | Sequence[str] | None = None,
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
        Text column, such as ``source``, each level of which gets a multiplier of its own, or
        several.
    random
        Random term (`qscale.fit.grouping`), such as ``run:bits``, or several, or ``()`` for none.
        None takes the cluster column. Terms whose variance these rows cannot tell are left out
        with a note.
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
        Where intervals come from, see `Fit`; a bootstrap of fewer than five clusters has none.
        None is ``model`` where a random term is estimated, else ``bootstrap``; but ``model`` for a
        single cluster, and from 20,000 clusters ``sandwich``, which is then the same.
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
        If too few rows or levels are left, an option is unknown, or conformal intervals are asked
        for with too few clusters.
    TableError
        If the table is no frame, or a column that the law reads is missing, given twice, or holds
        neither plain numbers nor text.
    """
    check_frame(frame, "table")
    check_law(law)
    check_kinds(frame, law, name)
    if interval is not None:
        check_choice("interval", interval, get_args(Interval))
    options: dict[str, Any] = {
        "mapping": dict(mapping or {}),
        "where": where,
        "offset": as_list(offset),
        "random": None if random is None else as_list(random),
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
            f"{made.data.name}: {made.interval} intervals compare clusters, and all rows have the "
            f"same {made.data.cluster}. Choose interval model, or another column as cluster."
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
    if made.interval == "bootstrap" and groups < FEWEST_RESAMPLED:
        return _noted(
            made,
            f"No intervals: a bootstrap resamples the values of {made.data.cluster}, and {groups} "
            f"are too few; at least {FEWEST_RESAMPLED} are needed. Choose model intervals, which "
            "take rows to be independent, sandwich, or another cluster column.",
        )
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
    return _without_aside(replace(made, draws=draws, cov=cov, search=search))


def _without_aside(made: Fit) -> Fit:
    """Say which parameters have no interval since percentiles of refits do not hold them."""
    found = made.parameters()
    aside = found.index[found["se"].notna() & found["low"].isna()]
    if not len(aside):
        return made
    return _noted(
        made,
        f"No interval of {', '.join(aside)}: nearly all refits to resampled {made.data.cluster}s "
        "lie on one side of the estimate. Choose model or sandwich intervals.",
    )


def _noted(made: Fit, sentence: str) -> Fit:
    """Add a sentence to what a user should know."""
    return replace(made, search=replace(made.search, notes=(*made.search.notes, sentence)))


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
