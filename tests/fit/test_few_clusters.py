"""Bootstraps of few clusters: intervals that would not hold their estimate are not given."""

from dataclasses import replace

import numpy as np
import pytest

from qscale import datasets
from qscale.cli.fit import summary
from qscale.fit import fit
from qscale.fit.record import FEWEST_RESAMPLED
from qscale.laws import get
from tests.simulations import simulate


@pytest.fixture(scope="module")
def published():
    table = datasets.load("published_ptq").query("method == 'gptq' and delta_loss > 0")
    return table[table["family"].isin(["LLaMA-1", "LLaMA-2"])]


def test_a_bootstrap_of_two_clusters_has_no_intervals(published, capsys) -> None:
    made = fit(published, get("kumar"), cluster="family", random=())
    assert made.interval == "bootstrap"
    assert made.data.clusters == 2
    assert made.parameters()[["se", "low", "high"]].isna().all(axis=None)
    assert "No intervals: a bootstrap resamples the values of family, and 2 are" in made.notes[-1]
    predicted = made.predict(published.head(2))
    assert predicted["delta_loss"].notna().all()
    assert predicted[["low_90", "high_90"]].isna().all(axis=None)
    summary(made)
    printed = capsys.readouterr().out
    assert "No intervals: " in printed
    assert "raise --boots" not in printed
    assert "too narrow" not in printed


def test_other_intervals_of_two_clusters_hold_their_estimate(published) -> None:
    for interval in ("sandwich", "model"):
        made = fit(published, get("kumar"), cluster="family", random=(), interval=interval)
        found = made.parameters()
        assert ((found["low"] < found["estimate"]) & (found["estimate"] < found["high"])).all()


def test_from_the_fewest_clusters_on_there_are_intervals() -> None:
    runs = [f"run{i}" for i in range(FEWEST_RESAMPLED)]
    table = simulate()
    made = fit(table[table["run"].isin(runs)], get("ouyang"), random=(), n_boot=200)
    assert made.parameters()["low"].notna().all()


def test_percentiles_that_do_not_hold_the_estimate_are_not_given() -> None:
    made = fit(simulate(), get("ouyang"), random=(), n_boot=100)
    where = made.law.names.index("beta")
    moved = np.where(np.arange(4) == where, np.abs(made.draws - made.theta) + 0.01, 0.0)
    shifted = replace(made, draws=made.theta + moved)
    low, high = shifted.conf_int().loc["beta"]
    assert np.isnan([low, high]).all()
    assert shifted.conf_int().drop("beta").notna().all(axis=None)
    band = shifted.predict(simulate().head(4), kind="mean")
    assert (band["low_90"] <= band["delta_loss"]).all()
    assert (band["delta_loss"] <= band["high_90"]).all()
