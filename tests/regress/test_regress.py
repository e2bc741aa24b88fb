"""Regressions: estimates of statsmodels, honest intervals, unseen levels and named mistakes."""

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
import statsmodels.formula.api as smf

from qscale import datasets
from qscale.errors import FitError, TableError
from qscale.predict import outside, predict
from qscale.regress import KINDS, regress
from qscale.regress.inputs import parse
from qscale.regress.models import fit_linear, sandwich
from qscale.validate import held_out
from qscale.validate.splits import leave_one_out
from tests.simulations import simulate

FORMULA = "np.log(delta_loss) ~ np.log(bits) + np.log(n_params) + np.log(tokens) + method"


@pytest.fixture(scope="module")
def table():
    """24 runs of two methods, of which one loses half as much."""
    frame = simulate()
    frame["method"] = np.where(np.arange(len(frame)) % 2, "rtn", "gptq")
    frame.loc[frame["method"] == "gptq", "delta_loss"] *= 0.5
    return frame


@pytest.fixture(scope="module")
def ols(table):
    return regress(table, kind="ols")


def test_ols_is_statsmodels_with_cluster_robust_errors(table, ols) -> None:
    codes = pd.factorize(table["run"])[0]
    direct = smf.ols(FORMULA, table).fit(cov_type="cluster", cov_kwds={"groups": codes})
    found = ols.parameters()
    assert sorted(found["estimate"]) == pytest.approx(sorted(direct.params), rel=1e-9)
    assert sorted(found["se"]) == pytest.approx(sorted(direct.bse), rel=1e-7)
    np.testing.assert_allclose(ols.center(table), np.exp(direct.fittedvalues))


def test_the_own_sandwich_is_that_of_statsmodels_for_least_squares(table) -> None:
    codes = pd.factorize(table["run"])[0]
    x = sm.add_constant(np.log(table[["bits", "n_params", "tokens"]]).to_numpy())
    direct = sm.OLS(np.log(table["delta_loss"]), x).fit()
    robust = direct.get_robustcov_results("cluster", groups=codes)
    own = sandwich(x.T @ x, x * direct.resid.to_numpy()[:, None], codes)
    np.testing.assert_allclose(own, robust.cov_params(), rtol=1e-7)


@pytest.mark.parametrize("kind", ["rlm", "mixedlm", "quantreg"])
def test_other_linear_kinds_are_those_of_statsmodels(table, kind) -> None:
    direct = {
        "rlm": lambda: smf.rlm(FORMULA, table).fit(),
        "mixedlm": lambda: smf.mixedlm(FORMULA, table, groups=table["run"]).fit(),
        "quantreg": lambda: smf.quantreg(FORMULA, table).fit(q=0.5, max_iter=5000),
    }[kind]()
    found = regress(table, kind=kind)
    expected = getattr(direct, "fe_params", direct.params)
    assert sorted(found.parameters()["estimate"]) == pytest.approx(sorted(expected), rel=1e-6)
    if kind == "mixedlm":
        assert sorted(found.parameters()["se"]) == pytest.approx(sorted(direct.bse_fe), rel=1e-6)


@pytest.mark.parametrize("kind", ["rlm", "quantreg"])
def test_their_clustered_errors_match_repeated_sampling(kind) -> None:
    found = []
    for seed in range(60):
        frame = simulate(runs=40, seed=seed)
        x = sm.add_constant(np.log(frame[["bits", "n_params", "tokens"]].to_numpy()))
        codes = pd.factorize(frame["run"])[0]
        found.append(fit_linear(kind, x, np.log(frame["delta_loss"].to_numpy()), codes)[0])
    claimed = np.mean([np.sqrt(model.cov[2, 2]) for model in found])
    assert claimed == pytest.approx(np.std([model.beta[2] for model in found]), rel=0.3)


@pytest.mark.parametrize("kind", ["ols", pytest.param("boosting", marks=pytest.mark.slow)])
def test_intervals_of_new_runs_cover_as_promised(kind) -> None:
    inside = []
    for seed in range(30):
        options = {} if kind == "ols" else {"formula": "bits + n_params + tokens"}
        found = regress(simulate(seed=seed), kind=kind, **options)
        fresh = simulate(runs=40, seed=1000 + seed, prefix="new")
        predicted = predict(found, fresh.drop(columns="delta_loss"))
        hits = fresh["delta_loss"].between(predicted["low_90"], predicted["high_90"])
        inside.append(hits.mean())
    assert 0.85 <= np.mean(inside) <= 0.95


def test_after_one_row_of_each_new_run_the_others_are_surer_and_still_covered() -> None:
    inside, ratio = [], []
    for seed in range(12):
        found = regress(simulate(runs=30, seed=seed), kind="ols")
        fresh = simulate(runs=20, seed=1000 + seed, prefix="new")
        first = fresh["bits"] == 2.0
        rest = fresh[~first].reset_index(drop=True)
        before, after = (predict(one, rest) for one in (found, found.given(fresh[first])))
        inside.append(rest["delta_loss"].between(after["low_90"], after["high_90"]).mean())
        widths = [np.log(p["high_90"] / p["low_90"]).mean() for p in (before, after)]
        ratio.append(widths[1] / widths[0])
    assert 0.85 <= np.mean(inside) <= 0.95
    assert np.mean(ratio) < 0.6


def test_a_measured_row_moves_predictions_by_its_shrunken_surprise(ols) -> None:
    row = pd.DataFrame({"n_params": [1e9], "tokens": [1e12], "bits": [3.0], "method": ["rtn"]})
    base = predict(ols, row)["delta_loss"][0]
    moved = predict(ols.given(row.assign(delta_loss=2 * base)), row)["delta_loss"][0]
    between, within = ols.effects.variances[0], ols.effects.residual
    assert np.log(moved / base) == pytest.approx(np.log(2) * between / (between + within))


def test_extrapolation_widens_a_linear_interval(ols) -> None:
    row = pd.DataFrame({"n_params": [1e10, 1e14], "tokens": 1e12, "bits": 3.0, "method": "rtn"})
    predicted = predict(ols, row)
    width = np.log(predicted["high_90"] / predicted["low_90"])
    inside, far = ols.own_variance(row)
    scatter = ols.effects.variances[0] + ols.effects.residual
    assert inside < ols.typical < far
    assert (width[1] / width[0]) ** 2 == pytest.approx((scatter + far - ols.typical) / scatter)


@pytest.mark.parametrize("kind", ["ols", "forest"])
def test_an_unseen_or_absent_method_is_the_average_of_the_known(table, ols, kind) -> None:
    found = ols if kind == "ols" else regress(table, kind=kind, formula="bits + n_params + method")
    row = pd.DataFrame({"n_params": [1e9], "tokens": [1e12], "bits": [3.0]})
    known = np.log([predict(found, row.assign(method=m))["delta_loss"][0] for m in ("gptq", "rtn")])
    unseen = predict(found, row.assign(method="new"))
    assert np.log(unseen["delta_loss"][0]) == pytest.approx(known.mean())
    pd.testing.assert_frame_equal(predict(found, row), unseen.drop(columns="method"))
    both = predict(
        found, pd.concat([row.assign(method="new"), row.assign(method="rtn")], ignore_index=True)
    )
    assert np.log(both["delta_loss"][1]) == pytest.approx(known[1])
    widths = np.log(both["high_90"] / both["low_90"])
    assert widths[0] > widths[1]
    assert outside(found, row.assign(method="new")) == [
        "method new was not among the fitted rows (gptq, rtn)."
    ]


def test_a_forest_is_the_same_for_the_same_seed(table) -> None:
    first, again, other = (
        regress(table.head(12), kind="forest", seed=seed).center(table) for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_a_forest_takes_the_inputs_of_the_paper_where_the_table_has_them() -> None:
    rng = np.random.default_rng(0)
    frame = simulate().assign(
        method=np.tile(["rtn", "gptq"], 36), fmt=np.repeat(["int", "mxint"], 36)
    )
    for column in ("loss_fp", "sqnr_db", "hessian_trace"):
        frame[column] = rng.normal(3, 1, len(frame))
    terms = regress(frame, kind="forest").main.inputs.terms
    assert {t.removeprefix("log(").removesuffix(")") for t in terms} == {
        "n_params", "loss_fp", "bits", "sqnr_db", "hessian_trace", "method", "fmt"
    }  # fmt: skip
    assert "sqnr_db" in terms


def test_a_process_learns_what_its_law_leaves_over() -> None:
    frame = simulate(runs=30, between=0.02)
    frame["delta_loss"] *= np.exp(0.5 * np.sin(np.log(frame["n_params"])))
    found = regress(frame, kind="gp", formula="log(n_params)")
    fresh = simulate(runs=30, between=0.02, seed=5, prefix="new")
    fresh["delta_loss"] *= np.exp(0.5 * np.sin(np.log(fresh["n_params"])))
    law = found.main.base.location(fresh)
    errors = [
        np.abs(np.log(fresh["delta_loss"]) - guess).mean()
        for guess in (law, np.log(found.center(fresh)))
    ]
    assert errors[1] < 0.5 * errors[0]


def test_the_mean_is_surer_than_a_new_checkpoint(table) -> None:
    for kind in ("ols", "boosting"):
        found = regress(table, kind=kind)
        mean, new = (predict(found, table, kind=k) for k in ("mean", "new_checkpoint"))
        spans = [np.log(p["high_90"] / p["low_90"]).mean() for p in (mean, new)]
        assert 0 < spans[0] < spans[1]


def test_inputs_that_say_nothing_new_are_left_out_with_a_note(table) -> None:
    frame = table.assign(lr_peak=1 / table["n_params"])
    found = regress(frame, kind="ols")
    assert "log(lr_peak)" not in found.main.inputs.names
    assert found.notes == ("log(lr_peak) says nothing that the inputs before it do not; left out.",)


def test_interactions_and_numbers_as_categories(table) -> None:
    found = regress(table, kind="ols", formula="log(n_params) * method + C(bits)")
    direct = smf.ols("np.log(delta_loss) ~ np.log(n_params) * method + C(bits)", table).fit()
    assert sorted(found.parameters()["estimate"]) == pytest.approx(sorted(direct.params), rel=1e-7)


def test_held_out_families_are_scored() -> None:
    frame = datasets.load("published_ptq")
    frame = frame[frame["method"] == "rtn"].reset_index(drop=True)
    split = leave_one_out(frame, "family")[0]
    formula = "log(bits) + log(n_params) + log(loss_fp)"
    errors = held_out(
        frame, lambda rows: regress(rows, kind="ols", formula=formula), split, target="delta_loss"
    )
    rest = frame[split.training & (frame["delta_loss"] > 0) & (frame["status"] == "ok")]
    text = "np.log(delta_loss) ~ np.log(bits) + np.log(n_params) + np.log(loss_fp)"
    direct = smf.ols(text, rest).fit().predict(frame.loc[errors["row"]])
    np.testing.assert_allclose(errors["predicted"], np.exp(direct), rtol=1e-7)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"kind": "tree"}, FitError, "unknown regression 'tree'.*ols.*forest"),
        ({"kind": "ols", "law": "ouyang"}, FitError, "only gp takes one"),
        ({"kind": "ols", "formula": "log(size)"}, TableError, "no column 'size'"),
        ({"kind": "ols", "formula": "exp(bits)"}, FitError, "cannot read 'exp.bits.'"),
        ({"kind": "ols", "formula": "bits + "}, FitError, "cannot read ''"),
        ({"kind": "ols", "formula": "kl ~ bits"}, FitError, "left side is always log.delta_loss"),
        ({"kind": "ols", "formula": "delta_loss"}, FitError, "cannot be predicted from itself"),
        ({"kind": "ols", "target": "kl"}, TableError, "no column 'kl'"),
        ({"kind": "ols", "cluster": "batch"}, TableError, "no column 'batch' to cluster by"),
        ({"kind": "ols", "where": "run in ['run0', 'run1']"}, FitError, "2 distinct values of run"),
        ({"kind": "ols", "where": "run == 'run0'"}, FitError, "1 distinct value of run"),
        ({"kind": "gp", "law": "nothing"}, FitError, "nothing"),
    ],
)
def test_mistakes_are_named(options, error, message) -> None:
    with pytest.raises(error, match=message):
        regress(simulate(), **options)


def test_a_value_without_a_logarithm_is_named(table) -> None:
    frame = table.assign(step=np.arange(len(table)))
    with pytest.raises(TableError, match="column 'step' has the value 0.*instead of log.step"):
        regress(frame, kind="ols", formula="log(step) + log(bits)")


def test_inputs_missing_in_a_prediction_are_named(ols) -> None:
    row = pd.DataFrame({"n_params": [1e9, 1e9], "tokens": [1e12, np.nan], "bits": [3.0, 3.0]})
    with pytest.raises(TableError, match="prediction: row 2 has no value in column 'tokens'"):
        predict(ols, row)
    with pytest.raises(TableError, match="prediction: no column 'bits'"):
        predict(ols, row.drop(columns="bits"))
    with pytest.raises(FitError, match="row 1, delta_loss must be above zero"):
        ols.given(row.head(1).assign(delta_loss=-1.0))


def test_runs_with_one_row_have_no_spread_to_update() -> None:
    frame = simulate().drop_duplicates("run").reset_index(drop=True)
    found = regress(frame, kind="ols")
    assert found.notes == ("No spread of run: no value of run has two rows.",)
    with pytest.raises(FitError, match="no spread of run to update"):
        found.given(frame.head(1))


def test_set_aside_rows_are_counted(table) -> None:
    frame = table.assign(status="ok", lr_peak=10.0 ** -np.arange(1, len(table) + 1))
    frame.loc[0, "status"] = "collapsed"
    frame.loc[[1, 2], "lr_peak"] = np.nan
    found = regress(frame, kind="ols")
    assert {s.reason: s.rows for s in found.data.set_aside} == {
        "status is collapsed": 1,
        "lr_peak is not known": 2,
    }
    assert found.data.rows == len(table) - 3


def test_every_kind_has_a_name_and_predicts_the_order_of_bits() -> None:
    frame = simulate(runs=9)
    rows = pd.DataFrame({"n_params": 1e9, "tokens": 1e11, "bits": [2.0, 4.0]})
    for kind in KINDS:
        found = regress(frame, kind=kind, formula="log(bits) + log(n_params)")
        assert found.name == kind
        low, high = found.center(rows)
        assert low > high


def test_products_are_spelled_out() -> None:
    assert parse("a * b + log(c):a + 1", "y") == ("a", "b", "a:b", "log(c):a")


def test_the_summary_says_what_the_regression_says(table, ols) -> None:
    text = str(ols.summary(0.8))
    assert all(len(line) <= 84 for line in text.splitlines() if not line.startswith("Note"))
    assert str(ols.data.rows) in text
    assert f"×{np.exp(ols.median_error):.3g}" in text
    assert "[0.1]" in text
    assert "[0.9]" in text
    line = next(line for line in text.splitlines() if line.startswith("log(bits) "))
    expected = ols.parameters(0.8).loc["log(bits)", ["estimate", "se", "low", "high"]]
    assert [float(cell) for cell in line.split()[1:]] == pytest.approx(expected, rel=1e-3)
    assert ols.params["log(bits)"] == expected["estimate"]
    assert ols.bse["log(bits)"] == expected["se"]
    assert ols.conf_int(0.2).loc["log(bits)"].tolist() == [expected["low"], expected["high"]]
    pd.testing.assert_frame_equal(ols.predict(table.head(3)), predict(ols, table.head(3)))
    assert ols._repr_html_().count("<table>") == 2


def test_the_summary_of_a_forest_has_no_coefficients(table) -> None:
    forest = regress(table, kind="forest")
    text = str(forest.summary())
    assert "std err" not in text
    assert f"inputs: {forest.data.options['formula']}." in text
    assert forest._repr_html_().count("<table>") == 1
    with pytest.raises(FitError, match="forest has no coefficients"):
        forest.conf_int()


def test_columns_that_the_default_inputs_leave_out_are_named() -> None:
    table = simulate().assign(sqnr_db=np.nan, fmt="int")
    table.loc[:40, "sqnr_db"] = np.linspace(10, 20, 41)
    left = "left out of the default inputs: "
    (note,) = regress(table, kind="forest").notes
    assert note.startswith(
        left + "tokens (not among those of forest), sqnr_db (known in 41 of 72 rows); "
    )
    (note,) = regress(table, kind="ols").notes
    assert note.startswith(left + "sqnr_db (known in 41 of 72 rows); ")
    assert not regress(table, kind="ols", formula="log(bits)").notes
    assert not regress(table.drop(columns="sqnr_db"), kind="ols").notes
