"""Laws: gradients against finite differences, published tables, and their specifications."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qscale import datasets
from qscale.errors import FitError
from qscale.fit import fit
from qscale.laws import LAWS, Law, columns_of, from_spec, get, published
from qscale.laws.factors import growth, offset, power
from qscale.laws.named_loss import critical_tokens
from qscale.laws.shapes import effective

FIXTURES = Path(__file__).parent.parent / "fixtures"
QUEST_RUNS = (
    "fmt == 'int' and bits == bits_activation and (bits == 8 or method in "
    "('quest-hadamardclip', 'quest-hadamardtrust', 'quest-halfhadamardtrust'))"
)


def example_table(rows: int = 12, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "n_params": 10 ** rng.uniform(8, 11, rows),
            "tokens": 10 ** rng.uniform(10, 13, rows),
            "bits": rng.choice([2.0, 3.0, 4.0], rows),
            "group_size": rng.choice([32.0, 64.0, 128.0], rows),
            "lr_peak": 10 ** rng.uniform(-4, -2, rows),
            "lr": 10 ** rng.uniform(-5, -4, rows),
            "decay_share": rng.uniform(0, 0.9, rows),
            "bits_per_weight": rng.uniform(2, 8, rows),
            "exponent_bits": rng.choice([2.0, 3.0, 4.0], rows),
            "mantissa_bits": rng.choice([1.0, 2.0, 3.0], rows),
            "quantized_share": rng.uniform(0.1, 1, rows),
            "calibration_samples": rng.choice([8.0, 32.0, 128.0], rows),
            "quadratic_delta": 10 ** rng.uniform(-3, 0, rows),
            "fmt": rng.choice(["fp4", "int", "int-sparse-4:8"], rows),
            "source": rng.choice(["a", "b", "c"], rows),
        }
    )


@pytest.mark.parametrize("name", sorted(LAWS))
@pytest.mark.parametrize("seed", range(3))
def test_gradient_matches_central_differences(name: str, seed: int) -> None:
    law = get(name).with_factors(offset("source", ("a", "b", "c")))
    data = columns_of(law, example_table(seed=seed))
    rng = np.random.default_rng(seed)
    theta = np.array([[p.internal(rng.choice(p.starts) + 0.01) for p in law.parameters]] * 2)
    theta += rng.normal(0, 0.1, theta.shape)
    theta = np.clip(theta, *np.array([p.bounds for p in law.parameters]).T)
    analytic = law.gradient(theta, data)
    step = 1e-5
    for j in range(theta.shape[1]):
        nudge = step * np.eye(theta.shape[1])[j]
        numeric = law.location(theta + nudge, data) - law.location(theta - nudge, data)
        np.testing.assert_allclose(analytic[:, :, j], numeric / (2 * step), rtol=1e-6, atol=1e-7)


def test_ouyang_constants_reproduce_his_two_bit_table() -> None:
    table = pd.read_csv(FIXTURES / "ouyang_table1_predictions.csv")
    table = table.rename(columns={"params_n": "n_params", "tokens_d_paper": "tokens"})
    two_bit = table[table["bits"] == 2]
    law = get("ouyang")
    predicted = law.evaluate(law.published[0].values, two_bit)
    assert len(two_bit) == 16
    np.testing.assert_allclose(predicted, two_bit["delta_loss_target"], rtol=0.03)


def test_ouyang_joint_constants_miss_his_three_bit_table_by_half() -> None:
    # The paper's 3- and 4-bit cells come from fits per bit width: this is stated in the law's note.
    table = pd.read_csv(FIXTURES / "ouyang_table1_predictions.csv")
    table = table.rename(columns={"params_n": "n_params", "tokens_d_paper": "tokens"})
    law = get("ouyang")
    ratio = law.evaluate(law.published[0].values, table) / table["delta_loss_target"]
    assert 1.5 < ratio[table["bits"] == 3].max() < 1.65


def test_chen_w4a4_constants_give_the_published_gap() -> None:
    law = get("chen")
    row = pd.DataFrame({"n_params": [595e6], "tokens": [100e9], "group_size": [128.0]})
    w4a4 = next(p for p in law.published if p.setting == "W4A4")
    assert law.evaluate(w4a4.values, row)[0] == pytest.approx(0.057, abs=5e-4)


def test_sun_constants_give_the_published_critical_tokens() -> None:
    assert 0.39e12 < critical_tokens(1e9, 128, 2, 1) < 0.40e12
    assert critical_tokens(1e9, 128, 4, 3) == pytest.approx(27e12, rel=0.02)
    assert critical_tokens(1e9, 128, 8, 7) == pytest.approx(1730e12, rel=0.02)


def test_sun_loss_is_the_published_sum_and_lowest_at_the_critical_tokens() -> None:
    law = get("sun")
    v = law.published[0].values
    critical = float(critical_tokens(1e9, 128, 2, 1))
    row = pd.DataFrame({"n_params": 1e9, "tokens": critical * np.array([0.9, 1.0, 1.1])})
    row = row.assign(exponent_bits=2.0, mantissa_bits=1.0, group_size=128.0)
    n, d = 1e9 ** v["alpha"], row["tokens"].to_numpy() ** v["beta"]
    noise = d / n * 7 / (v["gamma"] * 2.5 ** v["delta"] * 1.5 ** v["nu"])
    loss = law.evaluate(v, row)
    np.testing.assert_allclose(loss, v["n"] / n + v["d"] / d + v["eps"] + noise, rtol=1e-12)
    assert loss.argmin() == 1


def test_kaplan_with_ouyangs_constants_is_his_equation() -> None:
    law = get("kaplan")
    table = example_table()
    n, d = table["n_params"].to_numpy(), table["tokens"].to_numpy()
    written = ((4.74e19 / n) ** (0.045 / 0.399) + 7.63e10 / d) ** 0.399
    np.testing.assert_allclose(law.evaluate(law.published[0].values, table), written, rtol=1e-12)


def test_kumar_training_counts_effective_parameters() -> None:
    table = example_table()
    values = {**get("chinchilla").published[0].values, "gamma_w": 2.6745}
    share = 1 - np.exp(-table["bits"] / 2.6745)
    smaller = table.assign(n_params=table["n_params"] * share)
    np.testing.assert_allclose(
        get("kumar_training").evaluate(values, table),
        get("chinchilla").evaluate(values, smaller),
        rtol=1e-12,
    )


def test_cao_and_zhou_are_their_papers_products() -> None:
    table = example_table()
    cao = {"C": 0.3, "A": 2.0, "gamma_N": 0.2, "gamma_c": 0.4, "d": 9.0}
    written = 0.3 * np.exp(2 * table["quantized_share"]) * table["n_params"] ** -0.2
    written *= (table["group_size"] + 9) ** 0.4
    np.testing.assert_allclose(get("cao").evaluate(cao, table), written, rtol=1e-12)
    zhou = get("zhou")
    values = {"A": 700.0, **zhou.published[0].values}
    written = 700 * table["n_params"] ** -0.359 * np.log2(table["bits"]) ** -1.067
    written *= np.log2(table["calibration_samples"]) ** -0.032 * table["group_size"] ** 0.073
    np.testing.assert_allclose(zhou.evaluate(values, table), written, rtol=1e-12)


def test_quest_constants_predict_the_shipped_runs() -> None:
    law = get("quest")
    runs = datasets.load("quest_qat").query(QUEST_RUNS)
    assert len(runs) == 52
    missed = np.log(runs["loss_q"] / law.evaluate(law.published[0].values, runs))
    assert np.abs(missed).max() < 0.02
    assert np.abs(missed).median() < 0.005


def test_a_format_without_a_multiplier_is_outside_the_law() -> None:
    factor = effective("bits", (2.0, 3.0), "alpha", lossless=8.0)
    value = factor.value(np.array([[0.5, -1.0, -0.3]]), {"bits": np.array([2.0, 3.0, 5.0, 8.0])})
    np.testing.assert_allclose(value, [[0.5, 0.15, np.nan, 0.0]])


@pytest.mark.parametrize("name", ["size_exponential", "size_power"])
def test_size_laws_on_gguf_models_are_least_squares_on_logs(name) -> None:
    rows = datasets.load("gguf_kld").query(
        "family in ('Qwen3.5', 'Qwen3.6') and architecture == 'dense' and status == 'ok' "
        "and 2 <= bits_per_weight <= 7 and kl > 0"
    )
    made = fit(rows, get(name), random=(), likelihood="gaussian", interval="model", floor=None)
    bits = (
        rows["bits_per_weight"] if name == "size_exponential" else np.log(rows["bits_per_weight"])
    )
    x = np.column_stack([np.ones(len(rows)), -np.log(rows["n_params"]), -bits])
    y = np.log(rows["kl"].to_numpy())
    (k, alpha, slope), *_ = np.linalg.lstsq(x, y, rcond=None)
    shape = 1 / slope if name == "size_exponential" else slope
    np.testing.assert_allclose(list(made.values.values()), [np.exp(k), alpha, shape], rtol=1e-6)
    misfit = y - np.log(made.center(rows))
    assert 1 - misfit @ misfit / ((y - y.mean()) ** 2).sum() > 0.95


def test_drop_sum_adds_the_same_for_a_decay_however_long_the_run() -> None:
    law = get("drop_sum")
    values = {"k": 1.0, "alpha": 0.0, "gamma": 0.0, "s": 0.0, "beta": 0.1, "B": 5.0}
    table = pd.DataFrame({"tokens": [1e10, 1e12] * 2, "lr": [1e-3] * 2 + [2.5e-4] * 2})
    table = table.assign(n_params=1e8, bits=4.0, lr_peak=1e-3)
    stable, decayed = law.evaluate(values, table).reshape(2, 2)
    np.testing.assert_allclose(stable, [1e10**0.1, 1e12**0.1])
    np.testing.assert_allclose(decayed - stable, 5.0 * 0.75)


def test_chinchilla_is_the_plain_sum() -> None:
    law = get("chinchilla")
    values = law.published[0].values
    table = example_table()
    n, d = table["n_params"].to_numpy(), table["tokens"].to_numpy()
    plain = values["E"] + values["A"] / n ** values["alpha"] + values["B"] / d ** values["beta"]
    np.testing.assert_allclose(law.evaluate(values, table), plain, rtol=1e-12)


@given(
    k=st.floats(1e-3, 1e3),
    exponents=st.tuples(*[st.floats(-3, 3)] * 3),
    factor=st.floats(1e-3, 1e3),
)
@settings(max_examples=50, deadline=None)
def test_a_power_law_absorbs_a_change_of_units(k, exponents, factor) -> None:
    law = get("ouyang")
    beta, alpha, gamma = exponents
    table = example_table()
    values = {"k": k, "beta": beta, "alpha": alpha, "gamma": gamma}
    rescaled = {**values, "k": k * factor**alpha}
    in_other_units = table.assign(n_params=table["n_params"] * factor)
    np.testing.assert_allclose(
        law.evaluate(rescaled, in_other_units), law.evaluate(values, table), rtol=1e-9
    )


@pytest.mark.parametrize("name", sorted(LAWS))
def test_a_law_survives_json(name: str) -> None:
    law = get(name).with_factors(offset("source", ("a", "b", "c")))
    again = from_spec(json.loads(json.dumps(law.spec())))
    theta = np.array([[p.internal(p.starts[0]) for p in law.parameters]]) + 0.1
    data = columns_of(law, example_table())
    np.testing.assert_array_equal(again.location(theta, data), law.location(theta, data))
    assert again.names == law.names
    assert again.latex == law.latex


def test_offsets_average_to_one_and_an_unseen_level_is_average() -> None:
    factor = offset("source", ("a", "b", "c"))
    theta = np.array([[0.3, -0.8]])
    value = factor.value(theta, {"source": np.array(["a", "b", "c", "never seen"])})
    np.testing.assert_allclose(value, [[0.3, -0.8, 0.5, 0.0]])
    assert value[0, :3].sum() == pytest.approx(0.0)


def test_columns_without_a_symbol_are_written_in_full() -> None:
    law = Law("x", "relative_delta", (power("model_loss", "lambda"), growth("bits", "gamma")))
    assert law.formula == "relative_delta = model_loss^λ · e^γ P"
    assert law.latex == r"\mathrm{relative\_delta} = \mathrm{model\_loss}^{\lambda}\,e^{\gamma P}"


def test_published_constants_are_those_of_the_same_law_and_target() -> None:
    law = get("ouyang")
    assert published(law.with_factors(offset("source", ("a", "b")))) == law.published
    assert not published(get("ouyang", "kl"))
    assert not published(Law("ouyang", "delta_loss", law.factors[:3]))


def test_an_unknown_law_is_named_with_the_nearest() -> None:
    with pytest.raises(FitError, match="no law named 'ouyan'.*Did you mean 'ouyang'"):
        get("ouyan")


def test_an_unknown_factor_in_a_file_is_named() -> None:
    with pytest.raises(FitError, match="unknown factor 'magic'"):
        from_spec({"name": "x", "target": "delta_loss", "factors": [{"kind": "magic"}]})
