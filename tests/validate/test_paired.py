"""Paired comparison by cluster: the sign-flip test, its interval and Holm's adjustment."""

import itertools

import numpy as np
import pytest
from scipy.stats import binomtest, permutation_test
from statsmodels.stats.multitest import multipletests

from qscale.validate.paired import holm, paired


def rows_of(seed: int, groups: int, effect: float = 0.0):
    """Differences with shared cluster deviations; clusters of one to five rows."""
    rng = np.random.default_rng(seed)
    clusters = np.repeat(np.arange(groups), rng.integers(1, 6, groups))
    deviations = rng.normal(effect, 1.0, groups)
    return deviations[clusters] + 0.3 * rng.normal(size=len(clusters)), clusters


@pytest.mark.parametrize(("seed", "groups", "effect"), [(0, 4, 0.0), (1, 8, 0.5), (2, 10, 1.0)])
def test_p_value_equals_scipys_exact_permutation_test(seed, groups, effect) -> None:
    differences, clusters = rows_of(seed, groups, effect)
    sums = np.bincount(clusters, weights=differences)
    exact = permutation_test(
        (sums, np.zeros(groups)), lambda x, y: x.sum() - y.sum(), vectorized=False,
        permutation_type="samples", n_resamples=np.inf,
    )  # fmt: skip
    assert paired(differences, clusters).p_value == pytest.approx(exact.pvalue)


def test_drawn_signs_agree_with_all_signs() -> None:
    differences, clusters = rows_of(3, 14, 0.5)
    sums = np.bincount(clusters, weights=differences)
    signs = np.array(list(itertools.product((-1.0, 1.0), repeat=14)))
    exact = np.mean(np.abs(signs @ sums) >= abs(sums.sum()) * (1 - 1e-12))
    error = np.sqrt(exact * (1 - exact) / 9999)
    assert paired(differences, clusters).p_value == pytest.approx(exact, abs=4 * error)


def test_the_smallest_p_value_is_that_of_one_sign_for_all() -> None:
    found = paired(np.ones(5), np.arange(5))
    assert found.p_value == 2 / 2**5
    assert (found.difference, found.low, found.high, found.clusters) == (1.0, 1.0, 1.0, 5)
    alone = paired(np.ones(3), np.zeros(3))
    assert alone.p_value == 1.0
    assert np.isnan(alone.low)


def test_p_values_are_right_under_the_null_and_intervals_cover() -> None:
    found = [paired(*rows_of(seed, 12), n_boot=400) for seed in range(300)]
    rejected = sum(each.p_value <= 0.1 for each in found)
    assert binomtest(rejected, 300, 0.1).pvalue > 0.01
    covered = np.mean([each.low <= 0 <= each.high for each in found])
    assert 0.75 < covered < 0.95  # of 90 %: resampling twelve clusters is known to be narrow


def test_holm_equals_statsmodels() -> None:
    rng = np.random.default_rng(0)
    for size in (1, 2, 7, 20):
        p = rng.uniform(size=size) ** 3
        p[: size // 3] = p[0]  # ties
        assert holm(p) == pytest.approx(multipletests(p, method="holm")[1])
