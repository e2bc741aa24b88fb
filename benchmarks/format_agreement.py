"""Number formats beside those of other libraries: which weights come out the same to the bit.

Each library that is installed rounds the block matrices of a checkpoint, and so does qscale. For
each format the table has the largest absolute difference, the share of values that are equal to
the bit, and the share equal within a relative 1e-6, as they are where a library multiplies by a
reciprocal instead of dividing::

    pip install compressed-tensors ml_dtypes torchao bitsandbytes gguf auto-round
    python benchmarks/format_agreement.py examples/checkpoints/tiny-wsd-decayed
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import io
import logging
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors.torch import load_file

from qscale.quantize.format import Format
from qscale.quantize.grid import grid
from qscale.quantize.rtn import rtn

if TYPE_CHECKING:
    from collections.abc import Callable

    Rounder = Callable[[torch.Tensor], torch.Tensor]


def torch_casts() -> dict[str, Rounder]:
    """Return what torch's own eight-bit floats round to."""

    def fp8(weight: torch.Tensor) -> torch.Tensor:
        step = weight.abs().amax(1, keepdim=True) / 448
        return (weight / step).to(torch.float8_e4m3fn).float() * step

    return {"fp8": fp8}


def ml_dtypes_casts() -> dict[str, Rounder]:
    """Return what casts of ml_dtypes round to, their scales worked out with numpy."""
    import ml_dtypes  # noqa: PLC0415

    e2m1, e4m3 = ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e4m3fn

    def rounder(size: int, step: Callable[[np.ndarray], np.ndarray], element: type) -> Rounder:
        def rounded(weight: torch.Tensor) -> torch.Tensor:
            groups = weight.numpy().reshape(len(weight), -1, size or weight.shape[1])
            steps = step(np.abs(groups).max(-1, keepdims=True))
            top = float(ml_dtypes.finfo(element).max)
            levels = (groups / steps).clip(-top, top).astype(element).astype(np.float32)
            return torch.from_numpy((levels * steps).reshape(weight.shape))

        return rounded

    def power(binades: int) -> Callable[[np.ndarray], np.ndarray]:
        return lambda absmax: np.exp2(np.floor(np.log2(absmax)) - binades)

    def two_scales(absmax: np.ndarray) -> np.ndarray:
        matrix = np.float32(448 * 6) * (1 / absmax.max())  # torch divides a number so
        return (absmax / np.float32(6) * matrix).astype(e4m3).astype(np.float32) / matrix

    return {
        "fp8": rounder(0, lambda absmax: absmax / np.float32(448), e4m3),
        "mxfp4": rounder(32, power(2), e2m1),
        "mxfp8": rounder(32, power(8), e4m3),
        "nvfp4": rounder(16, two_scales, e2m1),
    }


def compressed_tensors() -> dict[str, Rounder]:
    """Return fake quantization by compressed-tensors, which llm-compressor runs."""
    from compressed_tensors.quantization import QuantizationArgs  # noqa: PLC0415
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize  # noqa: PLC0415
    from compressed_tensors.quantization.utils import (  # noqa: PLC0415
        calculate_qparams,
        generate_gparam,
    )

    def rounder(size: int | None = None, **arguments: object) -> Rounder:
        strategy = arguments.pop("strategy", "group" if size else "channel")
        args = QuantizationArgs(strategy=strategy, group_size=size, **arguments)

        def rounded(weight: torch.Tensor) -> torch.Tensor:
            groups = weight.reshape(len(weight), -1, size) if size else weight
            low, high = groups.amin(-1, keepdim=not size), groups.amax(-1, keepdim=not size)
            shared = {}
            if strategy == "tensor_group":
                shared["global_scale"] = generate_gparam(weight.min(), weight.max())
            scale, zero = calculate_qparams(low, high, args, **shared)
            return fake_quantize(weight, scale, zero, args, **shared)

        return rounded

    found = {}
    for bits in range(2, 9):
        for rule, symmetric in (("full", True), ("asym", False)):
            found[f"int{bits} g128 {rule}"] = rounder(128, num_bits=bits, symmetric=symmetric)
            found[f"int{bits} row {rule}"] = rounder(num_bits=bits, symmetric=symmetric)
    mx = {"type": "float", "scale_dtype": torch.uint8, "zp_dtype": torch.uint8}
    e4m3 = torch.float8_e4m3fn
    return found | {
        "fp8": rounder(num_bits=8, type="float"),
        "mxfp4 even": rounder(32, num_bits=4, **mx),
        "mxfp8 even": rounder(32, num_bits=8, **mx),
        "nvfp4": rounder(16, num_bits=4, type="float", strategy="tensor_group", scale_dtype=e4m3),
    }


def torchao() -> dict[str, Rounder]:
    """Return torchao's tensor subclasses."""
    from torchao.prototype.mx_formats import mx_tensor, nvfp4_tensor  # noqa: PLC0415
    from torchao.quantization import IntxUnpackedToInt8Tensor  # noqa: PLC0415
    from torchao.quantization.quant_primitives import MappingType  # noqa: PLC0415

    def integers(bits: int, mapping: MappingType) -> Rounder:
        dtype = getattr(torch, f"int{bits}")
        return lambda w: IntxUnpackedToInt8Tensor.from_hp(
            w, (1, 128), dtype, mapping_type=mapping
        ).dequantize()

    def mx(element: torch.dtype, mode: str) -> Rounder:
        scaling = mx_tensor.ScaleCalculationMode(mode)
        return lambda w: mx_tensor.MXTensor.to_mx(w, element, 32, scaling).dequantize(torch.float32)

    def nvfp4(weight: torch.Tensor) -> torch.Tensor:
        scale = nvfp4_tensor.per_tensor_amax_to_scale(weight.abs().max())
        tensor = nvfp4_tensor.NVFP4Tensor.to_nvfp4(weight, per_tensor_scale=scale)
        return tensor.dequantize(torch.float32)

    found = {"nvfp4": nvfp4}
    for bits in (2, 3, 4, 8):
        found[f"int{bits} g128 asym"] = integers(bits, MappingType.ASYMMETRIC)
        found[f"int{bits} g128 full"] = integers(bits, MappingType.SYMMETRIC)
    for name, element in (("mxfp4", torch.float4_e2m1fn_x2), ("mxfp8", torch.float8_e4m3fn)):
        for mode in ("floor", "even"):
            found[f"{name} {mode}"] = mx(element, mode)
    return found


def bitsandbytes() -> dict[str, Rounder]:
    """Return four-bit codebooks of bitsandbytes."""
    from bitsandbytes import functional  # noqa: PLC0415

    def nf4(weight: torch.Tensor) -> torch.Tensor:
        packed, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
        return functional.dequantize_4bit(packed, state)

    return {"nf4": nf4}


def auto_round() -> dict[str, Rounder]:
    """Return auto-round's data types without its tuning, scales in float32."""
    from auto_round.data_type.fp8 import quant_fp8_sym  # noqa: PLC0415
    from auto_round.data_type.int import quant_tensor_asym, quant_tensor_sym  # noqa: PLC0415
    from auto_round.data_type.mxfp import quant_mx  # noqa: PLC0415
    from auto_round.data_type.nvfp import nv_fp4  # noqa: PLC0415

    def mx(bits: int, kind: str) -> Rounder:
        return lambda w: quant_mx(w, bits=bits, group_size=32, data_type=f"mx_{kind}{bits}")[0]

    found: dict[str, Rounder] = {
        "fp8": lambda w: quant_fp8_sym(w)[0],
        "nvfp4": lambda w: nv_fp4(w)[0],
        "mxfp4": mx(4, "fp"),
        "mxfp8": mx(8, "fp"),
        **{f"mxint{bits}": mx(bits, "int") for bits in (2, 4, 8)},
    }
    exact = {"group_size": 128, "scale_dtype": torch.float32}
    for bits in (2, 3, 4, 8):
        found[f"int{bits} g128 asym"] = lambda w, b=bits: quant_tensor_asym(w, b, **exact)[0]
        found[f"int{bits} g128 signed"] = lambda w, b=bits: quant_tensor_sym(w, b, **exact)[0]
    return found


def gguf() -> dict[str, Rounder]:
    """Return llama.cpp's types by its own numpy code; integers keep their step in float16."""
    from gguf import GGMLQuantizationType, quants  # noqa: PLC0415

    def rounder(name: str) -> Rounder:
        kind = GGMLQuantizationType[name]
        return lambda w: torch.from_numpy(quants.dequantize(quants.quantize(w.numpy(), kind), kind))

    return {
        "mxfp4": rounder("MXFP4"),
        "int8 g32, half step": rounder("Q8_0"),
        "int4 g32 signed, half step": rounder("Q4_0"),
    }


LIBRARIES = {
    "torch": torch_casts,
    "ml_dtypes": ml_dtypes_casts,
    "compressed-tensors": compressed_tensors,
    "torchao": torchao,
    "auto-round": auto_round,
    "bitsandbytes": bitsandbytes,
    "gguf": gguf,
}


def own(weight: torch.Tensor, spec: str) -> torch.Tensor:
    """Round by qscale; with the step in float16 after rounding where the spec says so."""
    words, _, half = spec.partition(",")
    fmt = Format.parse(words)
    rounded = rtn(weight, fmt)
    if not half:
        return rounded
    step = grid(weight.reshape(len(weight), -1, fmt.group_size or 1), fmt).step
    levels = (rounded.reshape(len(weight), -1, fmt.group_size or 1) / step).round()
    return (levels * step.half().float()).reshape(weight.shape)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    weights = load_file(parser.parse_args().checkpoint / "model.safetensors")
    matrices = [w.float() for name, w in weights.items() if w.ndim == 2 and ".layers." in name]
    largest = max(float(w.abs().max()) for w in matrices)
    print(f"{len(matrices)} matrices, largest weight {largest:.3g}")
    print(f"{'format':27s}{'library':28s}{'max |difference|':>17s}{'equal':>10s}{'to 1e-6':>10s}")
    for name, load in LIBRARIES.items():
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                rounders = load()
        except ImportError as error:
            print(f"{'':27s}{name} is not installed ({error})")
            continue
        title = f"{name} {importlib.metadata.version(name)}"
        for spec, rounder in rounders.items():
            pairs = [(own(w, spec), rounder(w.clone())) for w in matrices]
            ours, theirs = (torch.cat([p[i].flatten() for p in pairs]) for i in (0, 1))
            apart = (ours - theirs).abs()
            near = apart <= torch.maximum(ours.abs(), theirs.abs()) * 1e-6
            equal, close = (float(flags.double().mean()) for flags in (apart == 0, near))
            print(f"{spec:27s}{title:28s}{float(apart.max()):17.3g}{equal:10.4%}{close:10.4%}")


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    main()
