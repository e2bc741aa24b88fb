"""Write a checkpoint with dequantized weights, as a Hugging Face folder that any tool can load."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers.pytorch_utils import Conv1D

from qscale.errors import CheckpointError, QscaleError
from qscale.model import pristine, quiet_transformers

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedModel

    from qscale.model import Checkpoint

    Dtype = Literal["float32", "bfloat16", "float16"]

FACTS = "qscale_quantization.json"
"""File of the folder that says how the weights were quantized."""


def check_folder(out: Path) -> None:
    """Raise before any work if no new folder can be put there.

    Raises
    ------
    QscaleError
        If something is there already, or the place cannot be written to.
    """
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise QscaleError(f"{out}: exists already. Give --output a new folder.")
    parent = next(p for p in out.absolute().parents if p.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise QscaleError(f"{out}: cannot be written, {parent} is not a folder you can write to.")


def save(
    checkpoint: Checkpoint,
    weights: Mapping[str, torch.Tensor],
    out: str | Path,
    *,
    facts: Mapping[str, Any],
    dtype: Dtype = "float32",
) -> None:
    """Write model, tokenizer and training metadata to a new folder, whole or not at all.

    Parameters
    ----------
    checkpoint
        The checkpoint, whose other weights are kept.
    weights
        Dequantized matrices by parameter name, float32.
    out
        The folder.
    facts
        What `FACTS` shall say: spec, library, bits per weight.
    dtype
        How weights are stored. Only float32 keeps the levels of every format to the bit.

    Raises
    ------
    CheckpointError
        If the checkpoint cannot be written by transformers.
    QscaleError
        If the folder exists or cannot be written.
    """
    out = Path(out)
    check_folder(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        model = pristine(checkpoint)
        _fill(model, weights)
        try:
            with quiet_transformers():
                model.to(getattr(torch, dtype)).save_pretrained(partial)
                checkpoint.tokenizer.save_pretrained(partial)
        except (OSError, ValueError, NotImplementedError) as error:
            raise CheckpointError(f"{out}: transformers cannot write this ({error}).") from error
        sidecar = Path(checkpoint.description.folder) / "qscale.toml"
        if sidecar.is_file():
            shutil.copy(sidecar, partial)
        (partial / FACTS).write_text(json.dumps(dict(facts), indent=2) + "\n", encoding="utf-8")
        partial.chmod(0o755)
        if out.exists():
            out.rmdir()
        partial.replace(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _fill(model: PreTrainedModel, weights: Mapping[str, torch.Tensor]) -> None:
    """Put matrices into a model as transformers built it: Conv1D transposed, experts fused."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, weight in weights.items():
        stem, _, leaf = name.rpartition(".")
        if name in parameters:
            target = parameters[name].data
            transposed = isinstance(model.get_submodule(stem), Conv1D)
            target.copy_(weight.T if transposed else weight)
        elif stem in parameters and leaf.isdigit():
            parameters[stem].data[int(leaf)].copy_(weight)
        else:
            raise CheckpointError(f"{name}: the model as transformers loads it has no such weight.")
