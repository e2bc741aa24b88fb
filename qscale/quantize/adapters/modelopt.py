"""Round to nearest, or by GPTQ or AWQ, by NVIDIA's Model Optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import modelopt.torch.quantization as mtq
import torch

from qscale.errors import QscaleError
from qscale.quantize import format as formats
from qscale.quantize.setting import GPTQ

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedModel

    from qscale.quantize.format import Format
    from qscale.quantize.mix import Quantizer

BATCH = 8
"""Windows in one forward pass."""


def quantize_matrix(weight: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Quantize a float32 matrix and back."""
    rows, columns = weight.shape
    linear = torch.nn.Linear(columns, rows, bias=False, device=weight.device)
    linear.weight.data = weight
    mtq.quantize(linear, _config({"weight": fmt}, "max"))
    mtq.fold_weight(linear)
    return linear.weight.detach()


def quantize_model(
    model: PreTrainedModel,
    named: Mapping[str, Format],
    quantizer: Quantizer,
    ids: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """Quantize the named matrices by GPTQ or AWQ (its variant without clipping) on the windows."""
    algorithm: Any = "awq_lite"
    if quantizer.method == GPTQ:
        # A piece of columns must hold whole groups.
        sizes = [fmt.group_size or 1 for fmt in named.values()]
        size = max(sizes)
        algorithm = {"method": "gptq", "block_size": -(-128 // size) * size}

    def forward(wrapped: torch.nn.Module) -> None:
        with torch.no_grad():
            for batch in ids.to(model.device).split(BATCH):
                wrapped(input_ids=batch, use_cache=False)

    mtq.quantize(model, _config(named, algorithm), forward)
    modules = {name: model.get_submodule(name.removesuffix(".weight")) for name in named}
    # AWQ divides what a matrix reads by what it multiplies the matrix's columns with.
    scales = {
        name: getattr(module.input_quantizer, "pre_quant_scale", None)
        for name, module in modules.items()
    }
    for name, module in modules.items():
        if not module.weight_quantizer.is_enabled:
            raise QscaleError(f"modelopt has left {name} alone. Choose another library.")
    mtq.fold_weight(model)
    found = {}
    for name, module in modules.items():
        scale, weight = scales[name], module.weight.detach()
        found[name] = weight if scale is None else weight * scale
    return found


def _config(named: Mapping[str, Format], algorithm: Any) -> dict[str, Any]:
    """Describe formats as modelopt does: every quantizer off but those of the named matrices."""
    return {
        "quant_cfg": [
            {"quantizer_name": "*", "enable": False},
            *(
                {"quantizer_name": f"{name}_quantizer", "cfg": _attributes(fmt), "enable": True}
                for name, fmt in named.items()
            ),
        ],
        "algorithm": algorithm,
    }


def _attributes(fmt: Format) -> dict[str, Any]:
    """Describe a format as modelopt does."""
    bits: Any = (4, 3) if fmt.fmt == formats.FP8 else fmt.bits
    if fmt.per_tensor:
        return {"num_bits": bits, "axis": None}
    if fmt.group_size is None:
        return {"num_bits": bits, "axis": 0}
    return {"num_bits": bits, "block_sizes": {-1: fmt.group_size, "type": "static"}}
