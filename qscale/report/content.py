"""What a report says, as blocks: answers first, then each fit, held-out scores, reproduction."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from qscale import datasets
from qscale.columns import COLUMNS
from qscale.fit import INTERVAL_MEANING, explain
from qscale.laws import published
from qscale.predict import predict
from qscale.report import checks, figures, words
from qscale.report.blocks import Bullets, Code, Figures, Heading, Table, Text
from qscale.report.cautions import cautions, trends
from qscale.report.cite import bibtex, methods_paragraph
from qscale.report.comparison import comparison, held_out_scores
from qscale.report.diagnostics import influence, influence_in_words
from qscale.report.evidence import refitter
from qscale.report.panel import panel
from qscale.report.svg import drawn
from qscale.report.tables import count, number
from qscale.select import exponents_within

if TYPE_CHECKING:
    from collections.abc import Sequence

    from qscale.report.blocks import Block, Figure
    from qscale.report.evidence import Evidence, Group, Refit

SURPRISING = 0.1
QUESTION = "How much will quantization cost, and how sure are we?"
REML = "Restricted maximum likelihood: Patterson and Thompson, Biometrika 58 (1971)."
_FREEDOM = "Degrees of freedom: Satterthwaite, Biometrics Bulletin 2 (1946)."
_ROBUST = "Cluster-robust covariance: Bell and McCaffrey, Survey Methodology 28 (2002)."
METHODS = {
    "model": _FREEDOM,
    "profile": _FREEDOM,
    "sandwich": _ROBUST,
    "conformal": _ROBUST,
    "bootstrap": "Cluster bootstrap: Cameron, Gelbach and Miller, Review of Economics and "
    "Statistics 90 (2008).",
    "huber": "Huber loss, 95 % efficient at 1.345 sigma: Huber, Robust Statistics (1981), section "
    "4.5.",
}


def blocks(groups: Sequence[Group]) -> list[Block]:
    """Return the whole report."""
    pairs = [(member, group) for group in groups for member in group.members]
    several = len(pairs) > 1
    names: list[str] = []
    for member, _ in pairs:
        name = words.slug(member.label)
        names.append(name if name not in names else f"{name}-{len(names) + 1}")
    return [
        *_answers(groups, several),
        *(comparison(groups) if several else []),
        *(b for pair, name in zip(pairs, names, strict=True) for b in _fit(*pair, name)),
        *(b for i, group in enumerate(groups) for b in held_out_scores(group, i, len(groups))),
        *_reproduction(groups, several),
        *_to_paste(groups, several),
        *_sources(groups),
    ]


def _answers(groups: Sequence[Group], several: bool) -> list[Block]:
    """Answer the question for each fit."""
    found: list[Block] = [Heading(QUESTION, 1)]
    for group in groups:
        for member in group.members:
            text = words.headline(member, group.held_out, group.summary)
            found.append(Text(f"{member.label}: {text}" if several else text, leading=True))
    return found


def _fit(evidence: Evidence, group: Group, name: str) -> list[Block]:
    """Describe one fit; ``name`` begins its figures' names."""
    fit, law = evidence.fit, evidence.law
    own = "" if evidence.label == law.name else f"{evidence.label}: "
    found, refit = cautions(evidence, group.summary), refitter(evidence)
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
        *_sensitivity(evidence),
        Heading("What it predicts in the middle of the rows", 3),
        _predictions(evidence),
        panel(evidence, name),
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
        *_surprising(evidence, refit),
        *_influence(evidence, refit),
        *_exponents(evidence, name),
    ]


def _law(evidence: Evidence, name: str) -> list[Block]:
    """Typeset the law and say what its letters and its note are."""
    law = evidence.fit.law
    meanings = [
        f"{column}: {COLUMNS[column].meaning.lower()}" if column in COLUMNS else column
        for column in (law.target, *law.columns)
    ]
    equation = drawn(
        figures.equation(law),
        name=f"{name}-equation",
        alt=law.formula,
        caption=f"{'; '.join(meanings)}.",
    )
    found: list[Block] = [Heading("The law", 3), Figures((equation,))]
    return [*found, Text(law.note)] if law.note else found


def _parameters(evidence: Evidence) -> list[Block]:
    """Tabulate estimates, intervals and published constants."""
    fit = evidence.fit
    table = fit.parameters().rename(columns={"low": "90 % low", "high": "90 % high"})
    constants = published(evidence.law)
    for each in constants:
        heading = f"published {each.setting}" if len(constants) > 1 else "published"
        table[heading] = table.index.map(each.values)
    held = list(fit.data.options.get("fixed", {}))
    caption = (
        f"Estimates on the natural scale, with standard errors. {INTERVAL_MEANING[fit.interval]} "
        f"{words.plural(fit.data.clusters, 'cluster')} ({fit.data.cluster})."
    )
    if held:
        caption += f" Held, not estimated: {words.listed(held)}."
    found: list[Block] = [Heading("Parameters", 3), Table(table, caption)]
    found += [Text(sentence) for sentence in (words.scatter(fit), *words.multipliers(fit))]
    if constants:
        lines = (f"Published for {p.setting}: {p.source} ({p.verified})." for p in constants)
        found.append(Bullets(tuple(lines)))
    return found


def _sensitivity(evidence: Evidence) -> list[Block]:
    """Tabulate the estimates under other losses."""
    caption = (
        "The same rows under other likelihoods of residuals. Where a row of this table moves by "
        "more than its standard error, single rows decide."
    )
    heading = Heading("Sensitivity to the loss", 3)
    return [heading, Table(checks.sensitivity(evidence), caption)]


def _surprising(evidence: Evidence, refit: Refit) -> list[Block]:
    """Tabulate the runs that the others predict worst."""
    table = checks.surprising(evidence, refit)
    if table is None:
        return []
    shown = table.head(8).set_index("cluster").rename_axis(evidence.fit.data.cluster)
    worst = table.iloc[0]
    text = f"Each {evidence.fit.data.cluster} against a fit of all others. " + (
        f"{worst['cluster']} lies {number(abs(worst['z']), 2)} standard deviations "
        f"{'above' if worst['z'] > 0 else 'below'} what they predict, which chance alone would do "
        f"with probability {number(worst['p_holm'], 2)} for any of them: check how it was recorded."
        if worst["p_holm"] < SURPRISING
        else "None lies further from what they predict than chance allows."
    )
    caption = (
        "log_ratio: mean log of observed over predicted; sd: what the fit expects of it; p_holm: "
        "adjusted for the number of rows of this table before it was cut to eight."
    )
    return [
        Heading("Runs that the others do not predict", 3),
        Text(text),
        Table(shown, caption),
    ]


def _influence(evidence: Evidence, refit: Refit) -> list[Block]:
    """Tabulate how far the estimates move when one cluster is left out."""
    table = influence(evidence, refit)
    if table is None:
        return []
    caption = (
        "Estimate without the cluster minus that with it, in standard errors, on the scale that "
        "the fit searches (logarithms of amplitudes). The eight with the largest move."
    )
    return [
        Heading("What single clusters decide", 3),
        Text(influence_in_words(table)),
        Table(table.head(8), caption),
    ]


def _exponents(evidence: Evidence, name: str) -> list[Block]:
    """Show the tokens exponent run by run where runs have several checkpoints."""
    fit = evidence.fit
    power = [f for f in evidence.law.factors if f.kind == "power" and f.columns == ("tokens",)]
    if not power or fit.data.cluster not in evidence.rows.columns:
        return []
    table = exponents_within(evidence.rows, fit.target, cluster=fit.data.cluster)
    if len(table) < 2:
        return []
    parts = table.groupby("part", sort=False)["exponent"].agg(["median", "size"])
    listed = words.listed(
        [f"{number(row['median'], 2)} {part} ({row['size']:.0f})" for part, row in parts.iterrows()]
    )
    estimate = fit.values[power[0].parameters[0].name]
    rate = {"lr", "lr_peak"} & set(evidence.law.columns)
    text = (
        f"Median exponent of tokens within runs: {listed}. The law's own is {number(estimate, 2)}. "
        + (
            "The law has the learning rate, and its exponent of tokens is at a given rate."
            if rate
            else "The law does not have the learning rate: where the rate decays along a run, its "
            "exponent of tokens also stands for the decay and will not hold under another schedule."
        )
    )
    figure = drawn(
        figures.run_exponents(table, estimate),
        name=f"{name}-exponents",
        alt=f"Exponent of tokens within {len(table)} parts of runs. {text}",
        caption="Bars: 90 % intervals that take rows as independent.",
    )
    return [Heading("Tokens and the schedule", 3), Text(text), Figures((figure,))]


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
        f"{words.plural(data.rows, 'row')} of {data.name} in "
        f"{words.plural(data.clusters, 'cluster')} ({data.cluster}). "
        f"{explain(data.set_aside)} The usable rows hash to {data.sha256}."
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
    typical = words.off_by(float(np.median(np.abs(evidence.residuals))))
    alt = (
        f"Observed against predicted {target} for {words.plural(len(evidence.rows), 'row')}, both "
        f"axes logarithmic; half of the rows lie within {typical} of the identity line."
    )
    return drawn(
        figures.predicted_observed(evidence.fit, evidence.rows),
        name=f"{name}-predicted",
        alt=alt,
        caption=f"{alt} Bands: where 50 and 90 % of new rows of new clusters fall around the law.",
    )


def _residuals(evidence: Evidence, name: str) -> tuple[Figure, ...]:
    """Draw the residuals against the law's columns and those with a trend."""
    found = []
    moved = trends(evidence)
    for column in dict.fromkeys((*evidence.fit.law.columns, *moved)):
        rank = f"Not in the law; rank correlation {moved[column]:.2f}." if column in moved else ""
        found.append(
            drawn(
                figures.residuals_against(evidence.fit, evidence.rows, column),
                name=f"{name}-residuals-{words.slug(column)}",
                alt=f"Observed over predicted {evidence.law.target} against {column}.",
                caption=rank,
            )
        )
    return tuple(found)


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
                    f"Made with {versions}; seed {fit.data.options.get('seed', 0)}; usable rows "
                    f"hash to {fit.data.sha256}. {words.reproduced(member)}"
                ),
            ]
    return found


def _to_paste(groups: Sequence[Group], several: bool) -> list[Block]:
    """Give a methods paragraph for each fit, and BibTeX."""
    found: list[Block] = [Heading("Methods and citations to paste", 2, "cite")]
    for group in groups:
        for member in group.members:
            found += [Heading(member.label, 3)] if several else []
            found.append(Code(methods_paragraph(member, group)))
    return [*found, Code(bibtex([member for group in groups for member in group.members]))]


def _sources(groups: Sequence[Group]) -> list[Block]:
    """List what to cite."""
    members = [member for group in groups for member in group.members]
    lines = [f"{m.law.name}: {m.law.source}." for m in members if m.law.source]
    lines += [f"{m.law.name} constants: {p.source}." for m in members for p in published(m.law)]
    lines.append(REML)
    for member in members:
        used = (member.fit.interval, member.fit.data.options.get("likelihood", "huber"))
        lines += [METHODS[name] for name in used if name in METHODS]
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
