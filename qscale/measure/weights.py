"""Weight norms and the noise that a number format puts on the weights."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING

from qscale.quantize.rtn import format_of, rounded

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch

    from qscale.quantize.format import Format
    from qscale.quantize.mix import Quantizer


def squared_norms(weights: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Squared Frobenius norm of each matrix, summed in float64."""
    return {name: _squares(w.detach()) for name, w in weights.items()}


def squared_errors(
    weights: Mapping[str, torch.Tensor], formats: Format | Quantizer
) -> dict[str, float]:
    """Squared Frobenius norm of each matrix's error ``||W - Q(W)||^2`` under round-to-nearest."""
    return {n: _squares(w.detach() - rounded(n, w.detach(), formats)) for n, w in weights.items()}


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
    found = ((w.shape[1], format_of(name, formats)) for name, w in weights.items())
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
        See :func:`qscale.quantize.rtn.dequantized`.
    """
    originals = {name: w.detach().clone() for name, w in weights.items()}
    try:
        for name, w in weights.items():
            w.data.copy_(rounded(name, originals[name], formats))
        yield
    finally:
        for name, w in weights.items():
            w.data.copy_(originals[name])


def _squares(values: torch.Tensor) -> float:
    """Sum of squares in float64."""
    return float(values.double().square().sum())
