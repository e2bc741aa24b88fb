"""What ``qscale predict`` prints of a fit: predictions, a verdict, what drives them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from qscale.cli.console import console, number, span, table
from qscale.errors import QscaleError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pandas as pd

    from qscale.fit import Fit, Fitted
    from qscale.predict import Candidate
    from qscale.regress import Regression

_ABOUT_ORIGIN = ("family", "run", "checkpoint", "source", "protocol")
_INTERVALS = ("low_50", "high_50", "low_90", "high_90")


def in_nats(fitted: Fit | Regression, result: pd.DataFrame) -> pd.DataFrame:
    """Give predictions of relative_delta as delta_loss too where the loss before is known.

    The intervals are then those of delta_loss.

    Parameters
    ----------
    fitted
        What predicted.
    result
        Its predictions.
    """
    known = "loss_fp" in result.columns and result["loss_fp"].notna().all()
    if fitted.target != "relative_delta" or not known:
        return result
    scaled = {
        name: result[column] * result["loss_fp"]
        for name, column in [("delta_loss", "relative_delta"), *((c, c) for c in _INTERVALS)]
    }
    return result.assign(**scaled)


def predictions(
    fitted: Fit | Regression,
    known: dict[str, Any],
    result: pd.DataFrame,
    ranked: Sequence[Candidate],
    said_too: Sequence[str] = (),
) -> None:
    """Print the predictions, what lies outside the fitted rows and what the fit itself notes."""
    from qscale.fit import Fit  # noqa: PLC0415
    from qscale.predict import outside, reasons  # noqa: PLC0415

    used = {*fitted.columns, *fitted.categories}
    labels = [c for c in ("method", "fmt") if c in result.columns]
    several = [c for c in labels if len(set(result[c])) > 1]
    by_setting = used if "quadratic_delta" not in used else {*used, "bits", "group_size"}
    own = [c for c in ("bits", "group_size") if c in by_setting and c in result.columns]
    settings = [*own, *several]
    facts = known | {c: result[c].iloc[0] for c in labels if c not in several}
    nats = "delta_loss" in result.columns
    also = nats and fitted.target != "delta_loss"
    rows = [
        (
            *(text(row[c]) for c in settings),
            number(row[fitted.target], 3),
            *([number(row["delta_loss"], 3)] if also else []),
            *([ratio(row["delta_loss"])] if nats else []),
            *(span(row[f"low_{i}"], row[f"high_{i}"]) for i in (50, 90)),
        )
        for _, row in result.iterrows()
    ]
    data, word = fitted.data, "Law" if isinstance(fitted, Fit) else "Regression"
    print_plain(f"\n{word} {fitted.name} fitted on {data.rows} rows of {data.name}.")
    if ranked:
        print_plain(f"Chosen: {reasons(ranked)[0]}")
    said = [f"{name} {text(value)}" for name, value in facts.items()]
    print_plain(f"Checkpoint: {', '.join(said) or 'nothing is said of it'}.")
    extra = [*(["delta_loss"] if also else []), *(["ppl ratio"] if nats else [])]
    of = ", delta_loss" if also else ""
    heading = [fitted.target, *extra, f"50 % interval{of}", f"90 % interval{of}"]
    console.print(table("", (*settings, *heading), rows))
    if result["low_90"].isna().any():
        why = "its bootstrap has too few clusters or refits, or its parameters are not determined"
        console.print(f"Note: a dash means that the fit has no interval there: {why}.")
    if fitted.target == "relative_delta" and not nats:
        console.print(
            "Note: relative_delta is delta_loss / loss_fp; --loss-fp gives nats per token."
        )
    averaged = _averaged(fitted, result)
    for sentence in (*said_too, *outside(fitted, result), *averaged, *fitted.notes):
        print_plain(f"Note: {sentence}")


def _averaged(fitted: Fit | Regression, result: pd.DataFrame) -> list[str]:
    """Say which settings were left open; that a new checkpoint is of a new source goes unsaid."""
    return [
        f"{column} is not given: the average of {', '.join(levels)} is predicted, their spread "
        "added."
        for column, levels in fitted.categories.items()
        if column not in _ABOUT_ORIGIN and (column not in result or result[column].isna().any())
    ]


def unused(
    fitted: Fit | Regression, flags: Mapping[str, Any], ranked: Sequence[Candidate]
) -> list[str]:
    """Say which facts that were given the fit does not use, and what another fit lacks to do so."""
    used = {*fitted.columns, *fitted.categories}
    if fitted.target == "relative_delta":
        used.add("loss_fp")
    sentences = []
    # A loss and names are of use in other ways; families and sources are averaged over elsewhere.
    for column in flags.keys() - used - {"loss_fp", "family", "source", "run"}:
        sentence = f"{column} is given, but {fitted.name} does not use it."
        other = next((c for c in ranked if column in c.fit.columns), None)
        if other is not None:
            options = [f"--{c.replace('_', '-')}" for c in other.missing]
            how = f"add {' and '.join(options)}" if options else f"name it: predict {other.name}"
            sentence += f" {other.name} does: {how}."
        sentences.append(sentence)
    return sorted(sentences)


def origin(fitted: Fitted, chosen: Sequence[str]) -> None:
    """Print what predicts, and why it was chosen if it was not named."""
    data = fitted.data
    print_plain(f"\n{fitted.name} fitted on {data.rows} rows of {data.name}.")
    for sentence in chosen:
        print_plain(f"Chosen: {sentence}")


def left_open(fitted: Fitted, settings: Mapping[str, Sequence[Any]]) -> list[str]:
    """Say which method predicts where none is asked for."""
    methods = fitted.data.levels.get("method", ())
    if not methods or settings["method"] or "method" in fitted.categories:
        return []
    return [f"no --method is given: the fit is of {', '.join(methods)}."]


def of_another_kind(fitted: Fit | Regression, rows: pd.DataFrame, frame: pd.DataFrame) -> list[str]:
    """Say where measured rows are of a method or format that is not the one predicted."""
    sentences = []
    for column in ("method", "fmt"):
        if column in fitted.categories or column not in rows.columns:
            continue
        asked = frame.get(column)
        levels = fitted.data.levels.get(column, ()) if asked is None else asked.dropna().unique()
        others = sorted(set(rows[column].dropna()) - set(levels))
        if others and len(levels):
            sentences.append(
                f"the given rows are of {column} {', '.join(others)}, the prediction of "
                f"{', '.join(levels)}: the fit takes them as one."
            )
    return sentences


def guessing(
    bits: pd.Series, increase: pd.Series, loss_fp: float | None, symbols: int | None
) -> list[str]:
    """Say where a predicted loss exceeds that of guessing among the symbols of the vocabulary."""
    if symbols is None:
        return []
    chance = math.log(symbols)
    above = bits[increase + (loss_fp or 0.0) > chance]
    if above.empty:
        return []
    sentence = (
        f"the loss predicted at {widths(above)} bits is above the loss of guessing, "
        f"ln({symbols}) = {chance:.3g} nats per token: read it as broken, not as a number."
    )
    return [sentence]


def check_observed(fitted: Fit | Regression, known: Mapping[str, Any]) -> None:
    """Raise if a fit does not predict what can be held against a measured loss increase."""
    if fitted.target == "relative_delta" and known.get("loss_fp") is None:
        raise QscaleError(
            "--observed is in nats per token, the fit predicts relative_delta: add --loss-fp."
        )
    if fitted.target not in ("delta_loss", "relative_delta"):
        raise QscaleError(f"--observed is a delta_loss. Got a fit of {fitted.target} instead.")


def verdict(fitted: Fit | Regression, frame: pd.DataFrame, observed: float) -> None:
    """Print where a measured loss increase, in nats per token, lies in what is predicted."""
    from qscale.predict import judge  # noqa: PLC0415

    scale = 1.0
    if fitted.target == "relative_delta":
        scale = float(frame["loss_fp"].iloc[0])
        print_plain(f"{number(observed)} nats per token are {number(observed / scale)} of loss_fp.")
    found = judge(fitted, frame, observed / scale)
    print_plain(f"Observed: {' '.join(found.sentences)}")


def drivers(fitted: Fit | Regression, frame: pd.DataFrame, ranked: Sequence[Candidate]) -> None:
    """Print what each factor contributes, what the fit has not seen, and the other fits."""
    from qscale.fit import Fit  # noqa: PLC0415
    from qscale.predict import contributions, outside, reasons, unread  # noqa: PLC0415

    parts = [contributions(fitted, frame.iloc[[i]]) for i in range(len(frame))]
    names = ("bits", "group_size", "method", "fmt")
    varying = [c for c in names if c in frame and len(frame[c].drop_duplicates()) > 1]
    heads = [", ".join(f"{c} {text(row[c])}" for c in varying) for _, row in frame.iterrows()]
    kind = "factor" if isinstance(fitted, Fit) else "column on its own"
    print_plain(f"\nWhat drives it, against the median of the fitted rows, by {kind}:")
    errors = ["log ± SE"] if len(parts) == 1 else []
    heading = ("", "here", "median", *(head or "times" for head in heads), *errors)
    console.print(table("", heading, _lines(parts)))
    said = [*outside(fitted, frame), *unread(fitted, frame)]
    print_plain(f"Not seen: {' '.join(said) or 'nothing that is known lies outside the data.'}")
    for sentence in reasons(ranked)[1:] if ranked else []:
        print_plain(f"Not chosen: {sentence}.")


def _lines(parts: Sequence[pd.DataFrame]) -> list[tuple[str, ...]]:
    """One line for each contribution, of one setting with its error, of several side by side."""
    lines = []
    for i in range(len(parts[0])):
        same = [part.iloc[i] for part in parts]
        here = same[0]["here"] if len({row["here"] for row in same}) == 1 else ""
        if "average" in here and not any(row["log_ratio"] for row in same):
            continue
        times = [f"x {number(row['ratio'], 3)}" for row in same]
        log = f"{same[0]['log_ratio']:+.3f} ± {number(same[0]['log_ratio_se'], 2)}"
        errors = [log] if len(parts) == 1 else []
        lines.append((same[0]["term"], here, same[0]["median"], *times, *errors))
    return lines


def unusable(ranked: Sequence[Candidate]) -> None:
    """Say that no shipped fit can be used, and what the nearest needs."""
    from qscale.predict import reasons  # noqa: PLC0415

    print_plain(f"\nNo shipped fit can be used: {reasons(ranked)[0]}")


def widths(bits: pd.Series) -> str:
    """Name bit widths."""
    return ", ".join(f"{width:g}" for width in bits.unique())


def print_plain(sentence: str) -> None:
    """Print a sentence as it is, whatever brackets are in it."""
    console.print(sentence, markup=False)


def text(value: Any) -> str:
    """Format a number, text or flag; a null prints as a dash."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return number(value, 6)


def ratio(delta_loss: float) -> str:
    """Format the perplexity ratio exp(delta_loss)."""
    return number(math.exp(delta_loss)) if delta_loss < math.log(1e6) else "> 1e+06"
