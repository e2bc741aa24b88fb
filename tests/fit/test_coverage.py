"""Do intervals hold what they promise, and does censoring remove the bias of a noise floor?

Small seeded versions of ``benchmarks/coverage.py``, whose tables and truth they use.
"""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

PATH = Path(__file__).resolve().parent.parent.parent / "benchmarks" / "coverage.py"


@pytest.fixture(scope="module")
def study():
    spec = importlib.util.spec_from_file_location("coverage_study", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("runs", "tables"), [(8, 100), (20, 100), (60, 50)])
def test_nine_in_ten_intervals_hold(study, runs, tables) -> None:
    hits = np.array([study.covered(seed, runs, "model") for seed in range(tables)])
    parameters, rows = hits[:, :3], hits[:, 3]
    # Three standard errors of a share of parameters and of the mean over tables.
    assert parameters.mean() == pytest.approx(0.9, abs=3 * np.sqrt(0.09 / (3 * tables)))
    assert rows.mean() == pytest.approx(0.9, abs=3 * rows.std() / np.sqrt(tables))


def test_a_noise_floor_biases_a_fit_that_drops_rows_and_not_one_that_censors(study) -> None:
    errors = np.array([study.bias(seed, 20) for seed in range(40)])
    censored, dropped = errors[:, :3].mean(axis=0), errors[:, 3:].mean(axis=0)
    assert (np.abs(censored) < 0.5).all()
    assert np.abs(dropped).max() > 1.0
