"""How often do 90 % intervals hold? Seeded simulations of every interval and of a noise floor.

Tables follow Ouyang's law; each run has its own size, tokens and deviation (standard deviation 0.2
in log), each row its own error (0.05). Coverage is that of the parameters beta, alpha and gamma,
and of rows of runs that were not fitted. The second part puts about 30 % of rows at or under their
noise floor and compares the censored fit with dropping those rows::

    python benchmarks/coverage.py --reps 400
"""

from __future__ import annotations

import argparse
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import numpy as np
import pandas as pd

from qscale.fit import fit
from qscale.laws import get
from qscale.predict import predict

TRUE = {"k": 0.02, "beta": 0.4, "alpha": 0.3, "gamma": 5.0}
NAMES = ("beta", "alpha", "gamma")
CLUSTERS = (8, 20, 60)
INTERVALS = ("model", "sandwich", "bootstrap", "profile", "conformal")


def simulate(runs: int, seed: int, prefix: str = "run", within: float = 0.05) -> pd.DataFrame:
    """Rows of Ouyang's law at three bit widths per run."""
    rng = np.random.default_rng(seed)
    size, tokens = 10 ** rng.uniform(8, 11, runs), 10 ** rng.uniform(10, 13, runs)
    table = pd.DataFrame(
        {
            "run": np.repeat([f"{prefix}{i}" for i in range(runs)], 3),
            "n_params": np.repeat(size, 3),
            "tokens": np.repeat(tokens, 3),
            "bits": np.tile([2.0, 3.0, 4.0], runs),
        }
    )
    scatter = np.repeat(rng.normal(0, 0.2, runs), 3) + rng.normal(0, within, 3 * runs)
    return table.assign(delta_loss=get("ouyang").evaluate(TRUE, table) * np.exp(scatter))


def covered(seed: int, runs: int, interval: str) -> list[float]:
    """Whether the 90 % intervals of one simulated table hold: parameters, then new rows."""
    found = fit(simulate(runs, seed), get("ouyang"), interval=interval, n_boot=200, seed=seed)
    table = found.parameters()
    hits = [float(table.loc[n, "low"] <= TRUE[n] <= table.loc[n, "high"]) for n in NAMES]
    fresh = simulate(10, 10**6 + seed, prefix="new")
    rows = predict(found, fresh.drop(columns="delta_loss"), seed=seed)
    inside = fresh["delta_loss"].between(rows["low_90"], rows["high_90"])
    return [*hits, float(inside.mean())]


def noisy(runs: int, seed: int) -> pd.DataFrame:
    """Return the same with an error that about 30 % of rows do not clear by twice its size."""
    rng = np.random.default_rng(10**7 + seed)
    table = simulate(runs, seed)
    error = np.full(len(table), float(np.quantile(table["delta_loss"], 0.3) / 2))
    measured = table["delta_loss"] + rng.normal(0, error)
    return table.assign(delta_loss=measured, delta_loss_se=error)


def bias(seed: int, runs: int) -> list[float]:
    """Errors of the exponents over their standard errors: censored fit, then rows dropped."""
    table = noisy(runs, seed)
    kept = table[table["delta_loss"] > 2 * table["delta_loss_se"]]
    both = (fit(table, get("ouyang")), fit(kept, get("ouyang"), floor=None))
    return [(f.values[n] - TRUE[n]) / f.parameters().loc[n, "se"] for f in both for n in NAMES]


def main() -> None:
    """Print coverage by interval and number of clusters, then bias under a noise floor."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--reps", type=int, default=400)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    seeds = range(options.reps)
    print(f"Coverage of 90 % intervals over {options.reps} tables, %")
    print(f"{'interval':10} clusters   beta  alpha  gamma  new rows")
    with ProcessPoolExecutor(options.workers) as pool:
        for interval in INTERVALS:
            for runs in CLUSTERS:
                if interval == "conformal" and runs < 9:
                    continue  # a 90 % interval needs nine left-out clusters
                job = partial(covered, runs=runs, interval=interval)
                rates = 100 * np.mean(list(pool.map(job, seeds, chunksize=8)), axis=0)
                cells = "  ".join(f"{rate:5.1f}" for rate in rates)
                print(f"{interval:10} {runs:8d}  {cells}", flush=True)
        print("\nMean error over standard error with 30 % of rows at or under twice their error")
        for runs in CLUSTERS[1:]:
            errors = np.array(list(pool.map(partial(bias, runs=runs), seeds, chunksize=8)))
            for label, part in (("censored", errors[:, :3]), ("dropped", errors[:, 3:])):
                cells = "  ".join(
                    f"{name} {mean:+.2f}"
                    for name, mean in zip(NAMES, part.mean(axis=0), strict=True)
                )
                print(f"{runs:3d} clusters, {label:9} {cells}", flush=True)


if __name__ == "__main__":
    main()
