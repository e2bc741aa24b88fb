"""Outside quantizers, each behind the same function: matrices in, dequantized matrices out."""

from __future__ import annotations

import copy
import importlib
import importlib.metadata
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from qscale.errors import CheckpointError, QscaleError
from qscale.quantize.adapters.offers import require
from qscale.quantize.setting import GPTQ, is_own_code
from qscale.user_code import file_hash, find, load

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType

    import torch
    from transformers import PreTrainedModel

    from qscale.quantize.format import Format
    from qscale.quantize.mix import Quantizer

MODULES = {
    "auto-round": "auto_round",
    "bitsandbytes": "bitsandbytes",
    "gguf": "gguf",
    "hqq": "hqq",
    "llmcompressor": "llmcompressor",
    "modelopt": "modelopt",
    "torchao": "torchao",
}
"""Module of this package by library, which is the name of its extra too.

Each has ``quantize_matrix(weight, fmt)``; those with methods that calibrate have
``quantize_model(model, formats, quantizer, ids)``, which may do to the model what it likes.
"""

_DISTRIBUTIONS = {"modelopt": "nvidia-modelopt"}  # where the library's name is not its package's


@dataclass(frozen=True, slots=True, eq=False)
class Outside:
    """Matrices that an outside library quantized.

    Parameters
    ----------
    weights
        Dequantized matrices by parameter name; one that a mix leaves alone is the model's own.
    implementation
        Library and version, such as ``torchao 0.18.0``.
    columns
        What else is known of the quantization, under the measurement table's column names.
    """

    weights: dict[str, torch.Tensor]
    implementation: str
    columns: dict[str, object]


def quantize(
    model: PreTrainedModel,
    weights: Mapping[str, torch.Tensor],
    quantizer: Quantizer,
    ids: torch.Tensor | None = None,
) -> Outside:
    """Have an outside library quantize matrices.

    The model is left as it was, to the bit, and so is the process: see
    :func:`qscale.quantize.adapters.preserve.preserved`. Activations are not rounded.

    Parameters
    ----------
    model
        Causal language model in evaluation mode, as :func:`qscale.model.load` opens it.
    weights
        Its matrices to quantize, by parameter name: the parameters themselves.
    quantizer
        A setting, or a mix of formats, of an outside library.
    ids
        Token ids of calibration windows, shape (windows, context), for methods that need them.

    Raises
    ------
    QscaleError
        If the library is not installed, does not have the format or fails, a row does not hold
        whole groups, or windows are missing.
    CheckpointError
        If a method that calibrates meets matrices that are not those of Linear modules.
    """
    from qscale.quantize.adapters.preserve import preserved  # noqa: PLC0415 - loads torch

    formats = {name: fmt for name in weights if (fmt := quantizer.format_of(name)) is not None}
    _check(model, weights, formats, quantizer, ids)
    with preserved():
        module, implementation = _open(quantizer.library)
        try:
            if quantizer.calibrated:
                found = module.quantize_model(copy.deepcopy(model), formats, quantizer, ids)
            else:
                found = {
                    name: module.quantize_matrix(weights[name].detach().float().clone(), fmt)
                    for name, fmt in formats.items()
                }
        except QscaleError:
            raise
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            raise QscaleError(
                f"{implementation} failed at {quantizer.method} ({type(error).__name__}: "
                f"{lines[0]}). Choose another library or method."
            ) from error
    _check_results(found, weights, formats, implementation)
    done = {
        name: found[name].to(weight.dtype) if name in found else weight.detach()
        for name, weight in weights.items()
    }
    columns: dict[str, object] = {}
    if quantizer.calibrated and ids is not None:
        columns["calibration_samples"] = float(len(ids))
    return Outside(done, implementation, columns)


def _open(library: str) -> tuple[ModuleType | SimpleNamespace, str]:
    """Import the module that speaks to a library, and say which version that is."""
    if is_own_code(library):
        path, name = library.rsplit(":", 1)
        function = find(load(path), path, name)
        said = f"{Path(path).name}:{name} {file_hash(path)[:12]}"
        return SimpleNamespace(quantize_matrix=function), said
    module = _module(library)
    distribution = _DISTRIBUTIONS.get(library, library)
    return module, f"{library} {importlib.metadata.version(distribution)}"


def _module(library: str) -> ModuleType:
    """Import the module that speaks to a library."""
    name = f"{__name__}.{MODULES[library]}"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name:
            raise
        raise QscaleError(
            f"library={library} needs {error.name}. Run: pip install 'qscale[{library}]'"
        ) from error
    except ImportError as error:
        raise QscaleError(
            f"library={library} cannot be imported ({error}). It does not go with the versions "
            f"installed. In a fresh environment run: pip install 'qscale[{library}]'"
        ) from error


def _check(
    model: PreTrainedModel,
    weights: Mapping[str, torch.Tensor],
    formats: Mapping[str, Format],
    quantizer: Quantizer,
    ids: torch.Tensor | None,
) -> None:
    """Refuse what the library cannot do before it is loaded."""
    import torch  # noqa: PLC0415 - only where a model is open

    library, method = quantizer.library, quantizer.method
    if not formats:
        raise QscaleError("An outside library needs matrices to quantize. Got none instead.")
    for fmt in dict.fromkeys(formats.values()):
        require(library, method, fmt)
    for name, fmt in formats.items():
        columns = weights[name].shape[1]
        if columns % (fmt.group_size or columns):
            raise QscaleError(
                f"group_size with library={library} must divide every row. {name} has {columns} "
                f"columns; got {fmt.group_size} instead."
            )
    if not quantizer.calibrated:
        return
    if ids is None or ids.ndim != 2 or not ids.numel():
        raise QscaleError(f"Method {method} needs windows of text to calibrate on.")
    if method == GPTQ and quantizer.act_order and library == "modelopt":
        raise QscaleError("library=modelopt takes columns in their order: add act_order=no.")
    if model.training:
        raise CheckpointError("model must be in evaluation mode. Call model.eval() first.")
    modules: dict[str, Any] = dict(model.named_modules())
    for name in formats:
        module = modules.get(name.removesuffix(".weight"))
        if not isinstance(module, torch.nn.Linear):
            raise CheckpointError(
                f"{name} must be the weight of a Linear module. {method} of other matrices, such "
                f"as fused experts, is not supported with library={library}."
            )


def _check_results(
    found: Mapping[str, torch.Tensor],
    weights: Mapping[str, torch.Tensor],
    formats: Mapping[str, Format],
    implementation: str,
) -> None:
    """Refuse results that leave a matrix out, change its shape or are not finite."""
    if set(found) != set(formats):
        raise QscaleError(
            f"{implementation} quantized {len(found)} matrices of {len(formats)}. "
            "Choose another library."
        )
    for name, matrix in found.items():
        if matrix.shape != weights[name].shape or not matrix.isfinite().all():
            raise QscaleError(
                f"{implementation} gave {name} NaN or infinite weights or a wrong shape. "
                "Choose another format or library."
            )
