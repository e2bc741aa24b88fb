"""Loss increase along a given change of the weights, to second order and without random probes."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.autograd import forward_ad

from qscale.errors import CheckpointError
from qscale.measure.curvature.guard import differentiable, double_backward_attention
from qscale.measure.curvature.head import check_head, chunks, head_logits
from qscale.measure.curvature.loss import (
    inner_products,
    loss_gradient,
    microbatches,
    scored_tokens,
)
from qscale.measure.curvature.parallel import add_up_array, processes, share

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray
    from transformers import PreTrainedModel

    from qscale.measure.curvature.loss import Progress


@dataclass(frozen=True, slots=True, eq=False)
class PerWindow:
    """A mean over tokens that is known for each window.

    Parameters
    ----------
    values
        Mean over each window's scored tokens, nats per token, shape ``(n_windows,)``.
    """

    values: NDArray[np.float64]

    @property
    def value(self) -> float:
        """Mean over all scored tokens; every window has as many."""
        return float(self.values.mean())

    @property
    def se(self) -> float:
        """Standard error over windows, NaN for a single one."""
        if len(self.values) < 2:
            return float("nan")
        return float(self.values.std(ddof=1) / np.sqrt(len(self.values)))

    def __add__(self, other: PerWindow) -> PerWindow:
        """Add window by window, so that the error of the sum is right."""
        return PerWindow(self.values + other.values)


@dataclass(frozen=True, slots=True, eq=False)
class Expansion:
    r"""Taylor terms of the mean loss along a change :math:`\epsilon` of the weights.

    Parameters
    ----------
    first_order
        :math:`g^T \epsilon`, with the gradient :math:`g`.
    gauss_newton
        :math:`\tfrac12 \epsilon^T G \epsilon`, with the Gauss-Newton matrix :math:`G`.
    hessian
        :math:`\tfrac12 \epsilon^T H \epsilon`, with the Hessian :math:`H`; None if not asked for.
    """

    first_order: PerWindow
    gauss_newton: PerWindow
    hessian: PerWindow | None = None

    @property
    def second_order(self) -> PerWindow | None:
        """The loss increase to second order, ``first_order + hessian``."""
        return None if self.hessian is None else self.first_order + self.hessian


def gauss_newton_along(
    model: PreTrainedModel,
    windows: torch.Tensor,
    errors: Mapping[str, torch.Tensor],
    *,
    batch_windows: int = 1,
    on_windows: Progress | None = None,
) -> Expansion:
    r"""Expand the mean loss along a change of some weights, with Gauss-Newton curvature.

    One forward pass in forward mode carries the change :math:`\epsilon` to the logits of every
    scored position, :math:`\dot z_t = J_t \epsilon`. With :math:`p_t` the softmax of the logits and
    :math:`y_t` the target, they hold both terms:

    .. math:: g^T \epsilon = \frac1T \sum_t (E_{v \sim p_t} \dot z_{tv} - \dot z_{t y_t}), \qquad
              \tfrac12 \epsilon^T G \epsilon
              = \frac1{2T} \sum_t \operatorname{Var}_{v \sim p_t} \dot z_{tv} .

    The second is exact and needs no probes, as :math:`G` is the mean over positions of
    :math:`J_t^T (\operatorname{diag} p_t - p_t p_t^T) J_t`; see :func:`ggn_trace`. With
    :math:`\epsilon` the weights themselves it would be half the squared Fisher-Rao norm (Liang et
    al., arXiv:1711.01530).

    Parameters
    ----------
    model
        Causal language model with float32 weights.
    windows
        Token ids, shape ``(n_windows, context)``; every token of a window but its first is scored.
    errors
        The change :math:`\epsilon`, one tensor per parameter by its name. Products between the
        errors of different parameters are included.
    batch_windows
        Windows in one microbatch; it bounds the memory and does not change the result.
    on_windows
        Called after each microbatch with the share of the windows that it is.

    Returns
    -------
    Expansion
        Without ``hessian``.

    Raises
    ------
    CheckpointError
        If an operation of the model has no forward-mode derivative, or the result is not finite.
    TextError
        If the windows have no token to score.
    ValueError
        If an error has another shape than its parameter.

    Notes
    -----
    Costs about two forward passes. No graph is kept: memory is that of a forward pass, twice, and
    logits exist for a chunk of positions only.
    """
    scored_tokens(windows)
    first, second = np.zeros(len(windows)), np.zeros(len(windows))
    with double_backward_attention(model), differentiable(model, list(errors)) as parameters:
        _check_shapes(parameters, errors)
        head = check_head(model, windows)
        for start, ids in share(microbatches(windows, batch_windows, model.device)):
            with torch.no_grad(), _forward_mode():
                hidden, tangent = _hidden_tangent(model, ids, parameters, errors)
                slope, variance = _logit_terms(
                    hidden[:, :-1].flatten(0, 1),
                    tangent[:, :-1].flatten(0, 1),
                    ids[:, 1:].flatten(),
                    head,
                    {id(p): errors[name] for name, p in parameters.items()},
                )
            part = slice(start, start + len(ids))
            first[part] = slope.view(len(ids), -1).mean(1).cpu().numpy()
            second[part] = variance.view(len(ids), -1).mean(1).cpu().numpy() / 2
            if on_windows:
                on_windows(processes() * len(ids) / len(windows))
    return Expansion(_finite(model, first), _finite(model, second))


def gauss_newton_along_each(
    model: PreTrainedModel,
    windows: torch.Tensor,
    errors: Mapping[str, torch.Tensor],
    *,
    batch_windows: int = 1,
) -> dict[str, Expansion]:
    """Expand the mean loss along the change of one weight matrix at a time.

    Parameters
    ----------
    model, windows, errors, batch_windows
        As for :func:`gauss_newton_along`.

    Returns
    -------
    dict of str to Expansion
        One per parameter. Their Gauss-Newton terms leave out the products between parameters.
    """
    return {
        name: gauss_newton_along(model, windows, {name: error}, batch_windows=batch_windows)
        for name, error in errors.items()
    }


def second_order_along(
    model: PreTrainedModel,
    windows: torch.Tensor,
    errors: Mapping[str, torch.Tensor],
    *,
    batch_windows: int = 1,
    on_windows: Progress | None = None,
) -> Expansion:
    r"""Expand the mean loss along a change of some weights, to second order.

    The difference of the two, :math:`\tfrac12 \epsilon^T (H - G) \epsilon`, is what the curvature
    of the logits themselves, weighted by the residuals, adds to the Gauss-Newton value.

    Parameters
    ----------
    model, windows, errors, batch_windows
        As for :func:`gauss_newton_along`.
    on_windows
        Called after each window with its share of all.

    Returns
    -------
    Expansion
        With ``hessian``.

    Raises
    ------
    CheckpointError
        If the loss cannot be differentiated twice, and as :func:`gauss_newton_along`.
    TextError, ValueError
        As :func:`gauss_newton_along`.

    Notes
    -----
    Costs one Hessian product, about three gradients, beside the forward pass. It is always taken
    one window at a time, which is what gives a value for each. Memory peaks at the graph of a
    window's gradient, two to three times the activations of a forward pass.
    """
    found = gauss_newton_along(model, windows, errors, batch_windows=batch_windows)
    tokens = windows.shape[1] - 1
    values = np.zeros(len(windows))
    with double_backward_attention(model), differentiable(model, list(errors)) as parameters:
        at = list(parameters.values())
        vector = [errors[name].to(p) for name, p in parameters.items()]
        for start, ids in share(microbatches(windows, 1, model.device)):
            gradient = loss_gradient(model, ids, parameters, tokens=tokens, create_graph=True)
            product = torch.autograd.grad(gradient, at, vector)
            values[start] = inner_products(vector, product).sum() / 2
            if on_windows:
                on_windows(processes() / len(windows))
    return Expansion(found.first_order, found.gauss_newton, _finite(model, values))


@contextmanager
def _forward_mode() -> Iterator[None]:
    """Enter forward mode, without the warning about itself that torch gives the first time."""
    with warnings.catch_warnings(), forward_ad.dual_level():
        warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")
        yield


def _hidden_tangent(
    model: PreTrainedModel,
    ids: torch.Tensor,
    parameters: Mapping[str, torch.nn.Parameter],
    errors: Mapping[str, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the input of the LM head and its derivative along the errors, in forward mode.

    Each has shape ``(windows, context, width)``.
    """
    inner = {id(p): name for name, p in model.base_model.named_parameters()}
    duals = {
        inner[id(p)]: forward_ad.make_dual(p.detach(), errors[name].to(p))
        for name, p in parameters.items()
        if id(p) in inner
    }
    output = torch.func.functional_call(
        model.base_model, duals, kwargs={"input_ids": ids, "use_cache": False}
    )
    hidden, tangent = forward_ad.unpack_dual(output.last_hidden_state)
    return hidden, torch.zeros_like(hidden) if tangent is None else tangent


def _logit_terms(
    hidden: torch.Tensor,
    tangent: torch.Tensor,
    targets: torch.Tensor,
    head: torch.nn.Linear,
    errors: Mapping[int, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each position's directional derivative of the loss and variance of logit tangents.

    Parameters
    ----------
    hidden, tangent
        Input of the head and its derivative, shape ``(positions, width)``.
    targets
        Token ids, shape ``(positions,)``.
    head
        The LM head.
    errors
        Change of each parameter, by its ``id``; the head's may be among them.

    Returns
    -------
    slope, variance : torch.Tensor
        Shape ``(positions,)``, float64.
    """
    weight, bias = head.weight, head.bias
    of_weight = errors.get(id(weight))
    of_bias = None if bias is None else errors.get(id(bias))
    slopes, variances = [], []
    for part in chunks(len(targets), len(weight)):
        p = head_logits(hidden[part], weight, bias).softmax(-1)
        moved = head_logits(tangent[part], weight, None)
        if of_weight is not None:
            moved = moved.addmm_(hidden[part].to(moved), of_weight.to(moved).T)
        if of_bias is not None:
            moved = moved.add_(of_bias.to(moved))
        mean = (p * moved).sum(-1, keepdim=True)
        slopes.append((mean - moved.gather(-1, targets[part, None]))[:, 0].double())
        # Centred first: the difference of two large moments would lose digits.
        variances.append(moved.sub_(mean).square_().mul_(p).sum(-1, dtype=torch.float64))
    return torch.cat(slopes), torch.cat(variances)


def _check_shapes(
    parameters: Mapping[str, torch.Tensor], errors: Mapping[str, torch.Tensor]
) -> None:
    """Refuse errors that do not fit their parameters."""
    for name, parameter in parameters.items():
        if errors[name].shape != parameter.shape:
            raise ValueError(
                f"errors[{name!r}] must have shape {tuple(parameter.shape)}. "
                f"Got {tuple(errors[name].shape)} instead."
            )


def _finite(model: PreTrainedModel, values: NDArray[np.float64]) -> PerWindow:
    """Collect the windows' values from all processes, unless one is not finite."""
    values = add_up_array(values, model.device)
    if not np.isfinite(values).all():
        raise CheckpointError(
            f"{type(model).__name__}: the expansion of the loss in window "
            f"{np.flatnonzero(~np.isfinite(values))[0]} is not finite. "
            "Check the weights and their errors for NaN and infinite values."
        )
    return PerWindow(values)
