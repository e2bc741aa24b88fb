"""Plain sentences built from the numbers of a fit."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from qscale.columns import COLUMNS
from qscale.fit import STATUS_MEANING
from qscale.laws import LAWS, is_named
from qscale.predict import predict
from qscale.report.evidence import LARGEST, LEAVE_ONE_OUT, fit_options
from qscale.report.tables import count, number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from qscale.fit import Fit
    from qscale.report.evidence import Evidence, HeldOut, Summaries, Summary

SMALL = 0.1  # log errors below it are said in percent
_MOST_BITS = 3


def listed(items: Sequence[str]) -> str:
    """Join items as in a sentence.

    Examples
    --------
    >>> listed(["tokens", "bits", "lr"])
    'tokens, bits and lr'
    """
    *first, last = items
    return f"{', '.join(first)} and {last}" if first else last


def times(log_factor: float) -> str:
    """Say a log factor as a factor.

    Examples
    --------
    >>> times(0.6931)
    '2'
    """
    return number(float(np.exp(log_factor)), 3)


def off_by(log_error: float) -> str:
    """Say an absolute log error, in percent where it is small.

    Examples
    --------
    >>> off_by(0.003), off_by(0.6931)
    ('0.3 %', 'a factor of 2')
    """
    if log_error < SMALL:
        return f"{number(100 * float(np.expm1(log_error)), 2)} %"
    return f"a factor of {times(log_error)}"


def percent(share: float) -> str:
    """Say a share in whole percent."""
    return f"{100 * share:.0f} %"


def plural(number_of: int, noun: str) -> str:
    """Say how many.

    Examples
    --------
    >>> plural(1, "row"), plural(2, "row")
    ('1 row', '2 rows')
    """
    return f"{number_of:,} {noun}" + ("" if number_of == 1 else "s")


def value_in_words(column: str, value: float) -> str:
    """Say the value of a column with its unit.

    Examples
    --------
    >>> value_in_words("n_params", 7e9), value_in_words("lr_peak", 3e-4)
    ('7B parameters', 'lr_peak 3e-4')
    """
    unit = COLUMNS[column].unit if column in COLUMNS else ""
    if unit in {"parameters", "tokens"}:
        return f"{count(value)} {unit}"
    if column == "bits":
        return f"{value:g} bit{'' if value == 1 else 's'}"
    return f"{column} {number(value, 3)}"


def slug(label: str) -> str:
    """Return a label as part of a file name or anchor.

    Examples
    --------
    >>> slug("fits/GPTQ ouyang.json")
    'fits-gptq-ouyang-json'
    """
    return re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-") or "fit"


def middle_settings(evidence: Evidence) -> pd.DataFrame:
    """Return settings in the middle of the fitted rows, at the bit widths with most rows.

    Returns
    -------
    pandas.DataFrame
        The law's columns, without offsets: for each the lower median of the usable rows.
    """
    columns = list(evidence.law.columns)
    middle = evidence.rows[columns].quantile(0.5, interpolation="lower")
    settings = pd.DataFrame([middle])
    if "bits" in columns:
        most = evidence.rows["bits"].value_counts().sort_index(ascending=False)
        widths = sorted(most.nlargest(_MOST_BITS, keep="first").index, reverse=True)
        settings = settings.drop(columns="bits").merge(pd.DataFrame({"bits": widths}), how="cross")
    return settings[columns].reset_index(drop=True)


def described(settings: pd.DataFrame) -> list[str]:
    """Say the values that `middle_settings` have in common, size and tokens first."""
    common = [column for column in settings.columns if column != "bits"]
    common.sort(key=lambda column: list(COLUMNS).index(column) if column in COLUMNS else 99)
    return [value_in_words(column, settings[column][0]) for column in common]


def headline(evidence: Evidence, held_out: HeldOut, summary: Summaries) -> str:
    """Answer in a few sentences what quantization will cost and how sure that is.

    Parameters
    ----------
    evidence
        A fit beside its rows.
    held_out
        Scores of the fit and of those it is compared with.
    summary
        `qscale.report.evidence.summarize` of the scores.
    """
    fit = evidence.fit
    data = f"{plural(fit.data.rows, 'row')} of {fit.data.name}"
    if fit.search.status == "failed":
        return (
            f"This fit of {fit.law.name} to {data} failed ({fit.search.detail}): "
            "its numbers say nothing about what quantization costs."
        )
    sentences = [_cost(evidence), _sureness(evidence.label, held_out, summary)]
    if fit.search.status != "converged":
        sentences.append(f"Status {fit.search.status}: {fit.search.detail}.")
    return " ".join(sentences)


def _cost(evidence: Evidence) -> str:
    """Say what the law predicts in the middle of its rows."""
    fit, settings = evidence.fit, middle_settings(evidence)
    result = predict(fit, settings)
    offsets = [f.options["column"] for f in fit.law.factors if f.kind == "offset"]
    known = [*described(settings), *(f"the average {column}" for column in offsets)]
    rows = f"the middle of its {plural(fit.data.rows, 'row')}"
    at = f"At {listed(known)}, {rows}, " if known else f"In {rows}, "
    parts: list[str] = []
    columns = result[[fit.law.target, "low_90", "high_90"]].to_numpy()
    for i, numbers in enumerate(columns):
        bits = f" at {value_in_words('bits', settings['bits'][i])}" if "bits" in settings else ""
        value, low, high = apart(numbers.tolist())
        what = "" if parts else "90 % of new checkpoints: "
        interval = "no interval" if np.isnan(numbers[1]) else f"{what}{low} to {high}"
        parts.append(f"{value}{bits} ({interval})")
    methods = fit.data.levels.get("method", ())
    by = f" by {methods[0]}" if len(methods) == 1 else ""
    if fit.law.target == "delta_loss":
        says = f"quantization{by} is predicted to raise the loss (nats/token) by {listed(parts)}."
    else:
        meaning = COLUMNS[fit.law.target].meaning if fit.law.target in COLUMNS else ""
        unit = COLUMNS[fit.law.target].unit if fit.law.target in COLUMNS else ""
        named = f"{fit.law.target} ({', '.join(filter(None, (meaning, unit)))})"
        says = f"the law predicts {named} of {listed(parts)}."
    return at + says


def apart(values: Sequence[float]) -> list[str]:
    """Write numbers with as few digits as tell them apart, two at least.

    Examples
    --------
    >>> apart([2.553, 2.529, 2.59]), apart([0.0291, 0.01, 0.129])
    (['2.55', '2.53', '2.59'], ['0.029', '0.01', '0.13'])
    """
    for digits in range(2, 6):
        texts = [number(value, digits) for value in values]
        if len(set(texts)) == len(texts):
            break
    return texts


def _sureness(label: str, held_out: HeldOut, summary: Summaries) -> str:
    """Say how large the errors on unseen rows were and whether intervals held them."""
    parts = []
    for protocol, unseen in (
        (LEAVE_ONE_OUT, f"each {held_out.left_out} left out"),
        (LARGEST, "the largest sizes, left out"),
    ):
        if (label, protocol) not in summary:
            continue
        scores = summary[label, protocol]
        ends = (scores.lowest, scores.highest)
        low, high = map(off_by if scores.error < SMALL else times, ends)
        spread = f" ({low} to {high} over {scores.splits})"
        parts.append(
            f"on {unseen}{but_for(scores)}, its typical error was {off_by(scores.error)}"
            f"{spread if scores.splits > 1 else ''} and {percent(scores.coverage[90])} of the "
            "measured values lay in its 90 % intervals"
        )
    if not parts:
        return "How it does on unseen rows could not be tested."
    return f"{parts[0][0].upper()}{'; '.join(parts)[1:]}."


def but_for(scores: Summary) -> str:
    """Say in brackets how many splits could not be scored, if any."""
    return f" (but for {scores.failed} that could not be scored)" if scores.failed else ""


def status(fit: Fit) -> str:
    """Say how the minimum was found and what its status means."""
    search, options = fit.search, fit.data.options
    detail = "" if search.status == "converged" else f" {search.detail}."
    starts = (
        "The problem is convex, so that one start finds its minimum."
        if fit.law.linear
        else f"{search.agreeing} of {plural(search.starts, 'start')} ended at the best objective."
    )
    delta = "given" if options.get("huber_delta") is not None else "1.345 robust deviations"
    loss = {
        "huber": f"Huber's, turning linear at {number(search.huber_delta)} ({delta})",
        "gaussian": "Gaussian",
        "student_t": "Student's t with 4 degrees of freedom",
    }[options.get("likelihood", "huber")]
    refits = (
        f" {search.boots_converged:,} of {plural(search.boots, 'bootstrap refit')} converged; each "
        f"resamples whole clusters ({fit.data.cluster})."
        if fit.interval == "bootstrap"
        else ""
    )
    return (
        f"Status {search.status}:{detail} {STATUS_MEANING[search.status]} {starts} The likelihood "
        f"of residuals is {loss}. The condition number of the information matrix, scaled to unit "
        f"diagonal, is {number(search.condition_number, 2)}.{refits}"
    )


def scatter(fit: Fit) -> str:
    """Say how far groups and rows scatter around the law."""
    unit = " of log residuals" if fit.law.link == "log" else ""
    parts = [f"{number(sd, 3)} between {what}" for what, sd in fit.effects.spreads]
    return f"Standard deviations{unit}: {listed(parts)}."


def multipliers(fit: Fit) -> list[str]:
    """Say the multiplier of every level of each offset, the last one included."""
    sentences = []
    estimates = fit.parameters()["estimate"]
    for factor in fit.law.factors:
        if factor.kind != "offset":
            continue
        column, levels = factor.options["column"], factor.options["levels"]
        logs = [float(estimates[f"{column}[{level}]"]) for level in levels[:-1]]
        logs.append(-sum(logs))
        each = [f"{name} × {times(log)}" for name, log in zip(levels, logs, strict=True)]
        sentences.append(
            f"Multipliers by {column}, whose geometric mean is one: {', '.join(each)}. "
            "The table lists their logarithms."
        )
    return sentences


def command(evidence: Evidence) -> str:
    """Return the shell command that makes a fit again, or Python if its law has no name there."""
    fit, options = evidence.fit, evidence.fit.data.options
    if not is_named(evidence.law):
        return _python(evidence)
    target = fit.law.target
    parts = ["qscale", "fit", fit.data.name, "--law", fit.law.name]
    if LAWS[fit.law.name].target != target:
        parts += ["--target", target]
    for name, theirs in options.get("mapping", {}).items():
        parts += ["--map", f"{name}={theirs}"]
    if options.get("where"):
        parts += ["--where", options["where"]]
    for column in options.get("offset", ()):
        parts += ["--offset", column]
    for name, value in options.get("fixed", {}).items():
        parts += ["--fix", f"{name}={float(value)!r}"]
    parts += ["--cluster", fit.data.cluster]
    random = options.get("random")
    for term in () if random is None else random or ["none"]:
        parts += ["--random", term]
    if options.get("likelihood", "huber") != "huber":
        parts += ["--likelihood", options["likelihood"]]
    for name in ("huber_delta", "floor", "ceiling"):
        value = 0.0 if name == "floor" and options.get(name) is None else options.get(name)
        if value is not None and (name, value) != ("floor", 2.0):
            parts += [f"--{name.replace('_', '-')}", repr(float(value))]
    parts += ["--interval", fit.interval]
    parts += ["--boots", str(options.get("n_boot", 0)), "--seed", str(options.get("seed", 0))]
    return shlex.join([*parts, "--output", "fit.json"])


def _python(evidence: Evidence) -> str:
    """Return Python that makes a fit of a law of the user's own again."""
    fit, mapping = evidence.fit, evidence.fit.data.options.get("mapping", {})
    options = {
        **fit_options(fit),
        "n_boot": fit.data.options.get("n_boot", 0),
        "name": fit.data.name,
    }
    options["mapping"] = mapping
    arguments = "".join(f"    {name}={value!r},\n" for name, value in options.items())
    return (
        "from qscale import datasets, table\n"
        "from qscale.fit import fit\n"
        "from qscale.laws import from_spec\n\n"
        f"law = from_spec({evidence.law.spec()!r})\n"
        f"frame = table.read(datasets.find({fit.data.name!r}), {mapping!r})\n"
        f"result = fit(\n    frame,\n    law,\n{arguments})"
    )


def reproduced(evidence: Evidence) -> str:
    """Say whether making the fit again from the table gave the same numbers."""
    then, now = evidence.fit, evidence.refitted
    if then.data.sha256 != now.data.sha256:
        return (
            f"The table at hand is not the one this fit was made on: its usable rows hash to "
            f"{now.data.sha256[:12]}…, those of the fit to {then.data.sha256[:12]}…."
        )
    apart = float(np.max(np.abs(then.theta - now.theta) / (1 + np.abs(then.theta))))
    same = "the same estimates" if apart < 1e-6 else f"estimates up to {apart:.1g} apart"
    return f"Made again from the table for this report, the fit has {same}."
