"""Trace of the generalized Gauss-Newton matrix by random vectors at the logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from qscale.errors import CheckpointError
from qscale.measure.curvature.estimate import TraceEstimate
from qscale.measure.curvature.guard import differentiable
from qscale.measure.curvature.head import (
    block_traces,
    check_head,
    chunks,
    head_logits,
    own_parameters,
    scored_hidden,
)
from qscale.measure.curvature.loss import (
    differentiate,
    inner_products,
    microbatch_count,
    microbatches,
    rademacher,
    scored_tokens,
    stream,
)
from qscale.measure.curvature.parallel import add_up_array, processes, share

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from transformers import PreTrainedModel

    from qscale.measure.curvature.loss import Progress

PROBES_AT_ONCE = 8
"""Probes that share one pass over the logits; each adds the hidden states of a microbatch."""


def ggn_trace(
    model: PreTrainedModel,
    windows: torch.Tensor,
    names: Sequence[str],
    *,
    num_probes: int = 6,
    batch_windows: int = 1,
    seed: int = 0,
    on_probe: Progress | None = None,
) -> TraceEstimate:
    r"""Estimate the trace of each parameter's block of the Gauss-Newton matrix of the mean loss.

    With :math:`J_t` the Jacobian of the logits at scored position :math:`t` and :math:`p_t` their
    softmax, the generalized Gauss-Newton matrix (Schraudolph, Neural Comput. 14, 2002) is

    .. math:: G = \frac1T \sum_t J_t^T (\operatorname{diag} p_t - p_t p_t^T) J_t .

    For a softmax under cross-entropy it equals the Fisher information of the model's own
    predictions (Martens, J. Mach. Learn. Res. 21 (146), 2020), is positive semidefinite, and
    differs from the Hessian by a term that is linear in the residuals. The middle factor is
    :math:`B_t B_t^T` with :math:`B_t = \operatorname{diag}\sqrt{p_t} - p_t \sqrt{p_t}^T`, since
    :math:`\sqrt{p_t}^T \sqrt{p_t} = 1`. Let :math:`z_t` be independent random signs and
    :math:`u_t = B_t z_t / \sqrt T`. One backward pass from the logits gives
    :math:`g = \sum_t J_t^T u_t` for all parameters, and as :math:`E[z_s z_t^T] = \delta_{st} I`,

    .. math:: E[g_l g_l^T] = \frac1T \sum_t J_{tl}^T B_t B_t^T J_{tl} = G_{ll}, \qquad
              E \lVert g_l \rVert^2 = \operatorname{tr} G_{ll} .

    :math:`G` is a sum over microbatches, and so is a probe: the squared norms of the microbatches
    are added, not their gradients, which leaves out the products between microbatches, noise of
    mean zero. The block of an LM head that is not tied to the embedding needs no probes, see
    :func:`~qscale.measure.curvature.head.block_traces`: its values are exact and all alike.

    Parameters
    ----------
    model
        Causal language model with float32 weights.
    windows
        Token ids, shape ``(n_windows, context)``; every token of a window but its first is scored.
    names
        Names of the parameters.
    num_probes
        Number of probes, at least 2. Each costs one backward pass over the windows, about 0.7 of
        a gradient, and all share one forward pass.
    batch_windows
        Windows in one microbatch. More take more memory and make probes noisier, not cheaper.
    seed
        Determines the signs, together with ``batch_windows``.
    on_probe
        Called after each microbatch of each probe with the share of a probe that it is.

    Returns
    -------
    TraceEstimate
        Its backward passes are the number of probes.

    Raises
    ------
    CheckpointError
        If the logits cannot be differentiated, or they or the trace are not finite.
    TextError
        If the windows have no token to score.
    ValueError
        If ``num_probes`` is below 2, which leaves no standard error.

    Notes
    -----
    Memory peaks at the activations of a microbatch: logits exist for a chunk of positions only.
    """
    if num_probes < 2:
        raise ValueError(f"num_probes must be at least 2. Got {num_probes} instead.")
    tokens = scored_tokens(windows)
    parts = microbatch_count(windows, batch_windows)
    values = np.zeros((num_probes, parts, len(names)))
    with differentiable(model, names) as parameters:
        head = check_head(model, windows)
        own = own_parameters(model, parameters)
        body = {name: p for name, p in parameters.items() if name not in own}
        probed = [i for i, name in enumerate(names) if name not in own]
        tied = next((i for i, p in enumerate(body.values()) if p is head.weight), None)
        for start, ids in share(microbatches(windows, batch_windows, model.device)):
            part = values[:, start // batch_windows]
            hidden, _ = scored_hidden(model, ids)
            if own:
                exact = block_traces(hidden.detach(), head)
                part += [exact[own[name]] if name in own else 0.0 for name in names]
            streams = [stream(hidden.device, seed, probe, start) for probe in range(num_probes)]
            vectors = pulled_back(hidden.detach(), head, streams, of_weight=tied is not None)
            for probe, (of_hidden, of_weight) in enumerate(vectors):
                if body:
                    gradient = differentiate(
                        hidden, body, of_hidden, retain_graph=probe + 1 < num_probes
                    )
                    if of_weight is not None and tied is not None:
                        gradient[tied].add_(of_weight)
                    part[probe, probed] += inner_products(gradient, gradient)
                if on_probe:
                    on_probe(processes() * len(ids) / len(windows))
        values = add_up_array(values, model.device)
    if not np.isfinite(values).all():
        raise CheckpointError(
            f"The Gauss-Newton trace of {type(model).__name__} is not finite: "
            "check its weights for NaN and infinite values."
        )
    samples = values.reshape(-1, len(names)) * parts / tokens
    return TraceEstimate(tuple(names), samples, tokens, num_probes, parts)


def pulled_back(
    hidden: torch.Tensor,
    head: torch.nn.Linear,
    streams: Sequence[torch.Generator],
    *,
    of_weight: bool,
) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """Yield each probe's vector :math:`B_t z_t`, carried from the logits back to the hidden states.

    With ``of_weight`` it is carried back to the head's weight as well.
    """
    group = 1 if of_weight else PROBES_AT_ONCE  # a gradient of the head may be large
    weight, bias = head.weight.detach(), None if head.bias is None else head.bias.detach()
    for first in range(0, len(streams), group):
        members = streams[first : first + group]
        at_hidden = hidden.new_zeros(len(members), *hidden.shape)
        at_weight = torch.zeros_like(weight) if of_weight else None
        for part in chunks(len(hidden), len(weight)):
            p = head_logits(hidden[part], weight, bias).softmax(-1)
            for total, generator in zip(at_hidden, members, strict=True):
                u = fisher_root(p, rademacher(p, generator))
                total[part] = u @ weight
                if at_weight is not None:
                    at_weight.addmm_(u.T, hidden[part])
        for total in at_hidden:
            yield total, at_weight


def fisher_root(p: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    r"""Multiply a square root of :math:`\operatorname{diag} p - p p^T` with vectors.

    Parameters
    ----------
    p
        Probabilities, along the last axis.
    z
        The vectors, same shape.

    Returns
    -------
    torch.Tensor
        :math:`\sqrt p \odot z - p \langle \sqrt p, z \rangle`, same shape.
    """
    scaled = p.sqrt().mul_(z)
    return scaled.addcmul_(p, scaled.sum(dim=-1, keepdim=True), value=-1)
