"""examples/api_tour.py runs, and what it returns is what its steps promise."""

import sys

import pandas as pd
import pytest

from tests.test_examples import load


@pytest.fixture(scope="module")
def tour():
    return load("api_tour")


def test_the_modelling_half_of_the_tour(tour, tmp_path, capsys) -> None:
    rows = tour.data_and_laws()
    path = tour.fitting(rows, tmp_path)
    found = tour.predicting(path)
    assert (found["low_90"] < found["delta_loss"]).all()
    assert tour.planning(path) == 4.0
    assert tour.selecting() == ("lr_peak", "anneal")
    out = capsys.readouterr().out
    assert "gamma_post" in out
    assert "within the predicted band" in out
    assert "published_gptq_kumar covers this best" in out


def test_the_measuring_half_of_the_tour(tour, tmp_path, capsys) -> None:
    pytest.importorskip("torch")
    rows = tour.measuring(tmp_path)
    joined = tour.joining(rows)
    assert (joined["weight"] > 0.9).all()
    inside = (joined["low_90"] < rows["delta_loss"]) & (rows["delta_loss"] < joined["high_90"])
    assert inside.iloc[0]
    assert isinstance(rows, pd.DataFrame)
    assert (tmp_path / "zero_fit.png").stat().st_size > 1000


@pytest.mark.slow
def test_the_whole_tour(tour, tmp_path, capsys) -> None:
    tour.main(tmp_path)
    for name in ("report.html", "predicted.png", "ols.json", "matrices.csv", "swept.parquet"):
        assert (tmp_path / name).stat().st_size > 100
    assert (tmp_path / "quantized" / "config.json").is_file()
    assert "torch" in sys.modules
