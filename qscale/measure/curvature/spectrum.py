"""Eigenvalues of the Hessian: its ends by Lanczos, its density by stochastic Lanczos quadrature."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
import torch

from qscale.errors import QscaleError
from qscale.measure.curvature.guard import differentiable
from qscale.measure.curvature.hessian import hessian_vector_product
from qscale.measure.curvature.loss import stream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray
    from transformers import PreTrainedModel

    from qscale.measure.curvature.loss import Progress

    Matvec: TypeAlias = Callable[[torch.Tensor], torch.Tensor]

MAX_BASIS_BYTES = 8 << 30
"""Memory that a Lanczos basis may take unless a caller allows more."""


@dataclass(frozen=True, slots=True, eq=False)
class Eigenvalues:
    r"""Some eigenvalues at one end of the spectrum.

    Parameters
    ----------
    values
        From the end inwards, nats per token per squared unit of weight, shape ``(k,)``.
    residuals
        Norm of :math:`H v - \lambda v` for each unit eigenvector, shape ``(k,)``. An eigenvalue of
        H lies within it, and the error is of the order of its square over the gap to the next.
    converged
        Whether each residual is within the tolerance asked for, shape ``(k,)``.
    steps
        Products with the Hessian that were spent.
    """

    values: NDArray[np.float64]
    residuals: NDArray[np.float64]
    converged: NDArray[np.bool]
    steps: int


@dataclass(frozen=True, slots=True, eq=False)
class SpectralDensity:
    """Quadrature of the density of all eigenvalues.

    Parameters
    ----------
    nodes
        Eigenvalue of each node, shape ``(runs, steps)``.
    weights
        Share of the spectrum at each node, shape ``(runs, steps)``; a run's sum to one.
    size
        Number of eigenvalues.
    """

    nodes: NDArray[np.float64]
    weights: NDArray[np.float64]
    size: int

    def grid(self, points: int = 500, margin: float = 0.05) -> NDArray[np.float64]:
        """Return even steps over all nodes, with a margin as a share of their range."""
        low, high = self.nodes.min(), self.nodes.max()
        edge = margin * (high - low)
        return np.linspace(low - edge, high + edge, points)

    def density(
        self, grid: NDArray[np.float64], sigma: float | None = None
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Smooth the density with a Gaussian kernel.

        Parameters
        ----------
        grid
            Where to evaluate it, shape ``(points,)``.
        sigma
            Standard deviation of the kernel; None takes a hundredth of the range of the nodes.

        Returns
        -------
        density, se : numpy.ndarray
            Per unit of eigenvalue, and its standard error over runs, shape ``(points,)``; the error
            is NaN for a single run. Smoothing itself has no error bar.

        Raises
        ------
        ValueError
            If ``sigma`` is not above 0.
        """
        if sigma is None:
            sigma = max(0.01 * float(np.ptp(self.nodes)), np.finfo(float).tiny)
        if not sigma > 0:
            raise ValueError(f"sigma must be above 0. Got {sigma} instead.")
        distance = (grid - self.nodes[..., None]) / sigma
        kernel = np.exp(-0.5 * distance**2) / (sigma * math.sqrt(2 * math.pi))
        runs = (self.weights[..., None] * kernel).sum(axis=1)
        return runs.mean(axis=0), _error(runs)

    def negative_share(self) -> tuple[float, float]:
        """Share of eigenvalues below zero, and its standard error over runs."""
        runs = np.where(self.nodes < 0, self.weights, 0.0).sum(axis=1)
        return float(runs.mean()), float(_error(runs))


def top_eigenvalues(
    model: PreTrainedModel,
    windows: torch.Tensor,
    names: Sequence[str],
    k: int = 5,
    *,
    which: Literal["largest", "smallest"] = "largest",
    rtol: float = 1e-4,
    max_steps: int = 100,
    batch_windows: int = 1,
    seed: int = 0,
    max_basis_bytes: int = MAX_BASIS_BYTES,
    on_step: Progress | None = None,
) -> Eigenvalues:
    r"""Find the largest or the smallest eigenvalues of the Hessian of the mean loss.

    Lanczos iteration from a random vector, with every new direction orthogonalised twice against
    all before it (Parlett, The Symmetric Eigenvalue Problem, 1998, chapter 13): without, copies of
    the largest eigenvalue come up instead of the next ones. With :math:`\beta_m` the last
    off-diagonal element and :math:`s_i` an eigenvector of the tridiagonal matrix, the residual of
    a Ritz value is :math:`\beta_m |s_{mi}|`. An eigenvalue that occurs more than once is found
    once.

    Parameters
    ----------
    model
        Causal language model with float32 weights.
    windows
        Token ids, shape ``(n_windows, context)``; every token of a window but its first is scored.
    names
        Names of the parameters; the Hessian is restricted to these.
    k
        Number of eigenvalues, at least 1.
    which
        ``largest`` or ``smallest`` by value: the smallest are the most negative.
    rtol
        Stop when all residuals are at most this share of the largest absolute eigenvalue.
    max_steps
        Products to stop at in any case; check ``converged`` of the result.
    batch_windows
        Windows in one microbatch; it bounds the memory and does not change the result.
    seed
        Determines the first vector.
    max_basis_bytes
        Refuse to start if the basis would take more.
    on_step
        Called after each product with the share of ``max_steps`` that it is.

    Returns
    -------
    Eigenvalues
        As many as asked for.

    Raises
    ------
    CheckpointError
        If the loss cannot be differentiated twice or is not finite.
    QscaleError
        If the basis would take more memory than allowed.
    TextError
        If the windows have no token to score.
    ValueError
        If ``k`` is impossible.

    Notes
    -----
    The basis takes ``max_steps`` times the memory of the named parameters, on their device; a step
    costs about three gradients.
    """
    size, like, matvec = _hessian(model, windows, names, batch_windows=batch_windows)
    max_steps = min(max_steps, size)
    if not 1 <= k <= max_steps:
        raise ValueError(
            f"k must be at least 1 and at most max_steps and the number of parameters, {max_steps}."
            f" Got {k} instead."
        )
    _require_memory(size, max_steps, like, max_basis_bytes)
    sign = -1 if which == "largest" else 1
    values = residuals = np.empty(0)
    steps, tolerance = 0, 0.0
    start = torch.randn(size, generator=stream(like.device, seed), **_kind(like))
    for alpha, beta in _lanczos(matvec, start, max_steps):
        steps = len(alpha)
        if on_step:
            on_step(1 / max_steps)
        if steps < k:
            continue
        ritz, vectors = _eigh_tridiagonal(alpha, beta[:-1])
        order = np.argsort(sign * ritz)[:k]
        values, residuals = ritz[order], beta[-1] * np.abs(vectors[-1, order])
        tolerance = rtol * float(np.abs(ritz).max())
        if (residuals <= tolerance).all():
            break
    return Eigenvalues(values, residuals, residuals <= tolerance, steps)


def spectral_density(
    model: PreTrainedModel,
    windows: torch.Tensor,
    names: Sequence[str],
    *,
    num_runs: int = 5,
    num_steps: int = 40,
    batch_windows: int = 1,
    seed: int = 0,
    max_basis_bytes: int = MAX_BASIS_BYTES,
    on_step: Progress | None = None,
) -> SpectralDensity:
    r"""Estimate the density of the Hessian's eigenvalues by stochastic Lanczos quadrature.

    For a random unit vector :math:`v` the quadratic form :math:`v^T f(H) v` has the mean
    :math:`\operatorname{tr} f(H) / n`. Lanczos iteration from :math:`v` gives the Gauss quadrature
    of that form: Ritz values as nodes, squared first components of the tridiagonal matrix's
    eigenvectors as weights (Golub & Welsch, Math. Comp. 23, 1969; Ghorbani et al.,
    arXiv:1901.10159). The ends of the spectrum come out right to many digits, moments only as well
    as a handful of random vectors does: take the trace from
    :func:`~qscale.measure.curvature.hessian_trace`.

    Parameters
    ----------
    model, windows, names, batch_windows, max_basis_bytes
        As for :func:`top_eigenvalues`.
    num_runs
        Random vectors, at least 2 for an error.
    num_steps
        Products with the Hessian in each run; at most as many nodes.
    seed
        Determines the random vectors.
    on_step
        Called after each product with the share of all runs that it is.

    Returns
    -------
    SpectralDensity
        The nodes and weights of every run.

    Raises
    ------
    CheckpointError, QscaleError, TextError
        As :func:`top_eigenvalues`.
    ValueError
        If ``num_runs`` or ``num_steps`` is below 1.

    Notes
    -----
    The basis takes ``num_steps`` times the memory of the named parameters.
    """
    if min(num_runs, num_steps) < 1:
        raise ValueError(
            f"num_runs and num_steps must be at least 1. Got {num_runs} and {num_steps} instead."
        )
    size, like, matvec = _hessian(model, windows, names, batch_windows=batch_windows)
    num_steps = min(num_steps, size)
    _require_memory(size, num_steps, like, max_basis_bytes)
    nodes, weights = np.zeros((2, num_runs, num_steps))
    for run in range(num_runs):
        start = torch.randn(size, generator=stream(like.device, seed, run), **_kind(like))
        for alpha, beta in _lanczos(matvec, start, num_steps):  # noqa: B007 - the last is kept
            if on_step:
                on_step(1 / (num_runs * num_steps))
        ritz, vectors = _eigh_tridiagonal(alpha, beta[:-1])
        # A run that ended early has found an invariant subspace: its last nodes weigh nothing.
        nodes[run] = np.pad(ritz, (0, num_steps - len(ritz)), mode="edge")
        weights[run, : len(ritz)] = vectors[0] ** 2
    return SpectralDensity(nodes, weights, size)


def _hessian(
    model: PreTrainedModel,
    windows: torch.Tensor,
    names: Sequence[str],
    *,
    batch_windows: int,
) -> tuple[int, torch.Tensor, Matvec]:
    """Return the size of the Hessian, one of its parameters, and its product with flat vectors.

    Products are exact: with differences of gradients at a displacement that suits random vectors,
    the top eigenvalue of a tiny model came out 15 to 30 % low, since the loss is far from quadratic
    over that length along its own sharpest directions.
    """
    with differentiable(model, names) as parameters:
        shapes = {name: p.shape for name, p in parameters.items()}
        sizes = [p.numel() for p in parameters.values()]
        like = next(iter(parameters.values())).detach()

    def matvec(vector: torch.Tensor) -> torch.Tensor:
        parts = vector.split(sizes)
        product = hessian_vector_product(
            model,
            windows,
            {name: part.view(shapes[name]) for name, part in zip(shapes, parts, strict=True)},
            batch_windows=batch_windows,
        )
        return torch.cat([part.flatten() for part in product.values()])

    return sum(sizes), like, matvec


def _lanczos(
    matvec: Matvec, start: torch.Tensor, max_steps: int
) -> Iterator[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Yield diagonal and off-diagonal of the tridiagonal matrix after each step.

    The last element of the off-diagonal is the norm of what the next step would start from. The
    iteration ends early where that vanishes: the basis then spans an invariant subspace.
    """
    basis = torch.empty(max_steps, len(start), **_kind(start))
    alpha, beta = np.zeros(max_steps), np.zeros(max_steps)
    vector = start / torch.linalg.vector_norm(start)
    for step in range(max_steps):
        basis[step] = vector
        known = basis[: step + 1]
        vector = matvec(vector)
        alpha[step] = float((known[-1] * vector).sum(dtype=torch.float64))
        for _ in range(2):  # once leaves rounding errors of the order of what it took away
            vector = vector - known.T @ (known @ vector)
        beta[step] = float(torch.linalg.vector_norm(vector, dtype=torch.float64))
        scale = np.abs(alpha[: step + 1]).max() + beta[: step + 1].max()
        ended = beta[step] <= 10 * torch.finfo(start.dtype).eps * scale
        yield alpha[: step + 1], beta[: step + 1]
        if ended:
            return
        vector = vector / beta[step]


def _eigh_tridiagonal(
    diagonal: NDArray[np.float64], off_diagonal: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return eigenvalues and eigenvectors of a symmetric tridiagonal matrix, ascending."""
    matrix = np.diag(diagonal) + np.diag(off_diagonal, 1) + np.diag(off_diagonal, -1)
    return np.linalg.eigh(matrix)


def _require_memory(size: int, steps: int, like: torch.Tensor, limit: int) -> None:
    """Refuse a basis above the limit."""
    needed = size * steps * like.element_size()
    if needed > limit:
        raise QscaleError(
            f"A Lanczos basis of {steps} vectors over {size:,} parameters takes "
            f"{needed / 2**30:.1f} GiB, above the limit of {limit / 2**30:.1f} GiB. "
            "Take fewer steps, fewer parameters, or raise max_basis_bytes."
        )


def _kind(like: torch.Tensor) -> dict:
    return {"dtype": like.dtype, "device": like.device}


def _error(runs: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the standard error of the mean over the first axis, NaN for a single run."""
    if len(runs) < 2:
        return np.full(runs.shape[1:], np.nan)
    return runs.std(axis=0, ddof=1) / np.sqrt(len(runs))
