"""``qscale regress`` and what takes its files: predict, given, report; mistakes are one line."""

import json
import re

import numpy as np
import pandas as pd
import pytest

from qscale import table
from qscale.cli import main
from qscale.errors import FitError
from qscale.fit import fit
from qscale.laws import get
from qscale.load import load_fitted
from qscale.predict import outside, predict
from qscale.regress import regress
from tests.simulations import simulate

NEW = ("--n-params", "1e9", "--tokens", "1e12")


def rows_of_two_methods():
    frame = simulate()
    frame["method"] = np.where(np.arange(len(frame)) % 2, "rtn", "gptq")
    frame.loc[frame["method"] == "gptq", "delta_loss"] *= 0.5
    frame["sqnr_db"] = 6.0 * frame["bits"] + np.random.default_rng(0).normal(0, 1, len(frame))
    return frame


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("regress")
    frame = rows_of_two_methods()
    table.write(frame, place / "rows.csv")
    regress(frame, kind="ols", name="rows.csv").save(place / "ols.json")
    regress(frame, kind="forest", name="rows.csv").save(place / "forest.fit")
    fit(frame, get("ouyang"), name="rows.csv").save(place / "law.json")
    row = {"bits": [2.0], "method": ["rtn"], "delta_loss": [0.9], "run": ["mine"]}
    table.write(pd.DataFrame(row), place / "measured.csv")
    return place


@pytest.fixture
def data(folder, monkeypatch):
    monkeypatch.chdir(folder)
    return folder


def run(capsys, *arguments: str) -> str:
    main(list(arguments))
    return " ".join(capsys.readouterr().out.split())


def predicted(tmp_path, *arguments: str):
    main(["predict", *arguments, "-o", str(tmp_path / "out.csv"), "--force"])
    return table.read(tmp_path / "out.csv")


# ------------------------------------------------------------------------------------- fitting
def test_a_linear_kind_prints_its_coefficients_and_is_written(data, capsys, tmp_path) -> None:
    path = tmp_path / "ols.json"
    out = run(capsys, "regress", "rows.csv", "--kind", "ols", "-o", str(path))
    direct = regress(rows_of_two_methods(), kind="ols")
    assert "ols: log(delta_loss) ~ log(bits) + log(n_params) + log(tokens) + method" in out
    assert "72 rows of rows.csv in 24 clusters (run). No row was set aside." in out
    assert "Values of method: gptq, rtn." in out
    for name, row in direct.parameters().iterrows():
        assert f"{name} │ {row.estimate:.4g} │ {row.low:.4g} to {row.high:.4g}" in out
    assert f"median |log error| {direct.median_error:.3g};" in out
    pd.testing.assert_frame_equal(load_fitted(path).parameters(), direct.parameters())


def test_the_printed_error_is_that_of_least_squares_without_each_run() -> None:
    frame = simulate(runs=20)  # as many runs as parts: each is left out alone
    x = np.column_stack([np.ones(60), *np.log(frame[["bits", "n_params", "tokens"]].to_numpy()).T])
    y, errors = np.log(frame["delta_loss"].to_numpy()), []
    for name in frame["run"].unique():
        out = (frame["run"] == name).to_numpy()
        errors += list(y[out] - x[out] @ np.linalg.lstsq(x[~out], y[~out])[0])
    found = regress(frame, kind="ols")
    assert found.median_error == pytest.approx(np.median(np.abs(errors)), rel=1e-9)


def test_a_forest_says_how_far_off_it_is_and_nothing_more(data, capsys) -> None:
    out = run(capsys, "regress", "rows.csv", "--kind", "forest", "--where", "bits > 2")
    found = regress(rows_of_two_methods(), kind="forest", where="bits > 2")
    assert "forest: log(delta_loss) ~ log(n_params) + log(bits) + sqnr_db + method" in out
    assert "Set aside: 24 rows because not bits > 2." in out
    assert f"median |log error| {found.median_error:.3g};" in out
    assert "coefficient" not in out


def test_a_process_names_its_law_and_maps_columns(data, capsys, tmp_path) -> None:
    theirs, path = tmp_path / "theirs.csv", tmp_path / "gp.fit"
    pd.read_csv("rows.csv").head(18).rename(columns={"tokens": "D"}).to_csv(theirs, index=False)
    out = run(
        capsys, "regress", str(theirs), "--kind", "gp", "--law", "kumar", "--map", "tokens=D",
        "--formula", "log(n_params)", "-o", str(path),
    )  # fmt: skip
    assert "gp: log(delta_loss) ~ log(n_params), on what law kumar leaves over" in out
    assert load_fitted(path).data.options["mapping"] == {"tokens": "D"}
    assert "Regression gp" in run(capsys, "predict", str(path), *NEW)


# ---------------------------------------------------------------------------------- predicting
@pytest.mark.parametrize("name", ["ols.json", "forest.fit"])
def test_predict_gives_what_the_regression_gives(data, capsys, tmp_path, name) -> None:
    several = name == "ols.json"
    given = (*NEW, "--bits", "3", "--method", "rtn,gptq" if several else "rtn")
    given = given if several else (*given, "--set", "sqnr_db=18")
    found = predicted(tmp_path, name, *given)
    asked = pd.DataFrame(
        {"n_params": 1e9, "tokens": 1e12, "bits": 3.0, "method": ["rtn", "gptq"], "sqnr_db": 18.0}
    )
    direct = predict(load_fitted(name), asked if several else asked.head(1))
    assert found["method"].tolist() == direct["method"].tolist()
    columns = ["delta_loss", "low_50", "high_50", "low_90", "high_90"]
    pd.testing.assert_frame_equal(found[columns], direct[columns])
    capsys.readouterr()
    out = run(capsys, "predict", name, *given)
    assert f"Regression {name.partition('.')[0]} fitted on 72 rows of rows.csv." in out
    assert ("bits ┃ method" in out) == several
    assert ("sqnr_db 18" in out) != several
    for value in direct["delta_loss"]:
        assert f"{value:.3g} " in out


def test_a_method_left_open_is_averaged_and_said(data, capsys, tmp_path) -> None:
    out = run(capsys, "predict", "ols.json", *NEW, "--bits", "3")
    assert "Note: method is not given: the average of gptq, rtn is predicted" in out
    open_, each = (
        predicted(tmp_path, "ols.json", *NEW, "--bits", "3", *more)["delta_loss"]
        for more in ((), ("--method", "gptq,rtn"))
    )
    assert np.log(open_[0]) == pytest.approx(np.log(each).mean())
    capsys.readouterr()
    out = run(capsys, "predict", "ols.json", *NEW, "--method", "awq")
    assert "Note: method awq was not among the fitted rows (gptq, rtn)." in out
    assert "is not given" not in out


def test_bits_as_categories_are_predicted_one_by_one(data, capsys, tmp_path) -> None:
    path = tmp_path / "steps.json"
    main(["regress", "rows.csv", "--kind", "ols", "--formula", "C(bits)", "-o", str(path)])
    found = predicted(tmp_path, str(path), "--bits", "2,3,4")
    low, middle, high = found["delta_loss"]
    assert low > middle > high
    capsys.readouterr()
    assert "Note: bits 5 was not among the fitted rows (2, 3, 4)" in run(
        capsys, "predict", str(path), "--bits", "4,5"
    )
    assert outside(load_fitted(path), pd.DataFrame({"bits": [4.0]})) == []


@pytest.mark.parametrize("name", ["ols.json", "forest.fit", "law.json"])
def test_a_measured_row_moves_and_narrows_the_others(data, capsys, tmp_path, name) -> None:
    asked = (*NEW, "--bits", "3", "--method", "rtn")
    if name == "forest.fit":
        asked = (*asked, "--set", "sqnr_db=18")
        rows = pd.read_csv("measured.csv").assign(sqnr_db=12.0)
    else:
        rows = pd.read_csv("measured.csv").drop(columns="method")  # taken from the flag
    path = tmp_path / "rows.csv"
    rows.to_csv(path, index=False)
    before = predicted(tmp_path, name, *asked)
    after = predicted(tmp_path, name, *asked, "--given", str(path))
    complete = rows.assign(n_params=1e9, tokens=1e12, method="rtn")
    frame = before.drop(columns=[c for c in before if c[:3] in ("low", "hig", "del", "per")])
    direct = predict(load_fitted(name).given(complete), frame.assign(run="mine"))
    np.testing.assert_allclose(after["delta_loss"], direct["delta_loss"], rtol=1e-9)
    widths = [np.log(p["high_90"] / p["low_90"])[0] for p in (before, after)]
    assert widths[1] < widths[0]
    assert not np.isclose(after["delta_loss"][0], before["delta_loss"][0])
    capsys.readouterr()
    assert "Given: 1 measured row of" in run(capsys, "predict", name, *asked, "--given", str(path))


def test_a_column_of_numbers_is_set_by_name(data, tmp_path) -> None:
    frame = simulate().assign(decay_share=np.tile([0.0, 0.1, 0.3], 24), widgets=np.arange(72.0))
    path = tmp_path / "stable.json"
    fit(frame, get("stable_tokens"), name="rows").save(path)
    early, late = (
        predicted(tmp_path, str(path), *NEW, "--bits", "3", "--set", f"decay_share={share}")
        for share in (0.0, 0.5)
    )
    beta = load_fitted(path).values["beta"]
    ratio = late["delta_loss"][0] / early["delta_loss"][0]
    assert ratio == pytest.approx(0.5**beta)
    own = tmp_path / "own.json"
    regress(frame, kind="ols", formula="widgets + log(bits)").save(own)
    found = predicted(tmp_path, str(own), "--bits", "3", "--set", "widgets=7")
    direct = load_fitted(own).center(pd.DataFrame({"widgets": [7.0], "bits": [3.0]}))
    assert found["delta_loss"][0] == pytest.approx(direct[0])


# ------------------------------------------------------------------------------------ mistakes
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("regress", "rows.csv", "--kind", "tree"), "unknown regression 'tree'; choose one of ols"),
        (("regress", "rows.csv"), "--kind"),
        (("regress", "absent.csv", "--kind", "ols"), "absent.csv"),
        (("regress", "rows.csv", "--kind", "ols", "--law", "ouyang"), "only gp takes one"),
        (("regress", "rows.csv", "--kind", "gp", "--law", "ouyan"), "Did you mean 'ouyang'"),
        (("regress", "rows.csv", "--kind", "ols", "--formula", "exp(bits)"), "cannot read 'exp"),
        (("regress", "rows.csv", "--kind", "ols", "--formula", "size"), "no column 'size'"),
        (("regress", "rows.csv", "--kind", "ols", "--target", "kl"), "no column 'kl'"),
        (("regress", "rows.csv", "--kind", "ols", "--cluster", "batch"), "no column 'batch'"),
        (("regress", "rows.csv", "--kind", "ols", "--where", "run == 'run0'"), "1 distinct value"),
        (("regress", "rows.csv", "--kind", "ols", "--map", "bits"), "--map must be NAME=VALUE"),
        (("regress", "rows.csv", "--kind", "ols", "-o", "rows.csv"), "must end in .fit or .json"),
        (("regress", "rows.csv", "--kind", "ols", "-o", "forest.fit"), "exists already"),
        (("predict", "forest.fit", *NEW, "--bits", "3"), "needs sqnr_db .*give --set sqnr_db=VALUE"),
        (("predict", "forest.fit", *NEW, "--set", "sqnr_db=18"), "one value of --bits"),
        (("predict", "forest.fit", *NEW, "--bits", "3", "--method", "gptq,rtn", "--set", "sqnr_db=18"), "one value of --method"),
        (("predict", "forest.fit", *NEW, "--set", "sqnr=18"), "Did you mean 'sqnr_db'"),
        (("predict", "forest.fit", *NEW, "--set", "sqnr_db=big"), "must be a number .dB.*Got 'big'"),
        (("predict", "forest.fit", *NEW, "--set", "sqnr_db"), "--set must be NAME=VALUE"),
        (("predict", "ols.json", "--tokens", "1e12"), "needs n_params .*give --n-params"),
        (("predict", "ols.json", *NEW, "--set", "bits=3"), "--set bits: give --bits"),
        (("predict", "ols.json", *NEW, "--set", "delta_loss=1"), "what the fit predicts"),
        (("predict", "ols.json", *NEW, "--fmt", "int,nf4"), "--fmt: the fit does not tell"),
        (("predict", "law.json", *NEW, "--method", "gptq,rtn"), "--method: the fit does not tell"),
        (("predict", "ols.json", *NEW, "--given", "absent.csv"), "absent.csv"),
        (("predict", "ols.json", *NEW, "--given", "rows.csv"), "'run' has several values"),
        (("report", "ols.json", "-o", "r.html"), "ols.json: is a regression, and reports are of laws"),
        (("report", "law.json", "forest.fit", "-o", "r.html"), "forest.fit: is a regression"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_with_exit_status_two(data, capsys, arguments, message) -> None:
    before = {path: path.read_bytes() for path in data.iterdir()}
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert re.search(message, said), said
    assert said.count("\n") == 1
    assert {path: path.read_bytes() for path in data.iterdir()} == before


def test_what_was_fitted_is_told_from_its_file(data, tmp_path) -> None:
    assert load_fitted("ols.json").name == "ols"
    assert load_fitted("forest.fit").name == "forest"
    assert load_fitted("law.json").name == "ouyang"
    other = tmp_path / "other.json"
    for text in ("{}", "novel", '{"format": 2}', json.dumps({"format": 1, "regression": "ols"})):
        other.write_text(text)
        with pytest.raises(FitError, match=r"other\.json: "):
            load_fitted(other)
    with pytest.raises(FitError, match="nowhere: no such fit file, nor a shipped fit"):
        load_fitted("nowhere")


def test_a_fit_that_did_not_converge_notes_its_status() -> None:
    frame = simulate(runs=4).assign(lr_peak=1e-3)
    frame["lr_peak"] = 1e3 / frame["n_params"]
    found = fit(frame, get("lr_power"))
    assert found.search.status == "not_identified"
    assert found.notes[-1].startswith("the fit's status is not_identified: ")
