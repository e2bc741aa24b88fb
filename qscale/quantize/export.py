"""Write formats of a model's matrices as the settings that other tools read; no torch needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qscale.errors import QscaleError
from qscale.quantize import format as formats

if TYPE_CHECKING:
    from collections.abc import Iterable

    from qscale.quantize.format import Format
    from qscale.quantize.mix import Quantizer


def compressed_tensors(quantizer: Quantizer, names: Iterable[str]) -> dict[str, Any]:
    """Return a ``quantization_config`` as compressed-tensors defines it.

    Its ``config_groups`` are what llm-compressor's modifiers take, module by module. How a scale
    follows from a group's values is the tool's own rule, and so is any clipping.

    Parameters
    ----------
    quantizer
        A setting, or a mix of formats.
    names
        Parameter names of the matrices.

    Raises
    ------
    QscaleError
        If a matrix is not a module's weight, or the tool does not have its format.
    """
    groups: dict[Format, list[str]] = {}
    left = []
    for name in names:
        fmt = quantizer.format_of(name)
        if fmt is None:
            left.append(_module(name))
        else:
            groups.setdefault(fmt, []).append(_module(name))
    acts = quantizer.activations
    inputs = None if acts is None else _arguments(acts) | {"dynamic": True}
    if inputs is not None and inputs["strategy"] == "channel":
        inputs["strategy"] = "token"
    if inputs is not None and inputs["strategy"] == "tensor_group":
        inputs["dynamic"] = "local"
    return {
        "quant_method": "compressed-tensors",
        "format": "fakequant",
        "quantization_status": "initialized",
        "config_groups": {
            f"group_{i}": {
                "targets": modules,
                "weights": _arguments(fmt),
                "input_activations": inputs,
            }
            for i, (fmt, modules) in enumerate(groups.items())
        },
        "ignore": ["lm_head", *left],
    }


def auto_round(quantizer: Quantizer, names: Iterable[str]) -> dict[str, Any]:
    """Return a ``layer_config`` as auto-round takes it: settings by module name.

    Parameters and errors are those of :func:`compressed_tensors`.
    """
    acts = quantizer.activations
    inputs = {"act_bits": 16} if acts is None else _layer(acts, "act_") | {"act_dynamic": True}
    found: dict[str, Any] = {}
    for name in names:
        fmt = quantizer.format_of(name)
        found[_module(name)] = (
            {"bits": 16, "act_bits": 16} if fmt is None else _layer(fmt, "") | inputs
        )
    return found


TOOLS = {"compressed-tensors": compressed_tensors, "auto-round": auto_round}
"""Exports by the tool that reads them."""


def _module(name: str) -> str:
    """Name of the module whose weight a matrix is."""
    if not name.endswith(".weight"):
        raise QscaleError(f"{name} is not the weight of a module: other tools cannot name it.")
    return name.removesuffix(".weight")


def _lacking(fmt: Format, tool: str) -> QscaleError:
    """Error for a format that a tool does not have."""
    return QscaleError(f"{tool} has no {fmt}. Choose another format, or another --export-for.")


def _arguments(fmt: Format) -> dict[str, Any]:
    """Arguments of a scheme of compressed-tensors."""
    if fmt.fmt not in {formats.INT, formats.FP8, formats.MXFP4, formats.MXFP8, formats.NVFP4}:
        raise _lacking(fmt, "compressed-tensors")
    strategy = "tensor" if fmt.per_tensor else "channel" if fmt.group_size is None else "group"
    scales = {formats.NVFP4: "torch.float8_e4m3fn"}
    scales |= dict.fromkeys((formats.MXFP4, formats.MXFP8), "torch.uint8")
    arguments: dict[str, Any] = {
        "num_bits": fmt.bits,
        "type": "int" if fmt.fmt == formats.INT else "float",
        "symmetric": fmt.symmetric,
        "strategy": "tensor_group" if fmt.fmt == formats.NVFP4 else strategy,
        "group_size": fmt.group_size,
    }
    if fmt.fmt in scales:
        arguments |= dict.fromkeys(("scale_dtype", "zp_dtype"), scales[fmt.fmt])
    return arguments


def _layer(fmt: Format, prefix: str) -> dict[str, Any]:
    """Describe a layer's weights or inputs as auto-round does."""
    kinds = {
        formats.INT: "int",
        formats.FP8: "fp",
        formats.MXINT: "mx_int",
        formats.MXFP4: "mx_fp",
        formats.MXFP8: "mx_fp",
        formats.NVFP4: "nv_fp",
    }
    if fmt.fmt not in kinds:
        raise _lacking(fmt, "auto-round")
    size = 0 if fmt.per_tensor else -1 if fmt.group_size is None else fmt.group_size
    values = {"bits": fmt.bits, "group_size": size, "sym": fmt.symmetric}
    return {
        f"{prefix}{key}": value for key, value in (values | {"data_type": kinds[fmt.fmt]}).items()
    }
