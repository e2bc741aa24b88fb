"""Fits side by side, and their scores on held-out rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from qscale.report import figures, words
from qscale.report.blocks import Bullets, Figures, Heading, Table, Text
from qscale.report.evidence import LARGEST, LEAVE_ONE_OUT
from qscale.report.svg import drawn
from qscale.report.tables import number
from qscale.validate.league import BASELINE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from qscale.report.blocks import Block
    from qscale.report.evidence import Group


def comparison(groups: Sequence[Group]) -> list[Block]:
    """Put the fits side by side, and rank only those that can be."""
    records = {}
    for group in groups:
        for member in group.members:
            data = member.fit.data
            scores = group.summary.get((member.label, LEAVE_ONE_OUT))
            records[member.label] = {
                "held-out error, ×": float(np.exp(scores.error)) if scores else np.nan,
                "% inside 90 %": round(100 * scores.coverage[90]) if scores else np.nan,
                "typical residual, ×": float(np.exp(np.median(np.abs(member.residuals)))),
                "rows": data.rows,
                "clusters": data.clusters,
                "status": member.fit.search.status,
                "law": member.law.name,
                "target": member.law.target,
                "table": data.name,
            }
    frame = pd.DataFrame.from_dict(records, orient="index").rename_axis("fit")
    caption = (
        "Typical residual: median over the rows, as a factor. Held-out error: mean over the groups "
        "left out of the median error of their rows; inside 90 %: share of those rows inside their "
        "90 % interval."
    )
    found: list[Block] = [Heading("The fits side by side"), Table(frame, caption)]
    found += [Text(sentence) for group in groups for sentence in _ranking(group)]
    found += _shared_laws(groups)
    if len(groups) > 1:
        found.append(
            Text(
                "Fits on different tables or of different targets are not ranked against each "
                "other: their errors are of different rows."
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


def _shared_laws(groups: Sequence[Group]) -> list[Block]:
    """Put estimates of one law on several tables side by side."""
    fits: dict[str, dict[str, pd.Series]] = {}
    for group in groups:
        for member in group.members:
            table = member.fit.parameters().loc[list(member.law.names)]
            spans = zip(table["estimate"], table["low"], table["high"], strict=True)
            cells = [
                f"{number(e)} ({number(low, 3)} to {number(high, 3)})" for e, low, high in spans
            ]
            column = pd.Series(cells, index=table.index)
            fits.setdefault(member.law.name, {})[member.label] = column
    return [
        Table(pd.DataFrame(columns), f"Estimates of {law} with 90 % intervals.")
        for law, columns in fits.items()
        if len(columns) > 1
    ]


def held_out_scores(group: Group, index: int, of: int) -> list[Block]:
    """Show the held-out scores of a group's fits side by side."""
    held_out, first = group.held_out, group.members[0]
    title = "Held-out scores"
    if of > 1:
        title += f": {first.law.target} on {first.fit.data.name}"
    found: list[Block] = [Heading(title, 2, f"held-out-{index + 1}")]
    text = (
        f"Each law is refitted without a {held_out.left_out}, and without the largest quarter of "
        f"sizes, and predicts the rows left out. Splits are made of the {held_out.rows} rows "
        f"that {'all the fits' if len(group.members) > 1 else 'the fit'} can use."
    )
    found.append(Text(" ".join((text, *held_out.notes))))
    if held_out.scores.empty:
        return found
    found += [Text(sentence) for sentence in against_baseline(group)]
    scores = pd.concat([held_out.scores, held_out.baseline], ignore_index=True)
    scored = scores.dropna(subset=["median_abs_log_error"])
    if len(scored):
        found.append(_score_figures(scored, f"held-out-{index + 1}"))
    found.append(_score_table(scores))
    failures = held_out.scores[held_out.scores["error"].fillna("") != ""]
    reasons = [f"{row.fit}, {row.held_out}: {row.error}" for row in failures.itertuples()]
    return [*found, Bullets(tuple(reasons), "Could not be scored")] if reasons else found


def against_baseline(group: Group) -> list[str]:
    """Say whether each fit beats the mean of each method and bit width on rows it has not seen."""
    naive = group.held_out.baseline.set_index(["protocol", "held_out"])["median_abs_log_error"]
    sentences = []
    for member in group.members:
        own = group.held_out.scores
        own = own[own["fit"] == member.label].set_index(["protocol", "held_out"])
        both = pd.DataFrame({"law": own["median_abs_log_error"], "naive": naive}).dropna()
        if both.empty:
            continue
        wins = int((both["law"] < both["naive"]).sum())
        mean = both.mean()
        sentences.append(
            f"A naive rule, the mean of the known rows of each method and bit width "
            f"({BASELINE}), errs by ×{words.times(mean['naive'])} on average over these splits; "
            f"{member.label} by ×{words.times(mean['law'])}, and it is closer on {wins} of "
            f"{len(both)}."
            + (
                ""
                if mean["law"] < mean["naive"]
                else " On such rows the law is no better than knowing the bit width alone: do not "
                "use it to extrapolate in this direction."
            )
        )
    return sentences


def _score_table(scores: pd.DataFrame) -> Table:
    """Tabulate scores split by split, the fits and the naive rule under each other."""
    columns = {
        "rows": scores["rows"],
        "median |log error|": scores["median_abs_log_error"],
        "error, ×": np.exp(scores["median_abs_log_error"]),
        "predicted / observed": np.exp(scores["bias"]),
        "% inside 50 %": (100 * scores["coverage_50"]).round(),
        "% inside 90 %": (100 * scores["coverage_90"]).round(),
    }
    with np.errstate(over="ignore"):  # a width beyond any number is shown as infinite
        columns["90 % high / low"] = np.exp(scores["width_90"])
    table = pd.DataFrame({"fit": scores["fit"], **columns})
    table.index = pd.Index(scores["held_out"], name="held out")
    order = np.argsort(pd.factorize(scores["held_out"])[0], kind="stable")
    caption = (
        "Error: median over the rows left out, as a logarithm and as a factor. Predicted over "
        "observed: median, the bias. Inside: percentage of rows inside the 50 % and the 90 % "
        "interval for a new checkpoint. High over low: median, the width of the 90 % interval."
    )
    return Table(table.iloc[order], caption)


def _score_figures(scored: pd.DataFrame, name: str) -> Figures:
    """Draw the errors and coverages of the splits."""
    splits = scored["fit"] + " on " + scored["held_out"] + " "
    errors = splits + scored["median_abs_log_error"].map(words.off_by)
    shares = splits + scored["coverage_90"].map(words.percent)
    return Figures(
        (
            drawn(
                figures.held_out_error(scored),
                name=f"{name}-error",
                alt=f"Typical error on each held-out split: {'; '.join(errors)}.",
            ),
            drawn(
                figures.held_out_coverage(scored),
                name=f"{name}-coverage",
                alt=f"Share of rows inside their 90 % interval: {'; '.join(shares)}.",
            ),
        )
    )
