"""Each warning appears when its condition holds and not otherwise."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from qscale.fit import fit
from qscale.laws import get
from qscale.report.cautions import cautions, trends
from qscale.report.evidence import LARGEST, LEAVE_ONE_OUT, Evidence, Summary, gather
from tests.simulations import TRUE, simulate


def evidence(frame: pd.DataFrame, law: str = "ouyang", n_boot: int = 100, **options) -> Evidence:
    return gather("x", fit(frame, get(law), n_boot=n_boot, **options), frame)


def summary(coverage_50: float = 0.5, coverage_90: float = 0.9, protocol: str = LEAVE_ONE_OUT):
    scores = Summary(4, 0, 0.1, 0.05, 0.2, {50: coverage_50, 90: coverage_90})
    return {("x", protocol): scores}


def found(each: Evidence, scores=None) -> dict[str, str]:
    return cautions(each, scores if scores is not None else summary())


def searched(each: Evidence, **changes) -> Evidence:
    return replace(each, fit=replace(each.fit, search=replace(each.fit.search, **changes)))


@pytest.fixture(scope="module")
def good() -> Evidence:
    """A fit of rows that follow Ouyang's law with his published exponents."""
    (published,) = get("ouyang").published
    frame = simulate(runs=40, between=0.05, within=0.02)
    noise = frame["delta_loss"] / get("ouyang").evaluate(TRUE, frame)
    return evidence(
        frame.assign(delta_loss=get("ouyang").evaluate(published.values, frame) * noise)
    )


def test_a_sound_fit_raises_none(good) -> None:
    assert found(good) == {}
    assert found(good, {}) == {}


@pytest.mark.parametrize("status", ["failed", "bound_hit", "not_identified"])
def test_status(good, status) -> None:
    each = searched(good, status=status, detail="alpha did something")
    assert list(found(each)) == [status]
    assert found(each)[status].startswith("Alpha did something. ")


def test_a_bound_that_was_hit() -> None:
    # More tokens lower this loss: its exponent's bound is zero.
    rng = np.random.default_rng(0)
    n, d = np.repeat(10.0 ** np.arange(7, 11), 5), np.tile(10.0 ** np.arange(9, 14), 4)
    loss = 2 + 100 / n**0.3 + 1e-3 * d**0.2
    frame = pd.DataFrame({"n_params": n, "tokens": d, "loss_fp": loss * rng.normal(1, 1e-3, 20)})
    each = evidence(frame.assign(run=None), "chinchilla", n_boot=0)
    assert each.fit.search.status in ("bound_hit", "not_identified")
    assert each.fit.search.status in found(each)


def test_a_start_that_stands_alone(good) -> None:
    assert "lonely_start" in found(searched(good, starts=8, agreeing=1))
    assert "lonely_start" not in found(searched(good, starts=8, agreeing=2))
    assert "lonely_start" not in found(searched(good, starts=1, agreeing=1))


@pytest.mark.parametrize(("runs", "few"), [(9, True), (10, False)])
def test_few_clusters(runs, few) -> None:
    text = found(evidence(simulate(runs=runs), interval="bootstrap")).get("few_clusters", "")
    assert ("Only 9 clusters (run)" in text) == few


def test_bootstrap_refits_that_are_missing(good) -> None:
    drawn = replace(good, fit=replace(good.fit, interval="bootstrap"))
    assert "lost_refits" not in found(searched(drawn, boots=100, boots_converged=95))
    lost = found(searched(drawn, boots=100, boots_converged=94))
    assert lost["lost_refits"].startswith("6 of 100 bootstrap refits")
    assert "lost_refits" not in found(searched(good, boots=100, boots_converged=94))
    none = found(evidence(simulate(), interval="bootstrap", n_boot=0))
    assert none["lost_refits"].startswith("There are no intervals: 0 converged")


@pytest.mark.parametrize(("unusable", "large"), [(14, False), (15, True)])
def test_a_large_share_set_aside(unusable, large) -> None:
    # 14 of 72 rows are 19 %, 15 are 21 %.
    frame = simulate().assign(status="ok")
    frame.loc[: unusable - 1, "status"] = "collapsed"
    text = found(evidence(frame)).get("set_aside")
    assert (text is not None) == large
    if large:
        assert "21 % of the rows asked for (15 of 72)" in text


def test_rows_that_the_query_leaves_out_are_not_set_aside() -> None:
    assert "set_aside" not in found(evidence(simulate(), where="bits > 2 and tokens > 0"))


def test_rows_without_a_logarithm() -> None:
    frame = simulate()
    assert "no_logarithm" not in found(evidence(frame))
    frame.loc[:1, "delta_loss"] = -0.01
    assert found(evidence(frame))["no_logarithm"].startswith("2 rows with delta_loss at or below")


@pytest.mark.parametrize(
    ("where", "chosen"),
    [
        ("delta_loss < 1e9", True),
        ("loss_q < 1e9", True),
        ("bits > 1", False),
        ("delta_loss_se > 0", False),
    ],
)
def test_rows_chosen_by_their_outcome(where, chosen) -> None:
    frame = simulate().assign(loss_q=1.0, delta_loss_se=1e-9)
    assert ("chosen_by_outcome" in found(evidence(frame, where=where))) == chosen


def with_learning_rate(power: float, seed: int = 5, runs: int = 40) -> pd.DataFrame:
    """Rows whose loss also goes with a power of a peak learning rate that nothing else follows."""
    frame = simulate(runs=runs, between=0.1, seed=seed)
    lr_peak = np.repeat(10 ** np.random.default_rng(seed + 100).uniform(-4, -2, runs), 3)
    delta = frame["delta_loss"] * (lr_peak / 1e-3) ** power
    return frame.assign(lr_peak=lr_peak, delta_loss=delta)


def test_residuals_that_move_with_a_column_outside_the_law() -> None:
    assert trends(evidence(with_learning_rate(0.0))) == {}
    each = evidence(with_learning_rate(-0.5))
    assert list(trends(each)) == ["lr_peak"]
    assert trends(each)["lr_peak"] < -0.8
    assert "Residuals move with lr_peak (rank correlation -0.9" in found(each)["trend"]
    # The same column inside the law is no news.
    frame = with_learning_rate(-0.5).assign(lr=lambda t: t["lr_peak"] * np.tile([1, 0.5, 0.1], 40))
    assert "lr_peak" not in trends(evidence(frame, "lr_anneal"))


def test_a_trend_is_not_seen_in_noise() -> None:
    """Rows of one run share their noise; counted apart, they would feign a trend."""
    noise = (pd.concat([with_learning_rate(0.0, seed, runs=12)] * 4) for seed in range(20))
    assert sum(bool(trends(evidence(frame, n_boot=0))) for frame in noise) <= 1


@pytest.mark.parametrize(("noise", "together"), [(0.05, True), (2.0, False)])
def test_tokens_confounded_with_the_learning_rate(noise, together) -> None:
    frame = simulate(runs=40)
    rng = np.random.default_rng(2)
    lr = frame["tokens"].to_numpy() ** -0.5 * np.exp(np.repeat(rng.normal(0, noise, 40), 3))
    text = found(evidence(frame.assign(lr_peak=lr))).get("confounded", "")
    assert ("tokens and lr_peak (rank correlation -" in text) == together


def test_an_exponent_whose_sign_is_open() -> None:
    frame = simulate(runs=30, between=0.5)
    clear = found(evidence(frame))
    assert "no_effect" not in clear
    flat = frame["delta_loss"] / frame["tokens"] ** TRUE["beta"] * 1e5
    text = found(evidence(frame.assign(delta_loss=flat)))["no_effect"]
    assert text.startswith("The 90 % interval of beta (-")
    assert "alpha" not in text
    falling = frame["delta_loss"] / frame["tokens"] ** (3 * TRUE["beta"]) * 1e15
    assert "no_effect" not in found(evidence(frame.assign(delta_loss=falling)))
    held = found(evidence(frame.assign(delta_loss=flat), fixed={"beta": 0.0}))
    assert "no_effect" not in held


def test_published_exponents_outside_the_intervals(good) -> None:
    text = found(evidence(simulate(runs=40, between=0.02)))["off_published"]
    for name in ("beta 0.5251", "alpha 0.2261", "gamma 5.497"):
        assert name in text
    assert "k 0.017" not in text  # amplitudes follow the data and the protocol
    other = evidence(simulate().assign(kl=1.0, relative_delta=lambda t: t["delta_loss"]))
    kl = replace(other, law=replace(other.law, target="kl"))
    assert "off_published" not in found(kl)


@pytest.mark.parametrize(("multiplier", "large"), [(1.2, False), (1e4, True)])
def test_offsets_larger_than_an_effect(multiplier, large) -> None:
    frame = simulate(runs=40)
    other = np.repeat(np.arange(40) % 2 == 1, 3)
    frame["delta_loss"] *= np.where(other, multiplier, 1.0)
    small = np.repeat(np.arange(40) % 3, 3).astype(str)
    frame = frame.assign(source=np.where(other, "b", "a"), protocol=small)
    text = found(evidence(frame, offset=["protocol", "source"])).get("large_offsets", "")
    assert ("Rows that differ only in source differ by up to ×" in text) == large
    if large:
        assert "n_params (×" in text


@pytest.mark.parametrize(
    ("at_50", "at_90", "words"),
    [
        (0.5, 0.9, None),
        (0.5, 0.79, "79 % in the 90 % intervals (leave one out: too narrow)"),
        (0.5, 0.81, None),
        (0.75, 0.95, "75 % in the 50 % intervals (leave one out: too wide)"),
        (0.2, 0.9, "20 % in the 50 % intervals (leave one out: too narrow)"),
    ],
)
def test_coverage_far_from_nominal(good, at_50, at_90, words) -> None:
    text = found(good, summary(at_50, at_90)).get("coverage")
    if words is None:
        assert text is None
        return
    assert text.startswith(f"Held-out rows inside their intervals: {words}. ")
    assert ("--interval conformal" in text) is ("too narrow" in words)


def test_coverage_of_the_largest_sizes(good) -> None:
    text = found(good, summary(0.5, 0.1, LARGEST))["coverage"]
    assert "largest sizes: too narrow" in text


def test_another_table(good) -> None:
    other = evidence(simulate(seed=9))
    mixed = replace(other, fit=good.fit)
    assert "other_table" in found(mixed)
