"""Round to nearest, or by learned rounding (SignRound), by auto-round."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from auto_round import AutoRound
from auto_round.data_type.fp8 import quant_fp8_sym
from auto_round.data_type.int import quant_tensor_asym, quant_tensor_sym
from auto_round.data_type.mxfp import quant_mx
from auto_round.data_type.nvfp import nv_fp4

from qscale.errors import QscaleError
from qscale.quantize import format as formats

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedModel

    from qscale.quantize.format import Format
    from qscale.quantize.mix import Quantizer

STEPS = 200
"""Steps that learn a block's rounding: auto-round's default."""


def quantize_matrix(weight: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Quantize a float32 matrix and back, scales of integers in float32."""
    size = _group_size(fmt)
    if fmt.fmt == formats.INT:
        function = quant_tensor_sym if fmt.symmetric else quant_tensor_asym
        return function(weight, fmt.bits, size, scale_dtype=torch.float32)[0]
    if fmt.fmt == formats.NVFP4:
        return nv_fp4(weight, fmt.bits, size)[0]
    if fmt.fmt == formats.FP8:
        return quant_fp8_sym(weight, group_size=size)[0]
    name = f"mx_int{fmt.bits}" if fmt.fmt == formats.MXINT else f"mx_fp{fmt.bits}"
    return quant_mx(weight, fmt.bits, size, data_type=name)[0]


def quantize_model(
    model: PreTrainedModel,
    named: Mapping[str, Format],
    quantizer: Quantizer,  # noqa: ARG001 - all that is left to say is in the formats
    ids: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """Learn the rounding of the named matrices, block after block, on the windows.

    Computes in float32 rather than auto-round's default of half precision, with scales in
    float32, so that weights are on the grid of the format.

    Raises
    ------
    QscaleError
        If a matrix is one that auto-round leaves alone without a word.
    """
    for name in named:
        rows, columns = model.get_parameter(name).shape
        if rows % 32 or columns % 32:
            raise QscaleError(
                f"auto-round needs matrices whose rows and columns are divisible by 32. {name} is "
                f"{rows} by {columns}; choose another library."
            )
    layers = {
        name: {"bits": 32, "act_bits": 32}
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    layers |= {name.removesuffix(".weight"): _scheme(fmt) for name, fmt in named.items()}
    windows: Any = [{"input_ids": window} for window in ids]
    rounded, done = AutoRound(
        model,
        _NoTokenizer(),
        scheme="W4A16",
        layer_config=layers,
        dataset=torch.utils.data.DataLoader(windows),
        iters=STEPS,
        nsamples=len(ids),
        seqlen=ids.shape[1],
        batch_size=min(8, len(ids)),
        device_map=str(model.device),
        amp=False,
        scale_dtype="fp32",
        enable_torch_compile=False,
        low_cpu_mem_usage=False,
    ).quantize()
    for name, fmt in named.items():
        if done[name.removesuffix(".weight")]["bits"] != fmt.bits:
            raise QscaleError(f"auto-round has left {name} alone. Choose another library.")
    return {name: rounded.get_parameter(name).detach() for name in named}


class _NoTokenizer:
    """Stands where auto-round asks for a tokenizer, which windows of token ids do without."""


def _group_size(fmt: Format) -> int:
    """Return the group size as auto-round spells it: -1 for a row, 0 for the whole matrix."""
    return 0 if fmt.per_tensor else fmt.group_size or -1


def _scheme(fmt: Format) -> dict[str, Any]:
    """Describe an integer format as auto-round does."""
    return {
        "bits": fmt.bits,
        "group_size": _group_size(fmt),
        "sym": fmt.symmetric,
        "data_type": "int",
        "act_bits": 16,
    }
