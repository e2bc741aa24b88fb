"""Selection finds the factors that made the data, and says which cannot be told apart."""

import numpy as np
import pandas as pd
import pytest
from statsmodels.stats.outliers_influence import variance_inflation_factor

from qscale import datasets
from qscale.errors import FitError, TableError
from qscale.laws import get
from qscale.select import confounding, select_factors
from tests.simulations import simulate


def table(seed: int, runs: int = 30):
    """Ouyang's law times ``lr_peak ** -0.5`` and a method's multiplier; two columns are noise."""
    frame = simulate(runs=runs, between=0.15, within=0.05, seed=seed)
    rng = np.random.default_rng(100 + seed)
    frame["lr_peak"] = np.repeat(10 ** rng.uniform(-4, -2, runs), 3)
    frame["weight_decay"] = np.repeat(rng.uniform(0.01, 0.3, runs), 3)
    frame["batch_tokens"] = 10 ** rng.uniform(5, 7, 3 * runs)
    frame["method"] = rng.choice(["gptq", "rtn"], 3 * runs)
    frame["delta_loss"] *= (frame["lr_peak"] / 1e-3) ** -0.5 * np.where(
        frame["method"] == "rtn", 1.5, 1.0
    )
    return frame


CANDIDATES = ["lr_peak", "weight_decay", "batch_tokens", "method"]


def test_true_factors_are_found_and_noise_is_rejected() -> None:
    wrong = 0
    for seed in range(10):
        found = select_factors(table(seed), get("ouyang"), CANDIDATES)
        assert {"lr_peak", "method"} <= set(found.chosen)
        wrong += len(set(found.chosen) - {"lr_peak", "method"})
    assert wrong <= 3  # each search errs with a probability of at most 0.1


def test_the_record_shows_why() -> None:
    found = select_factors(table(0), get("ouyang"), CANDIDATES)
    assert found.chosen == ("lr_peak", "method")
    assert (found.rows, found.clusters) == (90, 30)
    taken = found.steps[found.steps["taken"]]
    assert taken["factor"].tolist() == list(found.chosen)
    assert (taken["gain"] > 0).all()
    assert np.allclose(taken["gain"], taken["error_without"] - taken["error_with"])
    assert (found.steps["p_holm"] >= found.steps["p_value"]).all()
    support = found.support.set_index("factor")["supported"]
    assert support[["lr_peak", "method", "bits"]].tolist() == ["test and score"] * 3
    assert [f.kind for f in found.law.factors][-2:] == ["power", "offset"]


def test_a_stand_in_is_dropped_once_the_real_cause_is_in() -> None:
    frame = table(3)
    rng = np.random.default_rng(0)
    blurred = frame["lr_peak"].groupby(frame["run"]).transform("first") ** 0.5
    frame["stand_in"] = blurred * np.exp(np.repeat(rng.normal(0, 0.3, 30), 3))
    assert select_factors(frame, get("ouyang"), ["stand_in"]).chosen == ("stand_in",)
    found = select_factors(frame, get("ouyang"), ["stand_in", "lr_peak"])
    assert found.chosen == ("lr_peak",)


def test_a_method_that_where_removes_leaves_no_idle_level() -> None:
    frame = table(1)
    extra = frame.head(6).assign(method="zeroquant", weight_decay=0.0, run="other")
    both = pd.concat([frame, extra], ignore_index=True)
    candidates = ["weight_decay", "method"]
    where = "method != 'zeroquant'"
    found = select_factors(both, get("ouyang"), candidates, where=where)
    alone = select_factors(frame, get("ouyang"), candidates)
    assert found.steps.drop(columns="taken").equals(alone.steps.drop(columns="taken"))
    assert found.set_aside[0].rows == 6


def test_cosine_runs_cannot_tell_tokens_from_decay() -> None:
    rows = datasets.load("ptq_vs_learning_rate")
    rows = rows[rows["family"].eq("OLMo-2") & rows["lr_schedule"].eq("cosine")]
    found = select_factors(
        rows, get("ouyang", "relative_delta"), ["decay_fraction", "anneal", "lr_peak"]
    )
    first, *others = found.confounding.warnings
    assert first == (
        "tokens and decay_fraction move together within every run (correlation 1.00, rank "
        "correlation 1.00): their exponents cannot be told apart."
    )
    assert any("tokens and anneal move together within every run" in w for w in others)
    assert "3 runs are too few to tell 2 from chance" in others[-1]
    assert found.idle == ("bits",)
    terms = found.confounding.terms.set_index("term")
    assert terms.loc[["tokens", "decay_fraction"], "vif_within"].min() > 100
    assert terms.loc["lr_peak", "share_within"] == pytest.approx(0.0, abs=1e-12)


def test_runs_of_different_lengths_tell_them_apart() -> None:
    rows = datasets.load("ptq_vs_learning_rate")
    rows = rows[rows["averaging"].ne("lawa") & rows["lr_schedule"].ne("cosine")]
    found = select_factors(rows, get("ouyang", "relative_delta"), ["anneal"], cluster="checkpoint")
    assert not [w for w in found.confounding.warnings if "tokens and anneal" in w]


def test_variance_inflation_equals_statsmodels() -> None:
    rng = np.random.default_rng(0)
    clusters = np.repeat(np.arange(20), 4)
    x = rng.normal(size=(80, 3)) @ np.array([[1, 0.8, 0], [0, 1, 0.5], [0, 0, 1]])
    found = confounding(dict(zip("abc", x.T, strict=True)), clusters).terms
    design = np.column_stack([np.ones(80), x])
    expected = [variance_inflation_factor(design, i) for i in (1, 2, 3)]
    assert found["vif"].tolist() == pytest.approx(expected)
    within = x - np.stack([x[clusters == g].mean(axis=0) for g in range(20)])[clusters]
    assert found["share_within"].tolist() == pytest.approx(
        (within**2).sum(0) / ((x - x.mean(0)) ** 2).sum(0)
    )


@pytest.mark.parametrize(
    ("law", "candidates", "options", "error", "message"),
    [
        ("chinchilla", ["lr_peak"], {}, FitError, "not a product of powers"),
        ("ouyang", ["bits"], {}, FitError, "--candidates bits: law 'ouyang' has this factor"),
        ("ouyang", ["cubic:bits"], {}, FitError, "unknown kind 'cubic'"),
        ("ouyang", ["absent"], {}, TableError, "absent"),
        ("ouyang", ["fraction"], {}, FitError, "values at or below 0.*try exponential:fraction"),
        ("ouyang", ["flat"], {}, FitError, r"no candidate \(flat\) varies in the 90 usable rows"),
        ("ouyang", ["lr_peak"], {"cluster": "part"}, FitError, "at least three values of part; found 2"),
        ("ouyang", ["lr_peak"], {"where": "run == 'run0'"}, FitError, "at least three values of run; found 1"),
    ],
)  # fmt: skip
def test_a_mistake_says_what_to_do(law, candidates, options, error, message) -> None:
    frame = table(0).assign(flat=2.0, fraction=0.0, loss_fp=2.0)
    frame["part"] = np.where(frame["run"] < "run3", "a", "b")
    with pytest.raises(error, match=message):
        select_factors(frame, get(law), candidates, **options)
