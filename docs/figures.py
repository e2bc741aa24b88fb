"""Draw the figures of the explanations from shipped data, and print the numbers they show.

::

    python docs/figures.py            # all of them, into docs/explanation/figures
    python docs/figures.py few_runs   # one
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from qscale import datasets
from qscale.fit import fit
from qscale.laws import get

DOCS = Path(__file__).resolve().parent
FOLDER = DOCS / "explanation" / "figures"
MEASURED = DOCS.parent / "examples" / "measurements" / "zero_fit.csv"
GPTQ = "method == 'gptq'"
DRAWS = 20
FEW = (4, 6, 9, 12)


def _figure() -> tuple[Figure, mpl.axes.Axes]:
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def runs() -> tuple[Figure, str]:
    """Residuals of a fit of published GPTQ rows, run by run: those of a run lie together."""
    made = fit(datasets.load("published_ptq"), get("kumar"), where=GPTQ, offset=["source"])
    rows = datasets.load("published_ptq").query(GPTQ + " and status == 'ok' and tokens == tokens")
    rows = rows[rows["delta_loss"] > 0]
    residual = np.log(rows["delta_loss"].to_numpy()) - np.log(made.center(rows))
    by_run = pd.Series(residual).groupby(rows["run"].to_numpy())
    order = by_run.median().sort_values().index
    figure, axes = _figure()
    for place, run in enumerate(order):
        values = by_run.get_group(run)
        axes.plot(values, np.full(len(values), place), "o", alpha=0.5, markersize=4, color="C0")
        axes.plot(values.median(), place, "|", markersize=14, markeredgewidth=2, color="C1")
    axes.axvline(0, color="0.6", linewidth=1)
    axes.set_yticks(range(len(order)), order, fontsize=7)
    axes.set_xlabel("log of measured over fitted loss increase; bars are medians of runs")
    between, within = by_run.median().std(), by_run.std().median()
    text = (
        f"{len(rows)} rows of {len(order)} runs\n"
        f"standard deviation of the runs' medians: {between:.2f}\n"
        f"median standard deviation within a run: {within:.2f}\n"
    )
    return figure, text


def few_runs() -> tuple[Figure, str]:
    """Intervals of the size exponent from random draws of a few runs, beside that of all runs."""
    rows = datasets.load("published_ptq").query(GPTQ + " and source == 'GPTQ paper'")
    names = rows["run"].dropna().unique()
    random = np.random.default_rng(0)

    def ends(kept: np.ndarray) -> pd.Series:
        made = fit(rows[rows["run"].isin(kept)], get("kumar"), fixed={"gamma_D": 0.0})
        return made.parameters().loc["gamma_N"]

    everything = ends(names)
    figure, axes = _figure()
    axes.axhline(everything["estimate"], color="0.6", linewidth=1)
    lines = [f"all {len(names)} runs: gamma_N {everything['estimate']:.2f}"]
    for count in FEW:
        found = pd.DataFrame([ends(random.choice(names, count, False)) for _ in range(DRAWS)])
        held = found["low"].lt(everything["estimate"]) & found["high"].gt(everything["estimate"])
        place = count + np.linspace(-0.7, 0.7, DRAWS)
        for part, color in ((held, "C0"), (~held, "C1")):
            middle = (found["high"] + found["low"])[part] / 2
            reach = (found["high"] - found["low"])[part] / 2
            axes.errorbar(place[part], middle, yerr=reach, fmt="none", elinewidth=1, color=color)
        lines.append(
            f"{count:2d} runs: estimates from {found['estimate'].min():.2f} to "
            f"{found['estimate'].max():.2f}; {held.sum()} of {DRAWS} intervals hold that of all"
        )
    axes.set_xticks(FEW)
    axes.set_xlabel("runs drawn")
    axes.set_ylabel("90 % interval of gamma_N")
    return figure, "\n".join(lines) + "\n"


def floor() -> tuple[Figure, str]:
    """Measured increases with their errors: under two standard errors they are only bounds."""
    rows = pd.read_csv(MEASURED).query("method == 'rtn' and bits >= 3")
    size, error = rows["delta_loss"], rows["delta_loss_se"]
    under = size <= 2 * error
    figure, axes = _figure()
    known, bound = rows[~under], rows[under]
    axes.errorbar(
        known["quadratic_delta"], known["delta_loss"], yerr=known["delta_loss_se"], fmt="o",
        markersize=3, elinewidth=0.8, color="C0", label="above two standard errors",
    )  # fmt: skip
    axes.plot(
        bound["quadratic_delta"], 2 * bound["delta_loss_se"], "v", color="C1", label="only a bound"
    )
    ends = rows["quadratic_delta"].min(), rows["quadratic_delta"].max()
    axes.plot(ends, ends, color="0.6", linewidth=1)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("predicted from curvature and noise, nats per token")
    axes.set_ylabel("measured, nats per token")
    axes.legend(frameon=False)
    above = np.log(size[~under] / rows["quadratic_delta"][~under]).median()
    bits = rows["bits"][under].value_counts().sort_index()
    text = (
        f"{len(rows)} rows, {under.sum()} of them under two standard errors: "
        f"{', '.join(f'{n} at {b:g} bits' for b, n in bits.items())}\n"
        f"median log of measured over predicted, the others: {above:+.2f}\n"
    )
    return figure, text


def zero_fit() -> tuple[Figure, str]:
    """Unfitted predictions with and without the error's direction, for two methods."""
    rows = pd.read_csv(MEASURED)
    rows = rows[rows["delta_loss"] > 2 * rows["delta_loss_se"]]
    figure = Figure(figsize=(7.6, 3.8), layout="constrained")
    forms = {"quadratic_delta": "without direction", "gauss_newton_delta": "along the error"}
    lines = []
    for axes, (form, title) in zip(figure.subplots(1, 2, sharey=True), forms.items(), strict=True):
        axes.spines[["top", "right"]].set_visible(False)
        for method, marker in (("rtn", "o"), ("gptq", "^")):
            part = rows[rows["method"] == method]
            axes.plot(part[form], part["delta_loss"], marker, alpha=0.6, markersize=4, label=method)
            for low, high in ((2, 2), (3, 6)):
                chosen = part[part["bits"].between(low, high)]
                ratio = np.exp(np.log(chosen[form] / chosen["delta_loss"]).median())
                name = f"{low} bits" if low == high else f"{low} to {high} bits"
                lines.append(f"{method:4s} {name:11s} {title:17s} {ratio:.2f}")
        ends = rows["delta_loss"].min(), rows["delta_loss"].max()
        axes.plot(ends, ends, color="0.6", linewidth=1)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_title(title)
        axes.set_xlabel("predicted, nats per token")
    figure.axes[0].set_ylabel("measured, nats per token")
    figure.axes[0].legend(frameon=False)
    return figure, "median of predicted over measured\n" + "\n".join(sorted(lines)) + "\n"


FIGURES = {made.__name__: made for made in (runs, few_runs, floor, zero_fit)}


def main(names: list[str], folder: Path = FOLDER) -> None:
    """Draw figures, each into an SVG file of its name, and print their numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    mpl.rcParams["svg.hashsalt"] = "qscale"  # the same file each time
    for name in names or FIGURES:
        figure, text = FIGURES[name]()
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
        sys.stdout.write(text)


if __name__ == "__main__":
    main(sys.argv[1:])
