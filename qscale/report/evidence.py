"""What a report shows about a fit: its rows, residuals, a check by refitting, held-out scores."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pandas as pd

from qscale.errors import FitError
from qscale.fit import fit as fit_law
from qscale.fit.rows import select
from qscale.laws import Law, columns_of
from qscale.laws.factors import constant
from qscale.validate import Split, largest, leave_one_out, score
from qscale.validate.league import BASELINE, mean_by_setting, with_setting

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from qscale.fit import Fit

LEAVE_ONE_OUT = "leave one out"
LARGEST = "largest sizes"
_PARTS = 10
_ROW = "_row"
_SCORES = (
    "median_abs_log_error",
    "bias",
    "coverage_50",
    "coverage_90",
    "width_90",
)


@dataclass(frozen=True, slots=True)
class Evidence:
    """A fit beside the rows it was made on.

    Parameters
    ----------
    label
        Name of the fit in the report.
    fit
        The fit.
    law
        Its law without offsets.
    table
        The whole measurement table.
    rows
        The usable rows, without those that are censored.
    row_numbers
        Position of each usable row in the table, shape (n,).
    clusters
        Integer cluster of each usable row, shape (n,).
    residuals
        Log of observed over predicted target, shape (n,).
    censored
        Number of usable rows known only to lie under their noise floor or over the ceiling.
    refitted
        The same fit made again from the table, with intervals of the model.
    """

    label: str
    fit: Fit
    law: Law
    table: pd.DataFrame
    rows: pd.DataFrame
    row_numbers: np.ndarray
    clusters: np.ndarray
    residuals: np.ndarray
    censored: int
    refitted: Fit


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Scores of several laws on the same held-out rows.

    Parameters
    ----------
    scores
        One row per fit and split: ``fit``, ``protocol`` and the columns of `qscale.validate.score`.
    left_out
        What one split of the first protocol leaves out, in words.
    rows
        Number of rows that all the laws can use and the splits are made of.
    notes
        Sentences on what could not be held out, or was held out otherwise than by family.
    baseline
        The same as ``scores`` of `qscale.validate.league.mean_by_setting`, which reads nothing but
        the method and the bit width.
    """

    scores: pd.DataFrame
    left_out: str
    rows: int
    notes: tuple[str, ...]
    baseline: pd.DataFrame


@dataclass(frozen=True, slots=True)
class Summary:
    """Held-out scores of one fit over the splits of one protocol.

    Parameters
    ----------
    splits, failed
        Number of splits that could be scored, and of those that could not.
    error, lowest, highest
        Median absolute log error of a split: mean, lowest and highest.
    coverage
        Share of all held-out rows inside their 50 % and 90 % interval, by level.
    """

    splits: int
    failed: int
    error: float
    lowest: float
    highest: float
    coverage: dict[int, float]


Summaries = dict[tuple[str, str], Summary]
Refit: TypeAlias = "Callable[[pd.DataFrame], Fit]"

MOST_RUNS = 30
"""Runs beyond which the law is not fitted again without each of them."""


def fit_options(fit: Fit) -> dict[str, Any]:
    """Return the keyword options of `qscale.fit.fit` that a fit was made with."""
    options = fit.data.options
    return {
        "where": options.get("where"),
        "offset": tuple(options.get("offset", ())),
        "fixed": dict(options.get("fixed", {})),
        "cluster": fit.data.cluster,
        "random": options.get("random"),
        "likelihood": options.get("likelihood", "huber"),
        "huber_delta": options.get("huber_delta"),
        "floor": options.get("floor"),
        "ceiling": options.get("ceiling"),
        "interval": fit.interval,
        "seed": options.get("seed", 0),
    }


def refitter(evidence: Evidence) -> Refit:
    """Return what fits the law of the evidence to a part of its rows, once for each part."""
    options = {**fit_options(evidence.fit), "interval": "model", "where": None}
    name, offsets = evidence.fit.data.name, options["offset"]
    made: dict[bytes, Fit] = {}

    def refit(rows: pd.DataFrame) -> Fit:
        part = rows.index.to_numpy().tobytes()
        if part not in made:
            filled = rows.assign(**{column: rows[column].fillna("unknown") for column in offsets})
            made[part] = fit_law(filled, evidence.law, **options, n_boot=0, name=name)
        return made[part]

    return refit


def predicted(fit: Fit, rows: pd.DataFrame) -> np.ndarray:
    """Return the law at its estimates for usable rows, shape (n,), in the target's unit."""
    location = fit.law.location(fit.theta[None], columns_of(fit.law, rows))[0]
    return fit.law.unlinked(np.broadcast_to(location, len(rows)))


def gather(label: str, fit: Fit, table: pd.DataFrame, name: str | None = None) -> Evidence:
    """Select a fit's rows from its table again, and make the fit again as a check.

    Parameters
    ----------
    label
        Name of the fit in the report.
    fit
        The fit.
    table
        The table it was fitted to, or another with the same columns.
    name
        Name of the table in messages; by default that of the fit's own.

    Raises
    ------
    QscaleError
        If the table lacks a column of the law or has no usable row.
    """
    options = fit_options(fit)
    law = fit.law.without_offsets()
    name = name or fit.data.name
    refitted = fit_law(table, law, **{**options, "interval": "model"}, name=name)
    filled = {column: table[column].fillna("unknown") for column in options["offset"]}
    numbered = table.assign(**filled, **{_ROW: np.arange(len(table))})
    chosen = {key: options[key] for key in ("where", "cluster", "floor", "ceiling")}
    selection = select(numbered, law, **chosen, name=name)
    measured = selection.censored == 0
    rows = selection.frame[measured].reset_index(drop=True)
    return Evidence(
        label=label,
        fit=fit,
        law=law,
        table=table,
        rows=rows.drop(columns=_ROW),
        row_numbers=rows[_ROW].to_numpy(),
        clusters=selection.clusters[measured],
        residuals=selection.observed[measured] - law.linked(predicted(fit, rows)),
        censored=int((~measured).sum()),
        refitted=refitted,
    )


def comparable(evidence: Sequence[Evidence]) -> list[list[Evidence]]:
    """Group fits of the same target on the same table, in the order given."""
    groups: dict[tuple[str, int], list[Evidence]] = {}
    for each in evidence:
        groups.setdefault((each.law.target, id(each.table)), []).append(each)
    return list(groups.values())


def held_out(
    group: Sequence[Evidence], *, n_boot: int = 200, progress: Callable[[str], None]
) -> HeldOut:
    """Score comparable fits by leaving families out and by holding out the largest sizes.

    Parameters
    ----------
    group
        Fits of one target on one table. Splits are made of the rows that all of them can use.
    n_boot
        Refits behind the scored intervals of fits whose intervals are a bootstrap's.
    progress
        Called with what is being done.
    """
    first = group[0]
    common = sorted(set.intersection(*(set(each.row_numbers.tolist()) for each in group)))
    frame = first.table.iloc[common].reset_index(drop=True)
    clusters = pd.Series(first.clusters, index=first.row_numbers).loc[common].to_numpy()
    groups, left_out, notes = _leave_out(frame, clusters, first.fit.data.cluster)
    splits = [(LEAVE_ONE_OUT, split) for split in groups]
    try:
        splits.append((LARGEST, largest(frame)))
    except (FitError, KeyError) as error:
        notes.append(f"The largest sizes were not held out ({error}).")
    parts = []
    for each in group:
        options = fit_options(each.fit)
        refit = partial(fit_law, law=each.law, **options, n_boot=n_boot, name=each.fit.data.name)
        where, cluster = options["where"], options["cluster"]
        for protocol, split in splits:
            progress(f"{each.label}: refitting without {split.name}")
            part = score(frame, each.law, [split], refit, where=where, cluster=cluster)
            parts.append(part.assign(fit=each.label, protocol=protocol))
    naive = _baseline(frame, first, splits)
    return HeldOut(_stacked(parts), left_out, len(frame), tuple(notes), _stacked(naive))


def _baseline(
    frame: pd.DataFrame, first: Evidence, splits: Sequence[tuple[str, Split]]
) -> list[pd.DataFrame]:
    """Score the mean of each method and bit width on the same splits."""
    cluster, law = first.fit.data.cluster, Law(BASELINE, first.law.target, (constant("k"),))
    refit = mean_by_setting(first.law.target, cluster)
    rows = with_setting(frame)
    return [
        score(rows, law, [split], refit, cluster=cluster).assign(fit=BASELINE, protocol=protocol)
        for protocol, split in splits
    ]


def _stacked(parts: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Put the scores of several splits below one another."""
    columns = ["fit", "protocol", "held_out", "rows", *_SCORES, "error"]
    scores = pd.concat(parts) if parts else pd.DataFrame()
    return scores.reindex(columns=columns).reset_index(drop=True)


def _leave_out(
    frame: pd.DataFrame, clusters: np.ndarray, cluster: str
) -> tuple[list[Split], str, list[str]]:
    """Split by family; without two families by cluster, or by tenths of many clusters."""
    try:
        return leave_one_out(frame, "family"), "family", []
    except FitError:
        instead = "The rows have fewer than two families"
    codes = np.unique(clusters, return_inverse=True)[1] if len(clusters) else clusters
    groups = int(codes.max()) + 1 if len(codes) else 0
    if groups < 2:
        return [], cluster, [f"{instead} and fewer than two clusters: no group was left out."]
    if groups <= _PARTS and frame[cluster].notna().all():
        return leave_one_out(frame, cluster), cluster, [f"{instead}: each {cluster} was left out."]
    parts = min(_PARTS, groups)
    splits = [Split(f"part {i + 1} of {parts}", codes % parts == i) for i in range(parts)]
    note = f"{instead}: the {groups} clusters by {cluster} were dealt into {parts} parts."
    return splits, "part of the clusters", [note]


def summarize(scores: pd.DataFrame) -> Summaries:
    """Summarize scores over the splits of each fit and protocol, those that could be scored."""
    scored = scores.dropna(subset=["median_abs_log_error"])
    asked = Counter(zip(scores["fit"], scores["protocol"], strict=True))
    return {
        (str(fit), str(protocol)): Summary(
            splits=len(part),
            failed=asked[(fit, protocol)] - len(part),
            error=float(part["median_abs_log_error"].mean()),
            lowest=float(part["median_abs_log_error"].min()),
            highest=float(part["median_abs_log_error"].max()),
            coverage={
                level: float(np.average(part[f"coverage_{level}"], weights=part["rows"]))
                for level in (50, 90)
            },
        )
        for (fit, protocol), part in scored.groupby(["fit", "protocol"], sort=False)
    }


@dataclass(frozen=True, slots=True)
class Group:
    """Fits of one target on one table, with the held-out scores that compare them.

    Parameters
    ----------
    members
        The fits beside their rows.
    held_out
        Their scores.
    """

    members: tuple[Evidence, ...]
    held_out: HeldOut

    @property
    def summary(self) -> Summaries:
        """The scores summarized by fit and protocol."""
        return summarize(self.held_out.scores)
