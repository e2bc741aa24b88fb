"""Fit Ouyang's law to a million rows: seconds beside ordinary least squares, and peak memory.

Every case runs in a process of its own. Least squares is statsmodels' OLS on the design matrix of
the same rows, which estimates no random effect, no robust loss and no interval by cluster.

    OMP_NUM_THREADS=1 python benchmarks/fit_scale.py [ROWS]
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import statsmodels.api as sm

from qscale.fit import fit
from qscale.laws import get

TRUE = {"k": 0.02, "beta": 0.4, "alpha": 0.3, "gamma": 5.0}


def simulate(rows: int, runs: int) -> pd.DataFrame:
    """Rows of runs that share a size, a token count and a deviation of 0.2, and scatter by 0.1."""
    rng = np.random.default_rng(0)
    run = np.arange(rows) if runs == rows else rng.integers(0, runs, rows)
    table = pd.DataFrame(
        {
            "run": run,
            "n_params": (10 ** rng.uniform(8, 11, runs))[run],
            "tokens": (10 ** rng.uniform(10, 13, runs))[run],
            "bits": rng.choice([2.0, 3.0, 4.0], rows),
        }
    )
    noise = rng.normal(0, 0.2, runs)[run] + rng.normal(0, 0.1, rows)
    table["delta_loss"] = get("ouyang").evaluate(TRUE, table) * np.exp(noise)
    return table


def measure(rows: int, runs: int) -> dict[str, float]:
    """Seconds of the fit and of least squares, largest error in standard errors, peak in GB."""
    table = simulate(rows, runs)
    logs = np.log(table[["tokens", "n_params", "bits"]].to_numpy())
    start = time.perf_counter()
    sm.OLS(np.log(table["delta_loss"].to_numpy()), sm.add_constant(logs)).fit()
    least_squares = time.perf_counter() - start
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    start = time.perf_counter()
    found = fit(table, get("ouyang"))
    seconds = time.perf_counter() - start
    parameters = found.parameters()
    error = (parameters["estimate"] - pd.Series(TRUE)) / parameters["se"]
    return {
        "seconds": seconds,
        "least_squares": least_squares,
        "error": float(error.abs().max()),
        "before": before,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
    }


def in_a_process(rows: int, runs: int) -> dict[str, float]:
    """Measure one case in a fresh process."""
    command = [sys.executable, str(Path(__file__)), str(rows), str(runs)]
    return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)


def main(rows: int) -> None:
    """Print all cases."""
    for runs, words in ((5000 * rows // 10**6, "random effects by run"), (rows, "one row each")):
        found = in_a_process(rows, runs)
        print(
            f"{rows:,} rows of {runs:,} runs, {words}: {found['seconds']:.1f} s, "
            f"{found['seconds'] / found['least_squares']:.0f} times least squares, peak memory "
            f"{found['peak']:.2f} GB ({found['before']:.2f} GB before the fit), largest error "
            f"{found['error']:.1f} standard errors"
        )


if __name__ == "__main__":
    if len(sys.argv) > 2:
        print(json.dumps(measure(int(sys.argv[1]), int(sys.argv[2]))))
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 10**6)
