"""``qscale sensitivity``: a checkpoint, a text and a setting in, matrices by their cost out."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from qscale.atomic import check_place, replacing
from qscale.cli.console import Seed, console, number, progress, table
from qscale.quantize.export import TOOLS
from qscale.quantize.mix import parse_setting

if TYPE_CHECKING:
    from qscale.measure.sensitivity import Sensitivity

SHOWN = 40
COSTS = {
    "gauss_newton_delta": "along the error",
    "quadratic_delta": "no direction",
    "kl": "KL",
    "delta_loss": "Δloss",
}
"""Columns of nats per token, two predicted and two measured, and their names in print."""


def sensitivity(
    checkpoint: str,
    /,
    *,
    text: Path,
    spec: str,
    output: Annotated[Path, Parameter(name=["--output", "--out", "-o"])],
    predicted_only: bool = False,
    export: Path | None = None,
    export_for: Literal["compressed-tensors", "auto-round"] = "compressed-tensors",
    calibration: Path | None = None,
    calibration_samples: int = 64,
    revision: str | None = None,
    context: int | None = None,
    bos: Literal["none", "once", "each_window"] = "none",
    max_windows: int = 128,
    probe_windows: int = 16,
    probes: int = 6,
    batch_windows: int = 8,
    seed: Seed = 0,
    device: str = "cpu",
    force: bool = False,
) -> None:
    r"""Rank the matrices of a checkpoint by what quantizing each costs.

    Predicted from curvature by a few backward passes for all matrices, and measured by a pass over
    the evaluation windows with each matrix alone quantized. The table is written after each
    matrix; a call that was stopped goes on where it was. Needs the measure extra.

    ```sh
    # From curvature alone, in a minute or less
    qscale sensitivity examples/checkpoints/tiny-wsd-stable --predicted-only \
        --text examples/texts/austen-wilde-darwin.txt \
        --spec "rtn int3 g64" -o int3.csv
    # Measured too, and the formats as vLLM reads them
    qscale sensitivity examples/checkpoints/tiny-wsd-stable \
        --text examples/texts/austen-wilde-darwin.txt --spec "rtn int4 g128" \
        -o int4.csv --export config.json
    ```

    Next: qscale plan mix chooses a format for each matrix from such tables.

    Parameters
    ----------
    checkpoint
        Hugging Face folder, .gguf file, or hub id such as org/name@revision.
    text
        UTF-8 text file. Some windows of it serve for curvature, the others for the loss.
    spec
        Quantizer setting such as "rtn int4 g128", or a .toml file with a format for each pattern
        of matrix names; see qscale specs.
    output
        Table to write, .csv or .parquet.
    predicted_only
        Predict, but do not measure.
    export
        JSON file for the formats, module by module, as another tool reads them.
    export_for
        That tool: the file is the quantization_config of compressed-tensors (vLLM,
        llm-compressor), or auto-round's layer_config.
    calibration
        UTF-8 text file that a method such as gptq or awq calibrates on.
    calibration_samples
        Windows of context tokens to take from the calibration text.
    revision
        Revision of a hub id.
    context
        Tokens per window; by default the model's longest input, but at most 512.
    bos
        Where the beginning-of-sequence token goes.
    max_windows
        Evaluate on at most so many windows, evenly spaced over the text.
    probe_windows
        Windows for curvature.
    probes
        Backward passes over the curvature windows.
    batch_windows
        Windows evaluated at once; changes speed and memory only.
    seed
        Seed of the probes.
    device
        Where the model runs, such as cpu or cuda.
    force
        Measure again what the output already holds.
    """
    setting = parse_setting(spec)
    if export is not None:
        check_place(export)

    from qscale.measure import sensitivity as measuring  # noqa: PLC0415 - torch loads here

    with progress() as (report, _):
        found = measuring.sensitivity(
            checkpoint,
            text,
            output,
            setting=setting,
            measured=not predicted_only,
            calibration=calibration,
            calibration_samples=calibration_samples,
            revision=revision,
            context=context,
            bos=bos,
            probe_windows=probe_windows,
            num_probes=probes,
            max_windows=max_windows,
            batch_windows=batch_windows,
            seed=seed,
            device=device,
            force=force,
            on_progress=report,
        )
    _print(f"{checkpoint}, {setting}: cost in 0.001 nats per token", found)
    console.print(f"Written to {output}.", markup=False)
    if export is not None:
        with replacing(export) as partial:
            content = TOOLS[export_for](setting, found.names)
            partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        console.print(f"Formats for {export_for} written to {export}.", markup=False)


def _print(title: str, found: Sensitivity) -> None:
    """Print the ranking, its sums, and how well the predictions order what was measured.

    Errors of matrices are correlated: their sum bounds that of a sum from above.
    """
    frame = found.matrices
    costs = [name for name in COSTS if name in frame]
    lines = [
        (
            re.sub(r"^\D*\.(?=\d+\.)", "", row["matrix"].removesuffix(".weight")),
            f"{row['n']:,}",
            f"{row['bits']:g}",
            f"{row['share']:.1%}",
            *(_cost(row[c], row[f"{c}_se"]) for c in costs),
        )
        for _, row in frame.head(SHOWN).iterrows()
    ]
    sums = (_cost(frame[c].sum(), frame[f"{c}_se"].sum(), "<") for c in costs)
    joint = (_cost(found.joint[c], found.joint[f"{c}_se"]) for c in costs)
    lines += [("sum", f"{frame['n'].sum():,}", "", "", *sums), ("all at once", "", "", "", *joint)]
    heads = ("matrix", "weights", "bits", "share", *(COSTS[c] for c in costs))
    console.print(table(title, heads, lines))
    if len(frame) > SHOWN:
        console.print(f"{len(frame) - SHOWN} more matrices are in the table.")
    if "kl" not in frame:
        return
    bad = int(frame["kl"].isna().sum())
    if bad:
        console.print(f"Note: {bad} matrices alone give a loss that is not finite.")
    for form in ("gauss_newton_delta", "quadratic_delta"):
        console.print(
            f"Rank correlation of {form} over {len(frame)} matrices: "
            f"{number(found.agreement(form, 'kl'), 3)} with KL, "
            f"{number(found.agreement(form, 'delta_loss'), 3)} with Δloss.",
            markup=False,
        )


def _cost(value: float, se: float, bound: str = "") -> str:
    """Print thousandths and their standard error."""
    return f"{number(1000 * value, 3)} ± {bound}{number(1000 * se, 2)}"
