"""``qscale plan bits``: the smallest setting that keeps a tolerance at a stated confidence."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from qscale.cli import joined as both
from qscale.cli.console import Seed, console, number, refuse_existing, table
from qscale.cli.described import settings_of
from qscale.cli.facts import COMMON, NO_CURVATURE, NOTHING, Curvature, Facts, Settings
from qscale.cli.predicted import left_open, origin
from qscale.cli.subject import predicted_by, subject_of, with_facts, with_measured
from qscale.errors import QscaleError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

    from qscale.cli.subject import Subject
    from qscale.fit import Fitted
    from qscale.plan import Choice
    from qscale.quantize.setting import Setting


def bits(
    fit: str | None = None,
    checkpoint: str | None = None,
    /,
    *,
    tolerance: float | None = None,
    ppl_ratio: float | None = None,
    confidence: float = 0.9,
    facts: Facts = NOTHING,
    settings: Settings = COMMON,
    given: Path | None = None,
    curvature: Curvature = NO_CURVATURE,
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
    force: bool = False,
    seed: Seed = 0,
) -> None:
    r"""Find the fewest bits per weight whose loss increase stays within a tolerance.

    A setting is kept if the upper prediction bound of a new checkpoint, at the stated confidence,
    is within the tolerance. Without a fit, the shipped one that covers the checkpoint best is
    taken. With --text round-to-nearest is planned from the checkpoint's own curvature, joined with
    the fit's prediction as in qscale predict. examples/plan_bits.py tests such promises on
    checkpoints that were left out.

    ```sh
    # At most 10 % more perplexity, with a probability of 90 %
    qscale plan bits published_gptq_kumar --n-params 13e9 --tokens 2e12 \
        --method gptq --ppl-ratio 1.1
    # At most 0.05 nats per token, with a probability of 75 %
    qscale plan bits published_gptq_kumar --n-params 70e9 --tokens 2e12 \
        --method gptq --bits 3,4 --group-size 64,128,row \
        --tolerance 0.05 --confidence 0.75
    # A checkpoint, by its own curvature on a text
    qscale plan bits examples/checkpoints/tiny-wsd-decayed --ppl-ratio 1.02 \
        --bits 3,4,5,6 --text examples/texts/austen-wilde-darwin.txt
    ```

    Next: qscale quantize writes the model, qscale measure checks the promise.

    Parameters
    ----------
    fit
        A fit written by qscale fit or qscale regress, or the name of a shipped fit. May be left
        out, as in qscale predict.
    checkpoint
        Hugging Face folder, .gguf file or hub id: parameters are counted, its qscale.toml is read.
    tolerance
        Largest loss increase that is accepted, nats per token.
    ppl_ratio
        The same as a ratio of perplexities, such as 1.05.
    confidence
        Probability that the chosen setting is within the tolerance.
    given
        Table of one or a few measured rows of this checkpoint, as for qscale predict: they narrow
        what is known of its other settings.
    output
        Write the settings to this .csv or .parquet file.
    force
        Replace the output if it exists.
    seed
        Seed of the draws of a bootstrap fit.
    """
    from qscale import table as tables  # noqa: PLC0415
    from qscale.plan.bits import check  # noqa: PLC0415

    refuse_existing(output, force)
    nats = _nats(tolerance, ppl_ratio)
    check(nats, confidence)
    quantizers = curvature.quantizers((fit, checkpoint), settings)
    by_text = curvature.text is not None
    subject = subject_of(
        fit, checkpoint, facts, settings, given=given, of_rounding=by_text, reading=("bits",)
    )
    if by_text and subject.reads_curvature:
        rows = both.curvature_of(subject, curvature, quantizers)
        choice = _by_law(subject, given, nats, confidence, seed, rows)
    elif by_text:
        choice = _by_both(subject, curvature, quantizers, given, nats, confidence)
    else:
        _require_in_nats(subject.fitted, ppl_ratio)
        choice = _by_law(subject, given, nats, confidence, seed)
    if output is not None:
        tables.write(choice.settings, output)
        console.print(f"Written to {output}.", markup=False)


def _require_in_nats(fitted: Fitted, ppl_ratio: float | None) -> None:
    """Raise if a fit cannot tell what a width costs, or tells it in another unit."""
    if ppl_ratio is not None and fitted.target == "kl":
        raise QscaleError("--ppl-ratio is about the loss, and the fit predicts kl: --tolerance.")
    if not {"bits", "bits_per_weight"} & set(fitted.columns):
        raise QscaleError(
            f"{fitted.name} does not read bits, so that it cannot tell their costs apart. Use a "
            "fit whose law does."
        )


def _by_law(
    subject: Subject,
    given: Path | None,
    nats: float,
    confidence: float,
    seed: int,
    rows: pd.DataFrame | None = None,
) -> Choice:
    """Plan from a fit, and print it; ``rows`` hold the curvature that it may read."""
    from qscale.plan.bits import fewest_bits, in_unit_of  # noqa: PLC0415
    from qscale.predict import outside  # noqa: PLC0415

    fitted = subject.fitted
    origin(fitted, subject.chosen)
    accepted = in_unit_of(fitted.target, nats, subject.known.get("loss_fp"))
    if rows is None:
        frame = with_stored_bits(fitted, subject.known, subject.settings)
    else:
        frame = with_facts(subject, rows)
    told, frame, measured = with_measured(subject, frame, given)
    choice = fewest_bits(told, frame, accepted, confidence, seed=seed)
    _show(choice, nats)
    if measured is not None:
        count = len(measured)
        console.print(f"Given: {count} measured row{'s' * (count > 1)} of {given}.")
    also = [] if rows is not None else left_open(fitted, subject.settings)
    for sentence in (*also, *outside(fitted, _told(choice)), *fitted.notes):
        console.print(f"Note: {sentence}", markup=False)
    return choice


def _by_both(
    subject: Subject,
    curvature: Curvature,
    quantizers: Sequence[Setting],
    given: Path | None,
    nats: float,
    confidence: float,
) -> Choice:
    """Plan round-to-nearest from curvature joined with a fit, and print both."""
    from qscale.plan.bits import fewest_bits_of  # noqa: PLC0415
    from qscale.predict import outside  # noqa: PLC0415

    law = predicted_by(subject, given) if subject.usable else None
    if not both.of_rounding(None if law is None else law.fitted, subject.settings):
        raise QscaleError("--text is about rtn, which --method or the fit does not have.")
    rows = both.curvature_of(subject, curvature, quantizers)
    if law is not None:
        origin(law.fitted, subject.chosen)
    informed = None if law is None else law.informed
    found, notes = both.joined(informed, subject, rows)
    both.show(found, notes, "law" if informed is None else informed.name)
    if law is not None and (found["weight"] < 1).any():
        for sentence in outside(law.fitted, law.frame):
            console.print(f"Note: {sentence}", markup=False)
    offered = found[found["delta_loss"].notna()]
    if offered.empty:
        raise QscaleError("nothing is predicted at any of these settings: see the notes above.")
    choice = fewest_bits_of(offered, nats, confidence)
    _show(choice, nats)
    return choice


def with_stored_bits(
    fitted: Fitted, known: dict[str, Any], values: dict[str, list[Any]]
) -> pd.DataFrame:
    """One row for each setting with what it stores, which some laws read."""
    import pandas as pd  # noqa: PLC0415

    from qscale.plan.bits import stored_bits_per_weight  # noqa: PLC0415

    if "bits_per_weight" not in fitted.columns or known.get("bits_per_weight") is not None:
        frame = settings_of(fitted, known, values)
        return frame.assign(bits_per_weight=stored_bits_per_weight(frame))
    # A law of stored bits tells settings apart by them alone.
    rows = pd.DataFrame(
        [(b, g) for b in values["bits"] for g in values["group_size"]],
        columns=["bits", "group_size"],
    )
    stored = stored_bits_per_weight(rows)
    parts = [
        settings_of(fitted, known | {"bits_per_weight": float(s)}, values | {"bits": [b]})
        for b, s in zip(rows["bits"], stored, strict=True)
    ]
    frame = pd.concat(parts, ignore_index=True)
    return frame.assign(**rows)


def _nats(tolerance: float | None, ppl_ratio: float | None) -> float:
    """Return the tolerance in nats per token, of which one form must be given."""
    if (tolerance is None) == (ppl_ratio is None):
        raise QscaleError("give a tolerance: either --tolerance or --ppl-ratio.")
    if tolerance is not None:
        return tolerance
    if ppl_ratio is None or not ppl_ratio > 1:
        raise QscaleError(f"--ppl-ratio must be above 1. Got {ppl_ratio:g} instead.")
    return math.log(ppl_ratio)


def _show(choice: Choice, nats: float) -> None:
    """Print the settings and the answer."""
    frame = choice.settings
    shown = [c for c in ("bits", "group_size", "method", "fmt") if c in frame.columns]
    rows = [
        (
            f"{row['bits_per_weight']:.3f}",
            *(_word(row[c]) for c in shown),
            number(row[choice.target], 3),
            number(row["bound"], 3),
            _percent(row["probability"]),
            "yes" if row["kept"] else "no",
        )
        for _, row in frame.iterrows()
    ]
    heading = ("bits_per_weight", *shown, f"{choice.target}, median",
               f"{100 * choice.confidence:g} % bound", "within tolerance", "kept")  # fmt: skip
    console.print(table("", heading, rows))
    unit = "" if choice.target != "relative_delta" else f" (relative {number(choice.tolerance, 3)})"
    said = f"{number(nats, 3)} nats per token{unit} at confidence {choice.confidence:g}"
    chosen = choice.chosen
    if chosen is None:
        best = frame.iloc[int(frame["bound"].argmin())]
        console.print(
            f"No setting keeps {said}. The nearest, {_name(best, shown)}, is within it with "
            f"probability {_percent(best['probability'])}. Offer more bits, or accept more.",
            markup=False,
        )
    else:
        console.print(
            f"Fewest bits within {said}: {_name(chosen, shown)}, "
            f"{chosen['bits_per_weight']:.3f} bits per weight.",
            markup=False,
        )
        if chosen.name == 0 and len(frame) > 1:
            console.print("Note: it is the smallest setting offered; a smaller one may do.")


def _told(choice: Choice) -> pd.DataFrame:
    """Return the setting that was chosen, or all if none was."""
    frame, chosen = choice.settings, choice.chosen
    return frame if chosen is None else frame[frame.index == chosen.name]


def _name(row: pd.Series, shown: list[str]) -> str:
    """Name a setting."""
    return ", ".join(f"{c} {_word(row[c])}" for c in shown)


def _word(value: Any) -> str:
    """Print a number or a text; no group size is one scale per row."""
    if isinstance(value, str):
        return value
    return "row" if value is None or math.isnan(value) else number(value, 6)


def _percent(probability: float) -> str:
    """Print a probability, whose tabulated distribution ends at 0.5 and 99.5 %."""
    if probability > 0.994:
        return "> 99 %"
    return "< 1 %" if probability < 0.006 else f"{probability:.0%}".replace("%", " %")
