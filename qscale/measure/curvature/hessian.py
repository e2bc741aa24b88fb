"""Hessian of the mean token loss: products with vectors and Hutchinson's trace estimate."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from qscale.errors import CheckpointError
from qscale.measure.curvature.estimate import TraceEstimate, standard_error
from qscale.measure.curvature.guard import differentiable, double_backward_attention
from qscale.measure.curvature.head import check_head
from qscale.measure.curvature.loss import (
    inner_products,
    loss_gradient,
    microbatches,
    rademacher,
    scored_tokens,
    stream,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from transformers import PreTrainedModel

    from qscale.measure.curvature.loss import Progress


def hessian_vector_product(
    model: PreTrainedModel,
    windows: torch.Tensor,
    vectors: Mapping[str, torch.Tensor],
    *,
    batch_windows: int = 1,
) -> dict[str, torch.Tensor]:
    """Multiply the Hessian of the mean loss, restricted to some parameters, with a vector.

    The gradient is differentiated once more in reverse (reverse over reverse). The functional
    route, ``torch.func.hessian`` or anything else with ``jacrev`` inside, is silently wrong through
    ``nn.LayerNorm`` in torch 2.13 and is not used.

    Parameters
    ----------
    model
        Causal language model with float32 weights.
    windows
        Token ids, shape ``(n_windows, context)``; every token of a window but its first is scored.
    vectors
        The vector, one tensor per parameter by its name; the Hessian is restricted to these.
    batch_windows
        Windows in one microbatch; it bounds the memory and does not change the result.

    Returns
    -------
    dict of str to torch.Tensor
        The product, one tensor per parameter.

    Raises
    ------
    CheckpointError
        If the loss cannot be differentiated twice or is not finite.
    TextError
        If the windows have no token to score.
    """
    tokens = scored_tokens(windows)
    with double_backward_attention(model), differentiable(model, list(vectors)) as parameters:
        check_head(model, windows)
        total = [torch.zeros_like(parameter) for parameter in parameters.values()]
        for _, ids in microbatches(windows, batch_windows, model.device):
            gradient = loss_gradient(model, ids, parameters, tokens=tokens, create_graph=True)
            product = torch.autograd.grad(
                gradient, list(parameters.values()), list(vectors.values())
            )
            for sum_, part in zip(total, product, strict=True):
                sum_.add_(part)
    return dict(zip(vectors, total, strict=True))


def hessian_trace(
    model: PreTrainedModel,
    windows: torch.Tensor,
    names: Sequence[str],
    *,
    rtol: float = 0.1,
    min_probes: int = 8,
    max_probes: int = 100,
    batch_windows: int = 1,
    seed: int = 0,
    on_probe: Progress | None = None,
) -> TraceEstimate:
    r"""Estimate the trace of each parameter's diagonal block of the Hessian of the mean loss.

    Hutchinson's estimator (Commun. Stat. Simul. Comput. 19, 1990): for a vector :math:`v` of
    independent random signs, :math:`E[v v^T] = I`, hence

    .. math:: E[v_l^T (H v)_l] = \sum_m \operatorname{tr}(H_{lm} E[v_m v_l^T])
              = \operatorname{tr} H_{ll} ,

    so one product serves every block :math:`l` at once. The loss is a sum over microbatches, and
    each has its own independent signs. The sum over microbatches is one probe, and its variance,
    :math:`2 \sum_b (\lVert H_b \rVert_F^2 - \sum_i (H_b)_{ii}^2)`, is smaller than that of one
    vector shared by all of them to the extent that their Hessians :math:`H_b` are alike.

    Probes come in rounds. In a round the graph of each microbatch's gradient is built once and
    serves all probes (about 2 gradients a probe rather than 3); after it the relative standard
    error decides whether and how long another is needed, at most doubling the probes.

    Parameters
    ----------
    model
        Causal language model with float32 weights.
    windows
        Token ids, shape ``(n_windows, context)``; every token of a window but its first is scored.
    names
        Names of the parameters; the Hessian is restricted to these.
    rtol
        Stop when the standard error of the total is at most this share of its absolute value.
    min_probes
        Number of probes of the first round, at least 2.
    max_probes
        Number of probes to stop at in any case; check ``se`` of the result.
    batch_windows
        Windows in one microbatch. More take more memory and make probes noisier, not cheaper.
    seed
        Determines the signs, together with ``batch_windows``.
    on_probe
        Called after each microbatch of each probe with the share of a probe that it is.

    Returns
    -------
    TraceEstimate
        Its backward passes are one per probe and one per round for the gradient. A pass through
        the graph of the gradient costs about twice one through the graph of the loss.

    Raises
    ------
    CheckpointError
        If the loss cannot be differentiated twice, or the loss or the trace is not finite.
    TextError
        If the windows have no token to score.
    ValueError
        If the probes are fewer than 2 or the cap is below ``min_probes``.

    Notes
    -----
    Memory peaks at the graph of the gradient, two to three times the activations of a forward pass;
    logits exist for a chunk of positions only.
    """
    if not 2 <= min_probes <= max_probes:
        raise ValueError(
            "min_probes must be at least 2 and at most max_probes. "
            f"Got {min_probes} and {max_probes} instead."
        )
    tokens = scored_tokens(windows)
    values = np.empty((0, len(names)))
    rounds = 0
    with double_backward_attention(model), differentiable(model, names) as parameters:
        check_head(model, windows)
        while add := _probes_to_add(
            values.sum(axis=1), rtol=rtol, min_probes=min_probes, max_probes=max_probes
        ):
            probes = range(len(values), len(values) + add)
            more = _probe(
                model,
                windows,
                parameters,
                probes,
                batch_windows=batch_windows,
                seed=seed,
                on_probe=on_probe,
            )
            values = np.concatenate([values, more])
            rounds += 1
    return TraceEstimate(tuple(names), values, tokens, backward_passes=len(values) + rounds)


def _probe(
    model: PreTrainedModel,
    windows: torch.Tensor,
    parameters: Mapping[str, torch.nn.Parameter],
    probes: range,
    *,
    batch_windows: int,
    seed: int,
    on_probe: Progress | None,
) -> np.ndarray:
    """Return the trace of each block from each of some probes, shape ``(probes, parameters)``."""
    tokens = scored_tokens(windows)
    values = np.zeros((len(probes), len(parameters)))
    for start, ids in microbatches(windows, batch_windows, model.device):
        gradient = loss_gradient(model, ids, parameters, tokens=tokens, create_graph=True)
        for row, probe in enumerate(probes):
            signs = [
                rademacher(parameter, stream(parameter.device, seed, probe, start, block))
                for block, parameter in enumerate(parameters.values())
            ]
            product = torch.autograd.grad(
                gradient, list(parameters.values()), signs, retain_graph=probe != probes[-1]
            )
            values[row] += inner_products(signs, product)
            if on_probe:
                on_probe(len(ids) / len(windows))
    if not np.isfinite(values).all():
        raise CheckpointError(
            f"The Hessian trace of {type(model).__name__} is not finite although its loss is: "
            "check its weights for very large values."
        )
    return values


def _probes_to_add(totals: np.ndarray, *, rtol: float, min_probes: int, max_probes: int) -> int:
    """Plan the next round of probes from the totals so far; 0 says that they suffice."""
    done = len(totals)
    if not done:
        return min_probes
    error, target = standard_error(totals), rtol * abs(totals.mean())
    if error <= target:
        return 0
    # The error falls as 1/sqrt(probes), but its estimate is rough: at most double.
    needed = 2 * done if target == 0 else math.ceil(done * float(error / target) ** 2)
    return min(max(needed, done + 1), 2 * done, max_probes) - done
