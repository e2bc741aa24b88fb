"""Simulated measurement tables with known truth, shared by tests."""

import numpy as np
import pandas as pd

from qscale.laws import get

TRUE = {"k": 0.02, "beta": 0.4, "alpha": 0.3, "gamma": 5.0}


def simulate(
    runs: int = 24, between: float = 0.2, within: float = 0.05, seed: int = 0, prefix: str = "run"
):
    """Rows of Ouyang's law: each run has one size and token count, and a deviation of its own."""
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
    noise = np.repeat(rng.normal(0, between, runs), 3) + rng.normal(0, within, 3 * runs)
    table["delta_loss"] = get("ouyang").evaluate(TRUE, table) * np.exp(noise)
    return table
