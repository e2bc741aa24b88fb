"""Dense curvature of tiny models, sharing nothing with the estimators.

Hugging Face's own loss, its eager attention, all columns at once.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import torch

from qscale.measure.curvature import TraceEstimate, hessian_trace

if TYPE_CHECKING:
    from tests.measure.conftest import Tiny

ARCHITECTURES = ("llama", "llama-tied", "qwen2", "gpt2", "neox", "opt")
LAYER_NORM = ("gpt2", "neox", "opt")


def flat(tensors) -> torch.Tensor:
    return torch.cat([t.reshape(t.shape[0], -1) for t in tensors], dim=1)


def dense_hessian(model, ids: torch.Tensor) -> np.ndarray:
    """Every column by a batched backward pass through the gradient of HF's loss."""
    parameters = list(model.parameters())
    loss = model(input_ids=ids, labels=ids).loss
    gradient = torch.autograd.grad(loss, parameters, create_graph=True)
    gradient = torch.cat([g.flatten() for g in gradient])
    rows = torch.autograd.grad(
        gradient,
        parameters,
        torch.eye(len(gradient), dtype=gradient.dtype),
        is_grads_batched=True,
    )
    return flat(rows).numpy()


def dense_ggn_factor(model, ids: torch.Tensor) -> np.ndarray:
    """J^T R with R R^T the softmax Hessian of the mean loss, by an explicit Jacobian."""
    parameters = list(model.parameters())
    logits = model(input_ids=ids).logits[:, :-1]
    rows = torch.eye(logits.numel(), dtype=logits.dtype).view(-1, *logits.shape)
    jacobian = flat(torch.autograd.grad(logits, parameters, rows, is_grads_batched=True))
    p = logits.detach().softmax(-1).flatten(0, 1)
    blocks = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    blocks = torch.linalg.cholesky(blocks / len(p) + 1e-14 * torch.eye(p.shape[-1]))
    return (jacobian.T @ torch.block_diag(*blocks)).numpy()


def block_slices(tiny: Tiny) -> list[slice]:
    ends = np.cumsum([p.numel() for p in tiny.model.parameters()])
    return [slice(a, b) for a, b in itertools.pairwise([0, *ends.tolist()])]


def random_vectors(tiny: Tiny, seed: int = 0) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(p.shape, generator=draw, dtype=p.dtype)
        for name, p in tiny.model.named_parameters()
    }


def flatten(vectors: dict[str, torch.Tensor]) -> np.ndarray:
    return torch.cat([v.flatten() for v in vectors.values()]).detach().numpy()


def assert_close(got: np.ndarray, expected: np.ndarray, *, rtol: float) -> None:
    assert np.linalg.norm(got - expected) <= rtol * np.linalg.norm(expected)


def assert_mean(samples: np.ndarray, mean: float, variance: float) -> None:
    """Independent samples of this variance have this mean, within 4 standard errors."""
    rounding = 1e-9  # a key bias has no effect, so its exact trace is zero
    error = np.sqrt(variance / len(samples))
    assert abs(samples.mean() - mean) <= 4 * error + 1e-6 * abs(mean) + rounding


def rademacher_variance(matrix: np.ndarray) -> float:
    """Variance of v'Mv over random signs v: 2 (||S||^2 - sum S_ii^2), S the symmetric part."""
    symmetric = (matrix + matrix.T) / 2
    return 2 * float(np.sum(symmetric**2) - np.sum(np.diag(symmetric) ** 2))


def per_probe(estimate: TraceEstimate) -> np.ndarray:
    """Estimates of whole probes, shape (probes, blocks)."""
    return estimate.values.reshape(estimate.num_probes, estimate.microbatches, -1).mean(axis=1)


def rows_only(matrix: np.ndarray, rows: slice) -> np.ndarray:
    kept = np.zeros_like(matrix)
    kept[rows] = matrix[rows]
    return kept


def hessian_trace_of_few(*args, num_probes: int = 8, **options) -> TraceEstimate:
    """Hessian trace with a fixed number of probes, to stand beside the Gauss-Newton one."""
    return hessian_trace(*args, min_probes=num_probes, max_probes=num_probes, **options)
