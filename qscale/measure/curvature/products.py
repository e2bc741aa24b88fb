"""Products of one microbatch's Hessian with vectors, exactly or by finite differences."""

from __future__ import annotations

import math
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch

from qscale.measure.curvature.guard import double_backward_attention
from qscale.measure.curvature.loss import loss_gradient

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from transformers import PreTrainedModel

    Tensors: TypeAlias = Sequence[torch.Tensor]
    Method: TypeAlias = Literal["exact", "central", "forward"]

DISPLACEMENT = {"central": 0.1, "forward": 0.01}
"""Euclidean length by which finite differences move float32 weights.

Rounding rules below, the third derivative above. Products with random signs came out with relative
errors of 1e-4 and 1e-3 to 3e-3 in models of a million parameters.
"""


def attention_for(model: PreTrainedModel, method: Method) -> AbstractContextManager[None]:
    """Let attention be differentiated as often as a method needs it; only ``exact`` needs twice."""
    return double_backward_attention(model) if method == "exact" else nullcontext()


def hessian_multiplier(
    model: PreTrainedModel,
    ids: torch.Tensor,
    parameters: Mapping[str, torch.nn.Parameter],
    *,
    tokens: int,
    method: Method,
) -> Callable[[Tensors], Tensors]:
    r"""Prepare products with the Hessian :math:`H` of a microbatch's share of the mean loss.

    ``exact`` builds the graph of the gradient :math:`g` once and goes back through it for every
    vector :math:`v`. With :math:`w` the weights and a step :math:`s` that makes
    :math:`\lVert s v \rVert` the same for every vector (see ``DISPLACEMENT``), ``central`` is
    :math:`(g(w + s v) - g(w - s v)) / 2 s` and ``forward`` :math:`(g(w + s v) - g(w)) / s`, with
    :math:`g(w)` computed once. They take two gradients and one, no more memory than a gradient and
    two copies of the parameters, and work where an operation has no second derivative. Weights are
    put back bit for bit.

    Parameters
    ----------
    model
        Causal language model inside ``differentiable`` and ``attention_for``.
    ids
        Token ids of the microbatch, shape ``(windows, context)``.
    parameters
        Parameters that the Hessian is restricted to.
    tokens
        Scored tokens of the whole text.
    method
        ``exact``, ``central`` or ``forward``.

    Returns
    -------
    callable
        From a vector, one tensor per parameter, to the product.
    """
    at = list(parameters.values())
    if method == "exact":
        slope = loss_gradient(model, ids, parameters, tokens=tokens, create_graph=True)
        return lambda vector: torch.autograd.grad(slope, at, vector, retain_graph=True)

    def gradient() -> Tensors:
        return loss_gradient(model, ids, parameters, tokens=tokens)

    start = gradient() if method == "forward" else None

    def difference(vector: Tensors) -> Tensors:
        length = math.sqrt(sum(float(v.square().sum(dtype=torch.float64)) for v in vector))
        step = DISPLACEMENT[method] / length if length else 1.0
        with _displaced(at, vector) as move:
            move(step)
            after = gradient()
            before = start
            if before is None:
                move(-step)
                before, step = gradient(), 2 * step
        return [(a - b).div_(step) for a, b in zip(after, before, strict=True)]

    return difference


@contextmanager
def _displaced(parameters: Tensors, vector: Tensors) -> Iterator[Callable[[float], None]]:
    """Yield what moves the weights by a multiple of a vector, from where they are on entry."""
    saved = [p.detach().clone() for p in parameters]

    def move(step: float) -> None:
        with torch.no_grad():
            for p, origin, v in zip(parameters, saved, vector, strict=True):
                p.copy_(origin).add_(v, alpha=step)

    try:
        yield move
    finally:
        with torch.no_grad():
            for p, origin in zip(parameters, saved, strict=True):
                p.copy_(origin)
