"""Joint uncertainty of rows: its diagonal is that of single predictions, and draws follow it."""

import numpy as np
import pandas as pd
import pytest

from qscale.errors import QscaleError
from qscale.fit import fit
from qscale.fit.shipped import find
from qscale.laws import get
from qscale.plan.joint import draws, joint
from tests.plan.laws import increases

ROWS = pd.DataFrame({"n_params": 1e9, "tokens": [1e11, 1e12, 1e13], "bits": [2.0, 3.0, 4.0]})


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("published_gptq_ouyang", ROWS),
        ("published_gptq_kumar", ROWS.assign(source="GPTQ paper", protocol="c4/ctx2048")),
        ("learning_rate_gptq_lr_anneal", ROWS.assign(lr_peak=1e-3, lr=1e-4)),
        ("chinchilla_points_chinchilla", ROWS),
    ],
)
@pytest.mark.parametrize("kind", ["mean", "new_checkpoint"])
def test_the_diagonal_is_that_of_single_rows(name, rows, kind) -> None:
    fitted = find(name)
    found = joint(fitted, rows, kind)
    single = fitted.predictive(rows, kind)
    new = kind == "new_checkpoint"
    own = found.residual if new else 0.0
    np.testing.assert_allclose(np.diag(found.covariance) + own, single.sd**2, rtol=1e-8)
    np.testing.assert_allclose(found.location, single.mean)


def test_rows_of_one_run_share_its_deviation_and_those_of_two_do_not() -> None:
    fitted = fit(increases(0.4, 0.5, 0.02, 40, 0), get("ouyang"), interval="model")
    one = joint(fitted, ROWS).covariance
    two = joint(fitted, ROWS.assign(run=["a", "b", "c"])).covariance
    law = joint(fitted, ROWS, "mean").covariance
    variance = fitted.effects.variances[0]
    np.testing.assert_allclose(one - law, variance, rtol=1e-8)
    np.testing.assert_allclose(two - law, variance * np.eye(3), rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("interval", ["model", "sandwich", "bootstrap"])
def test_draws_have_the_quantiles_of_predictions(interval) -> None:
    table = increases(0.4, 0.3, 1e-3, 40, 0)
    random = () if interval == "bootstrap" else ("run",)
    fitted = fit(table, get("ouyang"), random=random, interval=interval, n_boot=400)
    kind = "mean" if interval == "bootstrap" else "new_checkpoint"
    drawn = draws(fitted, ROWS, 20_000, np.random.default_rng(0), kind)
    edges = fitted.quantiles(ROWS, np.array([0.05, 0.5, 0.95]), kind)
    np.testing.assert_allclose(
        np.log(np.quantile(drawn, [0.05, 0.5, 0.95], axis=0)), np.log(edges), atol=0.03
    )


def test_a_bootstrap_without_refits_cannot_be_drawn_from() -> None:
    bare = fit(increases(0.4, 0.1, 0.1, 20, 0), get("ouyang"), random=(), interval="bootstrap",
               n_boot=0)  # fmt: skip
    with pytest.raises(QscaleError, match="refits to draw from"):
        draws(bare, ROWS, 10, np.random.default_rng(0), "mean")
