"""Trade-offs: the shipped runs that cannot separate their terms, and ones that can."""

import numpy as np
import pytest

from qscale import datasets
from qscale.fit import fit
from qscale.fit.identify import trade_offs
from qscale.laws import get


def diagnose(name: str, table, **options) -> tuple[str, ...]:
    return fit(table, get(name), random=(), interval="model", **options).search.notes


def test_quest_runs_identify_neither_the_floor_nor_the_terms_in_size_and_tokens() -> None:
    # Nearly all runs have one ratio of tokens to parameters.
    runs = datasets.load("quest_qat").query("fmt == 'int' and bits == bits_activation")
    first, second = diagnose("quest", runs)
    assert first.startswith("E and alpha trade off, so E and the term in n_params and bits are")
    assert "E ended on its bound 1e-06" in first
    assert second.startswith("B and beta trade off, so the term in tokens is poorly identified")
    assert "relative standard error" in second


def test_chinchilla_points_identify_the_law() -> None:
    points = datasets.load("chinchilla_points").query("status == 'ok'")
    assert diagnose("chinchilla", points) == ()


def two_parameters(correlation: float, relative: float) -> tuple[str, ...]:
    """Diagnosis of `curvature` at c = 2, gamma = 1 with a given information matrix."""
    law = get("curvature")
    information = np.array([[1.0, correlation], [correlation, 1.0]])
    cov = np.diag([relative**2, 0.01])
    return trade_offs(law, law.to_internal({"c": 2.0, "gamma": 1.0}), information, cov)


@pytest.mark.parametrize(("relative", "told"), [(0.69, False), (0.71, True)])
def test_an_interval_over_more_than_a_factor_of_ten_is_poor(relative, told) -> None:
    # exp(2 * 1.645 * 0.7) is ten.
    assert bool(two_parameters(0.0, relative)) is told


def test_only_parameters_of_one_weak_direction_trade_off() -> None:
    (alone,) = two_parameters(0.5, 1.4)
    assert alone.startswith("c is poorly identified: the 90 % interval of c is 0.2 to 20")
    assert "(relative standard error 140 %)" in alone
    # A condition index of 30 needs a correlation above 1 - 2 / 901.
    (together,) = two_parameters(0.9999, 1.4)
    assert together.startswith("c and gamma trade off, so c and the term in quadratic_delta are")
