"""The LM head a chunk of logits at a time: its loss, twice differentiable, from hidden states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from qscale.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from transformers import PreTrainedModel

CHUNK_LOGITS = 1 << 22
"""Logits held at once, elements: 16 MiB in float32, over any vocabulary."""


def chunks(positions: int, vocabulary: int) -> Iterator[slice]:
    """Cut positions so that their logits stay within `CHUNK_LOGITS` elements.

    Examples
    --------
    >>> [part.stop - part.start for part in chunks(100, 100_000)]
    [41, 41, 18]
    """
    size = max(1, CHUNK_LOGITS // vocabulary)
    return (slice(i, min(i + size, positions)) for i in range(0, positions, size))


def last_hidden(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Return the input of the LM head, shape ``(windows, context, width)``."""
    return model.base_model(input_ids=ids, use_cache=False).last_hidden_state


def scored_hidden(model: PreTrainedModel, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what predicts the scored tokens, and these: all of a window but its first.

    Returns
    -------
    hidden : torch.Tensor
        Input of the LM head, shape ``(positions, width)``.
    targets : torch.Tensor
        Token ids, shape ``(positions,)``.
    """
    return last_hidden(model, ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()


def head_logits(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Apply the LM head, in float32 at least; hand over a chunk of positions at a time."""
    logits = linear(hidden, weight, bias)
    return logits if logits.dtype == torch.float64 else logits.float()


def check_head(model: PreTrainedModel, ids: torch.Tensor) -> torch.nn.Linear:
    """Check on a few tokens that logits are the LM head applied to the last hidden state.

    Some architectures scale or cap them on the way, and their loss would come out wrong. The model
    must be in evaluation mode.

    Returns
    -------
    torch.nn.Linear
        The head.

    Raises
    ------
    CheckpointError
        If they are not.
    """
    head = model.get_output_embeddings()
    with torch.inference_mode():
        ids = ids[:1, :8].to(model.device)
        logits = model(input_ids=ids, use_cache=False).logits
        if isinstance(head, torch.nn.Linear) and model.base_model is not model:
            rebuilt = head(last_hidden(model, ids))
            if torch.allclose(logits, rebuilt, rtol=1e-4, atol=1e-4, equal_nan=True):
                return head
    raise CheckpointError(
        f"{type(model).__name__}: logits are not the LM head applied to the last hidden state. "
        "This architecture is not supported."
    )


def own_parameters(
    model: PreTrainedModel, parameters: Mapping[str, torch.nn.Parameter]
) -> dict[str, str]:
    """Find those of some parameters that belong to the LM head alone, not tied to the body.

    Returns
    -------
    dict of str to str
        By parameter name, ``weight`` or ``bias``.
    """
    body = {id(p) for p in model.base_model.parameters()}
    head = model.get_output_embeddings()
    kinds = {id(p): kind for kind, p in head.named_parameters() if id(p) not in body}
    return {name: kinds[id(p)] for name, p in parameters.items() if id(p) in kinds}


def block_traces(hidden: torch.Tensor, head: torch.nn.Linear) -> dict[str, float]:
    r"""Sum over positions the traces of the head's own blocks of the Hessian, exactly.

    Logits are linear in the head, so its block of the Hessian is that of the Gauss-Newton matrix,
    :math:`(\operatorname{diag} p_t - p_t p_t^T) \otimes h_t h_t^T`, with trace
    :math:`(1 - \lVert p_t \rVert^2) \lVert h_t \rVert^2`; for the bias, without :math:`h_t`.

    Parameters
    ----------
    hidden
        Input of the head, shape ``(positions, width)``.
    head
        The LM head.

    Returns
    -------
    dict of str to float
        For ``weight`` and ``bias``.
    """
    weight, bias = 0.0, 0.0
    with torch.no_grad():
        for part in chunks(len(hidden), len(head.weight)):
            p = head_logits(hidden[part], head.weight, head.bias).softmax(-1)
            spread = 1 - p.square_().sum(-1, dtype=torch.float64)
            weight += float(spread @ hidden[part].double().square().sum(-1))
            bias += float(spread.sum())
    return {"weight": weight, "bias": bias}


def cross_entropy_sum(
    hidden: torch.Tensor, head: torch.nn.Linear, targets: torch.Tensor
) -> torch.Tensor:
    r"""Sum the cross-entropy over positions without holding more than a chunk of logits.

    The result can be differentiated twice, and no pass holds more than a few chunks. With
    :math:`z_t = W h_t + b`, :math:`p_t = \operatorname{softmax} z_t`, :math:`y_t` the target's unit
    vector and :math:`r_t = p_t - y_t`, the gradient is
    :math:`(r_t W, \sum_t r_t h_t^T, \sum_t r_t)` for :math:`(h_t, W, b)`. Its inner product with
    :math:`(v_{h,t}, v_W, v_b)` is :math:`\sum_t \langle r_t, a_t \rangle` where
    :math:`a_t = W v_{h,t} + v_W h_t + v_b`, and differentiating that once more gives, with
    :math:`c_t = (\operatorname{diag} p_t - p_t p_t^T) a_t`,

    .. math:: (c_t W + r_t v_W, \; \sum_t c_t h_t^T + r_t v_{h,t}^T, \; \sum_t c_t) .

    Parameters
    ----------
    hidden
        Input of the head, shape ``(positions, width)``.
    head
        The LM head; terms of its weight and bias are formed only where these need a gradient.
    targets
        Token ids, shape ``(positions,)``.

    Returns
    -------
    torch.Tensor
        Sum in nats, a float64 scalar.
    """
    loss: torch.Tensor = _CrossEntropy.apply(hidden, head.weight, head.bias, targets)
    return loss


class _CrossEntropy(torch.autograd.Function):
    """Summed cross-entropy. A scalar's gradient is known up to its scale, so forward forms it."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
    ) -> torch.Tensor:
        gradient = _zeros((hidden, weight, bias), ctx.needs_input_grad)
        loss = torch.zeros((), dtype=torch.float64, device=hidden.device)
        for part in chunks(len(targets), len(weight)):
            logp = head_logits(hidden[part], weight, bias).log_softmax(-1)
            loss -= logp.gather(-1, targets[part, None]).sum(dtype=torch.float64)
            if any(ctx.needs_input_grad):
                residual = _minus_targets(logp.exp_(), targets[part])
                _add_products(gradient, part, residual, hidden[part], weight)
        ctx.save_for_backward(hidden, weight, bias, targets, *gradient)
        return loss

    @staticmethod
    def backward(ctx: Any, scale: torch.Tensor) -> Any:
        return *_Gradient.apply(scale, *ctx.saved_tensors), None


class _Gradient(torch.autograd.Function):
    """Scaled gradient of the summed cross-entropy, whose values are already known."""

    @staticmethod
    def forward(ctx: Any, scale: torch.Tensor, *inputs: torch.Tensor | None) -> Any:
        ctx.save_for_backward(scale, *inputs)
        ctx.set_materialize_grads(False)
        return tuple(g if g is None else g * scale.to(g.dtype) for g in inputs[4:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *vectors: torch.Tensor | None) -> Any:
        scale, hidden, weight, bias, targets, *gradient = ctx.saved_tensors
        v_hidden, v_weight, v_bias = vectors
        wanted = ctx.needs_input_grad
        of_scale = torch.zeros_like(scale) if wanted[0] else None
        if of_scale is not None:
            for g, v in zip(gradient, vectors, strict=True):
                if g is not None and v is not None:
                    of_scale += (g * v).sum(dtype=of_scale.dtype)
        total = _zeros((hidden, weight, bias), wanted[1:])
        for part in chunks(len(targets), len(weight)):
            p = head_logits(hidden[part], weight, bias).softmax(-1)
            a = torch.zeros_like(p) if v_bias is None else v_bias.expand_as(p).clone()
            if v_hidden is not None:
                a.addmm_(v_hidden[part], weight.T)
            if v_weight is not None:
                a.addmm_(hidden[part], v_weight.T)
            c = a.sub_((p * a).sum(-1, keepdim=True)).mul_(p).mul_(scale)
            _add_products(total, part, c, hidden[part], weight)
            residual = _minus_targets(p, targets[part]).mul_(scale)
            if total[0] is not None and v_weight is not None:
                total[0][part].addmm_(residual, v_weight)
            if total[1] is not None and v_hidden is not None:
                total[1].addmm_(residual.T, v_hidden[part])
        return of_scale, *total, None, None, None, None


def _zeros(
    inputs: tuple[torch.Tensor | None, ...], wanted: tuple[bool, ...]
) -> list[torch.Tensor | None]:
    """Return zeros to sum derivatives in, or None where they are not wanted."""
    return [
        torch.zeros_like(x) if x is not None and needed else None
        for x, needed in zip(inputs, wanted, strict=False)
    ]


def _minus_targets(p: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Subtract one from each target's probability, in place."""
    return p.scatter_add_(-1, targets[:, None], p.new_full((len(p), 1), -1.0))


def _add_products(
    sums: list[torch.Tensor | None],
    part: slice,
    rows: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
) -> None:
    """Carry vectors at the logits of a chunk back to hidden states, weight and bias."""
    of_hidden, of_weight, of_bias = sums
    if of_hidden is not None:
        of_hidden[part].addmm_(rows, weight)
    if of_weight is not None:
        of_weight.addmm_(rows.T, hidden)
    if of_bias is not None:
        of_bias.add_(rows.sum(0))
