"""Which factors do the data support? Forward and backward steps, judged by test and by prediction.

Each step asks two questions of a factor. Is its coefficient further from zero than the scatter of
whole runs explains (a cluster-robust Wald statistic, with a bootstrap p-value)? And does it predict
runs that were left out better (mean absolute log error, paired by run)?
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from qscale.errors import FitError
from qscale.fit.likelihood import HUBER_EFFICIENT
from qscale.fit.options import check_offsets
from qscale.fit.rows import SetAside, matches
from qscale.fit.rows import select as select_rows
from qscale.laws import columns_of
from qscale.laws.compose import FACTORS
from qscale.laws.factors import offset as offset_factor
from qscale.laws.factors import upright
from qscale.select.confounding import Confounding, confounding
from qscale.select.judge import left_out_errors, unit, wald
from qscale.table import require
from qscale.validate.paired import holm, paired

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from qscale.laws import Law
    from qscale.laws.factors import Factor

    Array = np.ndarray


@dataclass(frozen=True, slots=True)
class Selected:
    """The factors that a table supports, and every step that led there.

    Parameters
    ----------
    law
        The starting law multiplied by the chosen factors.
    chosen
        Names of the chosen candidates in order of entry.
    steps
        One row per factor looked at: ``step``, ``action`` (``add`` or ``drop``), ``factor``,
        ``f`` (cluster-robust Wald F), ``p_value`` and ``p_holm`` (adjusted for the factors of the
        step), ``error_without`` and ``error_with`` (mean absolute log error of left-out runs),
        ``gain`` with ``low`` and ``high`` (their difference; above zero the factor helps),
        ``gain_p_holm``, ``supported`` (``test and score``, ``test``, ``score`` or ``neither``) and
        ``taken`` (whether the step was made).
    support
        The same for each factor of the final law, given all the others.
    confounding
        Which of all the factors move together.
    idle
        Factors whose columns do not vary in the rows and that took no part.
    target, cluster
        Column predicted, and the one whose values mark runs.
    rows, clusters
        Their numbers.
    set_aside
        Rows that took no part, with reasons.
    alpha
        Level at which p-values count as support.
    """

    law: Law
    chosen: tuple[str, ...]
    steps: pd.DataFrame
    support: pd.DataFrame
    confounding: Confounding
    idle: tuple[str, ...]
    target: str
    cluster: str
    rows: int
    clusters: int
    set_aside: tuple[SetAside, ...]
    alpha: float


@dataclass(frozen=True, slots=True)
class _Regression:
    """Weighted rows of the log target, their terms and their runs."""

    y: Array
    terms: dict[str, Array]
    clusters: Array
    root_weights: Array
    seed: int

    def design(self, names: Sequence[str]) -> Array:
        """Columns of the named terms, shape (n, p)."""
        blocks = [self.terms[name] for name in names]
        return np.concatenate(blocks, axis=1) if blocks else np.zeros((len(self.y), 0))


def select_factors(
    frame: pd.DataFrame,
    law: Law,
    candidates: Sequence[str],
    *,
    where: str | None = None,
    offset: Sequence[str] = (),
    cluster: str = "run",
    alpha: float = 0.05,
    seed: int = 0,
    name: str = "table",
) -> Selected:
    """Add candidate factors to a law as long as a test or held-out runs support them.

    After each addition, chosen factors that no longer have support are dropped for good. The law's
    own factors stay. All steps use the rows that every candidate can use, and least squares on the
    log scale with Huber weights from the regression on all of the factors; bounds are not imposed.

    Parameters
    ----------
    frame
        A measurement table.
    law
        The law to start from, linear on the log scale.
    candidates
        Factors as `candidate` reads them, such as ``lr_peak`` or ``anneal``.
    where, cluster, name
        As in `qscale.fit.fit`.
    offset
        Text columns whose values get a multiplier each throughout.
    alpha
        Level at which Holm-adjusted p-values count as support. Each question has its own, so a
        step takes a factor without effect with a probability of at most twice this.
    seed
        Of the bootstrap and the paired tests.

    Returns
    -------
    Selected
        P-values of factors found by a search are too small; held-out scores less so.

    Raises
    ------
    FitError
        If the law is not linear on the log scale, a candidate is unknown or there already, too few
        runs or rows are left, or the law's own factors are collinear.
    TableError
        If a column is missing.

    Notes
    -----
    Wald statistics use the CR1 covariance; their p-values come from the wild cluster bootstrap
    with the null imposed (Cameron, Gelbach and Miller 2008,
    https://doi.org/10.1162/rest.90.3.414), with the six-point multipliers of Webb (2023,
    https://doi.org/10.1111/caje.12661) up to 12 runs.
    """
    if not law.linear or law.link != "log":
        raise FitError(
            f"law {law.name!r} is not a product of powers and exponentials, linear on the log "
            "scale; factors can be selected only for such a law."
        )
    check_offsets(frame, offset, name)
    frame = frame.assign(**{column: frame[column].fillna("unknown") for column in offset})
    kept = frame[matches(frame, where, name)] if where else frame
    started, factors = _factors(law, candidates, offset, kept, name)
    full = started.with_factors(*factors.values())
    rows = select_rows(frame, full, where=where, cluster=cluster, name=name)
    # Again, as a text column may have fewer values in the usable rows.
    law, factors = _factors(law, candidates, offset, rows.frame, name)
    full = law.with_factors(*factors.values())
    data = columns_of(full, rows.frame)
    terms = {_label(factor): _columns(factor, data, len(rows.frame)) for factor in full.factors}
    idle = [label for label, columns in terms.items() if not columns.shape[1]]
    terms = {label: columns for label, columns in terms.items() if label not in idle}
    own = [label for label in map(_label, law.factors) if label in terms]
    observed = full.linked(rows.frame[law.target].to_numpy())
    regression = _regression(observed, terms, rows.clusters, seed)
    _check(regression, own, law, cluster, name)
    if not factors.keys() - set(idle):
        raise FitError(
            f"{name}: no candidate ({', '.join(factors)}) varies in the {len(rows.frame)} usable "
            "rows."
        )
    chosen, steps = _search(regression, own, [label for label in factors if label in terms], alpha)
    final = [*own, *chosen]
    testable = [term for term in final if term != "constant"]
    return Selected(
        law=law.with_factors(*(factors[text] for text in chosen)),
        chosen=tuple(chosen),
        steps=pd.DataFrame(steps),
        support=pd.DataFrame(_judge(regression, final, testable, alpha)),
        confounding=confounding(terms, rows.clusters, cluster),
        idle=tuple(idle),
        target=law.target,
        cluster=cluster,
        rows=len(rows.frame),
        clusters=int(rows.clusters.max()) + 1,
        set_aside=rows.set_aside,
        alpha=alpha,
    )


def _factors(
    law: Law, candidates: Sequence[str], offset: Sequence[str], frame: pd.DataFrame, name: str
) -> tuple[Law, dict[str, Factor]]:
    """Return the law with its offsets, and the candidates by label."""
    law = law.with_factors(*(_levels(c, frame) for c in offset if len(set(frame[c])) > 1))
    factors = {_label(f): f for f in (candidate(text, frame, name) for text in candidates)}
    for label, factor in factors.items():
        if law.target in factor.columns:
            raise FitError(f"--candidates {label}: {law.target} is what the law predicts.")
    for label in factors.keys() & {_label(factor) for factor in law.factors}:
        raise FitError(f"--candidates {label}: law {law.name!r} has this factor already.")
    return law, factors


def candidate(text: str, frame: pd.DataFrame, name: str = "table") -> Factor:
    """Return the factor that a word names.

    Parameters
    ----------
    text
        A numeric column, meaning a power of it; a text column, meaning a multiplier for each of
        its values; a kind and a column, such as ``exponential:bits``; or a kind that needs no
        column, such as ``anneal``.
    frame
        The table.
    name
        Name of the table for messages.

    Raises
    ------
    FitError
        If the kind is unknown or a power is asked of a column that is not above zero.
    TableError
        If the column is missing or empty.
    """
    if text == "anneal":
        return FACTORS["anneal"]("anneal")
    kind, colon, column = text.partition(":")
    kind, column = (kind, column) if colon else ("power", text)
    if kind not in ("power", "exponential", "log_power"):
        raise FitError(
            f"--candidates {text}: unknown kind {kind!r}. Give a column, anneal, or one of "
            "power:COLUMN, exponential:COLUMN, log_power:COLUMN."
        )
    require(frame, [column], name)
    if frame[column].dtype.kind not in "fiu":
        return _levels(column, frame)
    least = {"power": 0.0, "log_power": 1.0}.get(kind)
    if least is not None and (frame[column] <= least).any():
        raise FitError(
            f"--candidates {text}: column {column!r} has values at or below {least:g}, of which "
            f"there is no such power; try exponential:{column}, or choose rows with --where."
        )
    return FACTORS[kind](column, f"{kind}_{column}", rf"\theta_{{{upright(column)}}}")


def _levels(column: str, frame: pd.DataFrame) -> Factor:
    """Return one multiplier for each value of a text column."""
    return offset_factor(column, tuple(sorted(map(str, frame[column].dropna().unique()))))


def _label(factor: Factor) -> str:
    """Name a factor by its column, and by its kind too unless that is a power."""
    if factor.kind in ("constant", "anneal"):
        return factor.kind
    column = "+".join(factor.columns)
    return column if factor.kind in ("power", "offset") else f"{factor.kind}:{column}"


def _columns(factor: Factor, data: Mapping[str, Array], rows: int) -> Array:
    """Return what multiplies a factor's parameters, shape (n, k), without constant columns."""
    start = np.array([[p.internal(p.starts[0]) for p in factor.parameters]])
    columns = np.broadcast_to(factor.gradient(start, data)[0], (rows, len(factor.parameters)))
    return columns if factor.kind == "constant" else columns[:, np.ptp(columns, axis=0) > 0]


def _regression(y: Array, terms: dict[str, Array], clusters: Array, seed: int) -> _Regression:
    """Weigh rows down by their Huber weight in the regression on all of the terms."""
    design = np.concatenate(list(terms.values()), axis=1)
    weights = np.ones(len(y))
    for _ in range(50):
        root = np.sqrt(weights)
        theta = np.linalg.lstsq(design * root[:, None], y * root, rcond=None)[0]
        size = np.abs(y - design @ theta)
        edge = max(HUBER_EFFICIENT * float(np.median(size)) / 0.6745, 1e-12)
        weights = np.minimum(1.0, edge / np.maximum(size, 1e-300))
    return _Regression(y, terms, clusters, np.sqrt(weights), seed)


def _check(regression: _Regression, own: Sequence[str], law: Law, cluster: str, name: str) -> None:
    """Raise if the law alone cannot be determined, or there are no runs to judge by."""
    groups = int(regression.clusters.max()) + 1
    if groups < 3:
        raise FitError(
            f"{name}: selecting factors needs at least three values of {cluster}; found {groups}. "
            "Choose another column with --cluster."
        )
    design = unit(regression.design(own))
    if len(design) <= design.shape[1] or np.linalg.matrix_rank(design, tol=1e-8) < design.shape[1]:
        raise FitError(
            f"{name}: the {len(design)} usable rows cannot determine the factors of law "
            f"{law.name!r}, even without candidates; a column does not vary or two move as one."
        )


def _search(
    regression: _Regression, own: list[str], candidates: list[str], alpha: float
) -> tuple[list[str], list[dict[str, Any]]]:
    """Add the best supported candidate and drop what lost its support, until nothing changes."""
    chosen: list[str] = []
    waiting = list(candidates)
    steps: list[dict[str, Any]] = []
    for step in itertools.count(1):
        added = _judge(regression, [*own, *chosen], waiting, alpha)
        supported = [row for row in added if row["supported"] != "neither"]
        best = max(supported, key=_gain, default=None)
        steps += [{"step": step, "action": "add", **row, "taken": row is best} for row in added]
        if best is None:
            break
        dropped = _judge(regression, [*own, *chosen, best["factor"]], chosen, alpha)
        lost = [row for row in dropped if row["supported"] == "neither"]
        worst = min(lost, key=_gain, default=None)
        steps += [{"step": step, "action": "drop", **row, "taken": row is worst} for row in dropped]
        waiting.remove(best["factor"])
        chosen = [*(c for c in chosen if worst is None or c != worst["factor"]), best["factor"]]
    return chosen, steps


def _gain(row: Mapping[str, Any]) -> float:
    """Order factors by what they gain on left-out runs, then by their Wald statistic."""
    return float(np.nan_to_num(row["gain"])) + 1e-9 * float(np.nan_to_num(row["f"]))


def _judge(
    regression: _Regression, current: Sequence[str], names: Sequence[str], alpha: float
) -> list[dict[str, Any]]:
    """Test each named term beside the current ones, by coefficient and by left-out runs."""
    rows = [_judge_one(regression, [t for t in current if t != name], name) for name in names]
    tests = holm([row["p_value"] for row in rows])
    scores = holm([row["gain_p_value"] for row in rows])
    for row, test, score in zip(rows, tests, scores, strict=True):
        words = ["test"] if test < alpha else []
        words += ["score"] if score < alpha and row["gain"] > 0 else []
        row |= {
            "p_holm": float(test),
            "gain_p_holm": float(score),
            "supported": " and ".join(words) or "neither",
        }
    return rows


def _judge_one(regression: _Regression, rest: Sequence[str], name: str) -> dict[str, Any]:
    """Test one term beside the rest."""
    f, p_value = wald(
        regression.y * regression.root_weights,
        regression.design(rest) * regression.root_weights[:, None],
        regression.design([name]) * regression.root_weights[:, None],
        regression.clusters,
        seed=regression.seed,
    )
    without, beside = (
        left_out_errors(
            regression.y, regression.design(terms), regression.clusters, regression.root_weights
        )
        for terms in (rest, [*rest, name])
    )
    known = ~np.isnan(without) & ~np.isnan(beside)
    row = {"factor": name, "f": f, "p_value": p_value}
    if not known.any():
        nothing = ("error_without", "error_with", "gain", "low", "high")
        return row | dict.fromkeys(nothing, np.nan) | {"gain_p_value": 1.0}
    without, beside = np.abs(without[known]), np.abs(beside[known])
    gain = paired(without - beside, regression.clusters[known], seed=regression.seed)
    return row | {
        "error_without": float(without.mean()),
        "error_with": float(beside.mean()),
        "gain": gain.difference,
        "low": gain.low,
        "high": gain.high,
        "gain_p_value": gain.p_value,
    }
