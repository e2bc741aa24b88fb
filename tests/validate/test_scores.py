"""Held-out scores against hand computations, and measured rows given to a fit beforehand."""

from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pandas as pd
import pytest
from scipy.stats import norm
from sklearn.metrics import mean_pinball_loss

from qscale.errors import FitError
from qscale.fit import fit
from qscale.laws import get
from qscale.predict import predict
from qscale.validate import Split, held_out, summarize
from qscale.validate.scores import _medians, measured_first
from tests.simulations import simulate

PROBABILITIES = np.array([0.05, 0.25, 0.5, 0.75, 0.95])


@dataclass
class Lognormal:
    """A model whose prediction is known: median ``base * bits``, log scale ``sd``."""

    sd: float = 0.5
    base: float = 0.1
    told: list = field(default_factory=list)
    target: str = "delta_loss"
    columns: tuple[str, ...] = ("bits",)

    def quantiles(self, frame, probabilities, kind, seed=0):  # noqa: ARG002
        z = norm.ppf(probabilities)[:, None]
        with np.errstate(over="ignore"):
            return self.base * frame["bits"].to_numpy() * np.exp(self.sd * z)

    def center(self, frame):
        return self.base * frame["bits"].to_numpy()

    def given(self, rows):
        return Lognormal(self.sd, self.base, [*self.told, *rows["bits"]])


@pytest.fixture
def table():
    rng = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "run": ["train", "train", *np.repeat(["a", "b", "c"], 4), None],
            "bits": [3.0, 4.0, *np.tile([2.0, 3.0, 4.0, 8.0], 3), 4.0],
            "delta_loss": np.exp(rng.normal(-1.0, 0.7, 15)),
            "status": "ok",
        }
    )


TEST = Split("all but two", np.arange(15) >= 2)


def test_every_score_equals_a_hand_computation(table) -> None:
    errors = held_out(table, lambda _: Lognormal(), TEST, target="delta_loss")
    found = summarize(errors).iloc[0]
    test = table[TEST.test]
    y, median = np.log(test["delta_loss"].to_numpy()), np.log(0.1 * test["bits"].to_numpy())
    assert errors["log_error"].to_numpy() == pytest.approx(median - y)
    assert found["mean_abs_log_error"] == pytest.approx(np.abs(median - y).mean())
    assert found["median_abs_log_error"] == pytest.approx(np.median(np.abs(median - y)))
    assert found["bias"] == pytest.approx(np.median(median - y))
    for level in (50, 90):
        reach = 0.5 * norm.ppf(0.5 + level / 200)
        assert found[f"coverage_{level}"] == pytest.approx(np.mean(np.abs(median - y) <= reach))
        assert found[f"width_{level}"] == pytest.approx(2 * reach)
    losses = [mean_pinball_loss(y, median + 0.5 * norm.ppf(p), alpha=p) for p in PROBABILITIES]
    assert found["pinball"] == pytest.approx(np.mean(losses))
    assert (found["rows"], found["clusters"]) == (13, 4)  # the row without a run stands alone
    assert errors["row"].tolist() == list(range(2, 15))


def test_intervals_resample_whole_clusters(table) -> None:
    errors = held_out(table, lambda _: Lognormal(), TEST, target="delta_loss")
    found = summarize(errors, n_boot=500, seed=3).iloc[0]
    rng = np.random.default_rng(3)
    groups = [group["log_error"].abs() for _, group in errors.groupby("cluster", sort=False)]
    draws = [
        pd.concat([g for g, k in zip(groups, counts, strict=True) for _ in range(k)]).mean()
        for counts in rng.multinomial(4, np.full(4, 0.25), size=500)
    ]
    assert found["mean_abs_log_error_low"] == pytest.approx(np.quantile(draws, 0.05))
    assert found["mean_abs_log_error_high"] == pytest.approx(np.quantile(draws, 0.95))


def test_weighted_medians_equal_medians_of_repeated_rows() -> None:
    rng = np.random.default_rng(0)
    values, weights = rng.normal(size=9), rng.integers(0, 3, size=(200, 9)).astype(float)
    weights[0] = 0.0
    found = _medians(values, weights)
    assert np.isnan(found[0])
    by_hand = [np.median(np.repeat(values, row.astype(int))) for row in weights[1:]]
    assert found[1:] == pytest.approx(by_hand)


def test_rows_that_cannot_be_scored_are_left_out(table) -> None:
    table.loc[[3, 4, 5], "status"] = ["collapsed", None, "ok"]
    table.loc[6, "delta_loss"] = -0.1
    table.loc[7, "bits"] = np.nan
    errors = held_out(table, lambda _: Lognormal(), TEST, target="delta_loss").set_index("row")
    assert 3 not in errors.index
    assert 6 not in errors.index
    assert np.isnan(errors.loc[7, "log_error"])
    assert errors.loc[7, "observed"] == table.loc[7, "delta_loss"]
    with pytest.raises(FitError, match="no row with a value in each of bits"):
        held_out(table.assign(bits=np.nan), lambda _: Lognormal(), TEST, target="delta_loss")


def test_an_interval_beyond_all_numbers_counts_as_the_widest(table) -> None:
    errors = held_out(table, lambda _: Lognormal(sd=1e4), TEST, target="delta_loss")
    assert (errors["inside_90"] == 1).all()
    assert np.isfinite(errors[["width_90", "pinball"]]).all().all()


def test_given_rows_are_told_and_not_scored(table) -> None:
    models = []

    class Recording(Lognormal):
        def given(self, rows):
            models.append(sorted(rows["bits"]))
            return super().given(rows)

    errors = held_out(table, lambda _: Recording(), TEST, target="delta_loss", given_rows=2)
    # Of 2, 3, 4 and 8 bits the median is 3.5: 4 bits, the higher as near, then 3.
    assert models == [[3.0, 4.0]] * 3
    assert sorted(table["bits"][errors["row"]]) == [2.0, 2.0, 2.0, 8.0, 8.0, 8.0]
    with pytest.raises(FitError, match="no held-out run has more rows than the 4 given"):
        held_out(table, lambda _: Lognormal(), TEST, target="delta_loss", given_rows=4)


def test_plain_rounding_to_four_bits_is_measured_first() -> None:
    rows = pd.DataFrame(
        {
            "method": ["gptq", "rtn", "rtn", "rtn", "rtn"],
            "group_size": [np.nan, 128.0, np.nan, np.nan, np.nan],
            "bits": [4.0, 4.0, 2.0, 5.0, 3.0],
        }
    )
    assert measured_first(rows).tolist() == [3, 4, 2, 1, 0]
    assert measured_first(rows.drop(columns="method")).tolist() == [0, 1, 3, 4, 2]


def test_one_measured_row_lowers_the_error_when_runs_deviate() -> None:
    table = simulate(runs=30, between=0.6, within=0.05, seed=4)
    table["part"] = np.repeat(np.arange(30) % 3, 3)
    split = Split("part 0", (table["part"] == 0).to_numpy())
    refit = partial(fit, law=get("ouyang"), interval="model")
    blind, told = (
        held_out(table, refit, split, target="delta_loss", given_rows=given) for given in (0, 1)
    )
    same = blind[blind["row"].isin(told["row"])]
    assert len(told) == len(same) == 20
    assert told["log_error"].abs().mean() < 0.25 * same["log_error"].abs().mean()
    assert told["pinball"].mean() < 0.5 * same["pinball"].mean()
    # The other runs' measured rows stay unknown: each run is told its own alone.
    fitted, rows = refit(table[split.training]), table[table["run"] == "run0"]
    by_hand = predict(fitted.given(rows[rows["bits"] == 3.0]), rows[rows["bits"] != 3.0])
    own = told[told["cluster"] == "run0"]
    assert own["predicted"].to_numpy() == pytest.approx(by_hand["delta_loss"].to_numpy())
