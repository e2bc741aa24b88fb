"""Predictions: point values, intervals that cover, unseen levels, and what is outside."""

import numpy as np
import pandas as pd
import pytest

from qscale.errors import TableError
from qscale.fit import fit
from qscale.laws import get
from qscale.predict import furthest, outside, predict
from tests.simulations import TRUE, simulate


@pytest.fixture(scope="module")
def fitted():
    return fit(simulate(), get("ouyang"), n_boot=300)


def test_the_point_is_the_law_at_its_estimates(fitted) -> None:
    rows = simulate(seed=1)[["n_params", "tokens", "bits"]]
    predicted = predict(fitted, rows)
    np.testing.assert_allclose(predicted["delta_loss"], fitted.law.evaluate(fitted.values, rows))
    np.testing.assert_allclose(predicted["perplexity_ratio"], np.exp(predicted["delta_loss"]))
    assert (predicted["low_90"] < predicted["low_50"]).all()
    assert (predicted["low_50"] < predicted["delta_loss"]).all()
    assert (predicted["delta_loss"] < predicted["high_50"]).all()
    assert (predicted["high_50"] < predicted["high_90"]).all()


def test_intervals_of_new_runs_cover_as_promised() -> None:
    inside = {50: [], 90: []}
    for seed in range(30):
        found = fit(simulate(runs=20, seed=seed), get("ouyang"), n_boot=100, seed=seed)
        fresh = simulate(runs=10, seed=1000 + seed, prefix="new")
        predicted = predict(found, fresh.drop(columns="delta_loss"), seed=seed)
        for level, hits in inside.items():
            low, high = predicted[f"low_{level}"], predicted[f"high_{level}"]
            hits.append(((low <= fresh["delta_loss"]) & (fresh["delta_loss"] <= high)).mean())
    assert 0.44 <= np.mean(inside[50]) <= 0.56
    assert 0.86 <= np.mean(inside[90]) <= 0.94


def test_the_mean_is_surer_than_a_new_checkpoint(fitted) -> None:
    rows = pd.DataFrame({"n_params": [1e9], "tokens": [1e12], "bits": [3.0]})
    mean, new = (predict(fitted, rows, kind=kind) for kind in ("mean", "new_checkpoint"))
    assert mean["high_90"][0] / mean["low_90"][0] < 0.7 * new["high_90"][0] / new["low_90"][0]
    truth = get("ouyang").evaluate(TRUE, rows)[0]
    assert mean["low_90"][0] < truth < mean["high_90"][0]


def test_an_unseen_source_widens_the_interval_by_the_spread_of_sources() -> None:
    table = simulate(runs=40)
    sources = np.repeat(np.arange(40) % 4, 3)
    table["source"] = [f"paper{i}" for i in sources]
    table["delta_loss"] *= np.exp(np.array([-1.0, -0.3, 0.3, 1.0])[sources])
    found = fit(table, get("ouyang"), offset=["source"], n_boot=200)
    row = pd.DataFrame({"n_params": [1e9], "tokens": [1e12], "bits": [3.0]})
    known = predict(found, row.assign(source="paper3"))
    unseen = predict(found, row)
    width = [float(np.log(p["high_90"][0] / p["low_90"][0])) for p in (known, unseen)]
    assert width[1] > 1.5 * width[0]
    ratio = np.log(known["delta_loss"][0] / unseen["delta_loss"][0])
    assert ratio == pytest.approx(1.0, abs=0.35)


def test_a_bootstrap_without_draws_has_null_intervals() -> None:
    found = fit(simulate(), get("ouyang"), interval="bootstrap", n_boot=0)
    predicted = predict(found, simulate(seed=1).head(2))
    assert predicted[["low_90", "high_90"]].isna().all().all()


def test_what_lies_outside_is_said_in_words(fitted) -> None:
    low = fitted.data.ranges["n_params"][0]
    row = pd.DataFrame({"n_params": [low / 100], "tokens": [1e12], "bits": [3.0]})
    (sentence,) = outside(fitted, row)
    assert "n_params" in sentence
    assert "below the fitted range" in sentence
    assert "100 times beyond" in sentence
    assert outside(fitted, row.assign(n_params=1e9)) == []


def test_how_far_a_row_is_outside_is_that_of_the_furthest_column_that_is_read(fitted) -> None:
    low, high = fitted.data.ranges["n_params"][0], fitted.data.ranges["tokens"][1]
    rows = pd.DataFrame(
        {"n_params": [low / 100, 1e9, low / 2], "tokens": [1e12, 1e12, 30 * high],
         "bits": [3.0, 3.0, 3.0], "lr_peak": [9.0, 9.0, 9.0]}
    )  # fmt: skip
    names, factors = zip(*furthest(fitted, rows), strict=True)
    assert names == ("n_params", "", "tokens")
    assert factors == pytest.approx((100, 1, 30))


def test_a_method_not_in_the_fit_is_named() -> None:
    found = fit(simulate().assign(method="gptq"), get("ouyang"), n_boot=0)
    row = pd.DataFrame({"n_params": [1e9], "tokens": [1e12], "bits": [3.0], "method": ["rtn"]})
    assert outside(found, row) == ["method rtn was not among the fitted rows (gptq)."]


def test_a_missing_column_is_an_error(fitted) -> None:
    with pytest.raises(TableError, match="prediction: no column 'tokens'"):
        predict(fitted, pd.DataFrame({"n_params": [1e9], "bits": [3.0]}))
