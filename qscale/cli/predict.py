"""``qscale predict``: what quantization will cost a described checkpoint or a checkpoint folder."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from qscale.cli import predicted as show
from qscale.cli.console import console, group_sizes, numbers, refuse_existing
from qscale.cli.described import FLAGS, assigned, described, measured, parted, settings_of
from qscale.cli.settings import quantizer_settings
from qscale.errors import QscaleError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pandas as pd

    from qscale.fit import Fit
    from qscale.predict import Candidate
    from qscale.regress import Regression


def predict(
    fit: str | None = None,
    checkpoint: str | None = None,
    /,
    *,
    bits: str = "2,3,4",
    group_size: str = "128",
    method: str | None = None,
    fmt: str | None = None,
    n_params: float | None = None,
    tokens: float | None = None,
    lr_peak: float | None = None,
    lr: float | None = None,
    loss_fp: float | None = None,
    family: str | None = None,
    source: str | None = None,
    set_: Annotated[list[str] | None, Parameter(name="--set")] = None,
    given: Path | None = None,
    observed: float | None = None,
    explain: bool = False,
    text: Path | None = None,
    context: int | None = None,
    probes: int = 6,
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
    force: bool = False,
) -> None:
    r"""Predict the loss increase of an unseen checkpoint, with intervals and plain warnings.

    Describe the checkpoint with flags, or give it: parameters are counted and training facts read
    from its qscale.toml, flags taking precedence. Without a fit, the shipped one that covers the
    checkpoint best is taken, and why is said. With --text the checkpoint's own curvature is
    measured first; where that prediction is tested, it is joined with the fit's.

    ```sh
    # A described model
    qscale predict --n-params 13e9 --tokens 2e12 --bits 3,4 --method gptq
    # From a fit of your choice: is a measured increase of 0.31 normal?
    qscale predict published_gptq_kumar --n-params 13e9 --tokens 2e12 \
        --bits 3 --method gptq --observed 0.31
    # A checkpoint, with its own curvature on a text
    qscale predict examples/checkpoints/tiny-wsd-stable --bits 3,4 \
        --text examples/texts/austen-wilde-darwin.txt
    ```

    Next: qscale plan bits finds the fewest bits that keep a tolerance; qscale measure says whether
    the prediction holds, and --given takes in what it measured.

    Parameters
    ----------
    fit
        A fit written by qscale fit or qscale regress, or the name of a shipped fit. May be left
        out.
    checkpoint
        Hugging Face folder with safetensors, .gguf file or hub id.
    bits
        Bit widths, separated by commas.
    group_size
        Weights sharing a scale, separated by commas; row is one scale per row.
    method
        Quantization methods, separated by commas, checked against those the fit has seen.
    fmt
        Number formats, separated by commas, checked against those the fit has seen.
    n_params
        Non-embedding parameters, such as 13e9.
    tokens
        Training tokens, such as 2e12.
    lr_peak
        Peak learning rate, such as 3e-4.
    lr
        Learning rate at the checkpoint (0 at the end of a decay to zero).
    loss_fp
        Loss before quantization, nats per token.
    family
        Level of an offset in the fit; left out, the average level and its spread are used.
    source
        Source of the rows, as a level of an offset in the fit; left out, as for family.
    set_
        NAME=VALUE of any other column that the fit needs, such as sqnr_db=21. May be repeated.
    given
        Table of one or a few measured rows of this checkpoint (bits, method, delta_loss and the
        like; what it lacks is taken from the flags). They update what is known of it, so that the
        other settings are predicted more narrowly.
    observed
        A measured loss increase of one setting, nats per token: where it lies in what is
        predicted, and whether that is normal.
    explain
        Also show what each factor contributes against the median checkpoint of the fit's data,
        what the fit has not seen, and how the shipped fits compare.
    text
        UTF-8 text file for the curvature of the checkpoint (needs the measure extra).
    context
        Tokens per window of the text; by default the model's longest input, but at most 512.
    probes
        Backward passes over the probe windows.
    output
        Write the predictions to this .csv or .parquet file; with --text those that were joined.
    force
        Replace the output if it exists.
    """
    from qscale.predict import predict as predict_rows  # noqa: PLC0415

    refuse_existing(output, force)
    named, checkpoint = parted(fit, checkpoint)
    if text is not None and checkpoint is None:
        raise QscaleError("--text needs a checkpoint folder whose curvature to take.")
    settings: dict[str, list[Any]] = {
        "bits": numbers(bits, "--bits"),
        "group_size": group_sizes(group_size),
        "method": _listed(method),
        "fmt": _listed(fmt),
    }
    # Checked before any work; the curvature itself is taken last.
    quantizers = [] if text is None else quantizer_settings(bits, group_size)
    values = (n_params, tokens, lr_peak, lr, loss_fp, family, source)
    flags = _finite(dict(zip(FLAGS, values, strict=True)), observed)
    fitted, known, ranked = _subject(
        named, checkpoint, flags, set_ or [], settings, text is not None
    )
    if checkpoint is not None and text is not None and ranked and not ranked[0].usable:
        show.unusable(ranked)
        rows = show.curvature(checkpoint, text, quantizers, context, probes)
        _write(show.joined(None, known, settings, rows), output)
        return
    frame = settings_of(fitted, known, settings)
    if observed is not None and len(frame) > 1:
        raise QscaleError("--observed belongs to one setting: give one value of --bits and others.")
    informed, count = fitted, 0
    if given is not None:
        rows, frame = measured(fitted, known, settings, frame, given)
        informed, count = fitted.given(rows), len(rows)
    result = show.in_nats(fitted, predict_rows(informed, frame))
    shown = {*flags, *fitted.columns, *fitted.categories, "family"}
    facts = {column: value for column, value in known.items() if column in shown}
    show.predictions(fitted, facts, result, ranked)
    if count:
        console.print(f"Given: {count} measured row{'s' * (count > 1)} of {given}.")
    if observed is not None:
        show.verdict(informed, frame, observed)
    if explain:
        show.drivers(informed, frame, ranked)
    if checkpoint is not None and text is not None:
        rows = show.curvature(checkpoint, text, quantizers, context, probes)
        result = show.joined(informed, known, settings, rows)
    _write(result, output)


def _write(result: pd.DataFrame, output: Path | None) -> None:
    """Write the predictions, if they are wanted."""
    if output is not None:
        from qscale import table as tables  # noqa: PLC0415

        tables.write(result, output)
        console.print(f"Written to {output}.")


def _subject(
    named: str | None,
    checkpoint: str | None,
    flags: dict[str, Any],
    others: Sequence[str],
    settings: Mapping[str, list[Any]],
    of_rounding: bool,
) -> tuple[Fit | Regression, dict[str, Any], tuple[Candidate, ...]]:
    """Return what predicts, what is known of the checkpoint, and the shipped fits it was among.

    Where the fit is to be chosen for a prediction that is joined with that of rounding to nearest,
    and no method is asked for, it is one of that method.
    """
    fitted = None
    if named is not None:
        from qscale.load import load_fitted  # noqa: PLC0415

        fitted = load_fitted(named)
    also = assigned(others, fitted)
    if twice := flags.keys() & also.keys():
        raise QscaleError(f"--set {min(twice)}: it has a flag too; give one of them.")
    flags |= also
    known = described(checkpoint, flags)
    if fitted is not None:
        return fitted, known, ()
    from qscale.predict import candidates  # noqa: PLC0415

    wanted = {**known, **settings}
    if of_rounding and not settings["method"]:
        wanted["method"] = ["rtn"]
    ranked = candidates(wanted)
    return ranked[0].fit, known, ranked


def _finite(flags: Mapping[str, Any], observed: float | None) -> dict[str, Any]:
    """Return the flags that were given, or raise naming one that is not a finite number."""
    found = {name: value for name, value in flags.items() if value is not None}
    for name, value in [*found.items(), ("observed", observed)]:
        if isinstance(value, float) and not math.isfinite(value):
            flag = name.replace("_", "-")
            raise QscaleError(f"--{flag} must be a finite number. Got {value:g} instead.")
    return found


def _listed(text: str | None) -> list[str]:
    """Split ``rtn,gptq`` at its commas."""
    return [name.strip() for name in (text or "").split(",") if name.strip()]
