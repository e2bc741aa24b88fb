"""Time qscale's fits against scipy on the same problems in one process.

1. The Chinchilla form on the 240 points of Besiroglu et al. (arXiv:2404.10102): qscale's
   multi-start against scipy's L-BFGS-B from the replication's full grid of 4,500 starts, with
   analytic gradient.
2. 1,000 cluster-bootstrap refits of an eight-parameter law on 600 rows against a loop of
   ``scipy.optimize.least_squares`` with the same Huber loss and analytic Jacobian.

Run with ``OMP_NUM_THREADS=1`` for one core each. Nothing is asserted.
"""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from scipy.optimize import least_squares, minimize

from qscale import datasets
from qscale.fit.estimate import _problem, _starts
from qscale.fit.inference import cluster_weights
from qscale.fit.rows import select
from qscale.fit.solver import Problem, huber, solve
from qscale.laws import get
from qscale.laws.factors import offset

if TYPE_CHECKING:
    from collections.abc import Callable


def timed(function: Callable[[], object]) -> tuple[float, object]:
    """Seconds and result of one call."""
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


def chinchilla_grid(problem: Problem) -> float:
    """Best objective of L-BFGS-B over the replication's grid."""

    def objective(theta: np.ndarray) -> tuple[float, np.ndarray]:
        residuals = problem.observed - problem.value(theta[None])[0]
        slope = np.clip(residuals, -problem.huber_delta, problem.huber_delta)
        value = huber(residuals, problem.huber_delta).sum()
        return float(value), -slope @ problem.gradient(theta[None])[0]

    logs, exponents = np.arange(0.0, 26.0, 5.0), np.arange(0.0, 2.1, 0.5)
    offsets = np.arange(-1.0, 1.1, 0.5)
    with np.errstate(over="ignore", invalid="ignore"):
        return min(
            float(minimize(objective, start, jac=True, method="L-BFGS-B").fun)
            for start in itertools.product(logs, logs, offsets, exponents, exponents)
        )


def compare_multi_start() -> None:
    """Print the first comparison."""
    table = datasets.load("chinchilla_points")
    law = get("chinchilla")
    rows = select(table, law, where=None, cluster="run", name="table")
    problem = _problem(law, rows, {}, 1e-3)
    ours, solution = timed(lambda: solve(problem, _starts(law, problem), np.ones(240)))
    theirs, best = timed(lambda: chinchilla_grid(problem))
    print(
        f"Chinchilla multi-start: {theirs / ours:.0f} times faster than L-BFGS-B over 4,500 starts"
    )
    print(f"  objective {solution.objective.min():.10f} against {best:.10f}")


def eight_parameter_problem() -> tuple[Problem, np.ndarray, np.ndarray]:
    """Return 600 rows of 100 runs: k, three exponents and four offsets."""
    rng = np.random.default_rng(0)
    runs = np.repeat(np.arange(100), 6)
    frame = pd.DataFrame(
        {
            "n_params": 10 ** rng.uniform(8, 11, 100)[runs],
            "tokens": 10 ** rng.uniform(10, 13, 100)[runs],
            "bits": np.tile([2.0, 2.5, 3.0, 3.5, 4.0, 4.5], 100),
            "source": np.array(list("abcde"))[runs % 5],
        }
    )
    law = get("ouyang")
    values = {"k": 0.02, "beta": 0.4, "alpha": 0.3, "gamma": 5.0}
    noise = rng.normal(0, 0.2, 100)[runs] + rng.standard_t(3, 600) * 0.1
    frame["delta_loss"] = law.evaluate(values, frame) * np.exp(noise)
    law = law.with_factors(offset("source", tuple("abcde")))
    rows = select(frame.assign(run=runs), law, where=None, cluster="run", name="table")
    problem = _problem(law, rows, {}, 0.2)
    return problem, runs, cluster_weights(runs, 1000, rng)


def compare_bootstrap() -> None:
    """Print the second comparison."""
    problem, _, weights = eight_parameter_problem()
    start = solve(problem, np.zeros((1, 8)), np.ones(600)).theta
    ours, solution = timed(lambda: solve(problem, np.repeat(start, 1000, axis=0), weights))

    def loop() -> np.ndarray:
        fits = []
        for row in weights:
            keep = np.repeat(np.arange(600), row.astype(int))
            fits.append(
                least_squares(
                    lambda t, k=keep: (problem.value(t[None])[0] - problem.observed)[k],
                    start[0],
                    jac=lambda t, k=keep: problem.gradient(t[None])[0][k],
                    loss="huber",
                    f_scale=problem.huber_delta,
                ).x
            )
        return np.array(fits)

    theirs, fits = timed(loop)
    apart = np.abs(np.asarray(fits) - solution.theta).max(axis=0) / solution.theta.std(axis=0)
    print(f"1,000 bootstrap refits: {theirs / ours:.0f} times faster than a least_squares loop")
    print(f"  {solution.converged.mean():.1%} converged; largest gap {apart.max():.2g} of an SE")


if __name__ == "__main__":
    compare_bootstrap()
    compare_multi_start()
