"""KL divergence of GGUF formats by bits per weight: exponential or power, and the largest size.

The shipped table ``gguf_kld`` has whole models at one GGUF type each. On the dense Qwen3.5 line
(0.8B to 9B parameters, 2 to 7 bits per weight) two laws are fitted, compared on formats and on
models left out, and asked for the largest model from the smaller ones::

    python examples/gguf_formats.py
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pandas as pd

from qscale import datasets
from qscale.fit import Fit, fit
from qscale.laws import get
from qscale.validate import held_out, largest, leave_one_out, paired

LAWS = ("size_exponential", "size_power")
LINE = (
    "family == 'Qwen3.5' and architecture == 'dense' and method != 'none' and status == 'ok' "
    "and interleaved != True and kl > 0"
)


def measurements() -> pd.DataFrame:
    """Return the dense line; repacked (interleaved) types repeat their base type and are out.

    The bits per weight of the 2B are not published; they are taken as the mean of those of the 0.8B
    and the 4B at the same type, which are at most some hundredths of a bit apart.
    """
    table = datasets.load("gguf_kld").query(LINE)
    known = table.pivot_table(index="fmt", columns="run", values="bits_per_weight")
    between = known[["Qwen3.5-0.8B", "Qwen3.5-4B"]].mean(axis=1, skipna=False)
    table["bits_per_weight"] = table["bits_per_weight"].fillna(table["fmt"].map(between))
    return table.query("2 <= bits_per_weight <= 7").reset_index(drop=True)


def refit(rows: pd.DataFrame, name: str) -> Fit:
    """Fit a law with random deviations of models and formats."""
    return fit(rows, get(name), random=["run", "fmt"], name="gguf_kld")


def r_squared(rows: pd.DataFrame, name: str) -> tuple[Fit, float]:
    """Least squares on log KL, and the share of its variance that the law explains."""
    made = fit(rows, get(name), random=[], likelihood="gaussian", interval="model")
    log_kl = np.log(rows["kl"].to_numpy())
    return made, float(1 - np.var(log_kl - np.log(made.center(rows))) / np.var(log_kl))


def told_apart(rows: pd.DataFrame, split: str) -> str:
    """Say whether the laws' errors differ on the values of a column left out in turn."""
    errors = {
        name: pd.concat(
            held_out(rows, partial(refit, name=name), part, target="kl", cluster=split)
            for part in leave_one_out(rows, split)
        ).set_index("row")
        for name in LAWS
    }
    exponential, power = (errors[name]["log_error"].abs() for name in LAWS)
    test = paired((exponential - power).to_numpy(), errors[LAWS[0]]["cluster"].to_numpy())
    clear = test.p_value < 0.1 and not test.low <= 0 <= test.high
    verdict = "tell them apart" if clear else "cannot tell them apart"
    return (f"median |log error| {exponential.median():.3f} and {power.median():.3f}; mean |log "
            f"error| of the exponential beyond the power's {test.difference:+.3f}, 90 % "
            f"{test.low:+.3f} to {test.high:+.3f} ({test.clusters} clusters, sign-flip p "
            f"{test.p_value:.2g}): the data {verdict}.")  # fmt: skip


def main() -> None:
    """Print fits, the comparison and the prediction of the largest model."""
    rows = measurements()
    print(f"{len(rows)} rows of {', '.join(rows['run'].unique())}")
    for name in LAWS:
        made, share = r_squared(rows, name)
        mixed = refit(rows, name)
        table = mixed.parameters()
        shape = table.index[-1]
        print(f"\n{name}: {made.law.formula}")
        print(f"  least squares: alpha {made.values['alpha']:.3f}, {shape} "
              f"{made.values[shape]:.3f}, R2 {share:.3f}")  # fmt: skip
        for each in ("alpha", shape):
            print(f"  with deviations of models and formats: {each} {table['estimate'][each]:.3f}, "
                  f"90 % {table['low'][each]:.3f} to {table['high'][each]:.3f}")  # fmt: skip
    for split in ("fmt", "run"):
        print(f"\nEach {split} left out: {told_apart(rows, split)}")
    print("\nThe largest model from the smaller ones:")
    for name in LAWS:
        errors = held_out(rows, partial(refit, name=name), largest(rows), target="kl")
        size = errors["log_error"].abs()
        print(f"  {name}: {errors['split'].iloc[0]}, {len(errors)} rows, median |log error| "
              f"{size.median():.3f}, bias {errors['log_error'].median():+.3f}, 90 % interval holds "
              f"{errors['inside_90'].mean():.0%}")  # fmt: skip


if __name__ == "__main__":
    main()
