"""Round-to-nearest: quantize a matrix to a setting's grid and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from qscale.quantize.setting import ABSMAX_FULL, MINMAX

if TYPE_CHECKING:
    from qscale.quantize.setting import Setting


def rtn(weight: torch.Tensor, setting: Setting) -> torch.Tensor:
    """Round every element to the nearest level of its group's grid.

    Parameters
    ----------
    weight
        Matrix of shape (rows, columns); groups run along the rows. Not modified.
    setting
        Bits, group size and scale rule.

    Returns
    -------
    torch.Tensor
        Dequantized values, same shape and dtype. A group whose step underflows becomes zero; a
        non-finite element makes its whole group non-finite.

    Notes
    -----
    Ties round to even. The last, shorter group of a row is padded with zeros, which moves neither
    an absolute maximum nor a range that holds zero.
    """
    rows, columns = weight.shape
    size = setting.group_size or columns
    padding = -columns % size
    groups = torch.nn.functional.pad(weight, (0, padding)).view(rows, -1, size)
    rounded = (_asymmetric if setting.scale_rule == MINMAX else _symmetric)(groups, setting)
    return rounded.view(rows, -1)[:, :columns].contiguous()


def _symmetric(groups: torch.Tensor, setting: Setting) -> torch.Tensor:
    """Round groups along the last axis to levels around zero."""
    full = setting.scale_rule == ABSMAX_FULL
    top = 2 ** (setting.bits - 1) - 1
    step = groups.abs().amax(-1, keepdim=True) / ((2**setting.bits - 1) / 2 if full else top)
    step = torch.where(step == 0, 1.0, step)
    return (groups / step).round().clamp(-top - 1 if full else -top, top) * step


def _asymmetric(groups: torch.Tensor, setting: Setting) -> torch.Tensor:
    """Round groups along the last axis to levels from their minimum to their maximum.

    Levels are signed and rounding comes last, so that ties fall as in compressed-tensors.
    """
    bottom, top = -(2 ** (setting.bits - 1)), 2 ** (setting.bits - 1) - 1
    low = groups.amin(-1, keepdim=True).clamp(max=0)
    step = (groups.amax(-1, keepdim=True).clamp(min=0) - low) / (top - bottom)
    step = torch.where(step == 0, 1.0, step)
    zero = (bottom - low / step).clamp(bottom, top).round()
    return (groups / step + zero).clamp(bottom, top).round().sub(zero) * step
