"""The what-if panel of a report: everything a page needs to predict as the fit itself does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from qscale.columns import COLUMNS
from qscale.errors import FitError
from qscale.fit.grouping import THIS
from qscale.predict import predict
from qscale.report.blocks import Panel, Text
from qscale.report.expression import trees
from qscale.report.tables import count, number
from qscale.report.words import middle_settings

if TYPE_CHECKING:
    from qscale.fit import Fit
    from qscale.report.evidence import Evidence

LEVELS = (50, 90)
_NODES = 24  # of the quadrature behind Student's quantile: exact to rounding
_REFITS = 400  # fewer are repeated, as `Fit.quantiles` does
_WIDE = 20.0  # ratio of a column's ends from which its slider is logarithmic


def panel(evidence: Evidence, name: str) -> Panel | Text:
    """Return the panel of one fit, or a sentence that says why it has none.

    Parameters
    ----------
    evidence
        A fit beside its rows.
    name
        Prefix of the panel's ids in the page.
    """
    why = _left_out(evidence.fit)
    if why:
        return Text(f"There is no what-if panel for this fit: {why}")
    law = law_of(evidence.fit)
    inputs = _inputs(evidence)
    law["inputs"] = inputs
    point = {each["column"]: each["start"] for each in inputs}
    for each in inputs:
        if each["times"]:
            point[each["column"]] *= point[each["times"]]
    answer = predict(evidence.fit, pd.DataFrame([point])).iloc[0]
    start = {str(column): value for column, value in answer.items()}
    return Panel(name, law, _caption(evidence.fit, law["interval"]), start)


def _left_out(fit: Fit) -> str:
    """Say why a fit cannot be evaluated outside of Python; empty if it can."""
    given = {*fit.columns, *fit.categories}
    for term in fit.effects.terms:
        if set(term.columns) <= given or any(THIS in level for level in term.levels):
            return f"its prediction depends on which known value of {term.text} a row has."
    try:
        trees(fit.law.factors)
    except FitError:
        return "its law has a Python function, which a page cannot run."
    return ""


def law_of(fit: Fit) -> dict[str, Any]:
    """Return what a program needs to predict a new checkpoint, as JSON-able values.

    The keys are those that ``templates/law.js`` reads: the tree of each factor, the parameters on
    the solver's scale and, for the interval, what `Fit.quantiles` uses. A fit without intervals has
    None for ``interval``.
    """
    p = len(fit.theta)
    robust = fit.interval in ("sandwich", "conformal", "bootstrap") and bool(fit.cov.any())
    effects = fit.all_effects
    offsets = {offset.text: offset.column for offset in fit.offsets}
    own = {
        "residual": float(effects.residual),
        "terms": [
            {
                "variance": float(variance),
                "slope": term.slope,
                "center": term.center,
                "column": offsets.get(term.text),
                "levels": list(term.levels) if term.text in offsets else [],
            }
            for term, variance in zip(effects.terms, effects.variances, strict=True)
        ],
        "covariance": (fit.cov if robust else effects.cov[:p, :p]).tolist(),
        "covariance_slopes": effects.cov_slopes.tolist(),
        "scales_covariance": effects.scales_cov.tolist(),
    }
    arrays = (own["covariance"], own["covariance_slopes"], own["scales_covariance"])
    finite = all(np.isfinite(np.array(array, dtype=float)).all() for array in arrays)
    kind = {"bootstrap": "bootstrap", "conformal": "conformal"}.get(fit.interval, "student")
    if not finite or (kind == "bootstrap" and len(fit.draws) < 20):
        return {**_center(fit), "interval": None}
    return {**_center(fit), "interval": kind, "effects": own, **_reach(fit, kind)}


def _center(fit: Fit) -> dict[str, Any]:
    """Return what the median needs."""
    return {
        "target": fit.target,
        "link": fit.law.link,
        "names": list(fit.law.names),
        "theta": fit.theta.tolist(),
        "factors": [
            {"latex": factor.latex, "columns": list(factor.columns), "tree": tree}
            for factor, tree in zip(fit.law.factors, trees(fit.law.factors), strict=True)
        ],
    }


def _reach(fit: Fit, kind: str) -> dict[str, Any]:
    """Return what the ends of intervals need beside the variance."""
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    found: dict[str, Any] = {"quadrature": [nodes.tolist(), weights.tolist()]}
    if kind == "conformal" and fit.calibration is not None:
        reach = fit.calibration.reach(np.array([0.5 + level / 200 for level in LEVELS]))
        finite = [float(x) if np.isfinite(x) else None for x in reach]
        found["reach"] = dict(zip(map(str, LEVELS), finite, strict=True))
    if kind == "bootstrap":
        draws = -(-_REFITS // len(fit.draws)) * len(fit.draws)
        dof = max(fit.data.clusters - 1, 1)
        found["draws"] = fit.draws.tolist()
        found["noise"] = np.random.default_rng(0).standard_t(dof, (draws, 1))[:, 0].tolist()
    return found


def _inputs(evidence: Evidence) -> list[dict[str, Any]]:
    """Describe what a reader can set, numbers in the order of the schema, then labels."""
    fit, rows = evidence.fit, evidence.rows
    ordered = sorted(fit.columns, key=lambda c: list(COLUMNS).index(c) if c in COLUMNS else 99)
    middle = {**rows.select_dtypes("number").quantile(0.5, interpolation="lower")}
    middle |= middle_settings(evidence).iloc[0].to_dict()
    found = []
    for column in ordered:
        if pd.api.types.is_numeric_dtype(rows[column]):
            relative = column == "lr" and "lr_peak" in fit.columns
            values = rows["lr"] / rows["lr_peak"] if relative else rows[column]
            span = None if relative else fit.data.ranges.get(column)
            start = float(middle[column]) / (float(middle["lr_peak"]) if relative else 1.0)
            found.append(_slider(column, values.astype(float), span, start, relative=relative))
        else:
            levels = sorted(map(str, rows[column].dropna().unique()))
            found.append(_choice(column, levels, str(rows[column].mode().iloc[0])))
    found += [_choice(c, ["", *levels], "") for c, levels in fit.categories.items()]
    return found


def _slider(
    column: str,
    values: pd.Series,
    span: tuple[float, float] | None,
    start: float,
    *,
    relative: bool,
) -> dict[str, Any]:
    """Describe a number: where it starts, what was fitted and how far its slider goes."""
    low, high = span or (float(values.min()), float(values.max()))
    log = low > 0 and high / low > _WIDE
    if log:
        ends = [low / 4, high * 4]
    else:
        wider = [low - 0.25 * (high - low), high + 0.25 * (high - low)]
        ends = [max(wider[0], 0.0) if low >= 0 else wider[0], wider[1]]
    if column.startswith("bits"):
        ends = [min(low, 2.0), max(high, 8.0)]
    if relative:
        ends = [0.0, 1.0]
    meaning = COLUMNS[column].meaning if column in COLUMNS else ""
    unit = COLUMNS[column].unit if column in COLUMNS else ""
    return {
        "column": column,
        "label": "lr / lr_peak" if relative else column,
        "hint": "1 in the stable phase, 0 once fully decayed" if relative else meaning,
        "unit": "" if relative else unit,
        "times": "lr_peak" if relative else None,
        "start": start,
        "low": low,
        "high": high,
        "fitted": f"{_said(low)} to {_said(high)}",
        "ends": ends,
        # A rounded rate may be a little above its rounded peak.
        "plausible": [0.0, max(1.0, high)] if relative else _plausible(column),
        "log": log,
    }


def _plausible(column: str) -> list[float | None]:
    """Return the range outside which Python refuses a value; None where there is no end."""
    known = COLUMNS.get(column)
    return [None, None] if known is None else [known.low, known.high]


def _choice(column: str, levels: list[str], start: str) -> dict[str, Any]:
    """Describe a label to choose; an empty one is the average of all."""
    meaning = COLUMNS[column].meaning if column in COLUMNS else ""
    return {
        "column": column,
        "label": column,
        "hint": meaning,
        "unit": "",
        "times": None,
        "start": start,
        "levels": levels,
    }


def _said(value: float) -> str:
    """Say an end of a range."""
    return count(value) if abs(value) >= 1e5 else number(value)


def _caption(fit: Fit, interval: str | None) -> str:
    """Say what the panel's numbers are."""
    if interval is None:
        return (
            f"The median prediction of {fit.target}. This fit has no intervals, so that the panel "
            "shows none."
        )
    return (
        f"The numbers of qscale predict for a new checkpoint: median and intervals of {fit.target} "
        f"by the fit's {fit.interval} method, computed in this page from the fit's own parameters. "
        "The line above says what each column does to the prediction, against the start."
    )
