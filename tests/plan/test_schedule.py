"""Alternative schedules: ratios against their closed form and their interval."""

import numpy as np
import pandas as pd
import pytest
from scipy.stats import t as student

from qscale.errors import QscaleError
from qscale.fit.shipped import find
from qscale.plan.schedule import alternatives

RUN = pd.DataFrame(
    {"n_params": 1e9, "tokens": 1e12, "lr_peak": 1e-3, "lr": 1e-4, "bits": [3.0, 4.0]}
)
CHANGES = [{"lr_peak": 2e-3}, {"lr": 1e-3}, {"tokens": 2e12, "lr": 0.0}]


@pytest.fixture(scope="module")
def fitted():
    return find("learning_rate_gptq_lr_anneal")


def test_the_ratio_is_that_of_the_law(fitted) -> None:
    found = alternatives(fitted, RUN, CHANGES)
    v = fitted.values
    by_hand = [1.0, 2.0 ** -v["s"], np.exp(-0.9 * v["c"]), 2.0 ** v["beta"] * np.exp(0.1 * v["c"])]
    np.testing.assert_allclose(found["ratio"], by_hand * 2)
    assert found["schedule"].tolist()[:2] == ["as given", "lr_peak=0.002"]
    assert found["lr"].tolist()[:4] == [1e-4, 2e-4, 1e-3, 0.0]


def test_the_interval_of_the_ratio_is_that_of_one_exponent(fitted) -> None:
    found = alternatives(fitted, RUN[:1], [{"lr_peak": 2e-3}], count=40_000).iloc[1]
    place = fitted.law.names.index("s")
    se = np.sqrt(fitted.effects.cov[place, place]) * np.log(2)
    dof = fitted.predictive(RUN[:1], "mean").dof[0]
    reach = student.ppf(0.95, dof) * se
    middle = -fitted.values["s"] * np.log(2)
    assert np.log(found["ratio_low"]) == pytest.approx(middle - reach, rel=0.1)
    assert np.log(found["ratio_high"]) == pytest.approx(middle + reach, rel=0.1)
    assert found["share_less"] > 0.99


def test_predictions_are_those_of_each_schedule(fitted) -> None:
    found = alternatives(fitted, RUN[:1], CHANGES)
    rows = RUN[:1].assign(lr_peak=2e-3, lr=2e-4)
    edges = fitted.quantiles(rows, np.array([0.05, 0.5, 0.95]))[:, 0]
    np.testing.assert_allclose(found.loc[1, ["low", fitted.target, "high"]].astype(float), edges)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "must change something"),
        ({"weight_decay": 0.1}, "does not read it"),
        ({"lr_peak": -1.0}, "zero or more"),
        ({"tokens": 0.0}, "has no value there"),
    ],
)
def test_changes_that_cannot_be(fitted, change, message) -> None:
    with pytest.raises(QscaleError, match=message):
        alternatives(fitted, RUN, [change])
