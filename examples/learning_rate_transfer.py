"""Predict OLMo-2-13B from other models: by a law with the learning rate, and by two without.

The shipped table ``ptq_vs_learning_rate`` holds GPTQ errors along training runs whose learning
rates are known (digitised from the figures of arXiv:2510.06213): four 160M runs at four peak rates,
SmolLM3-3B, and OLMo-2 at 1B, 7B and 13B, whose peaks are 4e-4, 3e-4 and 9e-4. One law is fitted to
all of them but the 13B. Then the 13B's peak rate is recorded wrongly, as 3e-4 (the value in its
published configuration file, which the launch script overrides), and the runs that the others do
not predict are listed. Results go to ``out/``::

    python examples/learning_rate_transfer.py
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from qscale import datasets
from qscale.fit import Fit, fit
from qscale.laws import get
from qscale.predict import predict
from qscale.select import exponents_within
from qscale.validate import held_out, leave_one_out, paired, surprises

if TYPE_CHECKING:
    from qscale.validate.paired import Paired

TARGET = "error"
NEW, MISTAKEN_PEAK = "OLMo-2-13B", 3e-4
OLMO = "family == 'OLMo-2'"
BLOCK = 6  # neighbouring checkpoints of a run share their noise: errors are resampled by blocks


def measurements() -> pd.DataFrame:
    """Return the table with one target column, weight averages left out.

    ``error`` is relative (of the loss) or, in one figure's 160M runs, absolute; ``unit`` says which
    and takes up the constant between them.
    """
    table = datasets.load("ptq_vs_learning_rate")
    table = table[table["averaging"] != "lawa"].reset_index(drop=True)
    table["unit"] = np.where(table["relative_delta"].notna(), "relative", "absolute")
    table[TARGET] = table["relative_delta"].fillna(table["delta_loss"])
    return table


def mistaken(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table with the 13B's learning rates as its published configuration file has it."""
    wrong = table["run"] == NEW
    scale = MISTAKEN_PEAK / table.loc[wrong, "lr_peak"]
    table = table.copy()
    table.loc[wrong, ["lr_peak", "lr"]] = table.loc[wrong, ["lr_peak", "lr"]].mul(scale, axis=0)
    return table


def with_learning_rate(table: pd.DataFrame) -> Fit:
    """Fit size, tokens, bits, peak learning rate and its decay to all runs at once."""
    return fit(table, get("lr_anneal", TARGET), offset=["unit"], name="all runs")


def without_learning_rate(table: pd.DataFrame, law: str) -> Fit:
    """Fit size and tokens to the OLMo-2 runs; they have one bit width, so its term is held."""
    held = {"ouyang": {"gamma": 5.0}, "kumar": {"gamma_post": 0.7}}[law]
    return fit(table, get(law, TARGET), where=OLMO, fixed=held, interval="model", name="OLMo-2")


@dataclass(frozen=True)
class Transfer:
    """Predictions of the 13B by each law: log of predicted over measured, and intervals."""

    rows: pd.DataFrame
    predicted: dict[str, pd.DataFrame]
    tests: dict[str, Paired]

    def log_error(self, law: str) -> np.ndarray:
        """Log of predicted over measured, shape (n,)."""
        return np.log(self.predicted[law][TARGET] / self.rows[TARGET]).to_numpy()

    def coverage(self, law: str) -> float:
        """Share of measured rows inside the 90 % interval of a new checkpoint."""
        found, measured = self.predicted[law], self.rows[TARGET]
        return float(measured.between(found["low_90"], found["high_90"]).mean())


def transfer(table: pd.DataFrame) -> Transfer:
    """Predict the 13B from all other runs by three laws, and test the one against the others."""
    others, rows = (table[mask] for mask in (table["run"] != NEW, table["run"] == NEW))
    rows = rows.sort_values("tokens").reset_index(drop=True)
    fits = {
        "lr_anneal": with_learning_rate(others),
        "ouyang": without_learning_rate(others, "ouyang"),
        "kumar": without_learning_rate(others, "kumar"),
    }
    made = Transfer(rows, {name: predict(found, rows) for name, found in fits.items()}, {})
    blocks = np.arange(len(rows)) // BLOCK
    best = np.abs(made.log_error("lr_anneal"))
    for name in ("ouyang", "kumar"):
        made.tests[name] = paired(np.abs(made.log_error(name)) - best, blocks)
    return made


def peak_rates(table: pd.DataFrame) -> pd.DataFrame:
    """Predict each 160M peak rate from the other three, with and without the learning rate.

    These runs have one size and one bit width, so Ouyang's and Kumar's forms are both tokens alone.
    """
    rows = table[table["figure"].str.startswith("fig6a")].reset_index(drop=True)
    held = {"fixed": {"alpha": 0.0, "gamma": 0.0}, "interval": "model", "name": "160M runs"}
    found = [
        held_out(rows, partial(fit, law=get(law, TARGET), **held), split, target=TARGET).assign(
            law=law, lr_peak=float(split.name.removeprefix("lr_peak "))
        )
        for law in ("lr_anneal", "ouyang")
        for split in leave_one_out(rows, "lr_peak")
    ]
    return pd.concat(found, ignore_index=True)


def tokens_exponents(table: pd.DataFrame) -> pd.DataFrame:
    """Slope of log error in log tokens within each run once 10e9 tokens have been seen.

    The short final decays of the 160M runs are left out: tokens hardly move along them.
    """
    return exponents_within(table.query("tokens > 1e10 and phase != 'decay'"), TARGET)


def draw(made: Transfer, exponents: pd.DataFrame, seen: dict[str, pd.DataFrame]) -> plt.Figure:
    """Draw the transfer, the tokens exponents and the surprising runs."""
    mpl.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(1, 3, figsize=(12.5, 4), layout="constrained")
    _draw_transfer(axes[0], made)
    _draw_exponents(axes[1], exponents)
    _draw_surprises(axes[2], seen)
    return figure


def _draw_transfer(axis: plt.Axes, made: Transfer) -> None:
    """Measured and predicted error of the 13B along its run."""
    tokens, band = made.rows["tokens"] / 1e12, made.predicted["lr_anneal"]
    axis.plot(tokens, made.rows[TARGET], "o", ms=3.5, color="0.25", label="measured")
    axis.plot(tokens, band[TARGET], color="C0", label="with learning rate (lr_anneal)")
    axis.fill_between(tokens, band["low_90"], band["high_90"], color="C0", alpha=0.2, lw=0,
                      label="its 90 % interval")  # fmt: skip
    axis.plot(tokens, made.predicted["ouyang"][TARGET], "--", color="C3", label="size and tokens")
    axis.set(title="OLMo-2-13B, 3 bits, predicted from other models", yscale="log",
             xlabel="tokens (10¹²)", ylabel="relative_delta")  # fmt: skip
    axis.legend(frameon=False)


def _draw_exponents(axis: plt.Axes, exponents: pd.DataFrame) -> None:
    """Tokens exponent of each run, by what its learning rate did."""
    colors = {"constant rate": "C0", "after decay": "C2", "while decaying": "C3"}
    for position, row in exponents.iterrows():
        axis.errorbar(row["exponent"], position, xerr=1.645 * row["se"], fmt="o", ms=4,
                      color=colors[row["part"]])  # fmt: skip
    labels = (
        exponents["cluster"].str.removeprefix("Pythia-160M-arch ").str.replace("lr_peak=", "160M ")
    )
    axis.set_yticks(range(len(exponents)), labels)
    for part, color in colors.items():
        axis.plot([], [], "o", color=color, label=part)
    axis.set(title="The tokens exponent depends on the schedule", xlim=(-0.05, 0.5),
             xlabel="exponent of tokens within the run, 90 % interval")  # fmt: skip
    axis.legend(frameon=False, loc="center right")


def _draw_surprises(axis: plt.Axes, seen: dict[str, pd.DataFrame]) -> None:
    """How surprising each run is to a fit of the others, under both records."""
    order = list(seen["right"]["cluster"][::-1])
    for (record, table), color in zip(seen.items(), ("C0", "C3"), strict=True):
        z = table.set_index("cluster")["z"].reindex(order)
        axis.plot(z, range(len(order)), "o", ms=5, color=color,
                  label={"right": "13B recorded at 9e-4", "wrong": "at 3e-4"}[record])  # fmt: skip
    axis.axvline(0, color="0.8", zorder=0)
    labels = [label.replace("Pythia-160M-arch lr_peak=", "160M ") for label in order]
    axis.set_yticks(range(len(order)), labels)
    axis.set(title="A mistaken record stands out", xlabel="deviation from the other runs' law (sd)")
    axis.legend(frameon=False, loc="center left")


def main() -> None:
    """Print every number and draw the figure."""
    table = measurements()
    made = transfer(table)
    for law in made.predicted:
        error = made.log_error(law)
        print(f"OLMo-2-13B by {law}: median log error {np.median(error):+.3f}, mean "
              f"{error.mean():+.3f}, 90 % interval holds {made.coverage(law):.0%}")  # fmt: skip
    for law, test in made.tests.items():
        print(f"  |log error| of {law} beyond lr_anneal's: {test.difference:.3f}, "
              f"90 % interval {test.low:.3f} to {test.high:.3f}")  # fmt: skip
    rates = peak_rates(table)
    rates["size"] = rates["log_error"].abs()
    print("\nEach 160M peak rate from the other three, median |log error|:")
    medians = rates.pivot_table(index="lr_peak", columns="law", values="size", aggfunc="median")
    print(medians.round(3).to_string())
    wide = rates.pivot_table(index=["lr_peak", "row"], columns="law", values="size")
    test = paired((wide["ouyang"] - wide["lr_anneal"]).to_numpy(), wide.index.get_level_values(0))
    print(f"  tokens alone beyond lr_anneal: {test.difference:.3f}, 90 % interval {test.low:.3f} "
          f"to {test.high:.3f} over {test.clusters} rates")  # fmt: skip
    exponents = tokens_exponents(table)
    print("\nTokens exponent within each run:")
    print(exponents.round(3).to_string(index=False))
    print("\nAll runs, one law:")
    print(with_learning_rate(table).parameters().round(3).to_string())
    seen = {
        record: surprises(rows, with_learning_rate)
        for record, rows in (("right", table), ("wrong", mistaken(table)))
    }
    for record, found in seen.items():
        print(f"\nRuns that the others do not predict, the 13B's peak rate {record}:")
        print(found.round(3).to_string(index=False))
    path = Path("out") / "learning_rate_transfer.png"
    path.parent.mkdir(exist_ok=True)
    draw(made, exponents, seen).savefig(path, dpi=150)
    print(f"\nDrawn to {path}.")


if __name__ == "__main__":
    main()
