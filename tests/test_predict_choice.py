"""Which shipped fit is chosen, whether a loss is normal, what drives a prediction, and curvature."""

import numpy as np
import pandas as pd
import pytest
from scipy.stats import norm

from qscale.errors import FitError
from qscale.fit import fit
from qscale.fit.shipped import find, load_all
from qscale.laws import get
from qscale.predict import (
    candidates,
    combine,
    contributions,
    judge,
    judge_interval,
    normal_log,
    percentile,
    predict,
    reasons,
    unread,
    zero_fit_prediction,
)
from qscale.regress import regress
from tests.simulations import simulate

ROW = pd.DataFrame({"n_params": [1e9], "tokens": [1e12], "bits": [3.0]})


@pytest.fixture(scope="module")
def fitted():
    return fit(simulate(), get("ouyang"), n_boot=300)


@pytest.fixture(scope="module")
def linear():
    return regress(simulate(), kind="ols", formula="np.log(n_params) + np.log(tokens) + bits")


# ------------------------------------------------------------------------------------- choosing
@pytest.mark.parametrize(
    ("known", "name"),
    [
        ({"n_params": 13e9, "tokens": 1.4e12, "bits": [3, 4], "method": "gptq"}, "published_gptq_kumar"),
        ({"n_params": 13e9, "tokens": 1.4e12, "bits": [3, 4], "method": "rtn"}, "published_rtn_kumar"),
        # Fewer tokens than any published model had: the runs along which they were counted cover it.
        ({"n_params": 1e9, "tokens": 1e11, "bits": [3, 4], "method": "gptq"}, "learning_rate_gptq_ouyang"),
        ({"n_params": 1e9, "tokens": 1e11, "bits": [3, 4], "lr_peak": 4e-4, "lr": 1e-4}, "learning_rate_gptq_lr_anneal"),
        # Two bits were measured in the published tables alone.
        ({"n_params": 1e9, "tokens": 4e11, "bits": [2, 3]}, "published_gptq_kumar"),
    ],
)  # fmt: skip
def test_the_fit_that_covers_a_checkpoint_is_chosen(known, name) -> None:
    ranked = candidates(known)
    assert ranked[0].name == name
    assert ranked[0].usable
    assert not ranked[0].unseen
    assert {c.name for c in ranked} == set(load_all()) - {"chinchilla_points_chinchilla"}
    assert [c.rank for c in ranked] == sorted(c.rank for c in ranked)


def test_why_a_fit_is_chosen_and_the_others_are_not_is_said() -> None:
    known = {"n_params": 1e9, "tokens": 1e11, "bits": [3, 4], "method": "gptq", "lr_peak": 4e-4}
    said = reasons(candidates(known))
    assert said[0].startswith("learning_rate_gptq_ouyang covers this best of 7 fits")
    by_name = {line.split()[0]: line for line in said}
    assert "needs lr" in by_name["learning_rate_gptq_lr_anneal"]
    assert "tokens (3 times)" in by_name["published_gptq_kumar"]
    assert "has not seen method gptq" in by_name["published_rtn_kumar"]
    assert "needs quadratic_delta, which is measured" in by_name["zero_fit_3_4_bits"]


def test_the_criteria_come_in_their_order(fitted) -> None:
    seen = fit(simulate().assign(method="rtn"), get("ouyang"), n_boot=0)
    known = {"n_params": 1e9, "tokens": 1e12, "bits": 3, "method": "rtn"}
    other = fit(simulate().assign(method="gptq"), get("ouyang"), n_boot=0)
    assert candidates(known, {"a": other, "b": seen})[0].name == "b"
    fewer = fit(simulate(runs=8), get("ouyang"), n_boot=0)
    assert candidates(known, {"few": fewer, "more": fitted})[0].name == "more"
    ranked = candidates({"n_params": 1e9}, {"a": fitted})
    assert ranked[0].missing == ("tokens", "bits")
    assert reasons(ranked) == ["a is the nearest, but needs tokens and bits."]


# ------------------------------------------------------------------------------- is this normal
def test_a_percentile_inverts_the_quantiles(fitted, linear) -> None:
    boot = fit(simulate(), get("ouyang"), interval="bootstrap", n_boot=60)
    for model in (fitted, linear, boot):
        for p in (0.02, 0.3, 0.77, 0.99):
            value = float(model.quantiles(ROW, np.array([p]), "new_checkpoint")[0, 0])
            assert percentile(model, ROW, value) == pytest.approx(100 * p, abs=0.02)


def test_a_percentile_of_conformal_quantiles_is_on_their_step() -> None:
    model = fit(simulate(), get("ouyang"), interval="conformal")
    for p in (0.3, 0.77):
        value = float(model.quantiles(ROW, np.array([p]), "new_checkpoint")[0, 0])
        assert percentile(model, ROW, value) == pytest.approx(100 * p, abs=1.0)


def test_percentiles_of_new_measurements_are_uniform(fitted) -> None:
    fresh = simulate(runs=60, seed=7, prefix="new")
    found = [
        percentile(fitted, fresh.iloc[[i]].drop(columns="delta_loss"), fresh["delta_loss"].iloc[i])
        for i in range(0, len(fresh), 3)
    ]
    assert np.abs(np.sort(found) / 100 - (np.arange(60) + 0.5) / 60).max() < 1.63 / 60**0.5


def test_the_verdict_follows_the_band(fitted) -> None:
    row = predict(fitted, ROW).iloc[0]
    inside = judge(fitted, ROW, row["delta_loss"])
    assert inside.place == "within"
    assert inside.percentile == pytest.approx(50, abs=0.5)
    assert (inside.low_90, inside.high_90) == pytest.approx((row["low_90"], row["high_90"]))
    above = judge(fitted, ROW, 3 * row["high_90"])
    assert above.place == "above"
    assert "conversion" in above.sentences[1]
    below = judge(fitted, ROW, row["low_90"] / 3)
    assert below.place == "below"
    assert "overlaps" in below.sentences[1]
    assert "noise" in judge(fitted, ROW, -0.01).sentences[-1]
    far = ROW.assign(n_params=1e5)
    assert "extrapolation" in judge(fitted, far, 1.0).sentences[-1]


def test_a_log_normal_band_gives_the_percentiles_of_the_normal_distribution() -> None:
    low, high = np.exp(-3 + np.array([-1, 1]) * norm.ppf(0.95) * 0.4)
    for p in (0.01, 0.3, 0.5, 0.97):
        found = judge_interval(low, high, float(np.exp(-3 + 0.4 * norm.ppf(p))))
        assert found.percentile == pytest.approx(100 * p)
        assert found.place == {0.01: "below", 0.97: "above"}.get(p, "within")
    assert judge_interval(low, high, -0.1).percentile == 0.0
    assert "extrapolation" in judge_interval(low, high, 0.1, extrapolated=True).sentences[-1]
    with pytest.raises(FitError, match="no interval"):
        judge_interval(float("nan"), high, 0.1)


def test_a_value_that_has_no_percentile_is_refused(fitted) -> None:
    with pytest.raises(FitError, match="must be a finite number. Got nan"):
        percentile(fitted, ROW, float("nan"))
    with pytest.raises(FitError, match="Got 2 rows"):
        percentile(fitted, pd.concat([ROW, ROW]), 1.0)
    without = fit(simulate(), get("ouyang"), interval="bootstrap", n_boot=0)
    with pytest.raises(FitError, match="no intervals"):
        percentile(without, ROW, 1.0)


# ------------------------------------------------------------------------------ what drives it
@pytest.mark.parametrize("name", ["published_gptq_kumar", "learning_rate_gptq_lr_anneal"])
def test_contributions_add_up_to_the_ratio_to_the_median_checkpoint(name: str) -> None:
    shipped = find(name)
    row = ROW.assign(lr_peak=1e-3, lr=1e-4)
    parts = contributions(shipped, row)
    median = pd.DataFrame({c: [shipped.data.medians[c]] for c in shipped.columns})
    total = np.log(shipped.center(row) / shipped.center(median))[0]
    assert parts["log_ratio"].iloc[-1] == pytest.approx(total, rel=1e-9)
    assert parts["log_ratio"].iloc[:-1].sum() == pytest.approx(total, rel=1e-9)
    tokens = parts[parts["here"].str.contains("tokens")].iloc[0]
    exponent = shipped.law.names[1]
    slope = np.log(1e12 / shipped.data.medians["tokens"])
    assert tokens["log_ratio"] == pytest.approx(shipped.values[exponent] * slope)
    se = shipped.parameters()["se"][exponent] * abs(slope)
    assert tokens["log_ratio_se"] == pytest.approx(se, rel=1e-6)


def test_a_known_level_and_run_contribute() -> None:
    shipped = find("published_gptq_kumar")
    source = shipped.categories["source"][0]
    parts = contributions(shipped, ROW.assign(source=source, run="OPT-125M"))
    offset = parts[parts["here"] == f"source {source}"].iloc[0]
    assert offset["log_ratio"] == pytest.approx(shipped.values[f"source[{source}]"])
    run = shipped.effects.terms[0].levels[0]
    parts = contributions(shipped, ROW.assign(run=run))
    known = parts[parts["term"] == "known deviation of run"].iloc[0]
    assert known["log_ratio"] == pytest.approx(shipped.effects.values[0])
    effects, p = shipped.effects, len(shipped.theta)
    assert known["log_ratio_se"] == pytest.approx(np.sqrt(effects.cov[p, p]))
    # All together, errors of the law and of the run's deviation balance each other in part.
    whole = parts[parts["term"] == "all"]["log_ratio_se"].iloc[0]
    law = contributions(shipped, ROW)
    law = law[law["term"] == "all"]["log_ratio_se"].iloc[0]
    assert whole**2 != pytest.approx(law**2 + known["log_ratio_se"] ** 2, rel=0.01)
    assert whole < law + known["log_ratio_se"]


def test_a_regression_gives_the_effect_of_each_column_on_its_own(linear) -> None:
    parts = contributions(linear, ROW).set_index("term")
    back = ROW.assign(bits=linear.data.medians["bits"])
    expected = np.log(linear.center(ROW) / linear.center(back))[0]
    assert parts.loc["bits", "log_ratio"] == pytest.approx(expected)
    assert parts["log_ratio_se"].isna().all()


def test_what_the_fit_cannot_use_is_said() -> None:
    shipped = find("published_gptq_kumar")
    (sentence,) = unread(shipped, ROW.assign(lr_peak=0.01))
    assert "lr_peak = 0.01" in sentence
    assert "does not read it" in sentence
    assert unread(shipped, ROW.assign(lr_peak=1e-4)) == []


def test_contributions_need_one_row_and_medians(fitted) -> None:
    with pytest.raises(FitError, match="Got 2 rows"):
        contributions(fitted, pd.concat([ROW, ROW]))


# -------------------------------------------------------------------------- curvature beside it
def test_the_tested_error_is_that_of_the_measured_rows() -> None:
    # Against plain moments of the log ratio over rows that are far above their noise.
    from tests.test_fits import build_script  # noqa: PLC0415

    script = build_script()
    entry = script.entries()["zero_fit_3_4_bits"]
    again, shipped = script.make(entry), find("zero_fit_3_4_bits")
    assert again.values == pytest.approx(shipped.values, rel=1e-6)
    assert again.data == shipped.data
    rows = script.rows(entry).query(entry["where"])
    # By the prediction, as choosing by the measurement would favour what came out high.
    sure = rows[rows["quadratic_delta"] > 10 * rows["delta_loss_se"]]
    error = np.log(sure["delta_loss"] / sure["quadratic_delta"])
    assert len(sure) > 40
    _, sd = normal_log(shipped, ROW.assign(quadratic_delta=0.05))
    assert 0.7 * error.std() < sd[0] < 1.5 * error.std()
    se = shipped.parameters()["se"]["c"] / shipped.values["c"]
    assert np.log(shipped.values["c"]) == pytest.approx(error.mean(), abs=2 * se)


def test_models_left_out_lie_in_the_band_of_the_others() -> None:
    from tests.test_fits import build_script  # noqa: PLC0415

    script = build_script()
    entry = script.entries()["zero_fit_3_4_bits"]
    rows = script.rows(entry).query(entry["where"])
    rows = rows[(rows["status"] == "ok") & (rows["delta_loss"] > 10 * rows["delta_loss_se"])]
    hits = []
    for run in rows["run"].unique():
        rest = fit(rows[rows["run"] != run], get("curvature"), fixed={"gamma": 1.0})
        own = rows[rows["run"] == run]
        found = predict(rest, own)
        measured = own["delta_loss"].to_numpy()
        hits.append(((found["low_90"] <= measured) & (measured <= found["high_90"])).to_numpy())
    assert 0.8 <= np.concatenate(hits).mean() <= 1.0


def test_curvature_is_used_only_where_it_was_tested() -> None:
    rows = pd.DataFrame(
        {
            "bits": [3.0, 2.0, 3.0, 3.0, 3.0, 6.0],
            "method": ["rtn", "rtn", "gptq", "rtn", "rtn", "awq"],
            "fmt": ["int", "int", "int", "int", "q4_k", "int"],
            "quadratic_delta": [0.05, 0.05, 0.05, 5.0, 0.05, 0.001],
        }
    )
    found = zero_fit_prediction(rows)
    assert found["log_sd"].notna().tolist() == [True, False, False, False, False, False]
    assert found["why_not"].tolist() == [
        "",
        "tested at 3 to 8 bits only, not 2",
        "tested for method awq, rtn only, not gptq",
        "5 is above the largest tested at these bits, 0.569",
        "tested for fmt fp8_e4m3, int, mxfp4, mxfp8, mxint, nf4, nvfp4 only, not q4_k",
        "tested at 3 to 4 bits only, not 6",
    ]


def test_two_predictions_are_weighed_by_their_variances() -> None:
    one, other = (np.log([0.1]), np.array([0.2])), (np.log([0.12]), np.array([0.1]))
    found = combine(one, other).iloc[0]
    assert found["weight"] == pytest.approx(0.2)
    expected = 0.2 * np.log(0.1) + 0.8 * np.log(0.12)
    assert np.log(found["delta_loss"]) == pytest.approx(expected)
    sd = np.log(found["high_90"] / found["low_90"]) / (2 * norm.ppf(0.95))
    assert sd == pytest.approx((1 / 0.2**2 + 1 / 0.1**2) ** -0.5)
    alone = combine(one, (np.array([np.nan]), np.array([np.nan]))).iloc[0]
    assert (alone["delta_loss"], alone["weight"]) == (pytest.approx(0.1), 1.0)
    assert np.isnan(alone["disagreement"])


def test_a_combination_covers_as_promised_and_widens_where_the_two_disagree() -> None:
    rng = np.random.default_rng(0)
    sds = np.full(4000, 0.3), np.full(4000, 0.15)
    means = [rng.normal(0.0, sd) for sd in sds]
    found = combine((means[0], sds[0]), (means[1], sds[1]))
    inside = (found["low_90"] < 1.0) & (found["high_90"] > 1.0)
    # Agreeing by chance keeps the interval, disagreeing widens it: a little more than promised.
    assert 0.89 <= inside.mean() <= 0.94
    apart = combine((np.array([0.0]), np.array([0.1])), (np.array([2.0]), np.array([0.1]))).iloc[0]
    assert apart["low_90"] < 1.0
    assert apart["high_90"] > np.exp(2.0)
    assert apart["disagreement"] == pytest.approx(-2 / np.hypot(0.1, 0.1))
