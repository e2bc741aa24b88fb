"""``qscale plan bits``: the smallest setting that keeps a tolerance at a stated confidence."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from qscale.cli.console import Seed, console, number, refuse_existing, table
from qscale.cli.described import measured, settings_of
from qscale.cli.facts import COMMON, NOTHING, Facts, Settings
from qscale.errors import QscaleError

if TYPE_CHECKING:
    import pandas as pd

    from qscale.fit import Fitted
    from qscale.plan import Choice


def bits(
    fit: str,
    checkpoint: str | None = None,
    /,
    *,
    tolerance: float | None = None,
    ppl_ratio: float | None = None,
    confidence: float = 0.9,
    facts: Facts = NOTHING,
    settings: Settings = COMMON,
    given: Path | None = None,
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
    force: bool = False,
    seed: Seed = 0,
) -> None:
    r"""Find the fewest bits per weight whose loss increase stays within a tolerance.

    A setting is kept if the upper prediction bound of a new checkpoint, at the stated confidence,
    is within the tolerance. examples/plan_bits.py tests such promises on left-out rows.

    ```sh
    # At most 10 % more perplexity, with a probability of 90 %
    qscale plan bits published_gptq_kumar --n-params 13e9 --tokens 2e12 \
        --method gptq --ppl-ratio 1.1
    # At most 0.05 nats per token, with a probability of 75 %
    qscale plan bits published_gptq_kumar --n-params 70e9 --tokens 2e12 \
        --method gptq --bits 3,4 --group-size 64,128,row \
        --tolerance 0.05 --confidence 0.75
    ```

    Next: qscale quantize writes the model, qscale measure checks the promise.

    Parameters
    ----------
    fit
        A fit written by qscale fit or qscale regress, or the name of a shipped fit.
    checkpoint
        Hugging Face folder or hub id: parameters are counted, its qscale.toml is read.
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
    from qscale.load import load_fitted  # noqa: PLC0415
    from qscale.plan.bits import fewest_bits, in_unit_of  # noqa: PLC0415

    refuse_existing(output, force)
    nats = _nats(tolerance, ppl_ratio)
    fitted = load_fitted(fit)
    if ppl_ratio is not None and fitted.target == "kl":
        raise QscaleError("--ppl-ratio is about the loss, and the fit predicts kl: --tolerance.")
    if not {"bits", "bits_per_weight"} & set(fitted.columns):
        raise QscaleError(
            f"{fitted.name} does not read bits, so that it cannot tell their costs apart. Use a "
            "fit whose law does."
        )
    known = facts.known(fitted, checkpoint)
    accepted = in_unit_of(fitted.target, nats, known.get("loss_fp"))
    frame = with_stored_bits(fitted, known, settings)
    told: Fitted = fitted
    if given is not None:
        rows, frame = measured(fitted, known, settings.values(), frame, given)
        told = fitted.given(rows)
    choice = fewest_bits(told, frame, accepted, confidence, seed=seed)
    _show(fitted, choice, nats)
    if given is not None:
        console.print(f"Given: {len(rows)} measured row{'s' * (len(rows) > 1)} of {given}.")
    if output is not None:
        tables.write(choice.settings, output)
        console.print(f"Written to {output}.", markup=False)


def with_stored_bits(fitted: Fitted, known: dict[str, Any], settings: Settings) -> pd.DataFrame:
    """One row for each setting with what it stores, which some laws read."""
    import pandas as pd  # noqa: PLC0415

    from qscale.plan.bits import stored_bits_per_weight  # noqa: PLC0415

    values = settings.values()
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


def _show(fitted: Fitted, choice: Choice, nats: float) -> None:
    """Print the settings, the answer and what it rests on."""
    from qscale.predict import outside  # noqa: PLC0415

    data = fitted.data
    console.print(f"\n{fitted.name} fitted on {data.rows} rows of {data.name}.", markup=False)
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
    told = frame if chosen is None else frame[frame.index == chosen.name]
    for sentence in (*outside(fitted, told), *fitted.notes):
        console.print(f"Note: {sentence}", markup=False)


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
