"""The loss whose curvature is measured, and its gradient, over windows in microbatches."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from qscale.errors import CheckpointError, TextError
from qscale.measure.curvature.guard import differentiable, require_second_derivative
from qscale.measure.curvature.head import check_head, cross_entropy_sum, scored_hidden
from qscale.measure.curvature.parallel import add_up, share

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from transformers import PreTrainedModel

    Progress: TypeAlias = Callable[[float], None]


def scored_tokens(windows: torch.Tensor) -> int:
    """Count the scored tokens: every token of a window but its first.

    Parameters
    ----------
    windows
        Token ids, shape ``(n_windows, context)``.

    Raises
    ------
    TextError
        If there is no window or a window has nothing to score.
    """
    if windows.ndim != 2 or not len(windows) or windows.shape[1] < 2:
        raise TextError(
            "The text must give at least one window of 2 tokens. "
            f"Got windows of shape {tuple(windows.shape)} instead."
        )
    return len(windows) * (windows.shape[1] - 1)


def microbatch_count(windows: torch.Tensor, batch_windows: int) -> int:
    """Count the microbatches.

    Raises
    ------
    ValueError
        If ``batch_windows`` is below one.
    """
    if batch_windows < 1:
        raise ValueError(f"batch_windows must be at least 1. Got {batch_windows} instead.")
    return math.ceil(len(windows) / batch_windows)


def microbatches(
    windows: torch.Tensor, batch_windows: int, device: torch.device
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the index of each microbatch's first window, and its token ids; the last may be short.

    Raises
    ------
    ValueError
        If ``batch_windows`` is below one.
    """
    for part in range(microbatch_count(windows, batch_windows)):
        start = part * batch_windows
        yield start, windows[start : start + batch_windows].to(device)


def differentiate(
    output: torch.Tensor,
    parameters: Mapping[str, torch.nn.Parameter],
    vector: torch.Tensor | None = None,
    *,
    create_graph: bool = False,
    retain_graph: bool | None = None,
) -> tuple[torch.Tensor, ...]:
    """Multiply a vector with the Jacobian of an output with respect to named parameters.

    Arguments are those of ``torch.autograd.grad``, which would silently return zero for a
    parameter that does not lead to the output.

    Raises
    ------
    CheckpointError
        If a parameter does not lead to the output, as inside a kernel made for inference only.
    """
    gradient: Sequence[torch.Tensor | None] = [None] * len(parameters)
    if output.requires_grad:
        gradient = torch.autograd.grad(
            output,
            list(parameters.values()),
            vector,
            create_graph=create_graph,
            retain_graph=retain_graph,
            allow_unused=True,
        )
    used = []
    for name, part in zip(parameters, gradient, strict=True):
        if part is None:
            raise CheckpointError(f"{name} has no gradient: no derivative of the loss reaches it.")
        used.append(part)
    return tuple(used)


def loss_gradient(
    model: PreTrainedModel,
    ids: torch.Tensor,
    parameters: Mapping[str, torch.nn.Parameter],
    *,
    tokens: int,
    create_graph: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Return the gradient of a microbatch's share of the mean next-token cross-entropy.

    Parameters
    ----------
    model
        Causal language model inside ``differentiable``.
    ids
        Token ids of the microbatch, shape ``(windows, context)``.
    parameters
        Parameters to differentiate with respect to.
    tokens
        Scored tokens of the whole text. Dividing each microbatch's sum by it makes gradients and
        products add up to those of the mean over all tokens, however the windows are split.
    create_graph
        Whether the gradient will itself be differentiated.

    Raises
    ------
    CheckpointError
        If the loss is not finite, or a parameter has no part in it.
    RuntimeError
        If ``create_graph`` is set and the gradient cannot be differentiated.
    """
    hidden, targets = scored_hidden(model, ids)
    loss = cross_entropy_sum(hidden, model.get_output_embeddings(), targets) / tokens
    if not math.isfinite(loss.item()):
        raise CheckpointError(
            f"The loss of {type(model).__name__} is {loss.item()}: "
            "check its weights for NaN and infinite values."
        )
    gradient = differentiate(loss, parameters, create_graph=create_graph)
    if create_graph:
        require_second_derivative(gradient)
    return gradient


def grad_norm(
    model: PreTrainedModel, windows: torch.Tensor, names: Sequence[str], *, batch_windows: int = 1
) -> float:
    """Measure the Euclidean norm of the gradient of the mean loss.

    Parameters
    ----------
    model
        Causal language model with float32 weights.
    windows
        Token ids, shape ``(n_windows, context)``; every token of a window but its first is scored.
    names
        Names of the parameters the gradient is taken with respect to.
    batch_windows
        Windows in one microbatch; it bounds the memory and does not change the result.

    Returns
    -------
    float
        Norm in nats per token per unit of weight.

    Raises
    ------
    CheckpointError
        If the loss cannot be differentiated or is not finite.
    TextError
        If the windows have no token to score.
    """
    tokens = scored_tokens(windows)
    with differentiable(model, names) as parameters:
        check_head(model, windows)
        total = [torch.zeros_like(parameter) for parameter in parameters.values()]
        for _, ids in share(microbatches(windows, batch_windows, model.device)):
            gradient = loss_gradient(model, ids, parameters, tokens=tokens)
            for sum_, part in zip(total, gradient, strict=True):
                sum_.add_(part)
        add_up(total)
    return math.sqrt(inner_products(total, total).sum())


def inner_products(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> np.ndarray:
    """Return the inner product of each pair of tensors, summed in float64."""
    return np.array(
        [float((a * b).sum(dtype=torch.float64)) for a, b in zip(left, right, strict=True)]
    )


def stream(device: torch.device, *key: int) -> torch.Generator:
    """Start the stream of random numbers that only ``key`` determines.

    Streams of one key agree on one kind of device, not between kinds.
    """
    seed = int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0])
    return torch.Generator(device=device).manual_seed(seed)


def rademacher(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Draw independent signs in the shape of a tensor."""
    signs = torch.randint(
        0, 2, like.shape, generator=generator, dtype=like.dtype, device=like.device
    )
    return signs.mul_(2).sub_(1)
