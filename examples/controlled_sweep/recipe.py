"""Train the runs of the controlled sweep and keep their checkpoints as Hugging Face folders.

Runs are taken one after another, small models first::

    python examples/controlled_sweep/recipe.py books-train.txt.xz --out checkpoints

A run that was stopped, also by ``kill -9``, goes on from its last snapshot and ends with the same
weights, bit for bit on the same machine; what is finished is skipped. ``runs.py``
prints the grid.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import lean_llama
import numpy as np
import torch
from filelock import FileLock
from runs import AVERAGE_EVERY, AVERAGED_SHARE, BATCH_WINDOWS, grid

from qscale.model import quiet_transformers
from qscale.provenance import training_metadata

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from train_tiny_lm import byte_tokenizer, read_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from runs import Kept, Run

    Loss = Callable[[list[torch.Tensor], torch.Tensor], torch.Tensor]

SNAPSHOT_SECONDS = 300.0
DONE = "done.json"


class DivergedError(RuntimeError):
    """The loss of a run is no longer a number."""


@dataclass(eq=False)
class State:
    """A run at one step: all that the next step depends on.

    Parameters
    ----------
    weights
        Tensors that `lean_llama.logits` takes.
    optimizer
        AdamW over them.
    step
        Optimizer steps taken.
    total, summed
        Sum of the weights over the steps that the next average is over, and their number.
    loss
        Exponential mean of the training loss over about 100 steps, nats per token.
    """

    weights: list[torch.Tensor]
    optimizer: torch.optim.AdamW
    step: int = 0
    total: list[torch.Tensor] = field(default_factory=list)
    summed: int = 0
    loss: float = float("nan")


def start(run: Run) -> State:
    """Initialise a run from its seed."""
    weights = lean_llama.fuse(lean_llama.initial(run.shape, run.seed))
    return State(weights, _optimizer(weights, run))


def _optimizer(weights: list[torch.Tensor], run: Run) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only."""
    for weight in weights:
        weight.requires_grad_()
    groups = [
        {"params": [w for w in weights if w.ndim > 1], "weight_decay": run.weight_decay},
        {"params": [w for w in weights if w.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=run.lr_peak, betas=(0.9, 0.95), fused=True)


def save_state(state: State, path: Path) -> None:
    """Write a snapshot that takes the old one's place in one step."""
    content = {name: getattr(state, name) for name in ("step", "total", "summed", "loss")}
    content["weights"] = [weight.detach() for weight in state.weights]
    content["optimizer"] = state.optimizer.state_dict()
    partial = path.with_suffix(".partial")
    torch.save(content, partial)
    partial.replace(path)


def load_state(run: Run, path: Path) -> State:
    """Read a snapshot."""
    content = torch.load(path, weights_only=True)
    optimizer = _optimizer(content["weights"], run)
    optimizer.load_state_dict(content.pop("optimizer"))
    return State(optimizer=optimizer, **content)


def batch(data: torch.Tensor, run: Run, step: int) -> torch.Tensor:
    """Windows of one step, a function of seed and step alone: equal for all rates and sizes."""
    length = run.shape.context + 1
    draw = np.random.default_rng((run.seed, step))
    starts = torch.from_numpy(draw.integers(len(data) - length + 1, size=BATCH_WINDOWS))
    return data[starts[:, None] + torch.arange(length)].long()


@functools.cache
def loss_function(shape: lean_llama.Shape, compiled: bool) -> Loss:
    """Loss of one size of model with products in bfloat16, compiled if wanted."""
    at = lean_llama.tables(shape)

    def plain(weights: list[torch.Tensor], windows: torch.Tensor) -> torch.Tensor:
        return lean_llama.loss(weights, windows, shape, at)

    inner = torch.compile(plain, dynamic=False) if compiled else plain

    def mixed(weights: list[torch.Tensor], windows: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return inner(weights, windows)

    return mixed


def advance(
    state: State,
    run: Run,
    data: torch.Tensor,
    until: int,
    *,
    begin: int | None,
    snapshot: Path,
    compiled: bool,
) -> None:
    """Take steps up to ``until``, in place; write a snapshot every few minutes.

    Raises
    ------
    DivergedError
        If the loss is no longer a number.
    """
    loss_of, saved = loss_function(run.shape, compiled), time.monotonic()
    averaged = run.average and begin is None
    while state.step < until:
        for group in state.optimizer.param_groups:
            group["lr"] = run.lr(state.step, begin)
        loss = loss_of(state.weights, batch(data, run, state.step))
        state.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(state.weights, 1.0)
        state.optimizer.step()
        state.step += 1
        found = loss.item()
        if not np.isfinite(found):
            raise DivergedError(f"{run.name}: loss {found} at step {state.step}")
        state.loss = found if state.step == 1 else 0.99 * state.loss + 0.01 * found
        if averaged and state.step > (1 - AVERAGED_SHARE) * until:
            _add_to_average(state)
        if time.monotonic() - saved > SNAPSHOT_SECONDS:
            save_state(state, snapshot)
            saved = time.monotonic()


def _add_to_average(state: State) -> None:
    """Add the weights to the running sum, every few steps."""
    if state.step % AVERAGE_EVERY:
        return
    now = [weight.detach() for weight in state.weights]
    state.total = [a + b for a, b in zip(state.total, now, strict=True)] if state.total else now
    state.total = [total.clone() for total in state.total]
    state.summed += 1


def train(run: Run, data: torch.Tensor, out: Path, source: str, *, compiled: bool = True) -> Path:
    """Train a run, or what is left of it, and return the folder of its checkpoints.

    Parameters
    ----------
    run
        The run.
    data
        Token ids of the training text, uint8.
    out
        Folder of all runs.
    source
        Where the checkpoints come from, for their metadata.
    compiled
        Whether to compile the forward pass, which takes a C++ compiler and half a minute.

    Raises
    ------
    DivergedError
        If the loss is no longer a number.
    """
    folder = out / run.name
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        if not (folder / DONE).is_file():
            clock, processor = time.monotonic(), time.process_time()
            for partial in folder.glob(".partial-*"):
                shutil.rmtree(partial)
            _train(run, data, folder, source, compiled=compiled)
            _finish(folder, time.monotonic() - clock, time.process_time() - processor)
    return folder


def _train(run: Run, data: torch.Tensor, folder: Path, source: str, *, compiled: bool) -> None:
    """Walk along the stable phase or the cosine, and down each decay from where it begins."""
    trunk = folder / "trunk.pt"
    state = load_state(run, trunk) if trunk.is_file() else start(run)
    slope = next(iter({kept.begin for kept in run.kept if kept.kind == "cosine"}), None)
    for stop in run.stops:
        if state.step > stop:
            continue
        advance(state, run, data, stop, begin=slope, snapshot=trunk, compiled=compiled)
        for kept in run.kept:
            if kept.step == stop and kept.kind != "decay":
                _keep(run, kept, state, folder, source)
        save_state(state, trunk)
        if stop in run.branches:
            _branch(run, stop, data, folder, source, compiled=compiled)
        state.total, state.summed = [], 0


def _branch(
    run: Run, begin: int, data: torch.Tensor, folder: Path, source: str, *, compiled: bool
) -> None:
    """Decay from a snapshot of the stable phase, keep what is wanted, and leave the phase as is."""
    wanted = [kept for kept in run.kept if kept.kind == "decay" and kept.begin == begin]
    if all((folder / kept.name).is_dir() for kept in wanted):
        return
    branch = folder / f"branch-{begin}.pt"
    state = load_state(run, branch if branch.is_file() else folder / "trunk.pt")
    for kept in wanted:
        if state.step <= kept.step:
            advance(state, run, data, kept.step, begin=begin, snapshot=branch, compiled=compiled)
            _keep(run, kept, state, folder, source)
    branch.unlink(missing_ok=True)


def _keep(run: Run, kept: Kept, state: State, folder: Path, source: str) -> None:
    """Write a checkpoint as a Hugging Face folder, all or nothing."""
    target = folder / kept.name
    if target.is_dir():
        return
    weights = state.weights
    if kept.kind == "mean":
        weights = [total / state.summed for total in state.total]
    partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder))
    with quiet_transformers():
        lean_llama.unfuse(weights, run.shape).save_pretrained(partial)
    byte_tokenizer().save_pretrained(partial)
    described = training_metadata(run.training(kept, source), kept.name)
    lines = [f"{key} = {json.dumps(value)}" for key, value in described.items()]
    header = "# How this checkpoint was trained; read by qscale measure and qscale predict."
    (partial / "qscale.toml").write_text("\n".join([header, "[training]", *lines, ""]))
    partial.chmod(0o755)
    partial.rename(target)
    print(f"{run.name}/{kept.name}: training loss {state.loss:.3f} nats per token", flush=True)


def _finish(folder: Path, wall: float, processor: float) -> None:
    """Note that a run is finished and what it took since it was last started."""
    partial = folder / f"{DONE}.partial"
    partial.write_text(json.dumps({"wall_seconds": wall, "core_seconds": processor}))
    partial.rename(folder / DONE)
    (folder / "trunk.pt").unlink(missing_ok=True)
    print(f"{folder.name}: finished, {processor / 60:.1f} core-minutes", flush=True)


def main() -> None:
    """Train what is asked for and not there yet."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path, help="training text (.txt, .txt.xz or .txt.gz)")
    parser.add_argument("--out", type=Path, default=Path("checkpoints"), help="folder to write to")
    parser.add_argument("--only", nargs="+", help="names of runs; all if left out")
    parser.add_argument("--eager", action="store_true", help="do without a compiler")
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    data = read_bytes(args.text)
    source = f"examples/controlled_sweep on {args.text.name}"
    for run in grid():
        if args.only and run.name not in args.only:
            continue
        try:
            train(run, data, args.out, source, compiled=not args.eager)
        except DivergedError as error:
            print(f"{error}; left as it is", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
