"""Round to the block formats of llama.cpp by the gguf package."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from qscale.quantize import format as formats

if TYPE_CHECKING:
    from qscale.quantize.format import Format

_TYPES = {
    (formats.INT, 4): GGMLQuantizationType.Q4_0,
    (formats.INT, 5): GGMLQuantizationType.Q5_0,
    (formats.INT, 8): GGMLQuantizationType.Q8_0,
    (formats.MXFP4, 4): GGMLQuantizationType.MXFP4,
}


def quantize_matrix(weight: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Quantize a float32 matrix and back; scales of integers are float16."""
    kind = _TYPES[fmt.fmt, fmt.bits]
    rounded = dequantize(quantize(weight.cpu().numpy(), kind), kind)
    return torch.from_numpy(rounded).to(weight.device)
