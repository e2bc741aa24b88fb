"""Hessian of the mean token loss: products with vectors and Hutchinson's trace estimate."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from qscale.errors import CheckpointError
from qscale.measure.curvature.estimate import TraceEstimate
from qscale.measure.curvature.guard import differentiable
from qscale.measure.curvature.head import block_traces, check_head, own_parameters, scored_hidden
from qscale.measure.curvature.loss import (
    inner_products,
    microbatch_count,
    microbatches,
    rademacher,
    scored_tokens,
    stream,
)
from qscale.measure.curvature.parallel import add_up, add_up_array, processes, share
from qscale.measure.curvature.products import attention_for, hessian_multiplier

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from transformers import PreTrainedModel

    from qscale.measure.curvature.loss import Progress
    from qscale.measure.curvature.products import Method

DEGREES = 8
"""Degrees of freedom of the error after the first round of probes."""


def hessian_vector_product(
    model: PreTrainedModel,
    windows: torch.Tensor,
    vectors: Mapping[str, torch.Tensor],
    *,
    method: Method = "exact",
    batch_windows: int = 1,
) -> dict[str, torch.Tensor]:
    """Multiply the Hessian of the mean loss, restricted to some parameters, with a vector.

    The exact method differentiates the gradient once more in reverse (reverse over reverse). The
    functional route, ``torch.func.hessian`` or anything else with ``jacrev`` inside, is silently
    wrong through ``nn.LayerNorm`` in torch 2.13 and is not used.

    Parameters
    ----------
    model
        Causal language model with float32 weights.
    windows
        Token ids, shape ``(n_windows, context)``; every token of a window but its first is scored.
    vectors
        The vector, one tensor per parameter by its name; the Hessian is restricted to these.
    method
        ``exact``, or ``central`` or ``forward`` differences of gradients, which take the memory of
        a gradient and need no second derivative; see
        :func:`~qscale.measure.curvature.products.hessian_multiplier`.
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
    with attention_for(model, method), differentiable(model, list(vectors)) as parameters:
        check_head(model, windows)
        total = [torch.zeros_like(parameter) for parameter in parameters.values()]
        for _, ids in share(microbatches(windows, batch_windows, model.device)):
            multiply = hessian_multiplier(model, ids, parameters, tokens=tokens, method=method)
            for sum_, part in zip(total, multiply(list(vectors.values())), strict=True):
                sum_.add_(part)
        add_up(total)
    return dict(zip(vectors, total, strict=True))


def hessian_trace(
    model: PreTrainedModel,
    windows: torch.Tensor,
    names: Sequence[str],
    *,
    method: Method = "exact",
    rtol: float = 0.1,
    min_probes: int | None = None,
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
    vector shared by all of them to the extent that their Hessians :math:`H_b` are alike. The
    standard error compares the samples of each microbatch with each other, so two probes of many
    microbatches are enough for one. The block of an LM head that is not tied to the embedding needs
    no probes, see :func:`~qscale.measure.curvature.head.block_traces`: its values are exact.

    Probes come in rounds. In a round, what each microbatch's products share is computed once for
    all probes; after it the relative standard error decides whether and how long another is
    needed, at most doubling the probes.

    Parameters
    ----------
    model
        Causal language model with float32 weights.
    windows
        Token ids, shape ``(n_windows, context)``; every token of a window but its first is scored.
    names
        Names of the parameters; the Hessian is restricted to these.
    method
        As for :func:`hessian_vector_product`. A product takes about 2 gradients with ``exact`` and
        ``central``, 1 with ``forward``; the error of differences is far below that of probes.
    rtol
        Stop when the standard error of the total is at most this share of its absolute value.
    min_probes
        Number of probes of the first round, at least 2. Without it, as many as give the standard
        error 8 degrees of freedom.
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
        Its backward passes are one per probe, two with ``central``, and otherwise one per round for
        the gradient. A pass through the graph of a gradient costs twice one through a loss.

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
    Memory peaks at the graph of the gradient, two to three times the activations of a forward pass,
    or with differences at the activations. Logits exist for a chunk of positions only.
    """
    tokens = scored_tokens(windows)
    parts = microbatch_count(windows, batch_windows)
    if min_probes is None:
        min_probes = min(1 + math.ceil(DEGREES / parts), max_probes)
    if not 2 <= min_probes <= max_probes:
        raise ValueError(
            "min_probes must be at least 2 and at most max_probes. "
            f"Got {min_probes} and {max_probes} instead."
        )
    found = TraceEstimate(tuple(names), np.empty((0, len(names))), tokens, 0, parts)
    with attention_for(model, method), differentiable(model, names) as parameters:
        exact = _exact_blocks(model, windows, parameters, batch_windows=batch_windows)
        while add := _probes_to_add(found, rtol=rtol, min_probes=min_probes, max_probes=max_probes):
            probes = range(found.num_probes, found.num_probes + add)
            more = _probe(
                model,
                windows,
                parameters,
                probes,
                method=method,
                batch_windows=batch_windows,
                seed=seed,
                on_probe=on_probe,
            )
            samples = parts * add_up_array(more + exact, model.device).reshape(-1, len(names))
            found = TraceEstimate(
                tuple(names),
                np.concatenate([found.values, samples]),
                tokens,
                found.backward_passes + (2 * add if method == "central" else add + 1),
                parts,
            )
    return found


def _exact_blocks(
    model: PreTrainedModel,
    windows: torch.Tensor,
    parameters: Mapping[str, torch.nn.Parameter],
    *,
    batch_windows: int,
) -> np.ndarray:
    """Return what needs no probes of each block's trace, shape ``(microbatches, parameters)``.

    Parameters that have no more than that no longer need a gradient.
    """
    head = check_head(model, windows)
    own = own_parameters(model, parameters)
    for name in own:
        parameters[name].requires_grad_(False)
    values = np.zeros((microbatch_count(windows, batch_windows), len(parameters)))
    if own:
        for start, ids in share(microbatches(windows, batch_windows, model.device)):
            with torch.no_grad():
                exact = block_traces(scored_hidden(model, ids)[0], head)
            values[start // batch_windows] = [
                exact[own[name]] if name in own else 0.0 for name in parameters
            ]
    return values / scored_tokens(windows)


def _probe(
    model: PreTrainedModel,
    windows: torch.Tensor,
    parameters: Mapping[str, torch.nn.Parameter],
    probes: range,
    *,
    method: Method,
    batch_windows: int,
    seed: int,
    on_probe: Progress | None,
) -> np.ndarray:
    """Return samples of each block's trace, shape ``(probes, microbatches, parameters)``."""
    tokens = scored_tokens(windows)
    probed = {
        block: (name, p) for block, (name, p) in enumerate(parameters.items()) if p.requires_grad
    }
    values = np.zeros((len(probes), microbatch_count(windows, batch_windows), len(parameters)))
    if not probed:
        return values
    for start, ids in share(microbatches(windows, batch_windows, model.device)):
        multiply = hessian_multiplier(
            model, ids, dict(probed.values()), tokens=tokens, method=method
        )
        for row, probe in enumerate(probes):
            signs = [
                rademacher(p, stream(p.device, seed, probe, start, block))
                for block, (_, p) in probed.items()
            ]
            values[row, start // batch_windows, list(probed)] = inner_products(
                signs, multiply(signs)
            )
            if on_probe:
                on_probe(processes() * len(ids) / len(windows))
    if not np.isfinite(values).all():
        raise CheckpointError(
            f"The Hessian trace of {type(model).__name__} is not finite although its loss is: "
            "check its weights for very large values."
        )
    return values


def _probes_to_add(found: TraceEstimate, *, rtol: float, min_probes: int, max_probes: int) -> int:
    """Plan the next round of probes from what was found so far; 0 says that it suffices."""
    done = found.num_probes
    if not done:
        return min_probes
    error, target = found.se, rtol * abs(found.total)
    if error <= target:
        return 0
    # The error falls as 1/sqrt(probes), but its estimate is rough: at most double.
    needed = 2 * done if target == 0 else math.ceil(done * (error / target) ** 2)
    return min(max(needed, done + 1), 2 * done, max_probes) - done
