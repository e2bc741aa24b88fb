"""Checks of a fit that warn in plain words, each only when its condition holds."""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from scipy.stats import spearmanr

from qscale.fit import FEW_CLUSTERS, STATUS_MEANING
from qscale.fit.record import FEWEST_RESAMPLED
from qscale.laws import published
from qscale.laws.compose import product
from qscale.report.diagnostics import ranks, uneven_scatter
from qscale.report.evidence import LARGEST, LEAVE_ONE_OUT
from qscale.report.words import listed, number, percent, plural, times

if TYPE_CHECKING:
    from collections.abc import Callable

    from qscale.report.evidence import Evidence, Summaries

LARGE_SHARE = 0.2
COVERAGE_GAP = {50: 0.2, 90: 0.1}
CONFOUNDED = 0.9

RECIPE = ("lr_peak", "lr", "decay_fraction", "lr_sum", "weight_decay", "batch_tokens")
SETTING = ("n_params", "tokens", "bits", "group_size", "bits_per_weight")


def cautions(evidence: Evidence, summary: Summaries) -> dict[str, str]:
    """Return what a reader should know before trusting a fit.

    Parameters
    ----------
    evidence
        A fit beside its rows.
    summary
        `qscale.report.evidence.summarize` of its held-out scores.

    Returns
    -------
    dict
        Sentences by the name of the check that found them; checks without a finding are absent.
    """
    found = {check.__name__: check(evidence) for check in CHECKS}
    found["coverage"] = coverage(evidence.label, summary)
    return {name: text for name, text in found.items() if text}


def other_table(evidence: Evidence) -> str | None:
    """Warn that the report's table is not the one that was fitted."""
    if evidence.fit.data.sha256 == evidence.refitted.data.sha256:
        return None
    return (
        f"The table has changed since the fit, or is another one: now {len(evidence.rows)} usable "
        f"rows, then {evidence.fit.data.rows}. Figures and held-out scores below are of the "
        "table at hand, the parameters of the fit. Fit again to bring them together."
    )


def failed(evidence: Evidence) -> str | None:
    """Warn that no start converged."""
    return _status(evidence, "failed")


def bound_hit(evidence: Evidence) -> str | None:
    """Warn that a parameter ended on its bound."""
    return _status(evidence, "bound_hit")


def not_identified(evidence: Evidence) -> str | None:
    """Warn that parameters cannot be told apart."""
    return _status(evidence, "not_identified")


def _status(evidence: Evidence, status: str) -> str | None:
    """Explain the fit's status if it is the one given."""
    search = evidence.fit.search
    if search.status != status:
        return None
    return f"{search.detail[:1].upper()}{search.detail[1:]}. {STATUS_MEANING[status]}"


def lonely_start(evidence: Evidence) -> str | None:
    """Warn that only one of several starts found the best minimum."""
    search = evidence.fit.search
    if search.agreeing > 1 or search.starts == 1:
        return None
    return (
        f"Only 1 of {search.starts} starts ended at the best objective; "
        "a better minimum may have been missed."
    )


def few_clusters(evidence: Evidence) -> str | None:
    """Warn that the fit has too few clusters for its intervals."""
    data, interval = evidence.fit.data, evidence.fit.interval
    if data.clusters >= FEW_CLUSTERS[interval]:
        return None
    if interval == "bootstrap" and data.clusters < FEWEST_RESAMPLED:
        return None  # it has no intervals, and notes that
    return (
        f"Only {plural(data.clusters, 'cluster')} ({data.cluster}): {interval} intervals from "
        f"fewer than {FEW_CLUSTERS[interval]} clusters are too narrow."
    )


def notes(evidence: Evidence) -> str | None:
    """Pass on what the fit noted."""
    return " ".join(evidence.fit.search.notes) or None


def censored(evidence: Evidence) -> str | None:
    """Say how many rows took part only as bounds."""
    if not evidence.censored:
        return None
    return (
        f"{plural(evidence.censored, 'row')} under the noise floor or over the ceiling took part "
        "as bounds only; figures leave them out."
    )


def lost_refits(evidence: Evidence) -> str | None:
    """Warn that bootstrap refits are missing."""
    search = evidence.fit.search
    if evidence.fit.interval != "bootstrap":
        return None
    if search.boots_converged < 20:
        return (
            f"There are no intervals: {search.boots_converged} converged bootstrap refits, and at "
            "least 20 are needed."
        )
    if search.boots_converged >= 0.95 * search.boots:
        return None
    lost = search.boots - search.boots_converged
    return (
        f"{lost} of {search.boots} bootstrap refits did not converge and are left out of the "
        "intervals, which may be too narrow."
    )


def set_aside(evidence: Evidence) -> str | None:
    """Warn that many rows that the query asked for could not be used."""
    data = evidence.fit.data
    lost = sum(s.rows for s in data.set_aside if not s.reason.startswith("not "))
    share = lost / (lost + data.rows)
    if share <= LARGE_SHARE:
        return None
    return (
        f"{percent(share)} of the rows asked for ({lost} of {lost + data.rows}) could not be used; "
        "the fit speaks for the rest only if they were not left out for their outcome."
    )


def no_logarithm(evidence: Evidence) -> str | None:
    """Warn that rows at or below zero were left out because of their outcome."""
    lost = sum(s.rows for s in evidence.fit.data.set_aside if "has no logarithm" in s.reason)
    if not lost:
        return None
    target = evidence.law.target
    return (
        f"{plural(lost, 'row')} with {target} at or below zero took no part. Leaving out only the "
        f"lucky ones makes the law predict too much where {target} is near zero."
    )


def chosen_by_outcome(evidence: Evidence) -> str | None:
    """Warn that the query chose rows by what the law predicts."""
    where = evidence.fit.data.options.get("where") or ""
    used = [name for name in (evidence.law.target, "loss_q") if re.search(rf"\b{name}\b", where)]
    if not used:
        return None
    return (
        f"The query chose rows by their outcome ({listed(list(dict.fromkeys(used)))}): the law "
        "speaks only for checkpoints whose outcome is in that range, and is bent near its edges."
    )


def trend(evidence: Evidence) -> str | None:
    """Warn that residuals move with a column that the law does not have."""
    found = [f"{name} (rank correlation {rho:.2f})" for name, rho in trends(evidence).items()]
    if not found:
        return None
    return (
        f"Residuals move with {listed(found)}, which the law does not have: at values other than "
        "those of most rows its predictions lean to one side."
    )


def trends(evidence: Evidence) -> dict[str, float]:
    """Return rank correlations of residuals with columns outside the law, where they are clear."""
    outside = [c for c in (*RECIPE, *SETTING) if c not in evidence.fit.law.columns]
    return ranks(evidence, evidence.residuals, outside)


def confounded(evidence: Evidence) -> str | None:
    """Warn that columns of the law, or one of them and the learning rate, move together."""
    rows, law_columns = evidence.rows, evidence.law.columns
    numbers = [
        c
        for c in dict.fromkeys((*law_columns, "lr_peak", "lr"))
        if c in rows.columns and pd.api.types.is_numeric_dtype(rows[c])
    ]
    found = []
    for one, other in itertools.combinations(numbers, 2):
        pairs = rows[[one, other]].dropna().drop_duplicates()
        if one not in law_columns or len(pairs) < 3 or (pairs.nunique() < 2).any():
            continue
        rho = float(spearmanr(pairs[one], pairs[other])[0])
        if abs(rho) > CONFOUNDED:
            found.append(f"{one} and {other} (rank correlation {rho:.2f})")
    if not found:
        return None
    return (
        f"These move together in the rows: {listed(found)}. An effect of one cannot be told from "
        "an effect of the other: trust predictions only where they keep moving together, or "
        "measure runs in which one changes and the other does not."
    )


def no_effect(evidence: Evidence) -> str | None:
    """Warn that an exponent's interval holds zero."""
    table = evidence.fit.parameters()
    fixed = evidence.fit.data.options.get("fixed", {})
    open_signs = [
        f"{name} ({number(table['low'][name], 3)} to {number(table['high'][name], 3)})"
        for name in _exponents(evidence)
        if name not in fixed and table["low"][name] <= 0 <= table["high"][name]
    ]
    if not open_signs:
        return None
    return (
        f"The 90 % interval of {listed(open_signs)} holds zero: these rows do not say whether "
        f"{'it raises or lowers' if len(open_signs) == 1 else 'they raise or lower'} "
        f"{evidence.law.target}."
    )


def off_published(evidence: Evidence) -> str | None:
    """Warn that published exponents lie outside the fit's intervals."""
    table = evidence.fit.parameters()
    found = []
    for constants in published(evidence.law):
        outside = [
            f"{name} {number(value)} (here {number(table['low'][name], 3)} to "
            f"{number(table['high'][name], 3)})"
            for name, value in constants.values.items()
            if name in _exponents(evidence)
            and (value < table["low"][name] or value > table["high"][name])
        ]
        if outside:
            found.append(f"{constants.setting}: {listed(outside)}")
    if not found:
        return None
    return f"Published exponents outside the 90 % intervals. {'; '.join(found)}."


def _exponents(evidence: Evidence) -> set[str]:
    """Return the names of the law's parameters other than amplitudes and offsets."""
    return {
        p.name for factor in evidence.law.factors for p in factor.parameters if p.scale != "log"
    }


def large_offsets(evidence: Evidence) -> str | None:
    """Warn that offsets differ by more than an effect of the law over its whole range."""
    spans: dict[str, float] = {}
    factors = evidence.fit.law.factors
    for factor, slot in zip(factors, product(factors).slots, strict=True):
        if factor.columns:
            data = {column: evidence.rows[column].to_numpy() for column in factor.columns}
            values = factor.value(evidence.fit.theta[None, slot], data)
            spans[listed(factor.columns)] = float(np.ptp(values))
    columns = [f.options["column"] for f in evidence.fit.law.factors if f.kind == "offset"]
    if not columns:
        return None
    widest = max(columns, key=lambda column: spans[column])
    smaller = [
        f"{name} (×{times(span)})"
        for name, span in spans.items()
        if name not in columns and span < spans[widest]
    ]
    if not smaller:
        return None
    return (
        f"Rows that differ only in {widest} differ by up to ×{times(spans[widest])}, more than the "
        f"whole range of {listed(smaller)} makes: what looks like an effect may be a difference by "
        f"{widest}, and predictions for a new one are wide."
    )


def coverage(label: str, summary: Summaries) -> str | None:
    """Warn that intervals hold many fewer or many more held-out rows than they should."""
    found, narrow = [], False
    for protocol, (level, gap) in itertools.product((LEAVE_ONE_OUT, LARGEST), COVERAGE_GAP.items()):
        if (label, protocol) not in summary:
            continue
        share = summary[label, protocol].coverage[level]
        if abs(share - level / 100) > gap:
            way = "too narrow" if share < level / 100 else "too wide"
            narrow = narrow or share < level / 100
            found.append(f"{percent(share)} in the {level} % intervals ({protocol}: {way})")
    if not found:
        return None
    advice = (
        "Take them as too sure, or fit with --interval conformal, calibrated on what is left out, "
        "and by the groups that predictions are for (--cluster family)."
        if narrow
        else "They are safe but say less than the law knows: more clusters make them narrower."
    )
    return f"Held-out rows inside their intervals: {listed(found)}. {advice}"


CHECKS: tuple[Callable[[Evidence], str | None], ...] = (
    other_table,
    failed,
    bound_hit,
    not_identified,
    lonely_start,
    notes,
    few_clusters,
    lost_refits,
    set_aside,
    censored,
    no_logarithm,
    chosen_by_outcome,
    trend,
    uneven_scatter,
    confounded,
    no_effect,
    off_published,
    large_offsets,
)
