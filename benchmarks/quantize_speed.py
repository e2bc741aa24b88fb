"""Speed of rounding to nearest beside plain torch, and of GPTQ beside llm-compressor, on one core.

A square float32 matrix, int4 in groups of 128. Jobs take turns in one process, and the least
processor time of each counts. GPTQ has symmetric levels of the full rule, damping 0.01 and the Gram
matrix of correlated inputs; the error is tr((W - Q) X X^T (W - Q)^T). By columns in their order
qscale chooses a group's grid when its first column comes up, llm-compressor beforehand; by norm
both choose them beforehand. Run it where llm-compressor is installed::

    OMP_NUM_THREADS=1 python benchmarks/quantize_speed.py
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

import torch

from qscale.quantize.format import Format
from qscale.quantize.gptq import gptq
from qscale.quantize.rtn import rtn

if TYPE_CHECKING:
    from collections.abc import Callable

    Jobs = dict[str, Callable[[], torch.Tensor]]

GROUP, LEVEL = 128, 7


def best(jobs: Jobs, repeats: int) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Return each job's least processor time in seconds, and what it gave last."""
    seconds = dict.fromkeys(jobs, float("inf"))
    results = {}
    for _ in range(repeats):
        for name, job in jobs.items():
            start = time.process_time()
            results[name] = job()
            seconds[name] = min(seconds[name], time.process_time() - start)
    return seconds, results


def plain(weight: torch.Tensor) -> torch.Tensor:
    """Round the way one writes it down first."""
    groups = weight.view(-1, GROUP)
    step = groups.abs().amax(1, keepdim=True) / LEVEL
    return ((groups / step).round().clamp(-LEVEL, LEVEL) * step).view_as(weight)


def in_place(weight: torch.Tensor) -> torch.Tensor:
    """Round with one matrix of fresh memory."""
    groups = weight.view(-1, GROUP)
    absmax = torch.maximum(groups.amax(1, keepdim=True), -groups.amin(1, keepdim=True))
    step = absmax.div_(LEVEL)
    return (groups / step).round_().clamp_(-LEVEL, LEVEL).mul_(step).view_as(weight)


def compare_rtn(weight: torch.Tensor, repeats: int) -> None:
    """Print the throughput of rounding to nearest."""
    fmt = Format("int", 4, GROUP)
    jobs: Jobs = {
        "qscale": lambda: rtn(weight, fmt),
        "torch, plain": lambda: plain(weight),
        "torch, in place": lambda: in_place(weight),
        "torch, copy only": weight.clone,
    }
    seconds, results = best(jobs, repeats)
    same = torch.equal(results["qscale"], results["torch, in place"])
    print(f"RTN {fmt} of {tuple(weight.shape)}: results are {'equal' if same else 'UNEQUAL'}")
    for name, spent in seconds.items():
        rate = weight.numel() / spent / 1e6
        ratio = spent / seconds["qscale"]
        print(
            f"  {name:28s}{spent:9.4f} s{rate:9.0f} M weights/s   qscale {ratio:.2f} times as fast"
        )


def gram_matrix(columns: int, generator: torch.Generator) -> torch.Tensor:
    """Return the Gram matrix of inputs that share directions, of which some are large."""
    rank = max(1, columns // 8)
    shared = torch.randn(columns, rank, generator=generator)
    shared *= torch.logspace(0.5, -1, rank)
    own = torch.rand(columns, generator=generator) + 0.1
    return shared @ shared.T + own.diag()


def llmcompressor_gptq(
    weight: torch.Tensor, gram: torch.Tensor, *, act_order: bool
) -> Callable[[], torch.Tensor] | None:
    """Return llm-compressor's GPTQ of one matrix, or None if it is not installed."""
    try:
        from compressed_tensors.quantization import QuantizationArgs  # noqa: PLC0415
        from compressed_tensors.quantization.utils import calculate_qparams  # noqa: PLC0415
        from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight  # noqa: PLC0415
    except ImportError:
        return None
    args = QuantizationArgs(
        num_bits=4, strategy="group", group_size=GROUP, actorder="weight" if act_order else None
    )

    def job() -> torch.Tensor:
        groups = weight.view(len(weight), -1, GROUP)
        scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
        found = quantize_weight(
            weight[None].clone(), gram[None].clone(), scale[None], zero[None], None, args
        )
        return found[0][0]

    return job


def compare_gptq(weight: torch.Tensor, gram: torch.Tensor, repeats: int) -> None:
    """Print the time and the reconstruction error of GPTQ."""
    fmt = Format.parse(f"int4 g{GROUP} full")

    def error(quantized: torch.Tensor) -> float:
        off = weight - quantized
        return float(((off @ gram) * off).double().sum())

    nearest = error(rtn(weight, fmt))
    for act_order in (False, True):
        jobs: Jobs = {"qscale": lambda a=act_order: gptq(weight, gram, fmt, act_order=a).weight}
        theirs = llmcompressor_gptq(weight, gram, act_order=act_order)
        if theirs is not None:
            jobs["llm-compressor"] = theirs
        seconds, results = best(jobs, repeats)
        order = "columns by norm" if act_order else "columns in their order"
        print(f"GPTQ {fmt} of {tuple(weight.shape)}, {order}")
        for name, spent in seconds.items():
            share = error(results[name]) / nearest
            print(f"  {name:28s}{spent:9.2f} s   error {share:.5f} of that of RTN")
        if theirs is None:
            print("  llm-compressor is not installed")
            continue
        times = seconds["llm-compressor"] / seconds["qscale"]
        errors = error(results["qscale"]) / error(results["llm-compressor"])
        same = float((results["qscale"] == results["llm-compressor"]).double().mean())
        print(f"  qscale is {times:.2f} times as fast, with {errors:.4f} of the error; ", end="")
        print(f"{same:.2%} of the weights are equal")


def main() -> None:
    """Compare both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=4096, help="rows and columns")
    parser.add_argument("--repeats", type=int, default=10, help="of RTN; of GPTQ a fifth")
    options = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(options.size, options.size, generator=generator)
    print(f"torch {torch.__version__}, 1 thread, seed 0")
    compare_rtn(weight, options.repeats)
    compare_gptq(weight, gram_matrix(options.size, generator), max(1, options.repeats // 5))


if __name__ == "__main__":
    main()
