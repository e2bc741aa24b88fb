"""A million rows fit in two gigabytes."""

import importlib.util
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "benchmarks" / "fit_scale.py"


def load_benchmark():
    spec = importlib.util.spec_from_file_location("fit_scale", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("runs", [50, 10_000])
def test_ten_thousand_rows_recover_the_law(runs: int) -> None:
    found = load_benchmark().measure(10_000, runs)
    assert found["error"] < 3


@pytest.mark.slow
@pytest.mark.parametrize("runs", [5000, 1_000_000])
def test_a_million_rows_stay_under_two_gigabytes(runs: int) -> None:
    found = load_benchmark().in_a_process(1_000_000, runs)
    assert found["peak"] < 2.0
    assert found["error"] < 4
