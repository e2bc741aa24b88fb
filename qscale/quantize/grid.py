"""Levels that a format gives each group of values, and rounding to them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from qscale.errors import QscaleError
from qscale.quantize import format as formats

if TYPE_CHECKING:
    from collections.abc import Callable

    from qscale.quantize.format import Format

E2M1_TOP, E4M3_TOP = 6.0, 448.0
CLIPS = tuple(1 - 0.02 * i for i in range(40))
"""Shares of a group's range that a clipped format tries."""

# Levels of NF4: quantiles of a Gaussian, zero among them (arXiv:2305.14314, appendix E).
NF4_LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


class Grid(Protocol):
    """Levels of each group, which rounding goes to."""

    def round(self, values: torch.Tensor) -> torch.Tensor:
        """Return the level nearest to each value."""


@dataclass(frozen=True, slots=True, eq=False)
class IntegerGrid:
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


@dataclass(frozen=True, slots=True, eq=False)
class FloatGrid:
    """Levels of a small float format, or of a table, times ``step``.

    Parameters
    ----------
    step
        One for each group; its shape broadcasts against the values.
    cast
        Rounds values to the format's own levels.
    """

    step: torch.Tensor
    cast: Callable[[torch.Tensor], torch.Tensor]

    def round(self, values: torch.Tensor) -> torch.Tensor:
        """Return the level nearest to each value."""
        return self.cast(values / self.step).mul_(self.step)


def to_e2m1(values: torch.Tensor) -> torch.Tensor:
    """Round to 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, ties to even mantissas."""
    size = values.abs().clamp_(max=E2M1_TOP)
    # A binade's spacing: 1/2 below 2, 1 below 4, else 2.
    spacing = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0)).to(values.dtype)
    return size.div_(spacing).round_().mul_(spacing).copysign_(values)


def to_e4m3(values: torch.Tensor) -> torch.Tensor:
    """Round to torch's ``float8_e4m3fn``, values beyond its largest to that."""
    clamped = values.clamp(-E4M3_TOP, E4M3_TOP)
    return clamped.to(torch.float8_e4m3fn).to(values.dtype)


def to_nf4(values: torch.Tensor) -> torch.Tensor:
    """Round to the nearest of `NF4_LEVELS`."""
    levels = torch.tensor(NF4_LEVELS, dtype=values.dtype, device=values.device)
    return levels[torch.bucketize(values, (levels[1:] + levels[:-1]) / 2)]


_FLOATS = {
    formats.MXFP4: (to_e2m1, E2M1_TOP),
    formats.MXFP8: (to_e4m3, E4M3_TOP),
    formats.NVFP4: (to_e2m1, E2M1_TOP),
    formats.FP8: (to_e4m3, E4M3_TOP),
    formats.NF4: (to_nf4, 1.0),
}
"""How to round to a format's own levels, and the largest of them."""

_MX_FLOATS = {formats.MXFP4: (2, 1), formats.MXFP8: (8, 3)}
"""floor(log2) of the largest level, and bits of the mantissa."""


def grid(
    groups: torch.Tensor,
    fmt: Format,
    dim: int | tuple[int, ...] = -1,
    whole: torch.Tensor | None = None,
) -> Grid:
    """Choose the grid of each group by a format's scale rule.

    Parameters
    ----------
    groups
        Values, float32 or float64; those of one group lie along ``dim``.
    fmt
        The format.
    dim
        Axes that are reduced, and kept with length 1.
    whole
        Largest magnitude of all that shares NVFP4's second scale, a shape that broadcasts; by
        default that of ``groups``.

    Raises
    ------
    QscaleError
        If only an outside library rounds to the format.

    Notes
    -----
    Levels are finite whatever finite values the groups hold. If one is NaN or infinite, all levels
    of its group are NaN or infinite, and with NVFP4 all that shares its second scale.
    """
    low, high = groups.amin(dim, keepdim=True), groups.amax(dim, keepdim=True)
    if whole is None and fmt.fmt == formats.NVFP4:
        whole = torch.maximum(high, -low).amax()
    if not fmt.clipped:
        return _of_range(low, high, fmt, whole)
    best = torch.full_like(low, torch.inf)
    clip = torch.ones_like(low)
    for share in CLIPS:
        tried = _of_range(low * share, high * share, fmt, whole).round(groups)
        error = tried.sub_(groups).square_().sum(dim, keepdim=True)
        better = error < best
        best, clip = torch.where(better, error, best), torch.where(better, share, clip)
    return _of_range(low * clip, high * clip, fmt, whole)


def _of_range(
    low: torch.Tensor, high: torch.Tensor, fmt: Format, whole: torch.Tensor | None
) -> Grid:
    """Return the grid of groups that span from ``low`` to ``high``."""
    if fmt.fmt == formats.INT:
        return _integers(low, high, fmt)
    absmax = torch.maximum(high, -low)
    if fmt.fmt == formats.MXINT:
        top = 2 ** (fmt.bits - 1) - 1
        return IntegerGrid(_power(absmax, 0) / 2 ** (fmt.bits - 2), None, -top, top)
    if fmt.fmt not in _FLOATS:
        raise QscaleError(
            f"{fmt.fmt} is rounded to by its library alone: add library= to the spec."
        )
    cast, largest = _FLOATS[fmt.fmt]
    if fmt.fmt in _MX_FLOATS:
        below, mantissa = _MX_FLOATS[fmt.fmt]
        even = fmt.scale_rule == formats.POWER_EVEN
        return FloatGrid(_power(absmax, below, mantissa if even else None), cast)
    step = absmax / largest
    if fmt.fmt == formats.NVFP4 and whole is not None:
        matrix = (E4M3_TOP * E2M1_TOP / whole).clamp(max=torch.finfo(step.dtype).max)
        scale = to_e4m3(matrix * step)
        # One that underflows stands for zeros, which a scale of 1 turns the whole group into.
        step = torch.where(scale == 0, 1.0, scale) / matrix
    return FloatGrid(_finite(step, largest), cast)


def _integers(low: torch.Tensor, high: torch.Tensor, fmt: Format) -> IntegerGrid:
    """Return the grid of integers times a real scale."""
    bottom, top = -(2 ** (fmt.bits - 1)), 2 ** (fmt.bits - 1) - 1
    if fmt.scale_rule == formats.MINMAX:
        low, high = low.clamp(max=0), high.clamp(min=0)
        # Halves, which are exact, since the range of huge values would overflow.
        step = _finite((high / 2 - low / 2) / ((top - bottom) / 2), top - bottom)
        return IntegerGrid(step, (bottom - low / step).clamp(bottom, top).round(), bottom, top)
    if fmt.scale_rule == formats.ABSMAX_SIGNED:
        step = torch.where(-low > high, low, high) / bottom
        return IntegerGrid(_finite(step.abs(), -bottom).copysign(step), None, bottom, top)
    if fmt.scale_rule == formats.ABSMAX_FULL:
        step = torch.maximum(high, -low) / ((2**fmt.bits - 1) / 2)
        return IntegerGrid(_finite(step, -bottom), None, bottom, top)
    return IntegerGrid(_finite(torch.maximum(high, -low) / top, top), None, -top, top)


def _finite(step: torch.Tensor, levels: float) -> torch.Tensor:
    """Return the step, a positive number, so that ``levels`` times it do not overflow.

    An infinite one stays, so that the values it came from do not pass for finite ones.
    """
    info = torch.finfo(step.dtype)
    limited = step.clamp(info.tiny * info.eps, info.max * (1 - 2**-20) / levels)
    return torch.where(step.isinf(), step, limited)


def _power(absmax: torch.Tensor, below: int, mantissa: int | None = None) -> torch.Tensor:
    """Return the power of two ``below`` binades under the largest value's; NaN if not finite.

    With a number of mantissa bits, the value is first rounded to these, halves up, unless it then
    overflows. Exponents of a scale span -127 to 127 (E8M0).
    """
    part, exponent = torch.frexp(absmax)  # part lies in [1/2, 1), or is 0
    if mantissa is not None:
        last = math.frexp(torch.finfo(absmax.dtype).max)[1]
        exponent = (exponent + (part >= 1 - 2.0 ** -(mantissa + 2)).int()).clamp_(max=last)
    ones = 1 + 0 * absmax  # NaN where that is not finite
    return torch.ldexp(ones, (exponent - 1 - below).clamp_(-127, 127))
