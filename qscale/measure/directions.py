"""Directions in the space of the weights: to quantized weights, to a checkpoint, or at random."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from qscale.errors import CheckpointError
from qscale.measure.curvature.loss import inner_products, stream
from qscale.quantize.rtn import rtn

if TYPE_CHECKING:
    from collections.abc import Mapping

    from qscale.measure.perturb import Direction
    from qscale.quantize.format import Format


def quantization_direction(
    weights: Mapping[str, torch.Tensor], fmt: Format
) -> dict[str, torch.Tensor]:
    """Return the error ``Q(W) - W`` of round-to-nearest: at radius 1 lies the quantized model.

    Parameters
    ----------
    weights
        Matrices to quantize, by parameter name.
    fmt
        How to quantize.
    """
    return {name: rtn(w.detach(), fmt).sub_(w.detach()) for name, w in weights.items()}


def direction_to(
    weights: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the difference to other weights, such as another checkpoint's: these are at radius 1.

    Parameters
    ----------
    weights
        Where the direction starts, by parameter name.
    targets
        Where it leads, at least for the same names; any precision and device.

    Raises
    ------
    CheckpointError
        If a target is missing or of another shape.
    """
    found = {}
    for name, w in weights.items():
        shape = tuple(targets[name].shape) if name in targets else None
        if shape != tuple(w.shape):
            raise CheckpointError(
                f"{name} must have shape {tuple(w.shape)} in both checkpoints. "
                f"Got {shape or 'none'} in the other one instead."
            )
        found[name] = targets[name].detach().to(w.device, w.dtype) - w.detach()
    return found


def filter_normalized_direction(
    weights: Mapping[str, torch.Tensor], seed: int
) -> dict[str, torch.Tensor]:
    r"""Draw a random direction whose every filter is as long as the weights' own.

    Li et al. (arXiv:1712.09913, section 4): Gaussian numbers, rescaled filter by filter to
    :math:`d_{ij} \lVert w_{i} \rVert / \lVert d_{i} \rVert`, so that a radius is a relative change
    of the weights whatever their scale. A filter is a row of a matrix, which is one unit's input
    weights or one token's embedding; vectors such as biases and norm gains do not move.

    Parameters
    ----------
    weights
        By parameter name.
    seed
        Determines the direction, together with the order of ``weights``.
    """
    return {
        name: _like_filters(w.detach(), stream(w.device, seed, number))
        for number, (name, w) in enumerate(weights.items())
    }


def _like_filters(weight: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Draw Gaussian rows of the lengths that a matrix's rows have, and zeros for a vector."""
    if weight.ndim < 2:
        return torch.zeros_like(weight)
    drawn = torch.randn(weight.shape, generator=generator, dtype=weight.dtype, device=weight.device)
    lengths = weight.norm(dim=-1, keepdim=True) / drawn.norm(dim=-1, keepdim=True)
    return drawn.mul_(lengths)


def direction_norm(direction: Direction) -> float:
    """Euclidean length of a direction, in units of the weights."""
    parts = list(direction.values())
    return math.sqrt(inner_products(parts, parts).sum())
