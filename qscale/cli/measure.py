"""``qscale measure``: a checkpoint folder and a text in, measured rows out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from qscale.cli.console import Seed, console, number, progress, table
from qscale.cli.described import Count
from qscale.cli.settings import quantizer_settings
from qscale.errors import QscaleError
from qscale.quantize.mix import parse_setting
from qscale.quantize.setting import RTN

if TYPE_CHECKING:
    import pandas as pd


BITS, GROUP_SIZES = "2,3,4,5,6,8", "32,64,128,row"


def measure(
    checkpoint: str,
    /,
    *,
    text: Path,
    output: Annotated[Path, Parameter(name=["--output", "--out", "-o"])],
    features: str = "curvature,weights",
    spec: list[str] | None = None,
    method: str = RTN,
    calibration: Path | None = None,
    calibration_samples: int = 64,
    bits: str = BITS,
    group_size: str = GROUP_SIZES,
    asymmetric: bool = False,
    scale_rule: Literal["restricted", "full"] = "restricted",
    revision: str | None = None,
    context: int | None = None,
    stride: int | None = None,
    bos: Literal["none", "once", "each_window"] = "none",
    max_windows: int = 256,
    probe_windows: int = 16,
    probes: int = 6,
    hessian_rtol: float = 0.1,
    max_hessian_probes: int = 100,
    batch_windows: int = 8,
    seed: Seed = 0,
    device: str = "cpu",
    force: bool = False,
    track: str | None = None,
    family: str | None = None,
    run: str | None = None,
    tokens: Count | None = None,
    lr_peak: float | None = None,
    lr: float | None = None,
    lr_schedule: str | None = None,
    decay_fraction: float | None = None,
    weight_decay: float | None = None,
    source: str | None = None,
) -> None:
    r"""Measure a checkpoint's loss under quantization, its curvature and its weights.

    Every spec, or every combination of method, bits and group size, is one row, added to the output
    as soon as it is measured; rows that are there already are not measured again. Training facts
    come from the folder's qscale.toml, flags taking precedence. Needs the measure extra.

    ```sh
    # Plain rounding: 3 to 6 bits, three group sizes, and the zero-fit prediction
    qscale measure examples/checkpoints/tiny-wsd-stable \
        --text examples/texts/austen-wilde-darwin.txt \
        --bits 3,4,5,6 --group-size 32,64,128 -o tiny.csv
    # Two named settings, one of them calibrated, with curvature along the error
    qscale measure examples/checkpoints/tiny-wsd-stable \
        --text examples/texts/austen-wilde-darwin.txt \
        --spec "gptq int4 g128 asym" --spec "rtn nvfp4" --calibration train.txt \
        --features second_order -o tiny.csv
    # A model of the hub at a revision, losses alone
    qscale measure EleutherAI/pythia-70m@step3000 --text held_out.txt \
        --features "" --bits 4 -o pythia.csv
    ```

    Next: qscale plot tiny.csv -o figures; qscale fit tiny.csv --law curvature; qscale sweep for
    many checkpoints; qscale sensitivity for which matrices cost most.

    Parameters
    ----------
    checkpoint
        Hugging Face folder with safetensors weights and a tokenizer, .gguf file, or hub id such as
        org/name@revision.
    text
        UTF-8 text file. Some windows of it serve for curvature, the others for the loss.
    output
        Table to add to, .csv or .parquet; curvature by matrix goes to a file beside it.
    features
        What to measure beside the losses: all, or among curvature, weights, spectrum, sharpness,
        second_order, landscape, hidden and head, separated by commas. A feature that a row lacks
        is added to it.
    spec
        Quantizer setting such as "gptq int4 g128 asym", or a .toml file with a format for each
        pattern of matrix names; may be repeated. See qscale specs. Integers can also be had by
        the options that follow.
    method
        Among rtn, gptq and awq, separated by commas.
    calibration
        UTF-8 text file that gptq and awq calibrate on.
    calibration_samples
        Windows of context tokens to take from the calibration text.
    bits
        Bit widths from 2 to 8, separated by commas.
    group_size
        Weights sharing a scale, separated by commas; row is one scale per row.
    asymmetric
        Levels from the group's minimum to its maximum instead of around zero.
    scale_rule
        Symmetric step: restricted is absmax/(2^(b-1)-1), full is absmax/((2^b-1)/2).
    revision
        Revision of a hub id.
    context
        Tokens per window; by default the model's longest input, but at most 512.
    stride
        Tokens from one window to the next; by default windows do not overlap.
    bos
        Where the beginning-of-sequence token goes.
    max_windows
        Evaluate on at most so many windows, evenly spaced over the text.
    probe_windows
        Windows for curvature.
    probes
        Backward passes over the curvature windows for the Gauss-Newton trace.
    hessian_rtol
        Relative standard error at which the Hessian trace is good enough.
    max_hessian_probes
        Probes at which the Hessian trace stops in any case.
    batch_windows
        Windows evaluated at once; changes speed and memory only.
    seed
        Seed of the probes.
    device
        Where the model runs, such as cpu or cuda.
    force
        Measure again what the output already holds.
    track
        Log each row in an experiment tracker too: mlflow, mlflow:URI such as
        mlflow:sqlite:///mlflow.db, or a file ending in .jsonl. MLflow needs the tracking extra.
    family
        Model family, such as llama.
    run
        Name of the training run; rows of one run share its noise.
    tokens
        Training tokens, such as 2e12.
    lr_peak
        Peak learning rate, such as 3e-4.
    lr
        Learning rate at the checkpoint (0 at the end of a decay to zero).
    lr_schedule
        Learning-rate schedule: constant, cosine, wsd or linear.
    decay_fraction
        Share of the learning-rate decay already done, from 0 to 1.
    weight_decay
        Decoupled weight decay, such as 0.1.
    source
        Where the checkpoint comes from, such as a paper or a hub id.
    """
    crossed = (bits, group_size, asymmetric, scale_rule, method)
    if spec and crossed != (BITS, GROUP_SIZES, False, "restricted", RTN):
        raise QscaleError(
            "--spec says all of a setting: leave out --bits, --group-size, --asymmetric, "
            "--scale-rule and --method."
        )
    settings = (
        [parse_setting(text) for text in spec]
        if spec
        else quantizer_settings(
            bits, group_size, asymmetric=asymmetric, scale_rule=scale_rule, method=method
        )
    )

    from qscale.measure import run as running  # noqa: PLC0415 - torch loads here
    from qscale.measure.zerofit import agreement  # noqa: PLC0415
    from qscale.trackers import of_row, open_tracker  # noqa: PLC0415

    with progress() as (report, say):
        tracker = open_tracker(track, say) if track else None
        rows = running.measure(
            checkpoint,
            text,
            output,
            settings=settings,
            features=features,
            revision=revision,
            calibration=calibration,
            calibration_samples=calibration_samples,
            context=context,
            stride=stride,
            bos=bos,
            probe_windows=probe_windows,
            num_probes=probes,
            hessian_rtol=hessian_rtol,
            max_hessian_probes=max_hessian_probes,
            max_windows=max_windows,
            batch_windows=batch_windows,
            seed=seed,
            device=device,
            metadata={
                "family": family,
                "run": run,
                "tokens": tokens,
                "lr_peak": lr_peak,
                "lr": lr,
                "lr_schedule": lr_schedule,
                "decay_fraction": decay_fraction,
                "weight_decay": weight_decay,
                "source": source,
            },
            force=force,
            on_progress=report,
            on_note=say,
            on_row=(lambda row: tracker.log(of_row(row))) if tracker else None,
        )
    _print_rows(checkpoint, rows)
    for name, part in rows.groupby("method", sort=False):
        for form in ("quadratic_delta", "gauss_newton_delta"):
            if form in part and part[form].notna().all():
                console.print(f"{name}: {agreement(part, form)}", markup=False)
        if name not in ("rtn", "awq") and "gauss_newton_delta" not in part:
            console.print(
                "Note: quadratic_delta takes errors without direction, which those of "
                f"{name} have; add --features second_order for the form along the error.",
                markup=False,
            )
    console.print(f"Written to {output}.", markup=False)


def _print_rows(checkpoint: str, rows: pd.DataFrame) -> None:
    """Print the measured rows and what they share."""
    from qscale.measure.zerofit import trusted  # noqa: PLC0415 - torch loads here

    first = rows.iloc[0]
    console.print(
        f"{checkpoint}: {first['n_params']:,.0f} non-embedding parameters, "
        f"{first['n_quantized']:.0f} matrices quantized, loss {first['loss_fp']:.4f} ± "
        f"{number(first['loss_fp_se'], 2)} nats per token before.\n"
        f"Protocol {first['protocol']}.",
        markup=False,
    )
    if "hessian_trace" in rows:
        console.print(
            f"Traces over the matrices: Hessian {first['hessian_trace']:.4g} ± "
            f"{number(first['hessian_trace_se'], 2)}, Gauss-Newton {first['ggn_trace']:.4g} ± "
            f"{number(first['ggn_trace_se'], 2)}.",
            markup=False,
        )
    columns = ("spec", "bits/weight", "Δloss ± SE", "KL", "SQNR dB", "zero-fit Δloss")
    lines = [
        (
            row["spec"],
            f"{row['bits_per_weight']:.3f}",
            f"{number(row['delta_loss'])} ± {number(row['delta_loss_se'], 2)}",
            number(row["kl"]),
            number(row["sqnr_db"]),
            number(predicted),
        )
        for (_, row), predicted in zip(rows.iterrows(), trusted(rows), strict=True)
    ]
    console.print(table("", columns, lines))
    for _, row in rows[rows["status"] != "ok"].iterrows():
        console.print(
            f"Note: {row['spec']}: {row['status']}, {row['status_reason']}.", markup=False
        )
