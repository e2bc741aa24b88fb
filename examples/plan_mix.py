"""Choose bits for each matrix of a shipped checkpoint, and measure what the mixes cost.

The cost of each matrix under each of five formats is predicted from curvature, ``qscale plan mix``
finds the best mix within a budget, and the mix is quantized and evaluated, beside the uniform
setting that fits the same budget. At 2 bits the loss is far from quadratic: mixes that take some
matrices down to 2 bits cost more than predicted, and can lose to uniform bits. About three
minutes::

    python examples/plan_mix.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pandas as pd
from error_growth import CHECKPOINTS, TEXT
from rich.console import Console
from rich.table import Table

from qscale.cli.plan_mix import as_mix
from qscale.measure.loss import reference
from qscale.measure.sensitivity import costs, predicted
from qscale.measure.subject import open_subject
from qscale.plan.mix import Allocation, allocate
from qscale.quantize.apply import apply
from qscale.quantize.setting import Setting

if TYPE_CHECKING:
    from qscale.measure.loss import Reference
    from qscale.measure.subject import Subject
    from qscale.quantize.mix import Quantizer

SPECS = tuple(f"rtn int{bits} g64" for bits in (2, 3, 4, 5, 6))
BUDGETS = (2.5, 3.25, 4.25)
MAX_WINDOWS = 64


@dataclass(frozen=True)
class Mixed:
    """One budget: the mix, the cost measured with it, and with the uniform setting that fits."""

    budget: float
    found: Allocation
    measured: dict[str, float]
    uniform: str
    of_uniform: dict[str, float]


def matrices(subject: Subject) -> pd.DataFrame:
    """Predict the cost of each matrix under each setting, as ``qscale sensitivity`` does."""
    parts = []
    for spec in SPECS:
        setting = Setting.parse(spec)
        weights = apply(subject.checkpoint.model, subject.weights, setting).weights
        parts.append(predicted(subject, setting, weights).matrices.assign(spec=spec))
    return pd.concat(parts, ignore_index=True)


def measured(subject: Subject, full: Reference, quantizer: Quantizer) -> dict[str, float]:
    """Quantize all matrices and evaluate."""
    weights = apply(subject.checkpoint.model, subject.weights, quantizer).weights
    return costs(subject, quantizer, weights, full)


def study(max_windows: int = MAX_WINDOWS) -> list[Mixed]:
    """Plan and measure a mix for each budget."""
    subject = open_subject(CHECKPOINTS / "tiny-wsd-stable", TEXT, max_windows=max_windows)
    full = reference(subject.checkpoint.model, subject.evaluation)
    table = matrices(subject)
    settings = {spec: Setting.parse(spec) for spec in SPECS}
    made = []
    for budget in BUDGETS:
        found = allocate(table, budget)
        uniform = found.uniform[found.uniform["bits_per_weight"] <= budget]["spec"].iloc[-1]
        mix = as_mix(found.choices, settings)
        costs_of = [measured(subject, full, q) for q in (mix, settings[uniform])]
        made.append(Mixed(budget, found, costs_of[0], uniform, costs_of[1]))
    return made


def written(values: dict[str, float], name: str) -> str:
    """Write thousandths of a nat with their standard error."""
    return f"{1000 * values[name]:.1f} ± {1000 * values[f'{name}_se']:.1f}"


def main() -> None:
    """Print predicted and measured costs."""
    heading = ("budget", "setting", "bits per weight", "predicted", "KL", "loss increase")
    table = Table(*heading, title="Cost in 0.001 nats per token")
    for one in study():
        sums = one.found.uniform.set_index("spec").loc[one.uniform]
        mix = (f"mix of {one.found.choices['spec'].nunique()}", one.found.bits_per_weight,
               one.found.cost, one.measured)  # fmt: skip
        plain = (one.uniform, sums["bits_per_weight"], sums["cost"], one.of_uniform)
        for name, size, cost, found in (mix, plain):
            table.add_row(f"{one.budget:g}", name, f"{size:.3f}", f"{1000 * cost:.1f}",
                          written(found, "kl"), written(found, "delta_loss"))  # fmt: skip
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
