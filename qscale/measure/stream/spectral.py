"""Spectral norm of a stored matrix by Lanczos iteration: power iteration that keeps its vectors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy.linalg import eigh_tridiagonal

from qscale.measure.stream.blocks import BLOCK_ELEMENTS, float_blocks

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from qscale.matrices import Matrix

RTOL = 1e-3
MAX_PRODUCTS = 60


@dataclass(frozen=True, slots=True)
class SpectralNorm:
    """Largest singular value of a matrix W, approached from below.

    Parameters
    ----------
    value
        The largest Ritz value's root.
    residual
        ``||W'W v - value^2 v|| / value^2`` of its unit vector v. Some singular value is within
        half of it, relative to the value; the error is of the order of its square where the
        largest is well apart.
    products
        Products with W'W that it took.
    """

    value: float
    residual: float
    products: int


def spectral_norm(
    matrix: Matrix,
    *,
    rtol: float = RTOL,
    max_products: int = MAX_PRODUCTS,
    elements: int = BLOCK_ELEMENTS,
) -> SpectralNorm:
    """Approach the spectral norm of a stored matrix, reading it once for each product.

    Parameters
    ----------
    matrix
        What to read; the operating system keeps it in memory between products if it can.
    rtol
        Residual to stop at.
    max_products
        Products to stop at in any case.
    elements
        Size of a block.

    Notes
    -----
    Lanczos iteration for W'W with full reorthogonalisation (Golub and Van Loan, Matrix
    Computations, 4th ed., section 10.1) from a fixed Gaussian vector. It uses the products of
    power iteration, and its value is never below what they give.
    """
    size = matrix.shape[1]
    start = np.random.default_rng(0).standard_normal(size)
    basis = [start / np.linalg.norm(start)]
    diagonal: list[float] = []
    beside: list[float] = []
    top = residual = 0.0
    for _ in range(min(max_products, size)):
        new = _product(matrix, basis[-1], elements)
        diagonal.append(float(new @ basis[-1]))
        for _ in range(2):  # once leaves errors of the order of the cancellation
            kept = np.asarray(basis)
            new -= (kept @ new) @ kept
        values, vectors = eigh_tridiagonal(diagonal, beside)
        length = float(np.linalg.norm(new))
        top, residual = max(0.0, float(values[-1])), length * abs(float(vectors[-1, -1]))
        if residual <= rtol * top or length <= np.finfo(np.float32).eps * top:
            break
        beside.append(length)
        basis.append(new / length)
    return SpectralNorm(math.sqrt(top), residual / top if top else 0.0, len(diagonal))


def _product(matrix: Matrix, vector: NDArray[np.float64], elements: int) -> NDArray[np.float64]:
    """Multiply W'W with a vector, W in float32 and summed over blocks in float64."""
    right = torch.from_numpy(vector.astype(np.float32))
    total = torch.zeros(len(vector), dtype=torch.float64)
    for _, block in float_blocks(matrix, elements):
        total += (block @ right) @ block
    return total.numpy()
