"""Worst-case sharpness: how far the loss can rise within a small ball around the weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from qscale.errors import QscaleError
from qscale.measure.curvature.head import check_head
from qscale.measure.curvature.loss import (
    inner_products,
    loss_gradient,
    microbatches,
    scored_tokens,
)
from qscale.measure.loss import mean_and_se
from qscale.measure.perturb import displaceable, token_counts, window_losses

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from transformers import PreTrainedModel

    from qscale.measure.curvature.loss import Progress

LONGEST_STEP = 2.0
"""First length of a step, in radii, across the ball, so that it ends on the edge."""


@dataclass(frozen=True, slots=True)
class Sharpness:
    """Largest rise of the loss that was found in a ball around the weights.

    Parameters
    ----------
    value
        Largest rise over the points visited, nats per token; zero if none is above the weights'
        own loss. An ascent need not end at the maximum, so this is a **lower bound** of it.
    value_se
        Standard error of the rise at that point over windows, paired, nats per token. The point is
        taken as given, although it was sought on the same windows; NaN for a single window.
    one_step
        Rise after one step to the ball's edge along the gradient, nats per token.
    first_order
        Rise over the ball that the gradient alone promises, nats per token.
    loss
        Loss at the weights, nats per token.
    radius
        Radius of the ball, in units of its norm.
    steps
        Steps of the ascent, one gradient and one forward pass each.
    """

    value: float
    value_se: float
    one_step: float
    first_order: float
    loss: float
    radius: float
    steps: int

    @property
    def percent(self) -> float:
        """The rise in percent of one plus the loss, as Keskar et al. (arXiv:1609.04836) give it."""
        return 100 * self.value / (1 + self.loss)


def sam_sharpness(
    model: PreTrainedModel,
    windows: torch.Tensor,
    names: Sequence[str],
    *,
    rho: float = 0.05,
    steps: int = 10,
    batch_windows: int = 1,
    on_step: Progress | None = None,
) -> Sharpness:
    r"""Search the largest rise of the loss within a Euclidean distance of the weights.

    Foret et al. (arXiv:2010.01412, section 2) define

    .. math:: \max_{\lVert e \rVert_2 \le \rho} L(w + e) - L(w)

    and approximate it by one step, :math:`e = \rho g / \lVert g \rVert` with the gradient
    :math:`g`, whose first-order rise is :math:`\rho \lVert g \rVert`. At larger radii one step
    falls short several times over, so here the ascent goes on; see Notes.

    Parameters
    ----------
    model
        Causal language model with float32 weights.
    windows
        Token ids, shape ``(n_windows, context)``; every token of a window but its first is scored.
    names
        Names of the parameters that move.
    rho
        Radius, in units of the weights. It is a distance over all of them together, so it means
        less to a larger model.
    steps
        Steps of the ascent, at least 1. Each costs a gradient and a forward pass.
    batch_windows
        Windows in one microbatch; it bounds the memory and does not change the result.
    on_step
        Called with 1 after each step.

    Returns
    -------
    Sharpness
        In nats per token.

    Raises
    ------
    CheckpointError
        If the loss cannot be differentiated or is not finite.
    QscaleError
        If the radius or the number of steps cannot be, or the loss is not finite within the ball.
    TextError
        If the windows have no token to score.

    Notes
    -----
    Projected gradient ascent. A step goes along the unit vector that gains most to first order,
    then back to the nearest point of the ball. The first is two radii long and so ends where
    the one-step approximation does; lengths are halved whenever the rise is below that of the step
    before. Memory holds four more copies of the parameters that move.
    """
    return _ascend(
        model,
        windows,
        names,
        _unscaled,
        ball=Ball(2, _positive("rho", rho)),
        steps=steps,
        batch_windows=batch_windows,
        on_step=on_step,
    )


def adaptive_sharpness(
    model: PreTrainedModel,
    windows: torch.Tensor,
    names: Sequence[str],
    *,
    rho: float = 0.5,
    eta: float = 0.01,
    steps: int = 10,
    batch_windows: int = 1,
    on_step: Progress | None = None,
) -> Sharpness:
    r"""Search the largest rise of the loss within a distance relative to each weight's size.

    Kwon et al. (arXiv:2102.11600, eq. 3 and section 4) define, with
    :math:`T = \operatorname{diag}(|w| + \eta)` and here in the Euclidean norm,

    .. math:: \max_{\lVert T^{-1} e \rVert_2 \le \rho} L(w + e) - L(w),

    whose one-step approximation is :math:`e = \rho T^2 g / \lVert T g \rVert` and whose
    first-order rise :math:`\rho \lVert T g \rVert`. With :math:`\eta = 0` it does not change when
    weights are rescaled without changing the function.

    Parameters
    ----------
    model, windows, names, steps, batch_windows, on_step
        As for :func:`sam_sharpness`.
    rho
        Radius, a number without unit.
    eta
        Added to each weight's size, in units of the weights, so that small weights can move; 0.01
        in the authors' code. That code takes :math:`T = 1` for biases; here ``names`` are all
        treated alike, so leave biases out to be near it.

    Returns
    -------
    Sharpness
        In nats per token.

    Raises
    ------
    CheckpointError, QscaleError, TextError
        As for :func:`sam_sharpness`.

    Notes
    -----
    The ascent is that of :func:`sam_sharpness` in the coordinates :math:`T^{-1} e`.
    """
    if not 0 <= eta < math.inf:
        raise QscaleError(f"eta must be at least 0. Got {eta} instead.")
    return _ascend(
        model,
        windows,
        names,
        lambda weight: weight.abs() + eta,
        ball=Ball(2, _positive("rho", rho)),
        steps=steps,
        batch_windows=batch_windows,
        on_step=on_step,
    )


def keskar_sharpness(
    model: PreTrainedModel,
    windows: torch.Tensor,
    names: Sequence[str],
    *,
    epsilon: float = 1e-3,
    steps: int = 10,
    batch_windows: int = 1,
    on_step: Progress | None = None,
) -> Sharpness:
    r"""Search the largest rise of the loss within a box around the weights.

    Keskar et al. (arXiv:1609.04836, metric 2.1 in the full space, :math:`A = I`) define

    .. math:: \phi = 100 \cdot \frac{\max_{z \in C} L(w + z) - L(w)}{1 + L(w)}, \qquad
              C = \{ z : |z_i| \le \epsilon (|w_i| + 1) \} .

    The rise is the result's ``value`` and :math:`\phi` its ``percent``. Its first-order value is
    :math:`\epsilon \sum_i (|w_i| + 1) |g_i|`. The authors search with 10 iterations of L-BFGS-B.
    Here it is the projected ascent of :func:`sam_sharpness` with steps along the signs of the
    gradient, in the coordinates :math:`z_i / (|w_i| + 1)`: it holds 4 copies of the weights where
    L-BFGS-B holds more than 20 in float64.

    Parameters
    ----------
    model, windows, names, steps, batch_windows, on_step
        As for :func:`sam_sharpness`.
    epsilon
        Size of the box; the authors use 1e-3 and 5e-4. Because of the added 1, weights much smaller
        than 1, as a language model's are, move by nearly the same amount each.

    Returns
    -------
    Sharpness
        In nats per token.

    Raises
    ------
    CheckpointError, QscaleError, TextError
        As for :func:`sam_sharpness`.
    """
    return _ascend(
        model,
        windows,
        names,
        lambda weight: weight.abs() + 1,
        ball=Ball(math.inf, _positive("epsilon", epsilon)),
        steps=steps,
        batch_windows=batch_windows,
        on_step=on_step,
    )


@dataclass(frozen=True, slots=True)
class Ball:
    """Ball of a p-norm around the origin, p being 2 or infinity; works on its arguments in place.

    Parameters
    ----------
    p
        Order of the norm.
    radius
        Radius.
    """

    p: float
    radius: float

    def steepest(self, gradient: Sequence[torch.Tensor]) -> float:
        """Turn a gradient into the unit vector that gains most; return the gain per radius."""
        if self.p == math.inf:
            gain = sum(float(part.abs().sum(dtype=torch.float64)) for part in gradient)
            for part in gradient:
                part.sign_()
        else:
            gain = _norm(gradient)
            for part in gradient:
                part.div_(gain or 1.0)
        return gain

    def project(self, point: Sequence[torch.Tensor]) -> None:
        """Move a point outside to the nearest one inside."""
        if self.p == math.inf:
            for part in point:
                part.clamp_(-self.radius, self.radius)
        elif (norm := _norm(point)) > self.radius:
            for part in point:
                part.mul_(self.radius / norm)


def _ascend(
    model: PreTrainedModel,
    windows: torch.Tensor,
    names: Sequence[str],
    scale: Callable[[torch.Tensor], torch.Tensor],
    *,
    ball: Ball,
    steps: int,
    batch_windows: int,
    on_step: Progress | None,
) -> Sharpness:
    """Climb from the weights ``w`` over ``w + scale(w) * u``, ``u`` in a ball."""
    if steps < 1:
        raise QscaleError(f"steps must be at least 1. Got {steps} instead.")
    tokens, counts = scored_tokens(windows), token_counts(windows)
    with displaceable(model, names) as (parameters, move):
        check_head(model, windows)
        start = window_losses(model, windows, batch_windows=batch_windows)
        scales = {name: scale(w.detach()) for name, w in parameters.items()}
        point = [torch.zeros_like(w) for w in parameters.values()]
        rises, errors = [0.0], [0.0]
        first_order, length = 0.0, LONGEST_STEP * ball.radius
        for step in range(1, steps + 1):
            uphill = _gradient(model, windows, parameters, tokens, batch_windows)
            for part, by in zip(uphill, scales.values(), strict=True):
                part.mul_(by)
            gain = ball.steepest(uphill)
            if step == 1:
                first_order = ball.radius * gain
            for part, along in zip(point, uphill, strict=True):
                part.add_(along, alpha=length)
            ball.project(point)
            moved = zip(parameters, point, scales.values(), strict=True)
            move((1.0, {name: part * by for name, part, by in moved}))
            here = window_losses(model, windows, batch_windows=batch_windows)
            _require_finite(here, ball, step)
            rise, error = mean_and_se(here - start, counts)
            if rise < rises[-1]:
                length /= 2
            rises.append(rise)
            errors.append(error)
            if on_step:
                on_step(1.0)
    best = int(np.argmax(rises))
    loss = float(start.sum() / tokens)
    return Sharpness(rises[best], errors[best], rises[1], first_order, loss, ball.radius, steps)


def _gradient(
    model: PreTrainedModel,
    windows: torch.Tensor,
    parameters: Mapping[str, torch.nn.Parameter],
    tokens: int,
    batch_windows: int,
) -> list[torch.Tensor]:
    """Return the gradient of the mean loss, one tensor per parameter."""
    total = [torch.zeros_like(p) for p in parameters.values()]
    for _, ids in microbatches(windows, batch_windows, model.device):
        for sum_, part in zip(
            total, loss_gradient(model, ids, parameters, tokens=tokens), strict=True
        ):
            sum_.add_(part)
    return total


def _unscaled(weight: torch.Tensor) -> torch.Tensor:
    """Return a scale of one for every element."""
    return weight.new_ones(())


def _norm(tensors: Sequence[torch.Tensor]) -> float:
    """Euclidean norm over all tensors, summed in float64."""
    return math.sqrt(inner_products(tensors, tensors).sum())


def _positive(name: str, value: float) -> float:
    """Refuse a radius that is not a positive number."""
    if not 0 < value < math.inf:
        raise QscaleError(f"{name} must be above 0. Got {value} instead.")
    return value


def _require_finite(losses: np.ndarray, ball: Ball, step: int) -> None:
    """Refuse losses that overflow on the way."""
    if not np.isfinite(losses).all():
        raise QscaleError(
            f"The loss is not finite after step {step} within radius {ball.radius:g} of the "
            "weights: lower the radius."
        )
