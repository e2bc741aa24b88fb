"""Features by name: what is added to rows, what is kept beside them, and what survives a failure."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from qscale import table
from qscale.cli import main
from qscale.columns import COLUMNS
from qscale.errors import CheckpointError, QscaleError, TextError
from qscale.measure import features, job
from qscale.measure.run import measure
from qscale.quantize.setting import Setting
from tests.checkpoints import babble

SETTINGS = [Setting.parse("rtn int3 g8")]
OPTIONS: dict[str, Any] = {
    "context": 24,
    "probe_windows": 3,
    "num_probes": 2,
    "max_hessian_probes": 4,
    "max_windows": 6,
}
SIDES = ("matrices", "weights", "eigenvalues", "density", "sharpness", "errors", "radial",
         "slice", "blocks", "ranks")  # fmt: skip


def go(folder: Path, text: Path, out: Path, **changes: Any) -> pd.DataFrame:
    return measure(folder, text, out, **{"settings": SETTINGS, **OPTIONS, **changes})


@pytest.fixture(scope="module")
def everything(trained_llama, text_file, tmp_path_factory):
    """The path of a table with one row that holds all features, and the row."""
    out = tmp_path_factory.mktemp("all") / "rows.csv"
    return out, go(trained_llama, text_file, out, features="all").iloc[0]


def test_all_features_fill_their_columns_and_side_tables(everything):
    out, row = everything
    assert row["features"] == ",".join(features.FEATURES)
    theirs = {"quantized_share", "calibration", "calibration_samples", "damping",
              "neg_log_accuracy"}  # fmt: skip
    assert set(COLUMNS) - set(row.index) == theirs
    assert row["hessian_top"] > row["hessian_bottom"]
    assert row["hessian_top"] < row["hessian_trace"] - row["hessian_bottom"] * len(row)
    exact = row["first_order_delta"] + row["hessian_delta"]
    assert abs(exact - row["delta_loss"]) < 0.5 * abs(row["delta_loss"]) + 0.05
    assert row["radial_slope"] == pytest.approx(2, abs=1)
    for side in SIDES:
        frame = pd.read_parquet(table.side_path(out, side))
        assert len(frame)
        assert (frame["checkpoint"] == row["checkpoint"]).all()


def test_the_curve_passes_the_quantized_point(everything):
    out, row = everything
    radial = pd.read_parquet(table.side_path(out, "radial"))
    ray = radial[(radial["direction"] == "quantization") & np.isclose(radial["radius"], 1)]
    plane = pd.read_parquet(table.side_path(out, "slice"))
    at = plane[np.isclose(plane["alpha"], 0.9) & np.isclose(plane["beta"], -0.5 + 0.2 * 2)]
    assert len(at) == 1
    # Both are on the curvature windows, the row on the others: near, not equal.
    assert len(ray) == 1
    assert ray["delta_loss"].iloc[0] == pytest.approx(row["delta_loss"], rel=1)


def test_a_feature_is_added_to_a_row_whose_loss_is_not_measured_again(
    trained_llama, text_file, tmp_path, monkeypatch
):
    out = tmp_path / "rows.csv"
    first = go(trained_llama, text_file, out, features="curvature")
    assert "hidden_relative_error" not in first
    monkeypatch.setattr(job, "compare", lambda *_, **__: pytest.fail("measured again"))
    second = go(trained_llama, text_file, out, features="hidden")
    assert second["features"].tolist() == ["curvature,hidden"]
    assert second["hidden_relative_error"].iloc[0] > 0
    for name in ("delta_loss", "quadratic_delta", "ggn_trace"):
        assert second[name].tolist() == pytest.approx(first[name].tolist())
    assert len(table.read(out)) == 1


def test_features_of_a_checkpoint_are_measured_once_for_all_settings(
    trained_llama, text_file, tmp_path, monkeypatch
):
    out = tmp_path / "rows.csv"
    first = go(trained_llama, text_file, out, features="weights")
    monkeypatch.setitem(features.OF_CHECKPOINT, "weights", None)
    more = go(
        trained_llama, text_file, out, features="weights", settings=[Setting.parse("rtn int4 g8")]
    )
    assert more["weight_kurtosis"].tolist() == first["weight_kurtosis"].tolist()


def test_a_feature_that_fails_leaves_the_row(trained_llama, text_file, tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        raise CheckpointError("no derivative")

    monkeypatch.setitem(features.OF_SETTING, "second_order", fail)
    out = tmp_path / "rows.csv"
    with pytest.raises(CheckpointError, match="no derivative"):
        go(trained_llama, text_file, out, features="curvature,second_order")
    row = table.read(out).iloc[0]
    assert row["features"] == "curvature"
    assert row["delta_loss"] > 0


def test_gptq_is_calibrated_on_another_text(trained_llama, text_file, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text(babble(600, seed=11))
    settings = [Setting.parse("rtn int3 g8"), Setting.parse("gptq int3 g8")]
    found = go(
        trained_llama,
        text_file,
        tmp_path / "rows.csv",
        settings=settings,
        features="second_order",
        calibration=other,
        calibration_samples=20,
    )
    rtn, gptq = (row for _, row in found.iterrows())
    assert pd.isna(rtn["calibration"])
    assert gptq["calibration"].startswith("other-")
    assert gptq["calibration"].endswith("/20x24")
    assert (gptq["calibration_samples"], gptq["damping"]) == (20, 0.01)
    assert gptq["kl"] < rtn["kl"]
    assert gptq["quantization_noise"] > rtn["quantization_noise"]
    assert gptq["gauss_newton_delta"] < rtn["gauss_newton_delta"]


@pytest.mark.parametrize("text", [None, "same"])
def test_gptq_needs_a_text_of_its_own(trained_llama, text_file, tmp_path, text):
    with pytest.raises(TextError, match="calibrat"):
        go(
            trained_llama,
            text_file,
            tmp_path / "rows.csv",
            settings=[Setting.parse("gptq int3 g8")],
            calibration=text and text_file,
            context=32,
        )
    assert not (tmp_path / "rows.csv").exists()


def test_unknown_features_are_refused():
    with pytest.raises(QscaleError, match=r"--features must be among.*'hiden'.*hidden"):
        features.parse("curvature,hiden")
    assert features.parse("") == ()
    assert features.parse("all") == features.FEATURES


def test_plot_draws_what_the_table_holds(everything, tmp_path, capsys):
    out, _ = everything
    main(["plot", str(out), "-o", str(tmp_path / "figures"), "--format", "svg"])
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    drawn = {"spectral-density", "error-growth", "sensitivity", "radial-loss", "loss-slice"}
    for name in drawn:
        assert any(name in found for found in names), name
    assert capsys.readouterr().out.count(".svg") == len(names)
    with pytest.raises(SystemExit):
        main(["plot", str(out.with_name("none.csv")), "-o", str(tmp_path)])
