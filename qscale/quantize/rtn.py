"""Round-to-nearest: quantize a matrix to a format's grid and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from qscale.quantize.grid import grid

if TYPE_CHECKING:
    from qscale.quantize.format import Format


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
        Dequantized values, same shape and dtype. A group whose step underflows becomes zero; a
        non-finite element makes its whole group non-finite.

    Raises
    ------
    QscaleError
        If only an outside library rounds to the format.

    Notes
    -----
    The last, shorter group of a row is padded with zeros, which moves neither an absolute maximum
    nor a range that holds zero. Levels are worked out in place: fresh memory would cost more than
    the arithmetic.
    """
    rows, columns = weight.shape
    if fmt.per_tensor:
        return grid(weight, fmt, (-2, -1), whole).round(weight)
    size = fmt.group_size or columns
    padding = -columns % size
    padded = torch.nn.functional.pad(weight, (0, padding)) if padding else weight
    groups = padded.reshape(rows, -1, size)
    rounded = grid(groups, fmt, whole=whole).round(groups)
    return rounded.view(rows, -1)[:, :columns].contiguous()
