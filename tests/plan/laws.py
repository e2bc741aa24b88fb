"""Fits whose truth is known, shared by the tests of planning."""

from __future__ import annotations

import numpy as np
import pandas as pd

from qscale.fit import Fit, fit
from qscale.laws import get

LOSS = {"E": 1.8, "A": 480.0, "alpha": 0.35, "B": 2100.0, "beta": 0.37}


def loss_fit(noise: float = 1e-4, seed: int = 0) -> Fit:
    """A Chinchilla law fitted to a grid of sizes and tokens."""
    rng = np.random.default_rng(seed)
    size, tokens = np.meshgrid(np.geomspace(1e8, 1e11, 8), np.geomspace(1e9, 1e12, 8))
    table = pd.DataFrame({"n_params": size.ravel(), "tokens": tokens.ravel()})
    table["run"] = [f"run{i}" for i in range(len(table))]
    law = get("chinchilla")
    table["loss_fp"] = law.evaluate(LOSS, table) * np.exp(rng.normal(0, noise, len(table)))
    return fit(table, law, random=(), interval="sandwich")


def increase_fit(beta: float = 0.4, between: float = 0.1, within: float = 0.02, runs: int = 40,
                 seed: int = 0) -> Fit:  # fmt: skip
    """Ouyang's law fitted to runs of one size and token count each."""
    return fit(increases(beta, between, within, runs, seed), get("ouyang"), interval="model")


def increases(beta: float, between: float, within: float, runs: int, seed: int) -> pd.DataFrame:
    """Rows of Ouyang's law at 2 to 4 bits."""
    rng = np.random.default_rng(seed)
    table = pd.DataFrame(
        {
            "run": np.repeat([f"run{i}" for i in range(runs)], 3),
            "n_params": np.repeat(10 ** rng.uniform(8, 11, runs), 3),
            "tokens": np.repeat(10 ** rng.uniform(10, 13, runs), 3),
            "bits": np.tile([2.0, 3.0, 4.0], runs),
        }
    )
    values = {"k": 0.02, "beta": beta, "alpha": 0.3, "gamma": 5.0}
    noise = np.repeat(rng.normal(0, between, runs), 3) + rng.normal(0, within, 3 * runs)
    table["delta_loss"] = get("ouyang").evaluate(values, table) * np.exp(noise)
    return table
