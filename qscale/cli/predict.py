"""``qscale predict``: what quantization will cost a described checkpoint or a checkpoint folder."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from qscale.cli.console import console, group_sizes, number, numbers, refuse_existing, table
from qscale.cli.described import FLAGS, assigned, described, measured, settings_of
from qscale.cli.settings import quantizer_settings
from qscale.errors import QscaleError

if TYPE_CHECKING:
    import pandas as pd

    from qscale.fit import Fit
    from qscale.quantize.setting import Setting
    from qscale.regress import Regression

SMALL = 0.5
_ABOUT_ORIGIN = ("family", "run", "checkpoint", "source", "protocol")


def predict(
    fit: str,
    checkpoint: Path | None = None,
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
    text: Path | None = None,
    context: int | None = None,
    probes: int = 6,
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
    force: bool = False,
) -> None:
    """Predict the loss increase of an unseen checkpoint, with intervals and plain warnings.

    Describe the checkpoint with flags, or give its folder: parameters are counted and training
    facts read from its qscale.toml, flags taking precedence. With --text a folder also gets a
    prediction that needs no fit, from its own curvature times the quantization noise.

    Parameters
    ----------
    fit
        A fit written by qscale fit or qscale regress, or the name of a shipped fit.
    checkpoint
        Hugging Face folder with safetensors.
    bits
        Bit widths, separated by commas.
    group_size
        Weights sharing a scale, separated by commas; row is one scale per row.
    method
        Quantization methods, separated by commas, checked against those the fit has seen.
    fmt
        Number formats, separated by commas, checked likewise.
    n_params
        Non-embedding parameters, such as 13e9.
    tokens
        Training tokens, such as 2e12.
    lr_peak
        Peak learning rate.
    lr
        Learning rate at the checkpoint (0 at the end of a decay to zero).
    loss_fp
        Loss before quantization, nats per token.
    family
        Level of an offset in the fit; left out, the average level and its spread are used.
    source
        Likewise.
    set_
        NAME=VALUE of any other column that the fit needs, such as sqnr_db=21. May be repeated.
    given
        Table of one or a few measured rows of this checkpoint (bits, method, delta_loss and the
        like; what it lacks is taken from the flags). They update what is known of it, so that the
        other settings are predicted more narrowly.
    text
        Text for the curvature of a checkpoint folder (needs the measure extra).
    context
        Tokens per window of the text.
    probes
        Backward passes over the probe windows.
    output
        Write the predictions of the fit to this .csv or .parquet file.
    force
        Replace the output if it exists.
    """
    from qscale import table as tables  # noqa: PLC0415
    from qscale.load import load_fitted  # noqa: PLC0415
    from qscale.predict import predict as predict_rows  # noqa: PLC0415

    refuse_existing(output, force)
    if text is not None and checkpoint is None:
        raise QscaleError("--text needs a checkpoint folder whose curvature to take.")
    fitted = load_fitted(fit)
    flags = dict(zip(FLAGS, (n_params, tokens, lr_peak, lr, loss_fp, family, source), strict=True))
    flags = {k: v for k, v in flags.items() if v is not None}
    for name, value in flags.items():
        if isinstance(value, float) and not math.isfinite(value):
            flag = name.replace("_", "-")
            raise QscaleError(f"--{flag} must be a finite number. Got {value:g} instead.")
    others = assigned(set_ or [], fitted)
    if twice := flags.keys() & others.keys():
        raise QscaleError(f"--set {min(twice)}: it has a flag too; give one of them.")
    flags |= others
    known = described(checkpoint, flags)
    settings: dict[str, list[Any]] = {
        "bits": numbers(bits, "--bits"),
        "group_size": group_sizes(group_size),
        "method": _listed(method),
        "fmt": _listed(fmt),
    }
    quantizers = quantizer_settings(bits, group_size) if text is not None else []
    frame = settings_of(fitted, known, settings)
    rows = None
    if given is not None:
        rows, frame = measured(fitted, known, settings, frame, given)
    result = predict_rows(fitted if rows is None else fitted.given(rows), frame)
    shown = {*flags, *fitted.columns, *fitted.categories, "family"}
    _show(fitted, {name: value for name, value in known.items() if name in shown}, result)
    if rows is not None:
        console.print(f"Given: {len(rows)} measured row{'s' * (len(rows) > 1)} of {given}.")
    if text is not None and checkpoint is not None:
        _print_zero_fit(checkpoint, text, quantizers, context, probes)
    if output is not None:
        tables.write(result, output)
        console.print(f"Written to {output}.")


def _listed(text: str | None) -> list[str]:
    """Split ``rtn,gptq`` at its commas."""
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def _show(fitted: Fit | Regression, known: dict[str, Any], result: pd.DataFrame) -> None:
    """Print the predictions, what lies outside the fitted rows and what the fit itself notes."""
    from qscale.fit import Fit  # noqa: PLC0415
    from qscale.predict import outside  # noqa: PLC0415

    used = (*fitted.columns, *fitted.categories)
    labels = [c for c in ("method", "fmt") if c in result]
    several = [c for c in labels if len(set(result[c])) > 1]
    settings = [*(c for c in ("bits", "group_size") if c in used), *several]
    facts = known | {c: result[c].iloc[0] for c in labels if c not in several}
    ratio = "perplexity_ratio" in result.columns
    rows = [
        (
            *(_text(row[c]) for c in settings),
            number(row[fitted.target], 3),
            *([_ratio(row[fitted.target])] if ratio else []),
            *(f"{number(row[f'low_{i}'], 3)} to {number(row[f'high_{i}'], 3)}" for i in (50, 90)),
        )
        for _, row in result.iterrows()
    ]
    data, word = fitted.data, "Law" if isinstance(fitted, Fit) else "Regression"
    console.print(
        f"\n{word} {fitted.name} fitted on {data.rows} rows of {data.name}.", markup=False
    )
    said = [f"{name} {_text(value)}" for name, value in facts.items()]
    console.print(f"Checkpoint: {', '.join(said) or 'nothing is said of it'}.", markup=False)
    heading = [fitted.target, *(["ppl ratio"] if ratio else []), "50 % interval", "90 % interval"]
    console.print(table("", (*settings, *heading), rows))
    if result["low_90"].isna().any():
        why = "its bootstrap has fewer than twenty refits, or its parameters are not determined"
        console.print(f"Note: a dash means that the fit has no interval there: {why}.")
    for sentence in (*outside(fitted, result), *_averaged(fitted, result), *fitted.notes):
        console.print(f"Note: {sentence}", markup=False)


def _averaged(fitted: Fit | Regression, result: pd.DataFrame) -> list[str]:
    """Say which settings were left open; that a new checkpoint is of a new source goes unsaid."""
    return [
        f"{column} is not given: the average of {', '.join(levels)} is predicted, their spread "
        "added."
        for column, levels in fitted.categories.items()
        if column not in _ABOUT_ORIGIN and (column not in result or result[column].isna().any())
    ]


def _text(value: Any) -> str:
    """Format a number, text or flag; a null prints as a dash."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return number(value, 6)


def _ratio(delta_loss: float) -> str:
    """Format the perplexity ratio exp(delta_loss)."""
    return number(math.exp(delta_loss)) if delta_loss < math.log(1e6) else "> 1e+06"


def _print_zero_fit(
    checkpoint: Path, text: Path, settings: list[Setting], context: int | None, probes: int
) -> None:
    """Print the prediction from curvature times quantization noise."""
    from qscale.measure.zerofit import zero_fit  # noqa: PLC0415

    result = zero_fit(checkpoint, text, settings=settings, context=context, num_probes=probes)
    rows = [
        (
            number(row["bits"]),
            "row" if row.isna()["group_size"] else number(row["group_size"]),
            f"{row['bits_per_weight']:.3f}",
            f"{number(row['quadratic_delta'], 3)} ± {number(row['quadratic_delta_se'], 2)}",
            _ratio(row["quadratic_delta"]),
        )
        for _, row in result.iterrows()
    ]
    console.print(
        "\nWithout any fit: curvature times quantization noise of round-to-nearest "
        f"({settings[0].weights.scale_rule}), from {result['backward_passes'][0]:g} backward "
        f"passes on {text.name}, probe error ± 1 SE."
    )
    heading = ("bits", "group_size", "bits_per_weight", "delta_loss", "ppl ratio")
    console.print(table("", heading, rows))
    if (result["quadratic_delta"] > SMALL).any():
        console.print(
            f"Note: the quadratic picture holds for small increases; above about {SMALL:g} nats "
            "per token, take it as an order of magnitude.",
        )
