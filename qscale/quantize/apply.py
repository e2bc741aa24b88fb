"""Quantize the matrices of a model by any setting: own methods and outside libraries alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qscale import __version__
from qscale.errors import QscaleError
from qscale.quantize.calibrate import calibrate
from qscale.quantize.rtn import dequantized
from qscale.quantize.setting import OWN

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch
    from transformers import PreTrainedModel

    from qscale.quantize.mix import Quantizer


@dataclass(frozen=True, slots=True, eq=False)
class Applied:
    """A model's quantized matrices.

    Parameters
    ----------
    weights
        Dequantized matrices by parameter name; one that a mix leaves alone is the model's own.
    columns
        Library, version and calibration, under the measurement table's column names.
    """

    weights: dict[str, torch.Tensor]
    columns: dict[str, object]


def apply(
    model: PreTrainedModel,
    weights: Mapping[str, torch.Tensor],
    quantizer: Quantizer,
    ids: torch.Tensor | None = None,
    *,
    on_block: Callable[[int, int], None] | None = None,
) -> Applied:
    """Quantize matrices; the model is left as it was, to the bit.

    Parameters
    ----------
    model
        Causal language model in evaluation mode, as :func:`qscale.model.load` opens it.
    weights
        Its matrices to quantize, by parameter name: the parameters themselves.
    quantizer
        A setting, or a mix of formats.
    ids
        Token ids of calibration windows, shape (windows, context), for methods that need them.
    on_block
        Called after each block of a method that goes block by block, with those done and in all.

    Raises
    ------
    QscaleError
        If there are no calibration windows for a method that needs them, a library is missing, or
        it does not have the format.
    """
    if quantizer.calibrated and ids is None:
        raise QscaleError(f"Method {quantizer.method} needs windows of text to calibrate on.")
    implementation: dict[str, object] = {"implementation": f"qscale {__version__}"}
    if quantizer.library != OWN:
        from qscale.quantize import adapters  # noqa: PLC0415 - only where one is asked for

        outside = adapters.quantize(model, weights, quantizer, ids)
        return Applied(
            outside.weights, {"implementation": outside.implementation, **outside.columns}
        )
    if quantizer.calibrated and ids is not None:
        found = calibrate(model, weights, ids, quantizer, on_block=on_block)
        return Applied(found.weights, implementation | found.columns())
    return Applied(dequantized(weights, quantizer), implementation)
