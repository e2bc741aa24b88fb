"""Throughput and memory of weights-only features beside one plain pass over the same tensors.

A synthetic Llama checkpoint of bfloat16 shards is written to a temporary folder and read by several
jobs in turn, several times over, each in a process of its own. The plain passes only convert to
float32 and sum squares: one takes each tensor from safetensors, as is usually written; the other
uses qscale's reader and blocks that stay in the processor's cache, the fastest way known here.
Seconds are the least of the repeats, of the clock and of the processor. Linux only::

    OMP_NUM_THREADS=1 python benchmarks/weights_throughput.py --gigabytes 4
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

HIDDEN, INNER, KEYS, VOCAB = 2560, 6912, 640, 32000
LAYER = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KEYS, HIDDEN),
    "self_attn.v_proj": (KEYS, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
LAYERS_PER_SHARD = 6
BASE = "sums, groups, outliers, grid"
PLAIN = "plain pass, in cached blocks"


def write(folder: Path, gigabytes: float) -> None:
    """Write a checkpoint of about so many gigabytes, of weights with heavier tails than normal."""
    import torch  # noqa: PLC0415 - the parent process stays small
    from safetensors.torch import save_file  # noqa: PLC0415

    draw = torch.Generator().manual_seed(0)

    def weight(*shape: int) -> torch.Tensor:
        normal = torch.randn(shape, generator=draw)
        return (0.02 * normal * (1 + 0.1 * normal.square())).bfloat16()

    layer_bytes = 2 * sum(rows * columns for rows, columns in LAYER.values())
    count = max(1, round((gigabytes * 1e9 - 4 * VOCAB * HIDDEN) / layer_bytes))
    shards: list[dict[str, Callable[[], torch.Tensor]]] = [
        {f"{name}.weight": lambda: weight(VOCAB, HIDDEN)}
        for name in ("model.embed_tokens", "lm_head")
    ]
    for first in range(0, count, LAYERS_PER_SHARD):
        layers = range(first, min(count, first + LAYERS_PER_SHARD))
        shards.append(
            {
                f"model.layers.{layer}.{name}.weight": lambda shape=shape: weight(*shape)
                for layer in layers
                for name, shape in LAYER.items()
            }
        )
    files = {}
    for index, shard in enumerate(shards):
        file = f"model-{index:05}.safetensors"
        save_file({name: make() for name, make in shard.items()}, folder / file)
        files |= dict.fromkeys(shard, file)
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {"model_type": "llama", "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))


def by_safetensors(folder: Path) -> None:
    """Sum squares of every tensor as safetensors gives it."""
    from safetensors import safe_open  # noqa: PLC0415

    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is not a mapping
                float(file.get_tensor(name).float().square().sum())


def in_blocks(folder: Path) -> None:
    """Sum squares of every tensor in blocks that stay in cache."""
    import torch  # noqa: PLC0415

    from qscale.matrices import matrices  # noqa: PLC0415
    from qscale.measure.stream.blocks import float_blocks  # noqa: PLC0415
    from qscale.shards import locate  # noqa: PLC0415

    for matrix in matrices(locate(folder), "llama"):
        sum(float(torch.dot(x.view(-1), x.view(-1))) for _, x in float_blocks(matrix))


def features(folder: Path, bits: tuple[int, ...] = (), *, spectral: bool = False) -> None:
    """Form the features, with quantizer settings of some bits and groups of 128."""
    from qscale.measure.stream import weight_features  # noqa: PLC0415
    from qscale.quantize.format import Format  # noqa: PLC0415

    weight_features(folder, [Format("int", b, 128) for b in bits], spectral=spectral)


def one_setting(folder: Path) -> None:
    """Add the error of one quantizer fmt."""
    features(folder, (4,))


def with_spectral(folder: Path) -> None:
    """Add spectral norms."""
    features(folder, spectral=True)


JOBS: dict[str, Callable[[Path], None]] = {
    "plain pass, by safetensors": by_safetensors,
    PLAIN: in_blocks,
    BASE: features,
    "  and one quantizer fmt": one_setting,
    "  and spectral norms": with_spectral,
}


def measured(name: str, folder: Path) -> tuple[float, float, float]:
    """Run a job and return its seconds, processor seconds and the process's peak MB in memory."""
    import qscale.measure.stream  # noqa: F401, PLC0415 - importing is not part of a job

    clock, cpu = time.perf_counter(), time.process_time()
    JOBS[name](folder)
    clock, cpu = time.perf_counter() - clock, time.process_time() - cpu
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return clock, cpu, int(peak.split()[1]) / 1024


def main() -> None:
    """Print seconds, throughput, the ratio to the plain passes and peak memory."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", help="where to make the temporary folder")
    parser.add_argument("--spectral", action="store_true", help="time spectral norms too")
    given = parser.parse_args()
    jobs = [n for n in JOBS if given.spectral or JOBS[n] is not with_spectral]
    spawn = multiprocessing.get_context("spawn")
    best = {name: (float("inf"), float("inf"), 0.0) for name in jobs}
    with (
        tempfile.TemporaryDirectory(dir=given.folder) as made,
        ProcessPoolExecutor(1, spawn, max_tasks_per_child=1) as fresh,
    ):
        folder = Path(made)
        fresh.submit(write, folder, given.gigabytes).result()
        size = sum(p.stat().st_size for p in folder.glob("*.safetensors")) / 1e9
        for _ in range(given.repeats):
            for name in jobs:
                clock, cpu, peak = fresh.submit(measured, name, folder).result()
                old = best[name]
                best[name] = (min(clock, old[0]), min(cpu, old[1]), max(peak, old[2]))
    print(f"{size:.2f} GB of bfloat16, least of {given.repeats} repeats")
    print(f"{'':32}{'seconds':>9}{'CPU s':>8}{'GB/s':>7}{'of plain':>10}{'CPU':>7}{'peak MB':>9}")
    plain = best[PLAIN]
    for name, (clock, cpu, peak) in best.items():
        shares = f"{plain[0] / clock:10.0%}{plain[1] / cpu:7.0%}"
        print(f"{name:32}{clock:9.2f}{cpu:8.2f}{size / clock:7.2f}{shares}{peak:9.0f}")


if __name__ == "__main__":
    main()
