"""What a report says, as blocks: answers first, then each fit, held-out scores, reproduction."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from qscale import datasets
from qscale.fit import explain
from qscale.predict import predict
from qscale.report import figures, words
from qscale.report.blocks import Bullets, Code, Figure, Figures, Heading, Table, Text
from qscale.report.cautions import cautions, trends
from qscale.report.evidence import LARGEST, LEAVE_ONE_OUT, published, summarize
from qscale.report.tables import count, number
from qscale.table import COLUMNS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from qscale.report.blocks import Block
    from qscale.report.evidence import Evidence, HeldOut

QUESTION = "How much will quantization cost, and how sure are we?"


@dataclass(frozen=True, slots=True)
class Group:
    """Fits of one target on one table, with the held-out scores that compare them."""

    members: tuple[Evidence, ...]
    held_out: HeldOut
    summary: pd.DataFrame


def group_of(members: Sequence[Evidence], held_out: HeldOut) -> Group:
    """Join fits with their scores and the summary of those."""
    return Group(tuple(members), held_out, summarize(held_out.scores))


def blocks(groups: Sequence[Group]) -> list[Block]:
    """Return the whole report."""
    several = sum(len(group.members) for group in groups) > 1
    return [
        *_answers(groups, several),
        *(_comparison(groups) if several else []),
        *(b for group in groups for member in group.members for b in _fit(member, group)),
        *(b for i, group in enumerate(groups) for b in _held_out(group, i, len(groups))),
        *_reproduction(groups, several),
        *_sources(groups),
    ]


def slug(label: str) -> str:
    """Return a label as part of a file name or anchor."""
    return re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-") or "fit"


def _answers(groups: Sequence[Group], several: bool) -> list[Block]:
    """Answer the question for each fit."""
    found: list[Block] = [Heading(QUESTION, 1)]
    for group in groups:
        for member in group.members:
            text = words.headline(member, group.held_out, group.summary)
            found.append(Text(f"{member.label}: {text}" if several else text, leading=True))
    return found


def _comparison(groups: Sequence[Group]) -> list[Block]:
    """Put the fits side by side, and rank only those that can be."""
    records = {}
    for group in groups:
        for member in group.members:
            data = member.fit.data
            key = (member.label, LEAVE_ONE_OUT)
            scores = group.summary.loc[key] if key in group.summary.index else {}
            records[member.label] = {
                "law": member.law.name,
                "table": data.name,
                "target": member.law.target,
                "rows": data.rows,
                "clusters": data.clusters,
                "status": member.fit.search.status,
                "typical residual, ×": float(np.exp(np.median(np.abs(member.residuals)))),
                "held-out error, ×": float(np.exp(scores.get("error", np.nan))),
                "% inside 90 %": round(100 * scores.get("coverage_90", np.nan), 1),
            }
    frame = pd.DataFrame.from_dict(records, orient="index").rename_axis("fit")
    caption = (
        "Typical residual: median over the rows, as a factor. Held-out error: mean over the groups "
        "left out of the median error of their rows; inside 90 %: share of those rows inside their "
        "90 % interval."
    )
    found: list[Block] = [Heading("The fits side by side"), Table(frame, caption)]
    found += [Text(sentence) for group in groups for sentence in _ranking(group)]
    found += _shared_parameters([member for group in groups for member in group.members])
    if len(groups) > 1:
        found.append(
            Text(
                "Fits on different tables or of different targets are not ranked against each other: "
                "their errors are of different rows."
            )
        )
    return found


def _ranking(group: Group) -> list[str]:
    """Order the fits of a group by their held-out errors and say how consistent the order is."""
    sentences = []
    scores = group.held_out.scores
    for protocol, what in (
        (LEAVE_ONE_OUT, f"each {group.held_out.left_out} left out"),
        (LARGEST, "the largest sizes"),
    ):
        table = scores[scores["protocol"] == protocol].pivot_table(
            index="held_out", columns="fit", values="median_abs_log_error"
        )
        both = table.dropna()
        if len(group.members) < 2 or len(both.columns) < 2 or both.empty:
            continue
        errors = both.mean().sort_values(kind="stable")
        first, others = errors.index[0], errors.index[1:]
        wins = int((both[first].to_numpy()[:, None] < both[others].to_numpy()).all(axis=1).sum())
        order = ", ".join(f"{name} ×{words.times(error)}" for name, error in errors.items())
        best = f" {first} is best on {wins} of {len(both)}." if len(both) > 1 else ""
        sentences.append(f"Error on {what}: {order}.{best}")
    if not sentences:
        return []
    data = f"the {group.held_out.rows} rows of {group.members[0].fit.data.name}"
    return [f"Refitted on parts of {data} that all of them can use. {' '.join(sentences)}"]


def _shared_parameters(members: Sequence[Evidence]) -> list[Block]:
    """Put estimates of parameters that several fits have side by side."""
    cells = {}
    for member in members:
        names = set(member.law.names)
        cells[member.label] = {
            name: f"{number(row.estimate)} ({number(row.low, 3)} to {number(row.high, 3)})"
            for name, row in member.fit.parameters().iterrows()
            if name in names
        }
    table = pd.DataFrame(cells).rename_axis("parameter")
    table = table[table.notna().sum(axis=1) > 1]
    return [Table(table, "Estimates that several fits have, with 90 % intervals.")] * bool(len(table))


def _fit(evidence: Evidence, group: Group) -> list[Block]:
    """Describe one fit."""
    fit, law = evidence.fit, evidence.law
    name = slug(evidence.label)
    own = "" if evidence.label == law.name else f"{evidence.label}: "
    found = cautions(evidence, group.summary)
    warning = (
        Bullets(tuple(found.values()), "Before you rely on it")
        if found
        else Text("None of the checks of this report found a reason for caution.")
    )
    return [
        Heading(f"{own}{law.name} on {fit.data.name}", 2, name),
        warning,
        *_law(evidence, name),
        *_parameters(evidence),
        Heading("What it predicts in the middle of the rows", 3),
        _predictions(evidence),
        *_data(evidence),
        Heading("How the minimum was found", 3),
        Text(words.status(fit)),
        Heading("Predicted against observed", 3),
        Figures((_predicted(evidence, name),)),
        Heading("Residuals", 3),
        Text(
            "Observed over predicted, against each column of the law and any other column that the "
            "residuals were found to move with. Above one, the law predicts too little."
        ),
        Figures(_residuals(evidence, name)),
    ]


def _law(evidence: Evidence, name: str) -> list[Block]:
    """Typeset the law and say what its letters and its note are."""
    law = evidence.fit.law
    alt = law.formula
    svg = figures.to_svg(figures.equation(law), name=f"{name}-equation", alt=alt)
    meanings = [
        f"{column}: {COLUMNS[column].meaning.lower()}" if column in COLUMNS else column
        for column in (law.target, *law.columns)
    ]
    found: list[Block] = [
        Heading("The law", 3),
        Figures((Figure(f"{name}-equation", svg, alt, f"{'; '.join(meanings)}."),)),
    ]
    return [*found, Text(law.note)] if law.note else found


def _parameters(evidence: Evidence) -> list[Block]:
    """Tabulate estimates, intervals and published constants."""
    fit = evidence.fit
    table = fit.parameters().rename(columns={"low": "90 % low", "high": "90 % high"})
    constants = published(evidence.law)
    for each in constants:
        heading = f"published {each.setting}" if len(constants) > 1 else "published"
        table[heading] = pd.Series(each.values).reindex(table.index)
    held = list(fit.data.options.get("fixed", {}))
    caption = (
        f"Estimates on the natural scale, with standard errors and percentile intervals from "
        f"{fit.search.boots_converged} bootstrap refits over {fit.data.clusters} clusters "
        f"({fit.data.cluster})."
    )
    if held:
        caption += f" Held, not estimated: {words.listed(held)}."
    found: list[Block] = [Heading("Parameters", 3), Table(table, caption)]
    found += [Text(sentence) for sentence in words.multipliers(fit)]
    if constants:
        lines = tuple(f"{p.setting}: {p.source} ({p.verified})." for p in constants)
        found.append(Bullets(("Published constants are from other data than these.", *lines)))
    return found


def _predictions(evidence: Evidence) -> Table:
    """Tabulate the predictions that the first sentences of the report quote."""
    settings = words.middle_settings(evidence)
    result = predict(evidence.fit, settings)
    names = {
        f"{side}_{level}": f"{level} % {side}" for level in (50, 90) for side in ("low", "high")
    }
    target = evidence.law.target
    columns = [target, *names, *({"perplexity_ratio"} & set(result.columns))]
    table = result[columns].rename(columns=names)
    if "bits" in settings:
        table.index = pd.Index(settings["bits"].map("{:g}".format), name="bits")
    else:
        table.index = pd.Index(["middle"], name="setting")
    where = words.listed(words.described(settings))
    return Table(table, f"At {where}. Intervals are for a new checkpoint.")


def _data(evidence: Evidence) -> list[Block]:
    """Say what was fitted on what."""
    data = evidence.fit.data
    text = (
        f"{words.plural(data.rows, 'row')} of {data.name} in {words.plural(data.clusters, 'cluster')} "
        f"({data.cluster}). {explain(data.set_aside)} The usable rows hash to {data.sha256}."
    )
    ranges = pd.DataFrame.from_dict(
        {
            figures.label(column): [count(v) if v >= 1e5 else number(v) for v in span]
            for column, span in data.ranges.items()
        },
        orient="index",
        columns=["lowest", "highest"],
    ).rename_axis("column")
    levels = tuple(f"{column}: {', '.join(values)}" for column, values in data.levels.items())
    found: list[Block] = [Heading("What was fitted on what", 3), Text(text)]
    if len(ranges):
        found.append(Table(ranges, "Ranges of the rows used; beyond them it is extrapolation."))
    return [*found, Bullets(levels)] if levels else found


def _predicted(evidence: Evidence, name: str) -> Figure:
    """Draw predicted against observed and describe it."""
    target = evidence.law.target
    typical = words.times(float(np.median(np.abs(evidence.residuals))))
    alt = (
        f"Observed against predicted {target} for {words.plural(len(evidence.rows), 'row')}, both "
        f"axes logarithmic; half of the rows lie within a factor of {typical} of the identity line."
    )
    axes = figures.predicted_observed(evidence.fit, evidence.rows)
    full = f"{name}-predicted"
    caption = f"{alt} Bands: where 50 and 90 % of new rows of new clusters fall around the law."
    return Figure(full, figures.to_svg(axes, name=full, alt=alt), alt, caption)


def _residuals(evidence: Evidence, name: str) -> tuple[Figure, ...]:
    """Draw the residuals against the law's columns and those with a trend."""
    found = []
    moved = trends(evidence)
    for column in dict.fromkeys((*evidence.fit.law.columns, *moved)):
        axes = figures.residuals_against(evidence.fit, evidence.rows, column)
        full = f"{name}-residuals-{slug(column)}"
        alt = f"Observed over predicted {evidence.law.target} against {column}, with medians."
        caption = f"Not in the law; rank correlation {moved[column]:.2f}" if column in moved else ""
        found.append(Figure(full, figures.to_svg(axes, name=full, alt=alt), alt, caption))
    return tuple(found)


def _held_out(group: Group, index: int, of: int) -> list[Block]:
    """Show the held-out scores of a group's fits side by side."""
    held_out, first = group.held_out, group.members[0]
    title = "Held-out scores"
    if of > 1:
        title += f": {first.law.target} on {first.fit.data.name}"
    found: list[Block] = [Heading(title, 2, f"held-out-{index + 1}")]
    text = (
        f"Each law is refitted without a {held_out.left_out}, and without the quarter of sizes that "
        f"is largest, and predicts the rows left out. Splits are made of the {held_out.rows} rows "
        f"that {'all the fits' if len(group.members) > 1 else 'the fit'} can use."
    )
    found.append(Text(" ".join((text, *held_out.notes))))
    if held_out.scores.empty:
        return found
    scored = held_out.scores.dropna(subset=["median_abs_log_error"])
    if len(scored):
        found.append(Figures(_score_figures(scored, f"held-out-{index + 1}")))
    found.append(_score_table(held_out.scores, several=len(group.members) > 1))
    failures = held_out.scores[held_out.scores["error"].fillna("") != ""]
    reasons = [f"{row.fit}, {row.held_out}: {row.error}" for row in failures.itertuples()]
    return [*found, Bullets(tuple(reasons), "Could not be scored")] if reasons else found


def _score_table(scores: pd.DataFrame, *, several: bool) -> Table:
    """Tabulate scores split by split, the fits under each other."""
    columns = {
        "rows": scores["rows"],
        "median |log error|": scores["median_abs_log_error"],
        "error, ×": np.exp(scores["median_abs_log_error"]),
        "predicted / observed": np.exp(scores["bias"]),
        "% inside 50 %": (100 * scores["coverage_50"]).round(),
        "% inside 90 %": (100 * scores["coverage_90"]).round(),
        "90 % high / low": np.exp(scores["width_90"]),
    }
    first = {"fit": scores["fit"]} if several else {}
    table = pd.DataFrame({**first, **columns})
    table.index = pd.Index(scores["held_out"], name="held out")
    order = np.argsort(pd.factorize(scores["held_out"])[0], kind="stable")
    caption = (
        "Error: median over the rows left out, as a logarithm and as a factor. Predicted over "
        "observed: median, the bias. Inside: percentage of rows inside the 50 % and the 90 % "
        "interval for a new checkpoint. High over low: median, the width of the 90 % interval."
    )
    return Table(table.iloc[order], caption)


def _score_figures(scored: pd.DataFrame, name: str) -> tuple[Figure, ...]:
    """Draw the errors and coverages of the splits."""
    drawn = []
    for kind, draw, what in (
        ("error", figures.held_out_error, "Typical error as a factor"),
        ("coverage", figures.held_out_coverage, "Share of rows inside their 90 % interval"),
    ):
        alt = f"{what} on each held-out split: " + "; ".join(
            f"{row.fit} on {row.held_out} "
            + (
                words.times(row.median_abs_log_error)
                if kind == "error"
                else words.percent(row.coverage_90)
            )
            for row in scored.itertuples()
        )
        full = f"{name}-{kind}"
        drawn.append(Figure(full, figures.to_svg(draw(scored), name=full, alt=alt), alt, ""))
    return tuple(drawn)


def _reproduction(groups: Sequence[Group], several: bool) -> list[Block]:
    """Say how to make each fit again."""
    found: list[Block] = [Heading("How to reproduce", 2, "reproduce")]
    for group in groups:
        for member in group.members:
            fit = member.fit
            versions = ", ".join(f"{name} {version}" for name, version in fit.versions.items())
            found += [Heading(member.label, 3)] if several else []
            found += [
                Code(words.command(member)),
                Text(
                    f"Made with {versions}; seed {fit.data.options.get('seed', 0)}; usable rows hash "
                    f"to {fit.data.sha256}. {words.reproduced(member)}"
                ),
            ]
    return found


def _sources(groups: Sequence[Group]) -> list[Block]:
    """List what to cite."""
    members = [member for group in groups for member in group.members]
    lines = [f"{m.law.name}: {m.law.source}." for m in members if m.law.source]
    lines += [f"{m.law.name} constants: {p.source}." for m in members for p in published(m.law)]
    lines += [
        "Cluster bootstrap: Cameron, Gelbach and Miller, Bootstrap-based improvements for inference "
        "with clustered errors, Review of Economics and Statistics 90 (2008).",
        "Huber loss and its 95 % efficiency at 1.345 standard deviations: Huber, Robust Statistics "
        "(1981), section 4.5.",
    ]
    lines += [line for member in members for line in _data_sources(member)]
    return [Heading("Sources", 2, "sources"), Bullets(tuple(dict.fromkeys(lines)))]


def _data_sources(evidence: Evidence) -> list[str]:
    """Cite a shipped dataset as its description asks."""
    if evidence.fit.data.name not in datasets.names():
        return []
    described = datasets.describe(evidence.fit.data.name)
    return [
        f"{described.name} ({described.kind}, licence: {described.licence}): {described.citation}"
    ]
