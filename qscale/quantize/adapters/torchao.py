"""Round to nearest by torchao: integers, MX and NVIDIA floats, FP8."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torchao.prototype.mx_formats.mx_tensor import MXTensor, ScaleCalculationMode
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
from torchao.quantization import Float8Tensor, PerRow, PerTensor
from torchao.quantization.quant_primitives import (
    MappingType,
    choose_qparams_affine,
    dequantize_affine,
    quantize_affine,
)

from qscale.quantize import format as formats

if TYPE_CHECKING:
    from qscale.quantize.format import Format


def quantize_matrix(weight: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Quantize a float32 matrix and back."""
    if fmt.fmt == formats.INT:
        return _integers(weight, fmt)
    if fmt.fmt == formats.NVFP4:
        scale = per_tensor_amax_to_scale(weight.abs().amax())
        return NVFP4Tensor.to_nvfp4(weight, per_tensor_scale=scale).dequantize(weight.dtype)
    if fmt.fmt == formats.FP8:
        share = PerTensor() if fmt.per_tensor else PerRow()
        return Float8Tensor.from_hp(weight, torch.float8_e4m3fn, share).dequantize(weight.dtype)
    element = torch.float4_e2m1fn_x2 if fmt.fmt == formats.MXFP4 else torch.float8_e4m3fn
    even = fmt.scale_rule == formats.POWER_EVEN
    mode = ScaleCalculationMode.EVEN if even else ScaleCalculationMode.FLOOR
    return MXTensor.to_mx(weight, element, fmt.group_size, mode).dequantize(weight.dtype)


def _integers(weight: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Round to integers times a scale, by the functions behind torchao's integer tensors."""
    rows, columns = weight.shape
    block = (rows, columns) if fmt.per_tensor else (1, fmt.group_size or columns)
    bottom, top = -(2 ** (fmt.bits - 1)), 2 ** (fmt.bits - 1) - 1
    if fmt.scale_rule == formats.ABSMAX_RESTRICTED:
        bottom = -top
    mapping = MappingType.SYMMETRIC if fmt.symmetric else MappingType.ASYMMETRIC
    scale, zero = choose_qparams_affine(
        weight, mapping, block, torch.int8, bottom, top, zero_point_dtype=torch.int8
    )
    levels = quantize_affine(weight, block, scale, zero, torch.int8, bottom, top)
    return dequantize_affine(
        levels, block, scale, zero, torch.int8, bottom, top, output_dtype=weight.dtype
    )
