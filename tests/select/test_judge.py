"""The two questions asked of a factor, against independent implementations and under the null."""

import numpy as np
import pytest
import statsmodels.api as sm
from scipy.stats import binomtest, kstest

from qscale.select.judge import left_out_errors, wald


def regression(seed: int, groups: int, each: int = 5, q: int = 1, effect: float = 0.0):
    """Response with cluster deviations; the tested columns are constant within clusters."""
    rng = np.random.default_rng(seed)
    clusters = np.repeat(np.arange(groups), each)
    rows = len(clusters)
    rest = np.column_stack(
        [np.ones(rows), rng.normal(size=rows), rng.normal(size=groups)[clusters]]
    )
    added = rng.normal(size=(groups, q))[clusters]
    noise = rng.normal(size=groups)[clusters] + 0.5 * rng.normal(size=rows)
    return rest @ [1.0, 0.5, -0.5] + effect * added.sum(axis=1) + noise, rest, added, clusters


@pytest.mark.parametrize(("groups", "q"), [(8, 1), (30, 2), (250, 3)])
def test_f_equals_statsmodels_with_clustered_covariance(groups, q) -> None:
    y, rest, added, clusters = regression(groups, groups, q=q, effect=0.3)
    f, p = wald(y, rest, added, clusters)
    fitted = sm.OLS(y, np.column_stack([rest, added])).fit(
        cov_type="cluster", cov_kwds={"groups": clusters, "use_correction": True}
    )
    test = fitted.f_test(np.eye(3 + q)[3:])
    assert f == pytest.approx(float(test.fvalue))
    if groups > 200:
        assert p == pytest.approx(float(test.pvalue), rel=1e-6)


@pytest.mark.parametrize(("groups", "q"), [(6, 1), (15, 1), (15, 2)])
def test_p_values_are_uniform_without_an_effect(groups, q) -> None:
    found = np.array([wald(*regression(seed, groups, q=q))[1] for seed in range(300)])
    assert kstest(found, "uniform").pvalue > 0.01
    assert binomtest(int((found <= 0.05).sum()), 300, 0.05).pvalue > 0.01


def test_an_effect_is_found() -> None:
    found = [wald(*regression(seed, 15, effect=1.5))[1] for seed in range(40)]
    assert np.mean(np.array(found) <= 0.05) > 0.9


def test_clusters_that_cannot_tell_say_so() -> None:
    y, rest, added, clusters = regression(0, 8)
    for hopeless in (rest[:, 2:], np.concatenate([added, 2 * added], axis=1)):
        f, p = wald(y, rest, hopeless, clusters)
        assert np.isnan(f)
        assert p == 1.0


def test_left_out_errors_equal_refitting_without_each_cluster() -> None:
    y, rest, added, clusters = regression(1, 9, q=2)
    design, root = np.column_stack([rest, added]), np.random.default_rng(0).uniform(0.2, 1, len(y))
    expected = np.empty(len(y))
    for group in range(9):
        out = clusters == group
        weighted = design[~out] * root[~out, None]
        theta = np.linalg.lstsq(weighted, y[~out] * root[~out], rcond=None)[0]
        expected[out] = design[out] @ theta - y[out]
    assert left_out_errors(y, design, clusters, root) == pytest.approx(expected)


def test_a_cluster_without_which_a_coefficient_is_unknown_is_null() -> None:
    y, rest, _, clusters = regression(2, 6)
    only_last = (clusters == 5).astype(float)
    found = left_out_errors(y, np.column_stack([rest, only_last]), clusters, np.ones(len(y)))
    assert np.isnan(found).tolist() == (clusters == 5).tolist()
