"""``qscale quantize``: a checkpoint in, one with dequantized weights out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from qscale.cli.console import console, progress
from qscale.errors import TextError
from qscale.quantize.mix import parse_setting


def quantize(
    checkpoint: str,
    /,
    *,
    spec: str,
    output: Annotated[Path, Parameter(name=["--output", "--out", "-o"])],
    calibration: Path | None = None,
    calibration_samples: int = 64,
    context: int | None = None,
    revision: str | None = None,
    device: str = "cpu",
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
) -> None:
    r"""Write a checkpoint whose matrices went through a quantizer and back.

    The folder is an ordinary Hugging Face checkpoint that any evaluator loads; no low-bit kernel
    is needed, and none is used. Needs the measure extra.

    ```sh
    qscale quantize examples/checkpoints/tiny-wsd-stable \
        --spec "rtn int4 g64" -o tiny-int4
    qscale quantize examples/checkpoints/tiny-wsd-stable \
        --spec "gptq int4 g128 asym" -o tiny-gptq \
        --calibration examples/texts/austen-wilde-darwin.txt
    ```

    Next: qscale measure with the same spec says what that costs, without a folder in between.

    Parameters
    ----------
    checkpoint
        Hugging Face folder, .gguf file, or hub id such as org/name@revision.
    spec
        What to do, such as "gptq int4 g128 asym", or a .toml file with a format for each pattern
        of matrix names; see qscale specs.
    output
        New folder.
    calibration
        UTF-8 text file that the method, such as gptq or awq, calibrates on.
    calibration_samples
        Windows of context tokens to take from the calibration text.
    context
        Tokens per calibration window; by default the model's longest input, but at most 512.
    revision
        Revision of a hub id.
    device
        Where the model runs, such as cpu or cuda.
    dtype
        How weights are stored; only float32 keeps every level to the bit.
    """
    quantizer = parse_setting(spec)
    if quantizer.activations is not None:
        console.print("Note: activations are not part of a checkpoint: acts= is left out.")

    from qscale import model  # noqa: PLC0415 - torch loads from here on

    model.require_torch()

    import torch  # noqa: PLC0415

    from qscale.measure.subject import calibration_id, calibration_text  # noqa: PLC0415
    from qscale.quantize import save  # noqa: PLC0415
    from qscale.quantize.apply import apply  # noqa: PLC0415

    save.check_folder(output)
    with progress() as (report, _):
        opened = model.load(checkpoint, revision=revision, device=device)
        weights = model.quantizable(opened.model)
        shapes = {name: (w.shape[0], w.shape[1]) for name, w in weights.items()}
        bits = quantizer.bits_per_weight(shapes)  # refuses a mix that does not fit the model
        quantized = sum(1 for name in weights if quantizer.format_of(name) is not None)
        ids = calibrated_on = None
        if quantizer.calibrated:
            if calibration is None:
                raise TextError(f"Method {quantizer.method} needs a text: give --calibration.")
            found = calibration_text(opened, calibration, calibration_samples, context=context)
            ids, calibrated_on = torch.from_numpy(found.ids), calibration_id(found)
        applied = apply(
            opened.model,
            weights,
            quantizer,
            ids,
            on_block=lambda done, total: report("quantizing", done, total),
        )
        facts = {
            "checkpoint": opened.description.checkpoint,
            "spec": str(quantizer),
            "bits_per_weight": bits,
            "n_quantized": quantized,
            "calibration": calibrated_on,
            "calibration_samples": None if ids is None else len(ids),
            **{k: v for k, v in applied.columns.items() if v is not None},
        }
        report("writing", 0, None)
        save.save(opened, applied.weights, output, facts=facts, dtype=dtype)
    console.print(
        f"{quantized} matrices by {quantizer}: {bits:.3f} bits per weight. "
        f"Written to {output}, weights in {dtype}.",
        markup=False,
    )
