"""The Python API: a law's fit, its summary and figures, and the scikit-learn regressor."""

import json
import pickle
import warnings
from html.parser import HTMLParser

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from sklearn.exceptions import SkipTestWarning
from sklearn.model_selection import GridSearchCV, GroupKFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import check_estimator

from qscale import datasets
from qscale.estimator import LawRegressor
from qscale.fit import fit
from qscale.fit.storage import from_json
from qscale.laws import get
from qscale.predict import predict
from qscale.report import plots
from tests.simulations import TRUE, simulate

NOT_FOR_POWERS = {
    "check_fit_score_takes_y": "its data hold a zero, which has no logarithm",
    "check_regressors_train": "its data hold a zero, which has no logarithm",
    "check_estimators_dtypes": "16 of its 20 rows hold a zero; too few are left for six parameters",
}


@pytest.fixture(scope="module")
def fitted():
    return get("ouyang").fit(simulate(), interval="sandwich")


# ------------------------------------------------------------------------------------- results
def test_a_law_fits_itself(fitted) -> None:
    again = fit(simulate(), get("ouyang"), interval="sandwich")
    np.testing.assert_array_equal(fitted.theta, again.theta)
    assert fitted.params.to_dict() == pytest.approx(fitted.values)
    np.testing.assert_array_equal(fitted.bse, fitted.parameters()["se"])
    wide, narrow = fitted.conf_int(0.05), fitted.conf_int(0.5)
    assert (wide["low"] < narrow["low"]).all()
    assert (narrow["high"] < wide["high"]).all()
    row = simulate(seed=1).head(3)
    pd.testing.assert_frame_equal(fitted.predict(row), predict(fitted, row))
    pd.testing.assert_frame_equal(
        fitted.predict(row, levels=(0.8,)), predict(fitted, row, levels=(0.8,))
    )


def test_the_summary_says_what_the_fit_says(fitted) -> None:
    text = str(fitted.summary())
    assert all(len(line) <= 84 for line in text.splitlines())
    line = next(line for line in text.splitlines() if line.startswith("beta "))
    shown = [float(cell) for cell in line.split()[1:]]
    expected = fitted.parameters().loc["beta", ["estimate", "se", "low", "high"]]
    np.testing.assert_allclose(shown, expected.to_numpy(dtype=float), rtol=1e-3)
    assert "[0.05]" in text
    assert "[0.025]" in str(fitted.summary(0.95))
    assert "converged" in text


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open, self.cells = [], []

    def handle_starttag(self, tag, _attrs) -> None:
        self.open.append(tag)

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data) -> None:
        self.cells.append(data)


def test_a_notebook_shows_the_summary_as_a_table(fitted) -> None:
    page = Tags()
    page.feed(fitted._repr_html_())
    assert page.open == []
    assert f"{fitted.values['beta']:.4g}" in page.cells
    assert "status" in page.cells


def test_a_parameter_without_an_interval_is_a_dash() -> None:
    held = get("ouyang").fit(simulate(), fixed={"beta": TRUE["beta"]}, interval="sandwich")
    line = next(text for text in str(held.summary()).splitlines() if text.startswith("beta "))
    assert line.split()[2:] == ["-", "-", "-"]


def test_a_fit_comes_back_from_its_json(fitted) -> None:
    again = from_json(fitted.to_json())
    np.testing.assert_array_equal(again.theta, fitted.theta)
    assert json.loads(again.to_json()) == json.loads(fitted.to_json())


def test_figures_show_the_rows_that_were_fitted() -> None:
    table = datasets.load("published_ptq")
    rtn = get("kumar").fit(table, where="method == 'rtn'")
    ax = plots.predicted(rtn, table)
    observed = np.concatenate([points.get_offsets()[:, 1] for points in ax.collections])
    wanted = plots.used(rtn, table)["delta_loss"]
    assert set(np.round(wanted, 9)) <= set(np.round(observed, 9))
    assert plots.residuals(rtn, table, "bits").get_title("left") == "bits"
    assert len(plots.used(rtn, table)) == rtn.data.rows
    plt.close("all")


# ---------------------------------------------------------------------------------- regressor
@pytest.mark.parametrize(("law", "failing"), [("growth", {}), ("power", NOT_FOR_POWERS)])
def test_scikit_learn_accepts_the_regressor(law, failing) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SkipTestWarning)
        found = check_estimator(LawRegressor(law), expected_failed_checks=failing, on_skip=None)
    by_status = pd.Series([entry["status"] for entry in found]).value_counts()
    assert by_status["passed"] >= 45
    assert set(by_status.index) <= {"passed", "xfail", "skipped"}
    failed = {entry["check_name"] for entry in found if entry["status"] == "xfail"}
    assert failed == set(failing)


def test_the_regressor_is_the_fit() -> None:
    table = simulate()
    direct = fit(table, get("ouyang"), interval="model", floor=None)
    model = LawRegressor("ouyang", cluster="run").fit(table, table["delta_loss"])
    assert model.fit_.values == pytest.approx(direct.values)
    fresh = simulate(seed=1)
    np.testing.assert_allclose(model.predict(fresh), direct.center(fresh))
    band = model.predict_interval(fresh)
    frame = predict(direct, fresh.drop(columns="run"))
    np.testing.assert_allclose(band, frame[["low_90", "high_90"]])
    assert model.columns_ == get("ouyang").columns
    assert model.score(fresh, fresh["delta_loss"]) > 0.8


def test_an_array_has_the_columns_of_the_law_in_their_order() -> None:
    table = simulate()
    columns = list(get("ouyang").columns)
    named = LawRegressor("ouyang").fit(table, table["delta_loss"])
    plain = LawRegressor(get("ouyang")).fit(
        table[columns].to_numpy(), table["delta_loss"].to_numpy()
    )
    np.testing.assert_allclose(
        named.predict(table), plain.predict(table[columns].to_numpy()), rtol=1e-9
    )
    assert named.feature_names_in_.tolist() == columns


def test_powers_of_every_column_are_found() -> None:
    rng = np.random.default_rng(0)
    x = pd.DataFrame({"a": rng.uniform(1, 9, 200), "b": rng.uniform(1, 9, 200)})
    y = 3 * x["a"] ** 0.7 * x["b"] ** -1.2 * np.exp(rng.normal(0, 0.01, 200))
    found = LawRegressor("power").fit(x, y).fit_.values
    assert found == pytest.approx({"k": 3, "a_a": 0.7, "a_b": -1.2}, rel=0.02)


def test_it_works_in_pipelines_searches_and_cross_validation() -> None:
    table = simulate()
    model = make_pipeline(FunctionTransformer(), LawRegressor("ouyang"))
    scores = cross_val_score(
        model, table, table["delta_loss"], groups=table["run"], cv=GroupKFold(4)
    )
    assert scores.mean() > 0.6
    search = GridSearchCV(LawRegressor(), {"law": ["kumar", "ouyang"]}, cv=3)
    search.fit(table[["tokens", "n_params", "bits"]], table["delta_loss"])
    assert np.isfinite(search.cv_results_["mean_test_score"]).all()
    chosen = LawRegressor(search.best_params_["law"]).fit(table, table["delta_loss"])
    np.testing.assert_allclose(
        search.predict(table[["tokens", "n_params", "bits"]]), chosen.predict(table)
    )


def test_it_pickles_with_a_law_and_a_fit() -> None:
    table = simulate()
    model = LawRegressor(get("ouyang")).fit(table, table["delta_loss"])
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again.predict(table), model.predict(table))
    assert again.law.spec() == model.law.spec()


@pytest.mark.parametrize(
    ("options", "drop", "message"),
    [
        ({"law": "ouyan"}, (), "Did you mean 'ouyang'"),
        (
            {"law": "ouyang"},
            ("bits",),
            "X must have the columns tokens, n_params, bits. Got no bits",
        ),
        ({"law": "ouyang", "cluster": "site"}, (), "X must be a frame with the column 'site'"),
        ({"law": "ouyang", "fixed": {"zeta": 1.0}}, (), "zeta"),
    ],
)
def test_mistakes_are_value_errors(options, drop, message) -> None:
    table = simulate()
    with pytest.raises(ValueError, match=message):
        LawRegressor(**options).fit(table.drop(columns=list(drop)), table["delta_loss"])


def test_a_target_that_is_not_above_zero_is_refused_when_nothing_is_left() -> None:
    table = simulate()
    with pytest.raises(ValueError, match="not above zero"):
        LawRegressor("ouyang").fit(table, -table["delta_loss"])
