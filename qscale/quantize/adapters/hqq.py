"""Half-quadratic quantization by hqq."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from hqq.core.quantize import Quantizer

if TYPE_CHECKING:
    from qscale.quantize.format import Format


def quantize_matrix(weight: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Quantize a matrix and back, groups along rows.

    As by hqq's own configuration, the search starts from whole zero points at four bits. The zero
    points that it ends with are real numbers.
    """
    levels, meta = Quantizer.quantize(
        weight,
        nbits=fmt.bits,
        group_size=fmt.group_size or weight.shape[1],
        axis=1,
        round_zero=fmt.bits == 4,
        device=str(weight.device),
        compute_dtype=torch.float32,
    )
    return Quantizer.dequantize(levels, meta)
