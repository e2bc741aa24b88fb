"""A model card of fits for the Hugging Face Hub: metadata that its index reads, and plain words."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from qscale.report.cautions import cautions
from qscale.report.cite import bibtex
from qscale.report.evidence import predicted
from qscale.report.tables import count, escape_markdown, number, to_markdown
from qscale.report.words import headline
from qscale.validate.league import BASELINE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from qscale.report.evidence import Evidence, Group

_CAPTION = (
    "Medians of the fitted rows. Predictions are of the law for the average group; how it does on "
    "rows that it has not seen is in this card's metadata."
)


def model_card(groups: Sequence[Group]) -> str:
    """Return the card as Markdown with a YAML block.

    The block's ``model-index`` has one result for each split: the median error on the rows left
    out, the share of them inside the 90 % prediction interval, and the error of the mean of each
    method and bit width. The text has measured beside predicted degradation, limits and citations.

    Parameters
    ----------
    groups
        Fits beside their rows, with held-out scores.
    """
    pairs = [(member, group) for group in groups for member in group.members]
    fields: dict[str, Any] = {
        "library_name": "qscale",
        "tags": ["quantization", "scaling-law", *dict.fromkeys(m.law.name for m, _ in pairs)],
        "model-index": [
            {"name": member.label, "results": _results(member, group)} for member, group in pairs
        ],
    }
    # JSON is YAML: no text in it can be read as anything but a text.
    head = "\n".join(f"{key}: {json.dumps(v, ensure_ascii=False)}" for key, v in fields.items())
    sections = [_section(member, group) for member, group in pairs]
    citation = f"## Citation\n\n```bibtex\n{bibtex([member for member, _ in pairs])}\n```"
    return f"---\n{head}\n---\n\n" + "\n\n".join([*sections, citation]) + "\n"


def _results(evidence: Evidence, group: Group) -> list[dict[str, Any]]:
    """Return the held-out scores of one fit in the form of the Hub's model index."""
    naive = group.held_out.baseline.set_index(["protocol", "held_out"])["median_abs_log_error"]
    own = group.held_out.scores
    own = own[own["fit"] == evidence.label].dropna(subset=["median_abs_log_error"])
    found = []
    for row in own.to_dict(orient="records"):
        scores = {
            "median_error_factor": float(np.exp(row["median_abs_log_error"])),
            "coverage_90": float(row["coverage_90"]),
            f"median_error_factor_{BASELINE}": float(
                np.exp(naive.get((row["protocol"], row["held_out"]), np.nan))
            ),
        }
        metrics = [
            {"type": name, "name": f"{name.replace('_', ' ')} of {evidence.law.target}", "value": v}
            for name, v in scores.items()
            if np.isfinite(v)
        ]
        name = evidence.fit.data.name
        dataset = {"name": name, "type": name, "split": f"{row['held_out']} left out"}
        task = {"type": "text-generation", "name": f"prediction of {evidence.law.target}"}
        found.append({"task": task, "dataset": dataset, "metrics": metrics})
    return found


def _section(evidence: Evidence, group: Group) -> str:
    """Describe one fit."""
    fit = evidence.fit
    limits = [
        f"{column}: {_said(low)} to {_said(high)}"
        for column, (low, high) in fit.data.ranges.items()
        if column in fit.columns
    ]
    warnings = cautions(evidence, group.summary).values()
    lines = [
        f"# {escape_markdown(evidence.label)}",
        escape_markdown(headline(evidence, group.held_out, group.summary)),
        f"The law is {escape_markdown(fit.law.formula)}; its file is read by `qscale predict`.",
        "## Measured and predicted degradation",
        str(to_markdown(degradation(evidence))),
        _CAPTION,
        "## Limits",
        "\n".join(f"- {escape_markdown(line)}" for line in (*limits, *warnings)),
    ]
    return "\n\n".join(lines)


def degradation(evidence: Evidence) -> pd.DataFrame:
    """Return measured beside predicted degradation, by family and bit width where rows have them.

    Returns
    -------
    pandas.DataFrame
        Rows counted, and medians of measured and predicted target in its unit, and of their ratio.
    """
    rows, target = evidence.rows, evidence.law.target
    measured = rows[target].to_numpy(dtype=float)
    expected = predicted(evidence.fit, rows)
    table = pd.DataFrame(
        {"measured": measured, "predicted": expected, "measured / predicted": measured / expected}
    )
    keys = [c for c in ("family", "method", "bits") if c in rows.columns and rows[c].notna().any()]
    names = [
        rows[key].map(lambda value: number(value) if pd.notna(value) else "unknown") for key in keys
    ]
    joined = pd.concat(names, axis=1).agg(", ".join, axis=1) if names else "all rows"
    groups = table.assign(setting=joined).groupby("setting")
    found = groups.median()
    found.insert(0, "rows", groups.size())
    return found.rename_axis(", ".join(keys) or "rows")


def _said(value: float) -> str:
    """Say an end of a range."""
    return count(value) if abs(value) >= 1e5 else number(value)
