"""Time and memory of curvature traces at equal accuracy, beside pyhessian and hessian-eigenthings.

The same model, the same windows, one core. For each library its own probes, drawn here, tell how
many it needs for a relative standard error of 5 %; its time is set-up plus that many products.
Ours is the time of a whole call with ``rtol=0.05``; the last lines compare at the error it
reached. Jobs take turns in one process, and the least processor time of a job counts; peak memory
is that of a process of its own above the loaded model.
Give trained checkpoints and a text they have not seen::

    OMP_NUM_THREADS=1 python benchmarks/curvature_speed.py --text TEXT FOLDER [FOLDER ...]
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import hessian_eigenthings
import numpy as np
import pyhessian
import torch
import transformers

from qscale.measure.curvature import TraceEstimate, ggn_trace, grad_norm, hessian_trace

if TYPE_CHECKING:
    from collections.abc import Callable

    Product = Callable[[list[torch.Tensor]], list[torch.Tensor]]

WINDOWS, CONTEXT = 16, 128
RTOL = 0.05
PROBES = 10  # of each library, to see their spread
REPEATS = 2
METHODS = ("exact", "forward")
LIBRARIES = ("pyhessian", "hessian-eigenthings")


class Logits(torch.nn.Module):
    """Module from token ids to flat logits, as pyhessian wants it."""

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits that predict the scored tokens, shape ``(tokens, vocab)``."""
        return self.model(input_ids=ids).logits[:, :-1].flatten(0, 1)


def load(folder: Path, text: Path) -> tuple[transformers.PreTrainedModel, torch.Tensor]:
    """Open a checkpoint with attention every library can handle, and its windows of the text."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    ).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(text.read_text(), return_tensors="pt", verbose=False).input_ids[0]
    return model, ids[-WINDOWS * CONTEXT :].view(WINDOWS, CONTEXT)


def library(name: str, model: transformers.PreTrainedModel, ids: torch.Tensor) -> Product:
    """Set up a library's Hessian product over all windows and parameters."""
    if name == "pyhessian":
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Using backward.. with create_graph=True")
            model.zero_grad()  # it would add to the gradients of an earlier set-up
            kept = pyhessian.hessian(
                Logits(model), torch.nn.CrossEntropyLoss(), (ids, ids[:, 1:].flatten()), cuda=False
            )
        return lambda v: pyhessian.utils.hessian_vector_product(kept.gradsH, kept.params, v)
    operator = hessian_eigenthings.HessianOperator(
        model, [{"input_ids": ids, "labels": ids}], hessian_eigenthings.hf_lm_loss()
    )
    sizes = [p.numel() for p in model.parameters()]
    return lambda v: list(operator.matvec(torch.cat([x.flatten() for x in v])).split(sizes))


def signs(model: transformers.PreTrainedModel) -> list[torch.Tensor]:
    """Draw one vector of random signs over all parameters."""
    return [torch.randint_like(p, 2) * 2 - 1 for p in model.parameters()]


def ours(
    method: str, model: transformers.PreTrainedModel, ids: torch.Tensor
) -> Callable[[], TraceEstimate]:
    """Return the call of ours that reaches the accuracy."""
    names = [name for name, _ in model.named_parameters()]
    if method == "ggn":
        return lambda: ggn_trace(model, ids, names, num_probes=2)
    return lambda: hessian_trace(model, ids, names, method=method, rtol=RTOL, max_probes=1000)


def seconds(job: Callable[[], object]) -> float:
    """Return the processor time of a job."""
    start = time.process_time()
    job()
    return time.process_time() - start


def peak(folder: Path, text: Path, job: str) -> float:
    """Run a job in a process of its own and return its peak memory above the loaded model, MB."""
    command = [sys.executable, __file__, "--text", str(text), "--peak", job, str(folder)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def high_water() -> float:
    """Return this process's peak memory, MB; unlike ``ru_maxrss`` it is not that of its parent."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    if found is None:
        raise SystemExit("/proc/self/status has no VmHWM: run the benchmark on Linux.")
    return int(found[1]) / 1024


def print_peak(folder: Path, text: Path, job: str) -> None:
    """Print this process's peak memory above the loaded model, MB."""
    model, ids = load(folder, text)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of loading
    before = high_water()
    if job == "gradient":
        grad_norm(model, ids, [name for name, _ in model.named_parameters()])
    elif job in LIBRARIES:
        multiply = library(job, model, ids)
        for _ in range(2):
            multiply(signs(model))
    else:
        ours(job, model, ids)()
    print(high_water() - before)


def library_probes(
    name: str, model: transformers.PreTrainedModel, ids: torch.Tensor
) -> tuple[float, float, float, float]:
    """Return a library's trace, its relative spread a probe, and seconds of set-up and a probe."""
    setup = seconds(lambda: library(name, model, ids)) if name == "pyhessian" else 0.0
    multiply = library(name, model, ids)
    times, values = [], []
    for _ in range(PROBES):
        vector = signs(model)
        start = time.process_time()
        product = multiply(vector)
        times.append(time.process_time() - start)
        values.append(
            sum(float(a.flatten() @ b.flatten()) for a, b in zip(vector, product, strict=True))
        )
    trace = float(np.mean(values))
    return trace, float(np.std(values, ddof=1)) / abs(trace), setup, min(times)


def compare(folder: Path, text: Path) -> None:
    """Print one table."""
    model, ids = load(folder, text)
    names = [name for name, _ in model.named_parameters()]
    gradient = ggn_few = ggn_many = float("inf")
    best: dict[str, float] = {}
    found: dict[str, TraceEstimate] = {}

    def estimate(method: str) -> None:
        found[method] = ours(method, model, ids)()

    for _ in range(REPEATS):
        gradient = min(gradient, seconds(lambda: grad_norm(model, ids, names)))
        ggn_few = min(ggn_few, seconds(lambda: ggn_trace(model, ids, names, num_probes=2)))
        ggn_many = min(ggn_many, seconds(lambda: ggn_trace(model, ids, names, num_probes=6)))
        for method in METHODS:
            best[method] = min(best.get(method, np.inf), seconds(lambda m=method: estimate(m)))
    print(f"{folder.name}: {sum(p.numel() for p in model.parameters()):,} parameters, {ids.shape}")
    print(f"one gradient {gradient:.2f} s; time and memory for {RTOL:.0%} of the trace:")
    print(f"{'':30}{'trace':>9}{'rel. SE':>9}{'probes':>8}{'seconds':>9}{'gradients':>10}{'MB':>7}")

    def row(name: str, values: list[float], time_: float, job: str) -> float:
        trace, error, probes = values
        memory = peak(folder, text, job)
        print(
            f"{name:30}{trace:9.2f}{error:9.3f}{probes:8.0f}{time_:9.2f}{time_ / gradient:10.1f}"
            f"{memory:7.0f}"
        )
        return time_

    costs = {}
    torch.manual_seed(0)
    for name in LIBRARIES:
        trace, spread, setup, probe = library_probes(name, model, ids)
        needed = max(2, np.ceil((spread / RTOL) ** 2))
        total = setup + needed * probe
        costs[name] = (setup, probe, spread)
        row(name, [trace, spread / needed**0.5, needed], total, name)
    for method in METHODS:
        e = found[method]
        row(f"qscale, {method}", [e.total, e.se / abs(e.total), e.num_probes], best[method], method)
    ggn = ggn_trace(model, ids, names, num_probes=6)
    each = ggn.se / ggn.total * ggn.num_probes**0.5
    needed = max(2, int(np.ceil((each / RTOL) ** 2)))
    marginal = (ggn_many - ggn_few) / 4
    total = ggn_few + (needed - 2) * marginal
    row("qscale, Gauss-Newton", [ggn.total, each / needed**0.5, needed], total, "ggn")
    memory = peak(folder, text, "gradient")
    print(f"{'one gradient':30}{'':9}{'':9}{'':8}{gradient:9.2f}{1:10.1f}{memory:7.0f}")

    def theirs(error: float) -> float:
        """Return the seconds that the faster library takes to an error."""
        return min(setup + (spread / error) ** 2 * probe for setup, probe, spread in costs.values())

    for method in METHODS:
        error = found[method].se / abs(found[method].total)
        ratio = theirs(error) / best[method]
        print(f"to {error:.1%} the faster library takes {ratio:.1f} times qscale, {method}")
    error = each / needed**0.5
    print(f"to {error:.1%}, {theirs(error) / total:.1f} times the Gauss-Newton trace,")
    print(f"whose probe takes {marginal / gradient:.2f} gradient-times after the first two\n")


def main() -> None:
    """Compare on every checkpoint, or measure one peak."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    for folder in options.folders:
        if options.peak:
            print_peak(folder, options.text, options.peak)
        else:
            compare(folder, options.text)


if __name__ == "__main__":
    main()
