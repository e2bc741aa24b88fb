"""Round to nearest, or by GPTQ, by llm-compressor and compressed-tensors."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING, Any

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier

from qscale.quantize import format as formats

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedModel

    from qscale.quantize.format import Format
    from qscale.quantize.mix import Quantizer

BATCH = 8
"""Windows in one forward pass."""


def quantize_matrix(weight: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Quantize a float32 matrix and back."""
    args = _args(fmt)
    rows, columns = weight.shape
    groups = weight.reshape(rows, -1, fmt.group_size or columns)
    axes: Any = (0, 1, 2) if fmt.per_tensor else -1
    low, high = groups.amin(axes), groups.amax(axes)
    extra = {}
    if fmt.fmt == formats.NVFP4:
        extra["global_scale"] = generate_gparam(weight.min(), weight.max())
    scale, zero = calculate_qparams(low, high, args, **extra)
    return fake_quantize(weight, scale, zero, args, **extra)


def quantize_model(
    model: PreTrainedModel,
    named: Mapping[str, Format],
    quantizer: Quantizer,
    ids: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """Quantize the named matrices by GPTQ, block after block, on the windows."""
    groups = {
        str(fmt): QuantizationScheme(
            targets=[name.removesuffix(".weight") for name in named if named[name] == fmt],
            weights=_args(fmt),
        )
        for fmt in named.values()
    }
    order = "static" if quantizer.act_order else None
    batches: Any = [
        {"input_ids": batch, "attention_mask": torch.ones_like(batch)} for batch in ids.split(BATCH)
    ]
    with tempfile.TemporaryDirectory() as folder:
        # It looks up the configuration where the model came from, a GGUF file or a hub perhaps.
        model.config.save_pretrained(folder)
        model.config.name_or_path = folder
        oneshot(
            model=model,
            processor=_NoTokenizer(),
            recipe=GPTQModifier(config_groups=groups, actorder=order),
            dataset=torch.utils.data.DataLoader(batches, batch_size=None),
            num_calibration_samples=len(ids),
            clear_sparse_session=True,
        )
    return {name: _dequantized(model.get_submodule(name.removesuffix(".weight"))) for name in named}


class _NoTokenizer:
    """Stands where llm-compressor asks for a tokenizer, which windows of token ids do without."""


def _dequantized(module: Any) -> torch.Tensor:
    """Return the weight of a module on the grid that was chosen for it."""
    extra = {}
    if hasattr(module, "weight_global_scale"):
        extra["global_scale"] = module.weight_global_scale
    zero = getattr(module, "weight_zero_point", None)
    args = module.quantization_scheme.weights
    return fake_quantize(module.weight.detach(), module.weight_scale, zero, args, **extra).detach()


def _args(fmt: Format) -> QuantizationArgs:
    """Describe a format as compressed-tensors does."""
    strategy = "tensor" if fmt.per_tensor else "group" if fmt.group_size else "channel"
    found: dict[str, Any] = {
        "num_bits": fmt.bits,
        "type": "int" if fmt.fmt == formats.INT else "float",
        "symmetric": fmt.symmetric,
        "strategy": "tensor_group" if fmt.fmt == formats.NVFP4 else strategy,
        "group_size": fmt.group_size,
    }
    if fmt.fmt == formats.MXFP4:
        found |= {"scale_dtype": torch.uint8, "zp_dtype": torch.uint8}
    if fmt.fmt == formats.NVFP4:
        found["scale_dtype"] = torch.float8_e4m3fn
    return QuantizationArgs(**found)
