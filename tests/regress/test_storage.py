"""Saved regressions: the same predictions, and no trust in what a file holds."""

import json
import zipfile

import numpy as np
import pandas as pd
import pytest
import skops.io
from sklearn.linear_model import LinearRegression

from qscale.errors import FitError
from qscale.predict import predict
from qscale.regress import is_regression, load, regress
from tests.simulations import simulate


class Foreign:
    """Stands for a type that runs something when it is rebuilt."""


@pytest.fixture(scope="module")
def forest():
    return regress(simulate(runs=6), kind="forest")


@pytest.mark.parametrize("kind", ["ols", "forest", "boosting", "gp"])
def test_a_saved_regression_predicts_the_same(tmp_path, kind) -> None:
    table = simulate(runs=4).assign(method=np.tile(["gptq", "rtn"], 6))
    found = regress(table, kind=kind)
    rows = simulate(runs=3, seed=1, prefix="new")
    for step, before in enumerate((found, found.given(rows.head(1)))):
        path = tmp_path / f"{kind}{step}.fit"
        before.save(path)
        after = load(path)
        for asked in ("mean", "new_checkpoint"):
            pd.testing.assert_frame_equal(
                predict(after, rows, kind=asked), predict(before, rows, kind=asked), rtol=1e-8
            )
        assert after.data == before.data
        assert after.notes == before.notes
        assert is_regression(path)


def _with_estimators(forest, path, estimators) -> None:
    """Save a regression and swap what its skops file holds."""
    forest.save(path)
    with zipfile.ZipFile(path) as archive:
        facts = archive.read("regression.json")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("regression.json", facts)
        archive.writestr("estimators.skops", skops.io.dumps(estimators))


def test_a_file_with_an_untrusted_type_is_refused(forest, tmp_path) -> None:
    path = tmp_path / "bad.fit"
    _with_estimators(forest, path, [Foreign()])
    with pytest.raises(FitError, match=r"bad\.fit: not opened.*Foreign.*Do not trust"):
        load(path)


def test_a_trusted_type_in_the_wrong_place_is_refused(forest, tmp_path) -> None:
    path = tmp_path / "bad.fit"
    _with_estimators(forest, path, [LinearRegression()])
    with pytest.raises(FitError, match="are not those of forest"):
        load(path)


def test_a_formula_in_a_file_is_not_run(tmp_path) -> None:
    path = tmp_path / "ols.json"
    regress(simulate(), kind="ols").save(path)
    content = json.loads(path.read_text())
    content["predictors"][0]["inputs"]["terms"][0] = "__import__('os').abort()"
    path.write_text(json.dumps(content))
    with pytest.raises(FitError, match=r"ols\.json"):
        predict(load(path), simulate())


@pytest.mark.parametrize("text", ["", "[]", '{"a": 1}', '{"format": 99}', '{"format": 1}'])
def test_a_file_that_is_no_regression_is_named(tmp_path, text) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(FitError, match=r"other\.json"):
        load(path)
    assert not is_regression(path)


def test_a_missing_file_is_named(tmp_path) -> None:
    with pytest.raises(FitError, match=r"none\.fit: no such regression"):
        load(tmp_path / "none.fit")
    assert not is_regression(tmp_path / "none.fit")
