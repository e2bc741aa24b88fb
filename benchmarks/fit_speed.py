"""Time qscale's fits against scipy and another package on the same problems, in one process.

1. The Chinchilla form on the 240 points of Besiroglu et al. (arXiv:2404.10102): qscale's
   multi-start against scipy's L-BFGS-B from the replication's grid of 4,500 starts, with a lean
   objective and its analytic gradient.
2. The same fit against the ``chinchilla`` package, if it is installed, from the same starts and
   from the grid of 3,125 that its documentation shows (three minutes).
3. 1,000 cluster-bootstrap refits of an eight-parameter law on 600 rows against a loop of
   ``scipy.optimize.least_squares`` with the same Huber loss, start and analytic Jacobian.

Run with ``OMP_NUM_THREADS=1`` for one core each. Nothing is asserted.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from scipy.optimize import least_squares, minimize

from qscale import datasets
from qscale.fit.intervals import resampled
from qscale.fit.rows import select
from qscale.fit.search import problem_of, starts_of
from qscale.fit.solver import Problem, huber, solve
from qscale.laws import get
from qscale.laws.factors import offset

try:
    from chinchilla import Chinchilla
    from chinchilla._metrics import log_huber
except ImportError:
    Chinchilla = None

if TYPE_CHECKING:
    from collections.abc import Callable

DELTA = 1e-3
LOOPED = 200  # refits of the least_squares loop that are timed


def timed(function: Callable[[], object], repeats: int = 1) -> tuple[float, object]:
    """Median seconds of a call and its last result."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = function()
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds)), result


def lean_chinchilla(frame: pd.DataFrame, observed: np.ndarray) -> Callable[[np.ndarray], tuple]:
    """Objective and gradient in (log A, log B, log E, alpha, beta), as one would write by hand."""
    log_n, log_d = np.log(frame["n_params"].to_numpy()), np.log(frame["tokens"].to_numpy())
    flat = np.zeros(len(frame))

    def objective(theta: np.ndarray) -> tuple[float, np.ndarray]:
        a, b, e, alpha, beta = theta
        terms = np.stack([a - alpha * log_n, b - beta * log_d, e + flat])
        top = terms.max(axis=0)
        share = np.exp(terms - top)
        total = share.sum(axis=0)
        residuals = observed - top - np.log(total)
        share /= total
        slope = np.clip(residuals, -DELTA, DELTA)
        pull = share @ slope
        on_n, on_d = share[0] @ (log_n * slope), share[1] @ (log_d * slope)
        return slope @ (residuals - 0.5 * slope), np.array([*-pull, on_n, on_d])

    return objective


def scipy_grid(objective: Callable[[np.ndarray], tuple]) -> float:
    """Best objective of L-BFGS-B over the replication's grid."""
    logs, exponents = np.arange(0.0, 26.0, 5.0), np.arange(0.0, 2.1, 0.5)
    starts = list(itertools.product(logs, logs, np.arange(-1.0, 1.1, 0.5), exponents, exponents))
    print(f"  L-BFGS-B runs from {len(starts):,} starts")
    return min(minimize(objective, s, jac=True, method="L-BFGS-B").fun for s in starts)


def documented_grid() -> dict[str, np.ndarray]:
    """Return the starts that the documentation of the ``chinchilla`` package shows."""
    logs, exponents = np.linspace(1, 10, 5), np.linspace(0.1, 0.7, 5)
    return {"E": np.linspace(1, 2, 5), "a": logs, "b": logs, "alpha": exponents, "beta": exponents}


def same_grid() -> dict[str, np.ndarray]:
    """Return qscale's own starts in that package's terms."""
    starts = {p.name: np.array(p.starts) for p in get("chinchilla").parameters}
    logs = {name.lower(): np.log(starts[name]) for name in "EAB"}
    return logs | {name: starts[name] for name in ("alpha", "beta")}


def chinchilla_package(
    frame: pd.DataFrame, grid: dict[str, np.ndarray]
) -> tuple[float, dict[str, float]]:
    """Seconds and estimates of the ``chinchilla`` package; its plots are left out."""
    with tempfile.TemporaryDirectory() as folder:
        fitter = Chinchilla(
            folder,
            param_grid=grid,
            loss_fn=lambda y, p: log_huber(y, p, DELTA),
            log_level=50,
        )
        fitter.visualizer.optim = lambda *_, **__: None
        columns = {"N": "n_params", "D": "tokens", "loss": "loss_fp"}
        fitter.database.df = pd.DataFrame({k: frame[v] for k, v in columns.items()}).assign(
            C=6.0 * frame["n_params"] * frame["tokens"]
        )
        seconds, _ = timed(lambda: fitter.fit(parallel=False))
        return seconds, fitter.params


def compare_multi_start() -> None:
    """Print the first two comparisons."""
    law = get("chinchilla")
    table = datasets.load("chinchilla_points")
    rows = select(table, law, where=None, cluster="run", name="table")
    problem = problem_of(law, rows, {}, DELTA)
    starts = starts_of(law, problem)
    ours, solution = timed(lambda: solve(problem, starts, np.ones(len(rows.frame))), 5)
    best = solution.objective.min()
    print(f"Chinchilla, qscale from {len(starts)} starts: {ours:.2f} s, objective {best:.10f}")
    objective = lean_chinchilla(rows.frame, rows.observed)
    theirs, found = timed(lambda: scipy_grid(objective))
    print(f"  {theirs:.1f} s, objective {found:.10f}: qscale is {theirs / ours:.0f} times faster")
    if Chinchilla is None:
        print("  not compared with the package: pip install chinchilla")
        return
    for words, grid in (("qscale's starts", same_grid()), ("its own grid", documented_grid())):
        theirs, values = chinchilla_package(rows.frame, grid)
        theta = law.to_internal(values)[None]
        found = huber(problem.observed - problem.value(theta)[0], DELTA).sum()
        print(
            f"  the chinchilla package from {words}: {theirs:.1f} s, objective {found:.10f}: "
            f"qscale is {theirs / ours:.0f} times faster"
        )


def eight_parameter_problem() -> tuple[Problem, np.ndarray]:
    """Return 600 rows of 100 runs, k, three exponents and four offsets; and bootstrap weights."""
    rng = np.random.default_rng(0)
    runs = np.repeat(np.arange(100), 6)
    frame = pd.DataFrame(
        {
            "run": runs,
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
    rows = select(frame, law, where=None, cluster="run", name="table")
    return problem_of(law, rows, {}, 0.2), resampled(100, 1000, rng)[:, runs]


def refit(problem: Problem, start: np.ndarray, keep: np.ndarray, lean: bool) -> np.ndarray:
    """Refit resampled rows, with the law's functions or with its design matrix."""
    x, y = problem.design[keep], problem.observed[keep]

    def value(theta: np.ndarray) -> np.ndarray:
        return (x @ theta if lean else problem.value(theta[None])[0, keep]) - y

    def slopes(theta: np.ndarray) -> np.ndarray:
        return x if lean else problem.gradient(theta[None])[0, keep]

    scale = problem.huber_delta
    return least_squares(value, start, jac=slopes, loss="huber", f_scale=scale).x


def compare_bootstrap() -> None:
    """Print the third comparison."""
    problem, weights = eight_parameter_problem()
    start = solve(problem, np.zeros((1, 8)), np.ones(600)).theta[0]
    starts = np.repeat(start[None], len(weights), axis=0)
    ours, solution = timed(lambda: solve(problem, starts, weights), 5)
    print(
        f"1,000 bootstrap refits, qscale: {ours:.3f} s, {solution.converged.mean():.1%} converged"
    )
    for lean, words in ((False, "with the law's functions"), (True, "with the design precomputed")):
        samples = [np.repeat(np.arange(600), row.astype(int)) for row in weights[:LOOPED]]
        theirs, fits = timed(
            lambda lean=lean, samples=samples: [refit(problem, start, s, lean) for s in samples]
        )
        theirs *= len(weights) / LOOPED
        apart = np.abs(np.array(fits) - solution.theta[:LOOPED]).max(axis=0) / solution.theta.std(
            axis=0
        )
        print(
            f"  least_squares {words}: {theirs:.1f} s (scaled up from {LOOPED} refits), at most "
            f"{apart.max():.1g} standard errors apart: qscale is {theirs / ours:.0f} times faster"
        )


if __name__ == "__main__":
    compare_bootstrap()
    compare_multi_start()
