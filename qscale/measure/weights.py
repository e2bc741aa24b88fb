"""Weight norms and the noise that a number format puts on the weights."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING

from qscale.quantize.format import Format
from qscale.quantize.rtn import rtn

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch

    from qscale.quantize.mix import Quantizer


def squared_norms(weights: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Squared Frobenius norm of each matrix, summed in float64."""
    return {name: _squares(w.detach()) for name, w in weights.items()}


def dequantized(
    weights: Mapping[str, torch.Tensor], formats: Format | Quantizer
) -> dict[str, torch.Tensor]:
    """Round matrices to the nearest values that their formats have, whatever the method.

    Parameters
    ----------
    weights
        Matrices by parameter name. They are not modified; one that a mix leaves as it is comes
        back itself.
    formats
        One format for all, or what gives each its own.
    """
    return {name: _rounded(name, w.detach(), formats) for name, w in weights.items()}


def squared_errors(
    weights: Mapping[str, torch.Tensor], formats: Format | Quantizer
) -> dict[str, float]:
    """Squared Frobenius norm of each matrix's error ``||W - Q(W)||^2`` under round-to-nearest."""
    return {n: _squares(w.detach() - _rounded(n, w.detach(), formats)) for n, w in weights.items()}


def sqnr_db(signal: float, noise: float) -> float:
    """Signal-to-quantization-noise ratio in decibels, ``10 log10(signal / noise)``.

    Parameters
    ----------
    signal, noise
        Sums of squares; noise of zero gives infinity.

    Examples
    --------
    >>> sqnr_db(100.0, 1.0)
    20.0
    """
    return 10 * math.log10(signal / noise) if noise > 0 else math.inf


def ragged(weights: Mapping[str, torch.Tensor], formats: Format | Quantizer) -> int:
    """Count the matrices whose rows the group size does not divide."""
    found = ((w.shape[1], _format(name, formats)) for name, w in weights.items())
    return sum(1 for columns, fmt in found if fmt and fmt.group_size and columns % fmt.group_size)


@contextlib.contextmanager
def fake_quantized(
    weights: Mapping[str, torch.Tensor], formats: Format | Quantizer
) -> Iterator[None]:
    """Hold a model's matrices quantized in place, and put back the very same bits afterwards.

    Parameters
    ----------
    weights
        The matrices themselves; their originals are kept in memory meanwhile.
    formats
        See :func:`dequantized`.
    """
    originals = {name: w.detach().clone() for name, w in weights.items()}
    try:
        for name, w in weights.items():
            w.data.copy_(_rounded(name, originals[name], formats))
        yield
    finally:
        for name, w in weights.items():
            w.data.copy_(originals[name])


def _format(name: str, formats: Format | Quantizer) -> Format | None:
    """Format of one matrix."""
    return formats if isinstance(formats, Format) else formats.format_of(name)


def _rounded(name: str, weight: torch.Tensor, formats: Format | Quantizer) -> torch.Tensor:
    """Round one matrix to nearest."""
    fmt = _format(name, formats)
    return weight if fmt is None else rtn(weight, fmt)


def _squares(values: torch.Tensor) -> float:
    """Sum of squares in float64."""
    return float(values.double().square().sum())
