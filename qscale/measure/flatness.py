"""Flatness that rescaling weights between layers does not change: relative flatness, Fisher-Rao."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from qscale.errors import CheckpointError
from qscale.measure.curvature.along import gauss_newton_along
from qscale.measure.curvature.estimate import TraceEstimate
from qscale.measure.curvature.guard import differentiable
from qscale.measure.curvature.head import (
    check_head,
    chunks,
    head_logits,
    own_parameters,
    scored_hidden,
)
from qscale.measure.curvature.loss import (
    inner_products,
    microbatches,
    rademacher,
    scored_tokens,
    stream,
)
from qscale.measure.curvature.products import attention_for, hessian_multiplier
from qscale.measure.loss import mean_and_se
from qscale.measure.perturb import token_counts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from transformers import PreTrainedModel

    from qscale.measure.curvature.loss import Progress


def relative_flatness(
    model: PreTrainedModel,
    windows: torch.Tensor,
    names: Sequence[str],
    *,
    num_probes: int = 8,
    batch_windows: int = 1,
    seed: int = 0,
    on_probe: Progress | None = None,
) -> TraceEstimate:
    r"""Estimate the relative flatness of each matrix: its Hessian's trace weighted by its rows.

    Petzka et al. (arXiv:2001.00939, definition 3) define for a layer's matrix with rows
    :math:`w_s`, one a neuron's input weights, and the block :math:`H_{s,s'}` of the Hessian of the
    mean loss between two rows

    .. math:: \kappa = \sum_{s,s'} \langle w_s, w_{s'} \rangle \operatorname{tr} H_{s,s'} .

    It does not change when a factor moves from one layer to another, and small is flat. A probe
    shuffles the :math:`m` columns of the matrix by a uniform random permutation :math:`\pi` and
    flips each by an independent random sign :math:`\sigma_j`:

    .. math:: v_{sj} = \sqrt m \, \sigma_j W_{s \pi(j)}, \qquad
              E[v_{sj} v_{s'j'}] = m \, \delta_{jj'} \frac1m \sum_a W_{sa} W_{s'a}
              = \delta_{jj'} \langle w_s, w_{s'} \rangle ,

    since signs of different columns are uncorrelated and each column is as likely in each place.
    Therefore, with independent probes of mean zero in the other matrices,

    .. math:: E[\langle v, (H v) \rangle_l] = \sum_{s,s'} \langle w_s, w_{s'} \rangle
              \sum_j H_{sj,s'j} = \kappa_l ,

    and one product serves every matrix. A dense :math:`m \times m` matrix of signs times
    :math:`W`, the obvious probe, takes a matrix product and is about as noisy. An LM head that is
    not tied to the embedding needs no probes, see :func:`head_relative_flatness`: its values are
    exact and all alike.

    Parameters
    ----------
    model
        Causal language model with float32 weights.
    windows
        Token ids, shape ``(n_windows, context)``; every token of a window but its first is scored.
    names
        Names of matrices of shape (out, in); the Hessian is restricted to these.
    num_probes
        Number of probes, at least 2; each is a product with the Hessian.
    batch_windows
        Windows in one microbatch. More take more memory and make probes noisier, not cheaper.
    seed
        Determines the probes, together with ``batch_windows``.
    on_probe
        Called after each microbatch of each probe with the share of a probe that it is.

    Returns
    -------
    TraceEstimate
        Relative flatness of each matrix, nats per token, in place of its trace; the standard error
        is over probes.

    Raises
    ------
    CheckpointError
        If the loss cannot be differentiated twice, a parameter is no matrix, or the loss or the
        result is not finite.
    TextError
        If the windows have no token to score.
    ValueError
        If ``num_probes`` is below 2, which leaves no standard error.
    """
    if num_probes < 2:
        raise ValueError(f"num_probes must be at least 2. Got {num_probes} instead.")
    tokens = scored_tokens(windows)
    values = np.zeros((num_probes, len(names)))
    with attention_for(model, "exact"), differentiable(model, names) as parameters:
        _require_matrices(parameters)
        head = check_head(model, windows)
        own = own_parameters(model, parameters)
        probed = {name: p for name, p in parameters.items() if name not in own}
        columns = [column for column, name in enumerate(names) if name in probed]
        for start, ids in microbatches(
            windows if probed else windows[:0], batch_windows, model.device
        ):
            multiply = hessian_multiplier(model, ids, probed, tokens=tokens, method="exact")
            for row in range(num_probes):
                probe = [
                    shuffled_columns(p.detach(), stream(p.device, seed, row, start, block))
                    for block, p in enumerate(probed.values())
                ]
                values[row, columns] += inner_products(probe, multiply(probe))
                if on_probe:
                    on_probe(len(ids) / len(windows))
        for name in own:
            values[:, list(names).index(name)] = _head_flatness(
                model, windows, head, batch_windows
            )[0]
    if not np.isfinite(values).all():
        raise CheckpointError(
            f"The relative flatness of {type(model).__name__} is not finite although its loss is: "
            "check its weights for very large values."
        )
    return TraceEstimate(tuple(names), values, tokens, backward_passes=num_probes + 1)


def head_relative_flatness(
    model: PreTrainedModel, windows: torch.Tensor, *, batch_windows: int = 1
) -> tuple[float, float]:
    r"""Compute the relative flatness of the LM head, as a matrix of its own, exactly.

    The head's block of the Hessian is
    :math:`(\operatorname{diag} p_t - p_t p_t^T) \otimes h_t h_t^T`, a mean over positions :math:`t`
    with the head's input :math:`h_t` and the predictions :math:`p_t`, so that with rows
    :math:`w_v` of the head's matrix :math:`W`

    .. math:: \kappa = \frac1T \sum_t \lVert h_t \rVert^2
              \Bigl( \sum_v p_{tv} \lVert w_v \rVert^2 - \lVert W^T p_t \rVert^2 \Bigr) .

    Parameters
    ----------
    model, windows, batch_windows
        As for :func:`relative_flatness`. If the head is tied to the embedding, the result leaves
        the embedding's own part in the curvature out.

    Returns
    -------
    value, se : float
        Nats per token, and the standard error over windows; NaN for a single window.

    Raises
    ------
    CheckpointError, TextError
        As for :func:`relative_flatness`.
    """
    weight = model.get_output_embeddings().weight
    name = next(name for name, p in model.named_parameters() if p is weight)
    with differentiable(model, [name]):
        head = check_head(model, windows)
        return _head_flatness(model, windows, head, batch_windows)


def shuffled_columns(weight: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Draw a matrix whose row products, column by column, have a matrix's own as expectation.

    Parameters
    ----------
    weight
        Matrix of shape (rows, columns).
    generator
        Stream to draw from.

    Returns
    -------
    torch.Tensor
        The columns in random order, each with a random sign, times the root of their number.
    """
    columns = weight.shape[1]
    order = torch.randperm(columns, generator=generator, device=weight.device)
    signs = rademacher(weight[0], generator)
    return weight[:, order] * signs.mul_(math.sqrt(columns))


def _head_flatness(
    model: PreTrainedModel, windows: torch.Tensor, head: torch.nn.Linear, batch_windows: int
) -> tuple[float, float]:
    """Average the head's relative flatness over positions, with its error over windows."""
    scored_tokens(windows)
    sums = []
    with torch.no_grad():
        weight = head.weight
        squares = weight.square().sum(1)
        for _, ids in microbatches(windows, batch_windows, model.device):
            hidden, _ = scored_hidden(model, ids)
            spread = []
            for part in chunks(len(hidden), len(weight)):
                p = head_logits(hidden[part], weight, head.bias).softmax(-1).to(weight.dtype)
                spread.append((p @ squares).double() - (p @ weight).double().square().sum(1))
            each = torch.cat(spread) * hidden.double().square().sum(1)
            sums.append(each.view(len(ids), -1).sum(1).cpu().numpy())
    return mean_and_se(np.concatenate(sums), token_counts(windows))


def _require_matrices(parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """Refuse parameters that have no rows."""
    for name, p in parameters.items():
        if p.ndim != 2:
            raise CheckpointError(
                f"{name} must be a matrix to have a relative flatness. "
                f"Got shape {tuple(p.shape)} instead."
            )


def fisher_rao_norm(
    model: PreTrainedModel,
    windows: torch.Tensor,
    names: Sequence[str],
    *,
    batch_windows: int = 1,
) -> tuple[float, float]:
    r"""Fisher-Rao norm of the weights and its standard error over windows.

    Liang et al. (arXiv:1711.01530, definition 2): the root of :math:`w^T F w`, with :math:`F` the
    Fisher matrix of the model's own distribution, which is the Gauss-Newton matrix of the loss.

    Parameters
    ----------
    model
        Causal language model with float32 weights.
    windows
        Token ids, shape ``(n_windows, context)``; every token of a window but its first is scored.
    names
        Names of the parameters that make up :math:`w`.
    batch_windows
        Windows in one microbatch.

    Raises
    ------
    CheckpointError
        If the curvature is not finite or the model has no forward derivative.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    along = {name: parameters[name].detach().clone() for name in names}
    form = gauss_newton_along(model, windows, along, batch_windows=batch_windows).gauss_newton
    norm = math.sqrt(2 * form.value)
    return norm, form.se / norm
