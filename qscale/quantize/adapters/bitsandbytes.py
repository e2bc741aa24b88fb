"""Round to bitsandbytes' four-bit codebooks, NF4 and FP4."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bitsandbytes.functional import dequantize_4bit, quantize_4bit

if TYPE_CHECKING:
    import torch

    from qscale.quantize.format import Format


def quantize_matrix(weight: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Quantize a float32 matrix and back.

    On tensors, for a module repacks its weights at its first forward pass on some processors, and
    then dequantizes to garbage. Scales are not themselves quantized.
    """
    packed, state = quantize_4bit(weight, blocksize=fmt.group_size, quant_type=fmt.fmt)
    return dequantize_4bit(packed, state)
