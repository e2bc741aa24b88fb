"""The fewest bits within a tolerance, and the back-test of its promise."""

from functools import partial

import numpy as np
import pandas as pd
import pytest
from scipy.stats import norm

from qscale.errors import QscaleError
from qscale.fit import fit
from qscale.laws import get
from qscale.plan import decisions, fewest_bits, fewest_bits_of, realised
from qscale.plan.backtest import share
from qscale.plan.bits import in_unit_of
from qscale.validate import Split, leave_one_out
from tests.simulations import simulate


@pytest.fixture(scope="module")
def fitted():
    return fit(simulate(), get("ouyang"), interval="model")


def settings(bits=(2.0, 3.0, 4.0, 5.0, 6.0)) -> pd.DataFrame:
    rows = pd.DataFrame({"n_params": 1e9, "tokens": 1e12, "bits": [*bits]})
    return rows.assign(bits_per_weight=rows["bits"] + 0.125)


def test_the_choice_is_the_first_whose_bound_is_within(fitted) -> None:
    found = fewest_bits(fitted, settings((6.0, 2.0, 4.0, 3.0, 5.0)), 0.3, 0.8)
    bounds = fitted.quantiles(settings(), np.array([0.8]))[0]
    by_hand = settings()["bits"][np.flatnonzero(bounds <= 0.3)[0]]
    assert found.chosen["bits"] == by_hand
    np.testing.assert_allclose(found.settings["bound"], bounds)


def test_the_probability_at_the_bound_is_the_confidence(fitted) -> None:
    bound = fewest_bits(fitted, settings(), 1.0, 0.9).settings["bound"]
    for row, tolerance in enumerate(bound):
        at = fewest_bits(fitted, settings(), float(tolerance), 0.9).settings
        assert at["probability"][row] == pytest.approx(0.9, abs=1e-9)


def test_log_normal_predictions_are_planned_as_a_fit_of_that_distribution_is() -> None:
    rows = settings().assign(delta_loss=[1.0, 0.3, 0.09, 0.03, 0.01], log_sd=0.4)
    found = fewest_bits_of(rows.iloc[::-1], 0.1, 0.9)
    assert found.chosen["bits"] == 5.0
    bounds = rows["delta_loss"] * np.exp(norm.ppf(0.9) * 0.4)
    np.testing.assert_allclose(found.settings["bound"], bounds)
    inside = norm.cdf(np.log(0.1 / rows["delta_loss"]) / 0.4)
    shown = found.settings["probability"].clip(0.005, 0.995)
    np.testing.assert_allclose(shown, inside.clip(0.005, 0.995), atol=2e-3)
    with pytest.raises(QscaleError, match="predictions: .*log_sd"):
        fewest_bits_of(rows.drop(columns="log_sd"), 0.1)


def test_more_confidence_never_needs_fewer_bits(fitted) -> None:
    fine = settings(np.arange(2, 6, 0.1))
    chosen = [fewest_bits(fitted, fine, 0.02, c).chosen["bits"] for c in (0.5, 0.9, 0.99)]
    assert chosen == sorted(chosen)
    assert chosen[0] < chosen[-1]


def test_no_setting_may_do(fitted) -> None:
    assert fewest_bits(fitted, settings((2.0,)), 1e-6).chosen is None


def test_of_two_settings_of_one_size_the_surer_is_chosen() -> None:
    table = pd.concat(
        [simulate(seed=1).assign(method="rtn"), simulate(seed=2, prefix="b").assign(method="gptq")]
    )
    table.loc[table["method"] == "gptq", "delta_loss"] *= 0.5
    found = fit(table, get("ouyang"), offset=["method"], interval="model")
    rows = pd.concat([settings().assign(method=m) for m in ("rtn", "gptq")])
    assert fewest_bits(found, rows, 0.3).chosen["method"] == "gptq"


def test_promises_are_kept_on_simulated_new_runs() -> None:
    """Calibrated quantiles: single rows are covered as promised, and so are chosen ones."""
    chosen, rows = [], []
    for seed in range(12):
        train = simulate(runs=24, seed=seed)
        fresh = simulate(runs=20, seed=500 + seed, prefix="new")
        table = pd.concat([train, fresh], ignore_index=True)
        test = table["run"].str.startswith("new").to_numpy()
        asked, single = decisions(
            table, partial(fit, law=get("ouyang"), interval="model"), [Split("new", test)],
            tolerances=np.geomspace(0.003, 3.0, 25), confidences=(0.5, 0.8, 0.9),
        )  # fmt: skip
        chosen.append(asked.assign(cluster=asked["cluster"] + f" {seed}"))
        rows.append(single.assign(cluster=single["cluster"] + f" {seed}"))
    found = realised(pd.concat(chosen), pd.concat(rows)).set_index("confidence")
    for confidence in (0.5, 0.8, 0.9):
        row = found.loc[confidence]
        assert row["covered"] == pytest.approx(confidence, abs=0.05)
        assert row["selected"] == pytest.approx(confidence, abs=0.06)
        assert row["kept"] >= confidence
    assert (found["kept_se"] > 0).all()
    assert (found["answered"].diff().dropna() < 0).all()
    assert (found["excess"].diff().dropna() > 0).all()


class Fixed:
    """Predicts column ``said`` at any probability."""

    name, target, columns, categories = "fixed", "delta_loss", ("said",), {}

    def quantiles(self, frame, probabilities, *_):
        return np.tile(frame["said"].to_numpy(), (len(probabilities), 1))


def test_decisions_by_hand() -> None:
    table = pd.DataFrame(
        {
            "run": ["a", "a", "a", "b", "b", "c"],
            "bits": [2.0, 3.0, 4.0, 3.0, 4.0, 4.0],
            "said": [0.5, 0.1, 0.05, 0.09, 0.02, 0.3],
            "delta_loss": [0.4, 0.3, 0.01, 0.08, 0.01, 0.02],
            "status": ["ok", "ok", "ok", "ok", "collapsed", "ok"],
        }
    )
    splits = leave_one_out(table, "run")
    chosen, rows = decisions(
        table, lambda _: Fixed(), splits, tolerances=[0.1, 0.03], confidences=[0.9]
    )
    asked = chosen.set_index(["cluster", "tolerance"])
    assert asked.loc[("a", 0.1), "kept"] == 0.0  # 3 bits were said to cost 0.1 and cost 0.3
    assert asked.loc[("a", 0.1), ["bits_per_weight", "fewest"]].tolist() == [3.0, 4.0]
    assert asked.loc[("b", 0.1), ["kept", "fewest"]].tolist() == [1.0, 3.0]
    assert asked.loc[("b", 0.03), "kept"] == 0.0  # the model collapsed
    assert not asked.loc[("c", 0.1), "answered"]
    assert not asked.loc[("a", 0.03), "answered"]
    assert rows["covered"].tolist() == [1.0, 0.0, 1.0, 1.0, 0.0, 1.0]
    found = realised(chosen, rows).iloc[0]
    assert found["kept"] == pytest.approx(1 / 3)
    assert found["answered"] == pytest.approx(3 / 6)
    assert found["clusters"] == 3


def test_the_error_of_a_share_is_that_of_a_ratio() -> None:
    hits = pd.Series([1.0, 0.0, 1.0, 1.0])
    apart, _ = share(hits, pd.Series(["a", "b", "c", "d"]))
    assert apart == 0.75
    # Clusters of one: the plain standard error of a mean.
    plain = hits.std(ddof=1) / 2
    assert share(hits, pd.Series(["a", "b", "c", "d"]))[1] == pytest.approx(plain)
    assert np.isnan(share(hits, pd.Series(["a"] * 4))[1])


@pytest.mark.parametrize(
    ("tolerance", "confidence", "message"),
    [(0.0, 0.9, "tolerance must be"), (np.nan, 0.9, "tolerance must be"), (0.1, 1.0, "confidence")],
)
def test_options_out_of_range(fitted, tolerance, confidence, message) -> None:
    with pytest.raises(QscaleError, match=message):
        fewest_bits(fitted, settings(), tolerance, confidence)


def test_a_fit_without_intervals_promises_nothing() -> None:
    bare = fit(simulate(), get("ouyang"), random=(), interval="bootstrap", n_boot=0)
    with pytest.raises(QscaleError, match="no interval"):
        fewest_bits(bare, settings(), 0.1)


def test_units_of_a_tolerance() -> None:
    assert in_unit_of("delta_loss", 0.1, None) == 0.1
    assert in_unit_of("relative_delta", 0.1, 2.0) == 0.05
    with pytest.raises(QscaleError, match="--loss-fp"):
        in_unit_of("relative_delta", 0.1, None)
    with pytest.raises(QscaleError, match="predicts loss_fp"):
        in_unit_of("loss_fp", 0.1, None)
