"""Tell weights that already sit on an integer quantization grid, as dequantized ones do."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from qscale.measure.stream.blocks import floats
from qscale.shards import read_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from qscale.matrices import Matrix

GROUP_SIZES = (128, 64, 32, 16)
"""Group sizes to try, after the whole row."""

MAX_STEPS = 2**8 - 1
FIRST_ROWS, MORE_ROWS = 4, 64

_MAX_OFFSET = 0.25
"""Distance from a level, in steps, within which storage rounding must keep elements. A level that
is rounded further than that is no evidence of a grid."""

_AT_ONCE = 1 << 16
"""Elements of the arrays that hold several numbers of steps."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Equally spaced levels that the weights of a matrix sit on.

    Parameters
    ----------
    bits
        Least bits whose levels, 2^bits at most, hold every group.
    group_size
        Consecutive elements of a row with levels of their own; None for the whole row.
    """

    bits: int
    group_size: int | None


def find_grid(matrix: Matrix) -> Grid | None:
    """Find the coarsest grouping under which a matrix sits on a grid of at most 8 bits.

    Returns
    -------
    Grid or None
        None if some group of every size tried is off any grid. The grid holds for up to 64
        rows, evenly spaced; a matrix is given up after one to four where it fails.

    Notes
    -----
    A group's least and greatest elements are taken as levels n steps apart, and the least n is
    sought that puts the others near whole steps. Bfloat16 rounds too coarsely to tell more than
    five bits from no grid at all, float16 and float32 tell eight.
    """
    rows, columns = matrix.shape
    if columns < min(GROUP_SIZES):  # a handful of numbers fits some grid by chance
        return None
    few, many = (
        np.unique(np.linspace(0, rows - 1, min(rows, count)).round().astype(int))
        for count in (FIRST_ROWS, MORE_ROWS)
    )
    sample = _read(matrix, few)
    if not _levels(sample[:, : min(GROUP_SIZES)]):  # part of a group is on its grid, too
        return None
    for size in (columns, *(s for s in GROUP_SIZES if s < columns)):
        if _levels(_grouped(sample, size)):
            levels = _levels(_grouped(_read(matrix, many), size))
            if levels > 1:
                bits = math.ceil(math.log2(levels))
                return Grid(bits, None if size == columns else size)
    return None


def _read(matrix: Matrix, rows: NDArray[np.int64]) -> NDArray[np.float64]:
    """Read rows as float64."""
    bits = read_rows(matrix.stored, rows.tolist(), transposed=matrix.transposed)
    return floats(bits, matrix).double().numpy()


def _grouped(rows: NDArray[np.float64], size: int) -> NDArray[np.float64]:
    """Cut rows into full groups; a shorter last one is left out."""
    return rows[:, : rows.shape[1] // size * size].reshape(-1, size)


def _levels(groups: NDArray[np.float64]) -> int:
    """Levels of the finest grid among groups: 1 if all are constant, 0 if one is on no grid."""
    low, high = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)
    # An element and the ends it is placed between are off by half a unit in the last place each.
    rounding = np.ldexp(_half_unit(groups), np.frexp(np.maximum(abs(low), abs(high)))[1])
    span, above = high - low, groups - low
    left = np.flatnonzero(span[:, 0] > 0)  # a constant group is on any grid
    if len(left) and len(np.unique(groups[left[0]])) > MAX_STEPS + 1:
        return 0
    most = tried = 0
    while len(left):
        if tried == MAX_STEPS:
            return 0
        count = max(1, _AT_ONCE // (len(left) * groups.shape[1]))
        steps = np.arange(tried + 1, min(tried + count, MAX_STEPS) + 1).reshape(-1, 1, 1)
        slack, offset = (value[left] * steps / span[left] for value in (rounding, above))
        fits = ((abs(offset - offset.round()) <= slack) & (slack <= _MAX_OFFSET)).all(-1)
        found = fits.any(0)
        most = max(most, int((tried + 1 + fits.argmax(0))[found].max(initial=0)))
        if (slack[-1, ~found] > _MAX_OFFSET).any():  # as it will be for more steps
            return 0
        tried, left = int(steps[-1, 0, 0]), left[~found]
    return most + 1


def _half_unit(values: NDArray[np.float64]) -> float:
    """Half a unit in the last place of 1 in the narrowest format that holds all values."""
    single = values.astype(np.float32)
    if not (single.view(np.uint32) & 0xFFFF).any():
        return 2.0**-8  # bfloat16
    with np.errstate(over="ignore"):
        half = (single.astype(np.float16) == single).all()
    return 2.0**-11 if half else 2.0**-22  # float32 went through a few roundings
