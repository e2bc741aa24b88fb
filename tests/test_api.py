"""The Python API: a law's fit, its summary and figures, and the scikit-learn regressor."""

import json
import pickle
import subprocess
import sys
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
from qscale.errors import FitError
from qscale.estimator import LawRegressor
from qscale.fit import fit, load
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


# ----------------------------------------------------------------------------- figures of a fit
@pytest.fixture(scope="module")
def profiled():
    return get("ouyang").fit(simulate(), interval="profile")


def lines_of(ax):
    """Lines of axes as pairs of arrays, those that are straight across or up told apart."""
    drawn = [np.asarray(line.get_xydata(), dtype=float) for line in ax.lines]
    upright = [line[0, 0] for line in drawn if np.ptp(line[:, 0]) == 0]
    flat = [line[0, 1] for line in drawn if np.ptp(line[:, 1]) == 0]
    curves = [line for line in drawn if np.ptp(line, axis=0).all()]
    return curves, upright, flat


@pytest.mark.parametrize("parameter", ["k", "beta", "gamma"])
def test_a_profile_marks_the_profile_interval(profiled, parameter) -> None:
    ((curve,), (estimate, *ends), (allowed,)) = lines_of(profiled.plot.profile(parameter))
    interval = profiled.conf_int().loc[parameter]
    np.testing.assert_allclose(sorted(ends), interval[["low", "high"]], rtol=1e-5)
    assert estimate == profiled.params[parameter]
    at_ends = np.interp(ends, curve[:, 0], curve[:, 1])  # the curve has points there
    np.testing.assert_allclose(at_ends, allowed, rtol=1e-4)
    lowest = curve[np.argmin(curve[:, 1])]
    np.testing.assert_allclose(lowest, [estimate, 0.0], rtol=1e-6, atol=1e-6)


def test_a_profile_of_least_squares_is_that_of_its_sum_of_squares() -> None:
    """Without random effects the rise is (beta - estimate)^2 / se^2, and the ends are t's."""
    frame = simulate()
    made = get("ouyang").fit(frame, random=(), likelihood="gaussian", interval="model")
    (curve,), _, _ = lines_of(made.plot.profile("beta", level=0.95))
    z = (curve[:, 0] - made.params["beta"]) / made.bse["beta"]
    np.testing.assert_allclose(curve[:, 1], z**2, rtol=1e-5, atol=1e-7)
    _, (_, *ends), _ = lines_of(made.plot.profile("beta", level=0.95))
    np.testing.assert_allclose(ends, made.conf_int(0.05).loc["beta"], rtol=1e-5)


def test_points_and_residuals_are_those_of_the_predictions(fitted) -> None:
    frame = simulate()
    points = np.concatenate([p.get_offsets() for p in fitted.plot.fitted().collections[:3]])
    order = np.lexsort((points[:, 0], points[:, 1]))
    wanted = np.column_stack([fitted.center(frame), frame["delta_loss"]])
    wanted = wanted[np.lexsort((wanted[:, 0], wanted[:, 1]))]
    np.testing.assert_allclose(points[order], wanted, rtol=1e-12)
    (shown, *_) = fitted.plot.residuals("bits").collections
    ratio = frame["delta_loss"] / fitted.center(frame)
    np.testing.assert_allclose(shown.get_offsets(), np.column_stack([frame["bits"], ratio]))


def test_curves_are_predictions_with_their_band(fitted) -> None:
    ax = fitted.plot.curves("tokens", bits=[2, 4], level=0.8)
    median = fitted.data.medians["n_params"]
    for line, band, bits in zip(ax.lines, ax.collections, (2, 4), strict=True):
        x, y = line.get_data()
        assert (x[0], x[-1]) == pytest.approx(fitted.data.ranges["tokens"])
        frame = pd.DataFrame({"tokens": x, "n_params": median, "bits": float(bits)})
        wanted = fitted.predict(frame, levels=(0.8,))
        np.testing.assert_allclose(y, wanted["delta_loss"], rtol=1e-12)
        edges = band.get_paths()[0].vertices[:, 1]
        assert set(np.round(np.log(wanted["low_80"]), 9)) <= set(np.round(np.log(edges), 9))
        assert set(np.round(np.log(wanted["high_80"]), 9)) <= set(np.round(np.log(edges), 9))
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["bits 2", "bits 4"]
    given = fitted.plot.curves("bits", n_params=7e9, tokens=1e12)
    one = pd.DataFrame({"n_params": [7e9], "tokens": 1e12, "bits": 2.0})
    assert given.lines[0].get_ydata()[0] == pytest.approx(fitted.predict(one)["delta_loss"][0])
    assert "n_params 7B" in given.get_xlabel()


def test_a_fit_from_a_file_takes_its_table(profiled, tmp_path) -> None:
    profiled.save(tmp_path / "fit.json")
    read = load(tmp_path / "fit.json")
    with pytest.raises(FitError, match=r"fit\.plot\.fitted\(table\)"):
        read.plot.fitted()
    table = simulate()
    assert len(read.plot.fitted(table).lines) == 1
    _, there, _ = lines_of(read.plot.profile("beta", table))
    _, here, _ = lines_of(profiled.plot.profile("beta"))
    np.testing.assert_allclose(there, here, rtol=1e-7)
    with pytest.raises(FitError, match="does not give this fit again"):
        read.plot.profile("beta", simulate(seed=1))
    with pytest.raises(FitError, match="does not give this fit again"):
        profiled.given(simulate(runs=1, prefix="new")).plot.profile("beta")


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda plot: plot.profile("betta"), "no parameter 'betta'.*Did you mean 'beta'"),
        (lambda plot: plot.profile("beta", level=90), "between 0 and 1. Got 90"),
        (lambda plot: plot.curves("token"), "does not use the column 'token'; it uses: "),
        (lambda plot: plot.curves("tokens", bits=[2], n_params=[1e9]), "Got bits, n_params"),
        (lambda plot: plot.curves("tokens", lr=1), "does not use the column 'lr'"),
        (lambda plot: plot.curves("bits", level=2), "between 0 and 1. Got 2"),
    ],
)
def test_mistakes_in_figures_are_named(fitted, ask, message) -> None:
    with pytest.raises(FitError, match=message):
        ask(fitted.plot)


def test_a_held_parameter_has_no_profile() -> None:
    held = get("ouyang").fit(simulate(), fixed={"beta": 0.4}, interval="sandwich")
    with pytest.raises(FitError, match=r"beta was held at 0\.4"):
        held.plot.profile("beta")


def test_fitting_loads_no_plotting() -> None:
    code = (
        "import sys\nfrom qscale.laws import get\nfrom tests.simulations import simulate\n"
        "made = get('ouyang').fit(simulate(), interval='sandwich')\n"
        "assert 'matplotlib' not in sys.modules\n"
        "made.plot\nassert 'matplotlib' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
