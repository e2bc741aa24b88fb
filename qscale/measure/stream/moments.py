"""Sums over one stored matrix in one pass: norms, moments, group statistics, rounding errors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from qscale.measure.stream.blocks import BLOCK_ELEMENTS, float_blocks, float_dtype, refuse_nonfinite
from qscale.quantize.rtn import rtn
from qscale.shards import bits_dtype, read_blocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from qscale.matrices import Matrix
    from qscale.quantize.format import Format

GROUP = 128
"""Consecutive elements of a row in one group; the last group of a row may be shorter."""

SIGMAS = (3, 6)
"""An outlier is larger than this many standard deviations of its matrix."""


@dataclass(frozen=True, slots=True, eq=False)
class Sums:
    """Sums over the elements w of one matrix.

    Parameters
    ----------
    size
        Number of elements.
    first, third
        Sums of w and of w^3.
    group_sizes, group_squares, group_fourths, group_peaks
        For each group of `GROUP`, in row order: its elements, the sums of w^2 and of w^4, and the
        largest absolute value.
    errors
        Squared Frobenius norm of the error of each number format.
    """

    size: int
    first: float
    third: float
    group_sizes: NDArray[np.int64]
    group_squares: NDArray[np.float64]
    group_fourths: NDArray[np.float64]
    group_peaks: NDArray[np.float64]
    errors: tuple[float, ...]

    @property
    def squares(self) -> float:
        """Squared Frobenius norm."""
        return float(self.group_squares.sum())

    @property
    def peak(self) -> float:
        """Largest absolute value."""
        return float(self.group_peaks.max(initial=0.0))

    @property
    def mean(self) -> float:
        """Mean of the elements."""
        return self.first / self.size

    @property
    def sigma(self) -> float:
        """Standard deviation of the elements, divisor n."""
        return math.sqrt(max(0.0, self.squares / self.size - self.mean**2))

    @property
    def kurtosis(self) -> float:
        """Fourth central moment over the squared variance, 3 for a Gaussian; NaN if constant.

        It comes from raw moments of float32 values, so that it has no value where the standard
        deviation is below a thirtieth of the mean.
        """
        mean, variance = self.mean, self.sigma**2
        if variance < 1e-3 * mean**2 or variance == 0:
            return math.nan
        second, fourth = self.squares / self.size, float(self.group_fourths.sum()) / self.size
        central = fourth - 4 * mean * self.third / self.size + 6 * mean**2 * second - 3 * mean**4
        return central / variance**2

    @property
    def group_kurtosis(self) -> NDArray[np.float64]:
        """Kurtosis about zero, ``n sum w^4 / (sum w^2)^2``, of the groups that are not zero."""
        used = self.group_squares > 0
        squares = self.group_squares[used]
        return self.group_sizes[used] * self.group_fourths[used] / squares**2


def sums(matrix: Matrix, formats: Sequence[Format] = (), elements: int = BLOCK_ELEMENTS) -> Sums:
    """Read a matrix once and sum what its features need, float32 in a block, float64 beyond.

    Parameters
    ----------
    matrix
        What to read.
    formats
        Number formats to form the error of.
    elements
        Size of a block.

    Raises
    ------
    CheckpointError
        If a weight is not finite, or its square is not in float32.
    """
    rows, columns = matrix.shape
    groups = -(-columns // GROUP)
    squares, roots, peaks = (torch.empty(rows, groups) for _ in range(3))
    errors = torch.empty(len(formats), rows)
    scratch = torch.empty(min(rows, max(1, elements // columns)), groups * GROUP)
    first = third = 0.0
    for start, block in float_blocks(matrix, elements, multiple=GROUP):
        at = slice(start, start + len(block))
        second = torch.square(block, out=scratch[: len(block)])
        grouped = second.view(len(block), groups, GROUP)
        torch.sum(grouped, -1, out=squares[at])
        torch.linalg.vector_norm(grouped, dim=-1, out=roots[at])
        torch.amax(grouped, -1, out=peaks[at])
        if not math.isfinite(squares[at].sum()):
            refuse_nonfinite(block, start, matrix)
        first += float(block.sum())
        third += float(torch.dot(block.view(-1), second.view(-1)))
        for row, fmt in zip(errors, formats, strict=True):
            row[at] = _squared_errors(block[:, :columns], fmt)
    sizes = np.full((rows, groups), GROUP)
    sizes[:, -1] = columns - (groups - 1) * GROUP
    return Sums(
        size=rows * columns,
        first=first,
        third=third,
        group_sizes=sizes.ravel(),
        group_squares=squares.view(-1).double().numpy(),
        group_fourths=roots.view(-1).double().square().numpy(),
        group_peaks=peaks.view(-1).double().sqrt().numpy(),
        errors=tuple(errors.double().sum(-1).tolist()),
    )


def _squared_errors(block: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Squared norm of each row's quantization error."""
    return rtn(block, fmt).sub_(block).square_().sum(-1)


def outliers(matrix: Matrix, sigma: float, elements: int = BLOCK_ELEMENTS) -> tuple[int, ...]:
    """Count the elements beyond each of `SIGMAS` standard deviations, by their exact stored values.

    Without its sign bit, a floating-point number compares as the integer of the same bits.
    """
    stored = _below([sigma * k for k in SIGMAS], matrix)
    counts = np.zeros(len(SIGMAS), np.int64)
    beyond = np.empty(0, bool)
    for _, bits in read_blocks(matrix.stored, elements, transposed=matrix.transposed):
        doubled = bits.view(f"u{bits.itemsize}").ravel()
        doubled += doubled  # in place: the block is not used again
        if doubled.size > beyond.size:
            beyond = np.empty(doubled.size, bool)
        for index, limit in enumerate(stored):
            np.greater(doubled, limit, out=beyond[: doubled.size])
            counts[index] += np.count_nonzero(beyond[: doubled.size])
    return tuple(counts.tolist())


def _below(limits: Sequence[float], matrix: Matrix) -> NDArray[np.unsignedinteger]:
    """Doubled bits of the largest storable numbers that are not above the limits."""
    exact = torch.tensor(limits, dtype=torch.float64)
    near = exact.to(float_dtype(matrix))
    down = near.nextafter(torch.zeros_like(near))
    below = torch.where(near.double() > exact, down, near)
    bits = bits_dtype(matrix.stored)
    return below.view(getattr(torch, bits.name)).numpy().view(f"u{bits.itemsize}") * 2
