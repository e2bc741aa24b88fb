"""Further fits that a report makes: under other likelihoods, and without each run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from qscale.errors import QscaleError
from qscale.fit import fit as fit_law
from qscale.report.evidence import MOST_RUNS, fit_options
from qscale.validate import surprises

if TYPE_CHECKING:
    from qscale.report.evidence import Evidence, Refit


def sensitivity(evidence: Evidence) -> pd.DataFrame:
    """Estimates of the law's parameters under other losses, one column each, by parameter."""
    made = evidence.fit
    delta = made.search.huber_delta
    others: dict[str, dict[str, Any]] = {
        "Student's t": {"likelihood": "student_t"},
        "Gaussian": {"likelihood": "gaussian"},
    }
    if np.isfinite(delta):
        others = {
            f"Huber, δ × {factor:g}": {"likelihood": "huber", "huber_delta": factor * delta}
            for factor in (0.5, 2.0)
        } | others
    names = list(evidence.law.names)
    table = pd.DataFrame({"as fitted": pd.Series(made.values).loc[names]})
    for label, change in others.items():
        options = {**fit_options(made), "interval": "model", **change}
        if change["likelihood"] != "huber":
            options["huber_delta"] = None
        try:
            again = fit_law(evidence.table, evidence.law, **options, name=made.data.name)
        except QscaleError:
            continue
        table[label] = pd.Series(again.values).loc[names]
    return table.rename_axis("parameter")


def surprising(evidence: Evidence, refit: Refit) -> pd.DataFrame | None:
    """Return runs by how little the others predict them; None for too few or too many runs.

    Parameters
    ----------
    evidence
        A fit and its rows.
    refit
        From `qscale.report.evidence.refitter`.
    """
    data = evidence.fit.data
    known = evidence.rows.dropna(subset=[data.cluster])
    if not 4 <= known[data.cluster].nunique() <= MOST_RUNS:
        return None
    filled = {c: known[c].fillna("unknown") for c in fit_options(evidence.fit)["offset"]}
    return surprises(known.assign(**filled), refit, data.cluster)
