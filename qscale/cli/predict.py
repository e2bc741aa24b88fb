"""``qscale predict``: what quantization will cost a described checkpoint or a checkpoint folder."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from qscale.cli.console import console, group_sizes, number, numbers, refuse_existing, table
from qscale.cli.settings import quantizer_settings
from qscale.errors import QscaleError

if TYPE_CHECKING:
    import pandas as pd

    from qscale.fit import Fit
    from qscale.quantize.setting import Setting

SMALL = 0.5


def predict(
    fit: str,
    checkpoint: Path | None = None,
    /,
    *,
    bits: str = "2,3,4",
    group_size: str = "128",
    method: str | None = None,
    n_params: float | None = None,
    tokens: float | None = None,
    lr_peak: float | None = None,
    lr: float | None = None,
    family: str | None = None,
    source: str | None = None,
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
        A fit written by qscale fit, or the name of a shipped fit.
    checkpoint
        Hugging Face folder with safetensors.
    bits
        Bit widths, separated by commas.
    group_size
        Weights sharing a scale, separated by commas; row is one scale per row.
    method
        Quantization method, checked against those the fit has seen.
    n_params
        Non-embedding parameters, such as 13e9.
    tokens
        Training tokens, such as 2e12.
    lr_peak, lr
        Peak learning rate, and learning rate at the checkpoint (0 at the end of a decay to zero).
    family, source
        Level of an offset in the fit; left out, the average level and its spread are used.
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
        Write the predictions of the law to this .csv or .parquet file.
    force
        Replace the output if it exists.
    """
    from qscale import table as tables  # noqa: PLC0415
    from qscale.fit.shipped import find  # noqa: PLC0415
    from qscale.predict import predict as predict_law  # noqa: PLC0415

    refuse_existing(output, force)
    if text is not None and checkpoint is None:
        raise QscaleError("--text needs a checkpoint folder whose curvature to take.")
    fitted = find(fit)
    flags = {
        "n_params": n_params,
        "tokens": tokens,
        "lr_peak": lr_peak,
        "lr": lr,
        "family": family,
        "source": source,
        "method": method,
    }
    known = _described(checkpoint, flags)
    widths, sizes = numbers(bits, "--bits"), group_sizes(group_size)
    settings = quantizer_settings(bits, group_size) if text is not None else []
    frame = tables.check(_settings(fitted, known, widths, sizes), "prediction")
    measured = None
    if given is not None:
        measured, frame = _given(fitted, known, tables.read(given), frame, str(given))
    result = predict_law(fitted if measured is None else fitted.given(measured), frame)
    _print_law(fitted, known, result)
    if measured is not None:
        console.print(f"Given: {len(measured)} measured row{'s' * (len(measured) > 1)} of {given}.")
    if text is not None and checkpoint is not None:
        _print_zero_fit(checkpoint, text, settings, context, probes)
    if output is not None:
        tables.write(result, output)
        console.print(f"Written to {output}.")


def _given(
    fitted: Fit, known: dict[str, Any], rows: pd.DataFrame, frame: pd.DataFrame, name: str
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Complete measured rows from the flags, and say in both tables that it is one checkpoint."""
    if rows.empty:
        raise QscaleError(f"--given {name}: the table has no rows.")
    for column, value in known.items():
        rows[column] = rows[column].fillna(value) if column in rows.columns else value
    for term in fitted.effects.terms:
        for column in term.columns:
            if column in rows.columns and column not in frame.columns:
                if len(rows[column].drop_duplicates()) > 1:
                    raise QscaleError(
                        f"--given {name}: column {column!r} has several values, but the rows must "
                        "be of one checkpoint."
                    )
                frame[column] = rows[column].iloc[0]
    return rows, frame


def _described(checkpoint: Path | None, flags: dict[str, Any]) -> dict[str, Any]:
    """Join what the folder says with the flags, which take precedence."""
    known: dict[str, Any] = {}
    if checkpoint is not None:
        from qscale.checkpoint import describe  # noqa: PLC0415

        description = describe(checkpoint)
        known = {
            # A sidecar's source is where the weights come from, not where a measurement does.
            **{k: v for k, v in description.training.items() if k != "source"},
            "n_params": description.n_params,
            "n_params_total": description.n_params_total,
        }
    return known | {name: value for name, value in flags.items() if value is not None}


def _settings(
    fitted: Fit, known: dict[str, Any], widths: list[float], sizes: list[int | None]
) -> pd.DataFrame:
    """One row for each bit width and group size that the law can tell apart."""
    import pandas as pd  # noqa: PLC0415

    from qscale.table import COLUMNS  # noqa: PLC0415

    settings = {"bits", "group_size"}
    offsets = {f.options["column"] for f in fitted.law.factors if f.kind == "offset"}
    for column in fitted.law.columns:
        if column not in settings | offsets and known.get(column) is None:
            flag = column.replace("_", "-")
            raise QscaleError(
                f"the fit needs {column} ({COLUMNS[column].meaning.lower()}); give --{flag}, or "
                f"add it to the checkpoint's qscale.toml."
            )
    if "group_size" in fitted.law.columns and None in sizes:
        raise QscaleError("--group-size row cannot be used: the law needs a number of elements.")
    widths = widths if "bits" in fitted.law.columns else widths[:1]
    sizes = sizes if "group_size" in fitted.law.columns else sizes[:1]
    rows = [{**known, "bits": b, "group_size": g} for b in widths for g in sizes]
    return pd.DataFrame(rows)


def _print_law(fitted: Fit, known: dict[str, Any], result: pd.DataFrame) -> None:
    """Print the law's predictions and what lies outside the fitted rows."""
    from qscale.predict import outside  # noqa: PLC0415

    target = fitted.law.target
    described = ("n_params", "tokens", "lr_peak", "lr", "family", "source", "method")
    facts = ", ".join(
        f"{name} {value:g}" if isinstance(value, int | float) else f"{name} {value}"
        for name, value in known.items()
        if name in described
    )
    ratio = "perplexity_ratio" in result.columns
    heading = [target, *(["ppl ratio"] if ratio else []), "50 % interval", "90 % interval"]
    settings = [c for c in ("bits", "group_size") if c in fitted.law.columns]
    rows = [
        (
            *(number(row[c]) for c in settings),
            number(row[target], 3),
            *([_ratio(row[target])] if ratio else []),
            *(f"{number(row[f'low_{i}'], 3)} to {number(row[f'high_{i}'], 3)}" for i in (50, 90)),
        )
        for _, row in result.iterrows()
    ]
    console.print(
        f"\nLaw {fitted.law.name} fitted on {fitted.data.rows} rows of {fitted.data.name}."
    )
    console.print(f"Checkpoint: {facts}.", markup=False)
    console.print(table("", (*settings, *heading), rows))
    for sentence in outside(fitted, result):
        console.print(f"Note: {sentence}", markup=False)
    for sentence in fitted.search.notes:
        console.print(f"Note: {sentence}", markup=False)
    if fitted.search.status != "converged":
        console.print(f"Note: the fit's status is {fitted.search.status}: {fitted.search.detail}.")


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
        f"({settings[0].scale_rule}), from {result['backward_passes'][0]:g} backward passes on "
        f"{text.name}, probe error ± 1 SE."
    )
    heading = ("bits", "group_size", "bits_per_weight", "delta_loss", "ppl ratio")
    console.print(table("", heading, rows))
    if (result["quadratic_delta"] > SMALL).any():
        console.print(
            f"Note: the quadratic picture holds for small increases; above about {SMALL:g} nats "
            "per token, take it as an order of magnitude.",
        )
