"""Planned against random measurements: how fast the interval of a prediction narrows.

The rows of one run, the largest of a table, are to be predicted. From a few random rows of the
other runs a law is fitted; then further rows are taken, either as ``qscale plan next`` chooses them
or at random, the law is fitted again, and the intervals of the target are compared, over 50 random
starts. Any table or dataset with the law's columns will do::

    python examples/plan_next.py
    python examples/plan_next.py controlled_sweep --law lr_anneal --figure out/plan_next.svg
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from rich.console import Console
from rich.progress import track
from rich.table import Table

from qscale import datasets
from qscale import table as tables
from qscale.errors import QscaleError
from qscale.fit import Fit, fit
from qscale.fit.rows import select
from qscale.laws import Law, get
from qscale.plan.next import choose

START, COUNTS, TARGETS = 16, (2, 4, 8, 16), 6
WAYS = ("target", "parameters", "random")
LABELS = {
    "target": "planned for the target",
    "parameters": "planned for all parameters",
    "random": "at random",
}


@dataclass(frozen=True)
class Question:
    """The rows to be predicted, those that may be measured, and the law."""

    law: Law
    targets: pd.DataFrame
    pool: pd.DataFrame


def question(data: str, law_name: str, target: str, where: str | None, run: str | None) -> Question:
    """Hold the largest run out, and keep a few of its rows, evenly spaced, as what to predict."""
    law = get(law_name, target)
    frame = tables.read(datasets.find(data))
    rows = select(frame, law, where=where, cluster="run", name=data).frame
    rows = rows[rows["run"].notna()]
    out = run or str(rows.loc[rows["n_params"].idxmax(), "run"])
    own = rows[rows["run"] == out].sort_values(["tokens", "bits"])
    if own.empty or len(own) == len(rows):
        raise QscaleError(f"--run {out}: must be one of several runs of {data}.")
    places = np.unique(np.linspace(0, len(own) - 1, TARGETS).round().astype(int))
    pool = rows[rows["run"] != out].reset_index(drop=True)
    return Question(law, own.iloc[places].reset_index(drop=True), pool)


def refit(rows: pd.DataFrame, law: Law) -> Fit:
    """Fit the law with deviations of runs."""
    return fit(rows, law, interval="model", name="rows so far")


def score(fitted: Fit, targets: pd.DataFrame) -> tuple[float, float, float]:
    """Mean width of the 90 % intervals, mean |error| of medians, share covered; in logs."""
    low, middle, high = np.log(fitted.quantiles(targets, np.array([0.05, 0.5, 0.95])))
    observed = np.log(targets[fitted.target].to_numpy(dtype=float))
    inside = (low <= observed) & (observed <= high)
    return float((high - low).mean()), float(np.abs(middle - observed).mean()), inside.mean()


def one_start(asked: Question, rng: np.random.Generator) -> list[dict[str, object]]:
    """Measure on from one random start in each way; empty if the start cannot be fitted."""
    order = rng.permutation(len(asked.pool))
    start, rest = asked.pool.iloc[order[:START]], asked.pool.iloc[order[START:]]
    found = []
    try:
        first = refit(start, asked.law)
        orders = {
            way: choose(first, rest, asked.targets, max(COUNTS), criterion=way)["candidate"]
            for way in ("target", "parameters")
        }
        orders["random"] = pd.Series(np.arange(max(COUNTS)))  # rest is in random order
        found += [(way, 0, score(first, asked.targets)) for way in WAYS]
        for way in WAYS:
            for count in COUNTS:
                more = rest.iloc[orders[way][:count]]
                fitted = refit(pd.concat([start, more]), asked.law)
                found.append((way, count, score(fitted, asked.targets)))
    except QscaleError:
        return []  # sixteen rows may hold one level of bits
    names = ("width", "error", "covered")
    return [{"way": w, "count": c, **dict(zip(names, s, strict=True))} for w, c, s in found]


def study(asked: Question, draws: int, seed: int = 0) -> pd.DataFrame:
    """Scores of every start, way and number of measurements; starts without a fit drawn again."""
    rng, parts = np.random.default_rng(seed), []
    for draw in track(range(draws), description="starts", transient=True):
        scores: list[dict[str, object]] = []
        while not scores:
            scores = one_start(asked, rng)
        parts.append(pd.DataFrame(scores).assign(draw=draw))
    return pd.concat(parts, ignore_index=True)


def summary(scores: pd.DataFrame) -> pd.DataFrame:
    """Geometric mean width per way and count, and its ratio to random choice from equal starts."""
    wide = np.log(scores.pivot_table(index=["count", "draw"], columns="way", values="width"))
    rows = []
    for (count, way), own in scores.groupby(["count", "way"]):
        difference = (wide[way] - wide["random"]).xs(count)
        rows.append(
            {
                "count": count,
                "way": way,
                "width": float(np.exp(np.log(own["width"]).mean())),
                "ratio": float(np.exp(difference.mean())),
                "ratio_se": float(difference.std(ddof=1) / np.sqrt(len(difference))),
                "error": float(own["error"].mean()),
                "covered": float(own["covered"].mean()),
            }
        )
    return pd.DataFrame(rows)


def draw(found: pd.DataFrame, path: Path) -> None:
    """Draw how the interval narrows with measurements."""
    mpl.rcParams["svg.hashsalt"] = "qscale"
    figure, axes = plt.subplots(figsize=(5.5, 3.5), layout="constrained")
    for way, marker in zip(WAYS, "osx", strict=True):
        rows = found[found["way"] == way]
        axes.plot(rows["count"], np.exp(rows["width"] / 2), marker=marker, label=LABELS[way])
    axes.set_xlabel(f"measurements beyond the first {START}")
    axes.set_ylabel("90 % interval, factor either way")
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Print the table, and draw the figure if a path is given."""
    parser = argparse.ArgumentParser(description="Planned against random measurements.")
    parser.add_argument("data", nargs="?", default="ptq_vs_learning_rate")
    parser.add_argument("--law", default="lr_anneal")
    parser.add_argument("--target", default=None, help="column to predict")
    parser.add_argument("--where", default=None, help="rows to use, as a pandas query")
    parser.add_argument("--run", default=None, help="run to predict; by default the largest")
    parser.add_argument("--draws", type=int, default=50)
    parser.add_argument("--figure", type=Path, default=None)
    given = parser.parse_args()
    where, target = given.where, given.target
    if given.data == "ptq_vs_learning_rate":
        where, target = where or "averaging != 'lawa'", target or "relative_delta"
    asked = question(given.data, given.law, target or "delta_loss", where, given.run)
    found = summary(study(asked, given.draws))
    title = (
        f"{given.data}: {len(asked.targets)} rows of {asked.targets['run'].iloc[0]}, from "
        f"{START} of {len(asked.pool)} rows, {given.draws} starts"
    )
    heading = ("measured", "chosen", "90 % interval", "width to random's", "mean |log error|",
               "covered")  # fmt: skip
    table = Table(*heading, title=title)
    for _, row in found.iterrows():
        table.add_row(
            f"{row['count']}",
            LABELS[row["way"]],
            f"x {np.exp(row['width'] / 2):.3f}",
            f"{row['ratio']:.3f} ± {row['ratio'] * row['ratio_se']:.3f}",
            f"{row['error']:.3f}",
            f"{row['covered']:.0%}",
        )
    Console(width=120).print(table)
    if given.figure is not None:
        draw(found, given.figure)
        print(f"Figure: {given.figure}")


if __name__ == "__main__":
    main()
