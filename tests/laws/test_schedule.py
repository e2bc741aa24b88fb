"""Schedule laws: published constants and held-out schedules, drop sums against exact sums."""

import numpy as np
import pandas as pd
import pytest

from qscale import datasets
from qscale.errors import FitError
from qscale.fit.schedule import fit_multi_power
from qscale.laws import schedule

WARMUP = 2160
TRAIN = ("cosine_24000", "constant_24000", "wsdcon_9")
SHAPE = {"C": 2.0, "beta": 0.6, "gamma": 0.64}


def rates(name: str) -> np.ndarray:
    """Learning rate at every step of a schedule of the shipped loss curves."""
    kind, *_, last = name.split("_")
    last = int(last)
    peak, end = 3e-4, 3e-5
    match kind:
        case "cosine":
            return schedule.cosine(last, peak, end, WARMUP)
        case "constant":
            return schedule.stable_decay(last, peak, peak, WARMUP, WARMUP)
        case "wsd":
            return schedule.stable_decay(last, peak, end, 20_000, WARMUP, "exponential")
        case "wsdld":
            return schedule.stable_decay(last, peak, end, 20_000, WARMUP, "linear")
        case _:
            return schedule.stable_decay(16_000, peak, last * 1e-5, 7_999, WARMUP, "drop")


@pytest.fixture(scope="module")
def curves():
    """``{(size, schedule): rows}`` of the shipped loss curves."""
    table = datasets.load("lr_schedule_curves")
    size = (table["n_params"] / 1e6).astype(int).astype(str) + "M"
    return {key: rows for key, rows in table.groupby([size, "schedule_name"])}  # noqa: C416


def held_out_r2(law: schedule.MultiPower, runs: dict, exposures: dict) -> float:
    scores = []
    for name, rows in runs.items():
        if name not in TRAIN:
            loss = rows["loss_fp"].to_numpy()
            misfit = ((loss - law.loss(exposures[name])) ** 2).sum()
            scores.append(1 - misfit / ((loss - loss.mean()) ** 2).sum())
    assert len(scores) == 6
    return float(np.mean(scores))


def test_known_shapes_are_the_logged_rates(curves) -> None:
    for (_, name), rows in curves.items():
        step = rows["step"].to_numpy(dtype=int)
        np.testing.assert_allclose(rates(name)[step], rows["lr"], rtol=1e-9)


@pytest.mark.parametrize("published", schedule.PUBLISHED, ids=lambda p: p.setting)
def test_published_constants_give_the_published_r2_on_the_other_schedules(curves, published):
    runs = {name: rows for (size, name), rows in curves.items() if size == published.setting}
    exposures = {n: schedule.exposure(rates(n), rows["step"]) for n, rows in runs.items()}
    found = held_out_r2(schedule.MultiPower(published.values), runs, exposures)
    assert found == pytest.approx({"25M": 0.9988, "100M": 0.9983, "400M": 0.9978}[published.setting], abs=6e-5)  # fmt: skip


@pytest.mark.parametrize(("size", "least"), [("25M", 0.998), ("100M", 0.998), ("400M", 0.997)])
def test_a_fit_on_three_schedules_predicts_the_six_others(curves, size, least) -> None:
    # From the table's columns alone: the rates between logged steps are interpolated.
    runs = {name: rows for (at, name), rows in curves.items() if at == size}
    exposures = {
        name: schedule.exposure(
            schedule.interpolate(rows["step"], rows["lr"], WARMUP), rows["step"]
        )
        for name, rows in runs.items()
    }
    fit = fit_multi_power(
        schedule.stack([exposures[name] for name in TRAIN]),
        np.concatenate([runs[name]["loss_fp"] for name in TRAIN]),
    )
    assert fit.converged
    assert held_out_r2(fit.law, runs, exposures) >= least


@pytest.mark.slow
def test_all_seven_parameters_fit_better_than_the_published_and_predict_worse(curves) -> None:
    published = next(p for p in schedule.PUBLISHED if p.setting == "100M")
    runs = {name: rows for (at, name), rows in curves.items() if at == "100M"}
    exposures = {n: schedule.exposure(rates(n), rows["step"]) for n, rows in runs.items()}
    train = schedule.stack([exposures[name] for name in TRAIN])
    loss = np.concatenate([runs[name]["loss_fp"] for name in TRAIN])
    seven = fit_multi_power(train, loss, {})
    at_published = fit_multi_power(train, loss, published.values)
    assert seven.objective < 0.1 * at_published.objective
    assert held_out_r2(seven.law, runs, exposures) < held_out_r2(at_published.law, runs, exposures)


@pytest.mark.parametrize("name", ["cosine_24000", "wsd_20000_24000", "wsdcon_9"])
def test_bins_of_drops_agree_with_the_sum_over_steps(name) -> None:
    lr = rates(name)
    steps = np.arange(2200, len(lr), 997)
    law = schedule.MultiPower(schedule.PUBLISHED[1].values)
    v = law.values
    direct = []
    for t in steps:
        k = np.arange(1, t + 1)
        since = np.cumsum(lr[t:0:-1])[::-1]
        x = v["C"] * lr[k] ** -v["gamma"] * since
        direct.append(((lr[k - 1] - lr[k]) * (1 - (x + 1) ** -v["beta"])).sum())
    total = np.array([lr[: t + 1].sum() for t in steps])
    exact = v["L0"] + v["A"] * total ** -v["alpha"] - v["B"] * np.array(direct)
    binned = law.loss(schedule.exposure(lr, steps))
    # The losses are logged to four decimals.
    assert np.abs(binned - exact).max() < 1e-4
    every = law.loss(schedule.exposure(lr, steps, growth=1.0))
    np.testing.assert_allclose(every, exact, rtol=1e-9)


def test_the_gradient_matches_central_differences() -> None:
    exposure = schedule.exposure(rates("wsd_20000_24000"), np.array([3000, 15_000, 22_000, 23_999]))
    theta = np.array(
        [p.internal(schedule.PUBLISHED[0].values[p.name]) for p in schedule.PARAMETERS]
    )
    _, analytic = schedule.log_loss(theta[None], exposure)
    for j, step in enumerate(1e-5 * np.eye(7)):
        up, down = (schedule.log_loss((theta + s)[None], exposure)[0] for s in (step, -step))
        np.testing.assert_allclose(analytic[0, :, j], (up - down)[0] / 2e-5, rtol=1e-6, atol=1e-9)


def test_a_constant_rate_has_no_drops_and_one_old_drop_counts_in_full() -> None:
    constant = schedule.exposure(rates("constant_24000"), np.array([5000, 20_000]), warmup=WARMUP)
    np.testing.assert_array_equal(schedule.drop_sum(constant, **SHAPE), 0.0)
    lr = schedule.stable_decay(10**6, 1e-3, 4e-4, 5000, 10, "drop")
    late = schedule.exposure(lr, np.array([4000, 10**6]), warmup=10)
    # One minus what is left of the drop after 995,000 steps at the lower rate.
    left = (2.0 * 4e-4**-0.64 * 995_000 * 4e-4 + 1) ** -0.6
    np.testing.assert_allclose(
        schedule.drop_sum(late, **SHAPE), [0.0, 6e-4 * (1 - left)], rtol=1e-9
    )


@pytest.mark.parametrize("shape", ["linear", "cosine"])
@pytest.mark.parametrize("share", [0.2, 0.7, 1.0])
def test_the_closed_form_of_a_decay_agrees_with_the_sum(shape, share) -> None:
    warmup, start, last = 100, 10_000, 20_000
    if shape == "linear":
        lr = schedule.stable_decay(last, 1e-3, 0.0, start, warmup)
    else:
        start = warmup
        lr = schedule.cosine(last, 1e-3, 0.0, warmup)
    now = int(start + share * (last - start))
    summed = schedule.drop_sum(schedule.exposure(lr, np.array([now]), warmup, growth=1.0), **SHAPE)
    closed = schedule.cooldown_drop_sum(
        np.array([1e-3]), np.array([lr[now]]), np.array([now - start]), **SHAPE, shape=shape
    )
    np.testing.assert_allclose(closed, summed, rtol=2e-3)


def test_decay_share_finds_where_decay_began() -> None:
    tokens = np.array([1e9, 8e9, 8.5e9, 9e9, 10e9, 5e9])
    fraction = [0.0, 0.0, 0.25, 0.5, 1.0, 1.0]
    table = pd.DataFrame({"run": [*"aaaaa", "b"], "tokens": tokens, "decay_fraction": fraction})
    share = schedule.decay_share(table)
    np.testing.assert_allclose(share, [0, 0, 0.5 / 8.5, 1 / 9, 0.2, np.nan], atol=1e-12)


def test_shipped_cooldowns_begin_after_eighty_billion_tokens() -> None:
    table = datasets.load("ptq_vs_learning_rate")
    table["decay_share"] = schedule.decay_share(table, ("run", "lr_schedule", "phase"))
    rows = table[(table["phase"] == "decay") & (table["n_params"] < 1e9)]
    np.testing.assert_allclose(rows["tokens"] * (1 - rows["decay_share"]), 80e9, rtol=1e-3)


def test_mistakes_are_named() -> None:
    lr = rates("constant_24000")
    with pytest.raises(FitError, match="column 'step' must lie between 1"):
        schedule.exposure(lr, np.array([0, 10]))
    with pytest.raises(FitError, match="Sort the rows"):
        schedule.interpolate(np.array([5, 3]), np.array([1e-3, 1e-3]))
    flat = schedule.exposure(lr, np.arange(3000, 3100), warmup=WARMUP)
    with pytest.raises(FitError, match="constant after warm-up"):
        fit_multi_power(flat, np.full(100, 3.0))
    with pytest.raises(FitError, match="no such parameter"):
        fit_multi_power(flat, np.full(100, 3.0), {"delta": 1.0})
