"""Blocks of a stored matrix as float32 tensors that stay in the processor's cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from qscale.errors import CheckpointError
from qscale.shards import read_blocks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from qscale.matrices import Matrix
    from qscale.shards import Bits

BLOCK_ELEMENTS = 1 << 17
"""Elements of a block, half a megabyte in float32: larger temporaries cost page faults."""

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}


def floats(bits: Bits, matrix: Matrix) -> torch.Tensor:
    """View the bits of stored elements as the floating-point numbers they are."""
    return torch.from_numpy(bits).view(float_dtype(matrix))


def float_dtype(matrix: Matrix) -> torch.dtype:
    """Return the format that a matrix is stored in."""
    return _DTYPES[matrix.stored.dtype]


def float_blocks(
    matrix: Matrix, elements: int = BLOCK_ELEMENTS, *, multiple: int = 1
) -> Iterator[tuple[int, torch.Tensor]]:
    """Stream a matrix in float32.

    Parameters
    ----------
    matrix
        What to read.
    elements
        Size of a block; at least one row is read.
    multiple
        Zeros are appended to each row until its length is a multiple of this.

    Yields
    ------
    int
        First row of the block.
    torch.Tensor
        Shape (rows of the block, padded columns). The next block overwrites it.
    """
    columns = matrix.shape[1]
    buffer = torch.zeros(0, columns + -columns % multiple)
    for first, bits in read_blocks(matrix.stored, elements, transposed=matrix.transposed):
        if len(buffer) < len(bits):
            buffer = torch.zeros(len(bits), buffer.shape[1])
        block = buffer[: len(bits)]
        block[:, :columns].copy_(floats(bits, matrix))
        yield first, block


def refuse_nonfinite(block: torch.Tensor, first: int, matrix: Matrix) -> None:
    """Raise for a block whose sum of squares is not finite, naming the first element to blame.

    Raises
    ------
    CheckpointError
        Always.
    """
    bad = (block.square().isfinite().logical_not()).nonzero()[0].tolist()
    value = float(block[bad[0], bad[1]])
    raise CheckpointError(
        f"{matrix.stored.file}: {matrix.name!r} holds {value:g} at row {first + bad[0]}, column "
        f"{bad[1]}. The file is damaged or its training diverged."
    )
