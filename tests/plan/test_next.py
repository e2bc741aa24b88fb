"""Which measurements to make next: against conditioning, exhaustive search and random choice."""

import itertools

import numpy as np
import pandas as pd
import pytest

from qscale.errors import QscaleError
from qscale.fit import fit
from qscale.laws import get
from qscale.plan.joint import joint
from qscale.plan.next import choose, updated
from tests.plan.laws import increase_fit, increases

TARGET = pd.DataFrame({"n_params": [1e11], "tokens": [1e13], "bits": [2.0], "run": ["aim"]})


def pool(runs: int = 12, seed: int = 3) -> pd.DataFrame:
    rows = increases(0.4, 0.1, 0.05, runs, seed)
    return rows.assign(run="new " + rows["run"])


@pytest.fixture(scope="module")
def fitted():
    return increase_fit(between=0.1, within=0.05, runs=8)


def test_what_is_expected_is_what_conditioning_gives(fitted) -> None:
    """`Fit.given` conditions on measured rows by its own code; the law is linear."""
    candidates = pool()
    found = choose(fitted, candidates, TARGET, 5)
    for k in (1, 3, 5):
        told = fitted.given(candidates.iloc[found["candidate"][:k]])
        sd = told.predictive(TARGET).sd[0]
        assert found["sd"][k - 1] == pytest.approx(sd, rel=1e-6)
    before = found.attrs["before"]
    assert before[0] == pytest.approx(fitted.predictive(TARGET).sd[0], rel=1e-6)
    edges = np.log(fitted.quantiles(TARGET, np.array([0.05, 0.95])))
    assert before[1] == pytest.approx(float(edges[1, 0] - edges[0, 0]), rel=1e-6)
    assert (np.diff([before[0], *found["sd"]]) < 0).all()


def test_the_first_is_the_best_and_pairs_are_near_the_best_pair(fitted) -> None:
    candidates = pool(5)
    found = choose(fitted, candidates, TARGET, 2)
    sd = {
        pair: fitted.given(candidates.iloc[list(pair)]).predictive(TARGET).sd[0]
        for size in (1, 2)
        for pair in itertools.combinations(range(len(candidates)), size)
    }
    assert found["sd"][0] == pytest.approx(min(v for p, v in sd.items() if len(p) == 1), rel=1e-6)
    best, start = min(sd.values()), found.attrs["before"][0]
    assert start - found["sd"][1] >= 0.9 * (start - best)


def test_the_targets_own_checkpoint_says_most(fitted) -> None:
    wide = increase_fit(between=0.6, within=0.05, runs=30)
    own = TARGET.loc[[0, 0]].assign(bits=[3.0, 4.0])
    candidates = pd.concat([pool(), own], ignore_index=True)
    found = choose(wide, candidates, TARGET, 1)
    assert found["run"][0] == "aim"
    assert found["sd"][0] < 0.4 * found.attrs["before"][0]


def test_parameters_are_told_by_the_largest_determinant(fitted) -> None:
    candidates = pool(6)
    found = choose(fitted, candidates, TARGET, 1, criterion="parameters")
    known = joint(fitted, candidates)
    p = len(fitted.theta)
    after = [
        np.linalg.slogdet(updated(known.cov, d, known.residual)[:p, :p])[1] for d in known.design
    ]
    assert found["candidate"][0] == int(np.argmin(after))


def test_a_noisy_measurement_is_worth_less(fitted) -> None:
    candidates = pool()
    best = choose(fitted, candidates, TARGET, 1)["candidate"][0]
    noisy = candidates.assign(delta_loss_se=0.0)
    noisy.loc[best, "delta_loss_se"] = 10.0 * noisy.loc[best, "delta_loss"]
    assert choose(fitted, noisy, TARGET, 1)["candidate"][0] != best


def test_planned_measurements_narrow_more_than_random_ones() -> None:
    """Refitted after measuring: intervals of the target, over many simulated tables."""
    law, width, error = get("ouyang"), {}, {}
    for seed in range(25):
        rng = np.random.default_rng(seed)
        table = increases(0.4, 0.1, 0.05, 60, seed)
        small = table[table["n_params"] < 10**9.5]
        start = small[small["run"].isin(small["run"].unique()[:6])]
        rest = table.drop(start.index)
        first = fit(start, law, interval="model")
        planned = rest.iloc[choose(first, rest, TARGET, 6)["candidate"]]
        drawn = rest.iloc[rng.permutation(len(rest))[:6]]
        truth = np.log(law.evaluate({"k": 0.02, "beta": 0.4, "alpha": 0.3, "gamma": 5.0}, TARGET))
        for name, extra in (("planned", planned), ("random", drawn)):
            after = fit(pd.concat([start, extra]), law, interval="model")
            low, middle, high = np.log(after.quantiles(TARGET, np.array([0.05, 0.5, 0.95])))[:, 0]
            width.setdefault(name, []).append(high - low)
            error.setdefault(name, []).append(abs(middle - truth[0]))
    narrower = np.log(np.array(width["planned"]) / np.array(width["random"]))
    assert narrower.mean() + 2 * narrower.std(ddof=1) / np.sqrt(len(narrower)) < 0
    assert np.mean(error["planned"]) < np.mean(error["random"])


@pytest.mark.parametrize("count", [0, 100])
def test_counts_that_cannot_be(fitted, count) -> None:
    with pytest.raises(QscaleError, match="count must be between 1 and the number of candidates"):
        choose(fitted, pool(2), TARGET, count)
