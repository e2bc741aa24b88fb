"""Round-to-nearest: quantize matrices to their formats' grids and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from qscale.quantize.format import Format
from qscale.quantize.grid import grid

if TYPE_CHECKING:
    from collections.abc import Mapping

    from qscale.quantize.mix import Quantizer


PIECE = 2**19
"""Elements rounded at a time on a CPU, few enough to stay in its cache between the steps."""


def rtn(weight: torch.Tensor, fmt: Format, whole: torch.Tensor | None = None) -> torch.Tensor:
    """Round every element to the nearest level of its group's grid.

    Parameters
    ----------
    weight
        Matrix of shape (rows, columns); groups run along the rows. Not modified.
    fmt
        The format.
    whole
        Largest magnitude of what shares NVFP4's second scale, a number or shape (rows, 1, 1); by
        default that of the matrix.

    Returns
    -------
    torch.Tensor
        Dequantized values, same shape and dtype. An element that is NaN or infinite makes its
        whole group so (see `grid`).

    Raises
    ------
    QscaleError
        If only an outside library rounds to the format.

    Notes
    -----
    The last, shorter group of a row is padded with zeros, which moves neither an absolute maximum
    nor a range that holds zero. The arithmetic is in float32, or float64 if the weights are.
    """
    work = torch.promote_types(weight.dtype, torch.float32)
    if fmt.per_tensor:
        values = weight.to(work)
        return grid(values, fmt, (-2, -1)).round(values).to(weight.dtype)
    rows, columns = weight.shape
    size = fmt.group_size or columns
    if not fmt.rowwise:
        whole = torch.stack(weight.aminmax()).abs().amax() if whole is None else whole
        whole = whole.to(work)
    rounded = weight.new_empty(rows, columns)
    taken = max(1, PIECE // columns) if weight.device.type == "cpu" else rows
    for start in range(0, rows, taken):
        part = slice(start, start + taken)
        piece = weight[part].to(work)
        if columns % size:
            piece = torch.nn.functional.pad(piece, (0, -columns % size))
        groups = piece.reshape(len(piece), -1, size)
        shared = whole[part] if whole is not None and whole.ndim else whole
        levels = grid(groups, fmt, whole=shared)
        rounded[part] = levels.round(groups).view(len(piece), -1)[:, :columns]
    return rounded


def dequantized(
    weights: Mapping[str, torch.Tensor], formats: Format | Quantizer
) -> dict[str, torch.Tensor]:
    """Round matrices to the nearest values that their formats have, whatever the method.

    Parameters
    ----------
    weights
        Matrices by parameter name. They are not modified; one that a mix leaves as it is comes
        back itself.
    formats
        One format for all, or what gives each its own.
    """
    return {name: rounded(name, w.detach(), formats) for name, w in weights.items()}


def rounded(name: str, weight: torch.Tensor, formats: Format | Quantizer) -> torch.Tensor:
    """Round one matrix to the nearest values of its format, if it has one."""
    fmt = format_of(name, formats)
    return weight if fmt is None else rtn(weight, fmt)


def format_of(name: str, formats: Format | Quantizer) -> Format | None:
    """Return the format of one matrix; None for one that is left as it is."""
    return formats if isinstance(formats, Format) else formats.format_of(name)
