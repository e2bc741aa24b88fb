"""Grids of integer settings, and round-to-nearest: quantize a matrix to a grid and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from qscale.errors import QscaleError
from qscale.quantize.setting import ABSMAX_FULL, MINMAX, RTN

if TYPE_CHECKING:
    from qscale.quantize.setting import Setting


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """Levels ``(k - zero) * step`` for the integers ``k`` from ``bottom`` to ``top``.

    Parameters
    ----------
    step, zero
        One for each group; their shape broadcasts against the values. ``zero`` is None where
        level 0 is the value 0.
    bottom, top
        Integers of the lowest and the highest level.
    """

    step: torch.Tensor
    zero: torch.Tensor | None
    bottom: int
    top: int

    def round(self, values: torch.Tensor) -> torch.Tensor:
        """Return the level nearest to each value.

        Ties round to even. With a zero point, rounding comes last, so that ties fall as in
        compressed-tensors.
        """
        levels = values / self.step
        if self.zero is None:
            return levels.round_().clamp_(self.bottom, self.top).mul_(self.step)
        levels = levels.add_(self.zero).clamp_(self.bottom, self.top).round_()
        return levels.sub_(self.zero).mul_(self.step)


def grid(groups: torch.Tensor, setting: Setting, dim: int = -1) -> Grid:
    """Choose the grid of each group by a setting's scale rule.

    Parameters
    ----------
    groups
        Values; those of one group lie along ``dim``.
    setting
        Bits and scale rule.
    dim
        Axis that is reduced, and kept with length 1.
    """
    low, high = groups.amin(dim, keepdim=True), groups.amax(dim, keepdim=True)
    bottom, top = -(2 ** (setting.bits - 1)), 2 ** (setting.bits - 1) - 1
    if setting.scale_rule == MINMAX:
        low = low.clamp_(max=0)
        step = (high.clamp_(min=0) - low) / (top - bottom)
        step = torch.where(step == 0, 1.0, step)
        return Grid(step, (bottom - low / step).clamp(bottom, top).round(), bottom, top)
    full = setting.scale_rule == ABSMAX_FULL
    step = torch.maximum(high, -low) / ((2**setting.bits - 1) / 2 if full else top)
    return Grid(torch.where(step == 0, 1.0, step), None, bottom if full else -top, top)


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

    Raises
    ------
    QscaleError
        If the setting's method is another one, which would need calibration.

    Notes
    -----
    The last, shorter group of a row is padded with zeros, which moves neither an absolute maximum
    nor a range that holds zero. Levels are worked out in place: fresh memory would cost more than
    the arithmetic.
    """
    if setting.method != RTN:
        raise QscaleError(f"setting.method must be {RTN} to round. Got {setting.method} instead.")
    rows, columns = weight.shape
    size = setting.group_size or columns
    padding = -columns % size
    padded = torch.nn.functional.pad(weight, (0, padding)) if padding else weight
    groups = padded.reshape(rows, -1, size)
    rounded = grid(groups, setting).round(groups)
    return rounded.view(rows, -1)[:, :columns].contiguous()
