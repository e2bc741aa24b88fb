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
    an absolute maximum nor a range that holds zero. Levels are worked out in place: fresh memory
    would cost more than the arithmetic.
    """
    rows, columns = weight.shape
    size = setting.group_size or columns
    padding = -columns % size
    padded = torch.nn.functional.pad(weight, (0, padding)) if padding else weight
    groups = padded.reshape(rows, -1, size)
    rounded = (_asymmetric if setting.scale_rule == MINMAX else _symmetric)(groups, setting)
    return rounded.view(rows, -1)[:, :columns].contiguous()


def _symmetric(groups: torch.Tensor, setting: Setting) -> torch.Tensor:
    """Round groups along the last axis to levels around zero."""
    full = setting.scale_rule == ABSMAX_FULL
    top = 2 ** (setting.bits - 1) - 1
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    step = torch.maximum(high, -low) / ((2**setting.bits - 1) / 2 if full else top)
    step = torch.where(step == 0, 1.0, step)
    levels = groups / step
    return levels.round_().clamp_(-top - 1 if full else -top, top).mul_(step)


def _asymmetric(groups: torch.Tensor, setting: Setting) -> torch.Tensor:
    """Round groups along the last axis to levels from their minimum to their maximum.

    Levels are signed and rounding comes last, so that ties fall as in compressed-tensors.
    """
    bottom, top = -(2 ** (setting.bits - 1)), 2 ** (setting.bits - 1) - 1
    low = groups.amin(-1, keepdim=True).clamp(max=0)
    step = (groups.amax(-1, keepdim=True).clamp(min=0) - low) / (top - bottom)
    step = torch.where(step == 0, 1.0, step)
    zero = (bottom - low / step).clamp(bottom, top).round()
    levels = groups / step
    return levels.add_(zero).clamp_(bottom, top).round_().sub_(zero).mul_(step)
