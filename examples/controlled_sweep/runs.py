"""The runs of the controlled sweep: schedules, and which checkpoints each run keeps.

A run of schedule ``wsd`` is a stable phase at a constant rate with decays to zero branched off it,
so that one run gives constant-rate checkpoints at many token counts, and decayed ones of each.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from lean_llama import Shape

if TYPE_CHECKING:
    from collections.abc import Sequence

BATCH_WINDOWS = 16
WARMUP_STEPS = 100
COSINE_END = 0.1
"""Rate at the end of a cosine over its peak."""
DECAY_OVER_STABLE = 0.25
"""Length of a decay over what went before it, so that a decay is a fifth of its run."""
AVERAGED_SHARE = 0.2
AVERAGE_EVERY = 10
"""An average is over the last fifth of the steps so far, one in ten of them."""
Kind = Literal["stable", "mean", "decay", "cosine"]


@dataclass(frozen=True, slots=True)
class Kept:
    """One checkpoint to keep.

    Parameters
    ----------
    step
        Optimizer steps taken.
    kind
        Phase that it is in; ``mean`` is an average of weights of the stable phase.
    begin
        Step at which its decay began, or None if it is in none.
    """

    step: int
    kind: Kind
    begin: int | None = None

    @property
    def name(self) -> str:
        """Folder's name."""
        branch = "" if self.kind != "decay" else f"-from{self.begin}"
        return f"{self.kind}{branch}-step{self.step}"


@dataclass(frozen=True)
class Run:
    """One training run.

    Parameters
    ----------
    width
        Width of the model; sizes follow from it, see `lean_llama.Shape`.
    lr_peak, weight_decay, seed
        Peak learning rate, decoupled weight decay, and seed of weights and data order.
    schedule
        ``wsd`` or ``cosine``.
    ends
        Tokens per non-embedding parameter at which decays end, rising; a cosine has one.
    average
        Whether to keep averages of the stable phase's weights.
    """

    width: int
    lr_peak: float
    weight_decay: float
    seed: int
    schedule: str
    ends: tuple[float, ...]
    average: bool = False

    @cached_property
    def shape(self) -> Shape:
        """Sizes of the model."""
        return Shape(self.width)

    @property
    def batch_tokens(self) -> int:
        """Tokens per optimizer step."""
        return BATCH_WINDOWS * self.shape.context

    @property
    def name(self) -> str:
        """Name of the run and of its folder; checkpoints of one run share its noise."""
        horizon = "" if self.schedule == "wsd" else f"-{self.ends[-1]:g}per"
        return (
            f"w{self.width}-lr{self.lr_peak:g}-wd{self.weight_decay:g}"
            f"-{self.schedule}{horizon}-seed{self.seed}"
        )

    def steps(self, tokens_per_parameter: float) -> int:
        """Optimizer steps that give so many tokens per parameter, rounded."""
        return round(tokens_per_parameter * self.shape.n_params / self.batch_tokens)

    @cached_property
    def branches(self) -> dict[int, int]:
        """First step of each decay and the step at which it ends."""
        if self.schedule != "wsd":
            return {}
        ends = [self.steps(end) for end in self.ends]
        return {round(end / (1 + DECAY_OVER_STABLE)): end for end in ends}

    @cached_property
    def last(self) -> int:
        """Last step of the stable phase, or of the cosine."""
        return self.steps(self.ends[-1])

    @cached_property
    def stops(self) -> tuple[int, ...]:
        """Steps of the stable phase, or of the cosine, at which something is kept."""
        if self.schedule == "wsd":
            return (*self.branches, self.last)
        return (self.last // 2, self.last * 3 // 4, self.last)

    @cached_property
    def kept(self) -> tuple[Kept, ...]:
        """Checkpoints to keep: of two last decays one halfway, and of each its end."""
        if self.schedule == "cosine":
            return tuple(Kept(step, "cosine", WARMUP_STEPS) for step in self.stops)
        found = [Kept(step, "stable") for step in self.stops]
        if self.average:
            found += [Kept(step, "mean") for step in (self.stops[0], *self.stops[-2:])]
        late = list(self.branches)[-2:]
        for begin, end in self.branches.items():
            found += [Kept((begin + end) // 2, "decay", begin)] if begin in late else []
            found.append(Kept(end, "decay", begin))
        return tuple(found)

    @property
    def tokens(self) -> int:
        """Tokens trained on in all, branches included."""
        decays = sum(end - begin for begin, end in self.branches.items())
        return (self.last + decays) * self.batch_tokens

    def lr(self, step: int, begin: int | None = None) -> float:
        """Learning rate of optimizer step ``step``, from zero, in a decay begun at ``begin``."""
        warm = self.lr_peak * min((step + 1) / WARMUP_STEPS, 1.0)
        if begin is None or step < begin:
            return warm
        if self.schedule == "cosine":
            share = (step - begin) / (self.last - begin)
            return self.lr_peak * (
                COSINE_END + (1 - COSINE_END) * (1 + math.cos(math.pi * share)) / 2
            )
        end = self.branches[begin]
        return self.lr_peak * (end - step) / (end - begin)

    def training(self, kept: Kept, source: str) -> dict[str, Any]:
        """Training metadata of a checkpoint under the measurement table's column names."""
        decayed = share = 0.0
        if kept.begin is not None:
            end = self.branches.get(kept.begin, self.last)
            decayed = (kept.step - kept.begin) / (end - kept.begin)
            share = (kept.step - kept.begin) / kept.step
        schedules = {"stable": "constant", "mean": "constant", "decay": "wsd", "cosine": "cosine"}
        return {
            "family": "controlled-sweep",
            "run": self.name,
            "tokens": kept.step * self.batch_tokens,
            "step": kept.step,
            "lr_peak": self.lr_peak,
            "lr": self.lr(kept.step, kept.begin),
            "lr_schedule": schedules[kept.kind],
            "decay_fraction": decayed,
            "decay_share": share,
            "lr_sum": sum(self.lr(step, kept.begin) for step in range(kept.step)),
            "weight_decay": self.weight_decay,
            "batch_tokens": self.batch_tokens,
            "optimizer": "adamw",
            "averaging": "lawa" if kept.kind == "mean" else "none",
            "source": source,
        }


RATES = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)
SMALL, MEDIUM, LARGE = 64, 128, 256
"""Widths; the models have 0.11, 0.44 and 1.77 million non-embedding parameters."""
ENDS = {SMALL: (12.5, 25, 50, 100, 200), MEDIUM: (12.5, 25, 50), LARGE: (6.25, 12.5)}


def grid() -> tuple[Run, ...]:
    """All runs in the order of training: the core of each size before its other arms."""
    runs = []

    def add(
        width: int, rates: tuple[float, ...], seed: int = 0, decay: float = 0.1, **options: Any
    ) -> None:
        """Add a WSD run at each rate."""
        runs.extend(Run(width, lr, decay, seed, "wsd", ENDS[width], **options) for lr in rates)

    def add_cosines(width: int, rates: tuple[float, ...], ends: tuple[float, ...]) -> None:
        """Add a cosine run of each length at each rate."""
        runs.extend(Run(width, lr, 0.1, 0, "cosine", (end,)) for lr in rates for end in ends)

    add(SMALL, RATES, average=True)
    add_cosines(SMALL, (5e-4, 2e-3, 8e-3), (50, 200))
    add(SMALL, RATES, seed=1)
    add(SMALL, (1e-3, 2e-3, 8e-3), decay=0.01)
    add(MEDIUM, RATES, average=True)
    add(LARGE, (5e-4, 2e-3, 8e-3, 1e-3), average=True)
    add_cosines(MEDIUM, (5e-4, 2e-3, 8e-3), (50,))
    add(MEDIUM, (5e-4, 2e-3, 8e-3), seed=1)
    add(MEDIUM, (2e-3, 8e-3), decay=0.01)
    add_cosines(LARGE, (2e-3,), (12.5,))
    return tuple(runs)


SPEED = {SMALL: 68e3, MEDIUM: 27e3, LARGE: 11e3}
"""Tokens per core-second that the recipe trains on one 2.6 GHz core with AVX-512."""


HEADER = """# {about} of the controlled sweep, a task each; runs.py --plan {name} wrote this.
# qscale sweep {name}.toml --folder {folder}, in a folder that holds checkpoints/ and texts/.
task = "{task}"

[fixed]
checkpoints = "checkpoints"
texts = "texts"
"""


@dataclass(frozen=True)
class Measuring:
    """One of the plans: a task for every checkpoint.

    Parameters
    ----------
    about
        What is done, in the plan's heading.
    folder
        Folder that the heading proposes.
    task
        Function that does it.
    seconds
        Core-seconds that a checkpoint is expected to take, by width.
    """

    about: str
    folder: str
    task: str
    seconds: dict[int, int]


PLANS = {
    "plan": Measuring(
        "Measure each checkpoint",
        "measured",
        "measuring.py:measure_checkpoint",
        {SMALL: 45, MEDIUM: 110, LARGE: 300},
    ),
    "spectrum": Measuring(
        "Find the largest and smallest eigenvalue of each checkpoint",
        "spectra",
        "spectrum.py:measure_spectrum",
        {SMALL: 7, MEDIUM: 18, LARGE: 45},
    ),
}


def plan(name: str = "plan") -> str:
    """Return a plan: an arm for each size, checkpoints in the order of training."""
    made = PLANS[name]
    lines = [HEADER.format(name=name, about=made.about, folder=made.folder, task=made.task)]
    for width, seconds in made.seconds.items():
        runs = [run for run in grid() if run.width == width]
        lines += [
            "[[arms]]",
            f'name = "{Shape(width).n_params} parameters"',
            f"fixed = {{ width = {width} }}",
            f"cost = {{ seconds = {seconds} }}",
            "grid.checkpoint = [",
            *(f'    "{run.name}/{kept.name}",' for run in runs for kept in run.kept),
            "]\n",
        ]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    """Print the grid: runs, checkpoints, tokens and estimated core-minutes; or the plan."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--plan", choices=PLANS, help="print a plan of measurements instead")
    wanted = parser.parse_args().plan
    if wanted:
        print(plan(wanted), end="")
        return
    arms: dict[tuple[int, str, float, int], list[Run]] = {}
    for run in grid():
        arms.setdefault((run.width, run.schedule, run.weight_decay, run.seed), []).append(run)
    heads = ("parameters", "schedule", "decay", "seed", "peak rates")
    form = "{:>10} {:8} {:>6} {:>4} {:28} {:>4} {:>11} {:>9} {:>12}"
    print(form.format(*heads, "runs", "checkpoints", "M tokens", "core-minutes"))
    for (width, schedule, decay, seed), runs in arms.items():
        rates = " ".join(f"{lr:g}" for lr in sorted({run.lr_peak for run in runs}))
        print(form.format(Shape(width).n_params, schedule, decay, seed, rates, *_totals(runs)))
    print(form.format("all", "", "", "", "", *_totals(grid())))


def _totals(runs: Sequence[Run]) -> tuple[int, int, str, str]:
    """Count runs, checkpoints, millions of tokens and core-minutes."""
    minutes = sum(run.tokens / SPEED[run.width] for run in runs) / 60
    tokens = sum(run.tokens for run in runs) / 1e6
    return len(runs), sum(len(run.kept) for run in runs), f"{tokens:.1f}", f"{minutes:.0f}"


if __name__ == "__main__":
    main()
