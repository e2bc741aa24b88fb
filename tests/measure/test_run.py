"""From a checkpoint folder and a text to rows: what is in them, and that they survive anything."""

from __future__ import annotations

import math
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from qscale import table
from qscale.cli import main
from qscale.columns import COLUMNS
from qscale.errors import QscaleError, TableError
from qscale.measure import job, store, weights
from qscale.measure.curvature import ggn_trace, quadratic_delta
from qscale.measure.loss import compare, reference
from qscale.measure.run import measure
from qscale.measure.subject import open_subject
from qscale.measure.zerofit import agreement, zero_fit
from qscale.provenance import TRAINING_COLUMNS
from qscale.quantize.setting import Setting
from tests.checkpoints import build_model, save

EXAMPLES = Path(__file__).parents[2] / "examples"
SETTINGS = [
    Setting.parse("rtn int2 g8"),
    Setting.parse("rtn int4 g8"),
    Setting.parse("rtn int4 row asym"),
    Setting.parse("rtn int8 row"),
]
OPTIONS: dict[str, Any] = {
    "context": 32,
    "probe_windows": 4,
    "num_probes": 3,
    "max_hessian_probes": 8,
}


def go(folder: Path, text: Path, out: Path, **changes: Any) -> pd.DataFrame:
    return measure(folder, text, out, **{"settings": SETTINGS, **OPTIONS, **changes})


def numbers(frame: pd.DataFrame) -> pd.DataFrame:
    """The columns that are numbers, without labels."""
    return frame.select_dtypes("number").reset_index(drop=True)


@pytest.fixture(scope="module")
def rows(trained, text_file, tmp_path_factory):
    """Rows of a trained model, measured once."""
    return go(trained, text_file, tmp_path_factory.mktemp("rows") / "rows.csv")


def test_rows_agree_with_the_parts_they_are_made_of(trained, text_file, rows):
    subject = open_subject(trained, text_file, context=32, probe_windows=4)
    model = subject.checkpoint.model
    full = reference(model, subject.evaluation)
    ggn = ggn_trace(
        model, torch.from_numpy(subject.probe.ids), list(subject.weights), num_probes=3, seed=0
    )
    tokens = full.counts.sum()
    for (_, row), setting in zip(rows.iterrows(), SETTINGS, strict=True):
        with weights.fake_quantized(subject.weights, setting.weights):
            found = compare(model, full)
        assert row["loss_fp"] == pytest.approx(full.nll.sum() / tokens, abs=1e-6)
        assert row["delta_loss"] == pytest.approx((found.nll - full.nll).sum() / tokens, abs=1e-6)
        assert row["loss_q"] == pytest.approx(row["loss_fp"] + row["delta_loss"])
        assert row["relative_delta"] == pytest.approx(row["delta_loss"] / row["loss_fp"])
        assert row["kl"] == pytest.approx(found.kl.sum() / tokens, abs=1e-6)
        assert row["top1_agreement"] == pytest.approx(found.agreements.sum() / tokens)
        errors = weights.squared_errors(subject.weights, setting.weights)
        predicted = quadratic_delta(ggn, errors, subject.sizes)
        assert (row["quadratic_delta"], row["quadratic_delta_se"]) == pytest.approx(predicted)
        assert row["quantization_noise"] == pytest.approx(sum(errors.values()))
        assert row["bits_per_weight"] == pytest.approx(setting.bits_per_weight(subject.shapes))
        assert row["ggn_trace"] == pytest.approx(ggn.total)
    assert (rows["scored_tokens"] == tokens).all()
    assert (rows["curvature_tokens"] == 4 * 31).all()
    assert (rows["backward_passes"] == 3).all()
    assert (rows["status"] == "ok").all()


def test_rows_hold_the_whole_schema_and_tell_settings_apart(rows):
    # How these columns are filled is the business of other methods and formats.
    others = ("hidden_", "head_", "radial_", "sharpness_", "fisher_rao", "relative_flatness",
              "hessian_top", "hessian_bottom", "hessian_delta", "first_order", "gauss_newton_",
              "kronecker_")  # fmt: skip
    missing = {name for name in COLUMNS if name not in rows and not name.startswith(others)}
    assert missing == {
        "quantized_share", "calibration", "calibration_samples", "damping", "neg_log_accuracy",
    }  # fmt: skip
    floats = ["bits_activation", "exponent_bits", "mantissa_bits"]
    known = rows.drop(columns=[*TRAINING_COLUMNS, *floats, "status_reason"])
    empty = known.columns[known.isna().any()]
    assert empty.tolist() == ["group_size", "weight_grid_bits"]  # one scale per row; on no grid
    assert (rows["features"] == "curvature,weights").all()
    assert rows["symmetric"].tolist() == [True, True, False, True]
    assert len({store.row_key(row) for _, row in rows.iterrows()}) == len(SETTINGS)
    assert rows["n_quantized"].iloc[0] in (14, 8)


def test_coarser_grids_diverge_more_and_eight_bits_hardly(rows):
    kl = rows.set_index("bits")["kl"]
    assert kl[2] > 10 * kl[4].max() > 100 * kl[8] > 0
    # To second order |delta| is at most |g||e| and the quadratic term, up to the noise of the text.
    eight = rows[rows["bits"] == 8].iloc[0]
    linear = eight["grad_norm"] * math.sqrt(eight["quantization_noise"])
    allowed = linear + eight["quadratic_delta"] + 3 * eight["delta_loss_se"]
    assert abs(eight["delta_loss"]) < allowed
    assert rows.groupby("bits")["sqnr_db"].mean().diff().dropna().min() > 6 * 2


def test_unfitted_prediction_has_the_size_of_the_divergence(rows):
    # With a few thousand weights their rounding errors are far from filling all directions.
    four = rows[rows["bits"] == 4]
    assert np.abs(np.log(four["quadratic_delta"] / four["kl"])).max() < math.log(4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny-wsd-stable", "tiny-wsd-decayed"])
def test_unfitted_prediction_meets_the_measured_loss_of_a_trained_model(name, tmp_path):
    found = measure(
        EXAMPLES / "checkpoints" / name,
        EXAMPLES / "texts" / "austen-wilde-darwin.txt",
        tmp_path / "rows.csv",
        settings=[
            Setting.parse(f"rtn int{b} {g}") for b in (3, 4, 5, 6, 8) for g in ("g32", "g64", "row")
        ],
        max_windows=200,
    )
    scored = agreement(found)
    assert scored.rows >= 9
    assert scored.median < 0.25
    eight = found[found["bits"] == 8]
    excess = eight["delta_loss"] - eight["quadratic_delta"]
    assert (excess.abs() < 3 * eight["delta_loss_se"]).all()


def test_zero_fit_predicts_what_measuring_reports(trained, text_file, rows):
    found = zero_fit(
        trained, text_file, settings=SETTINGS, context=32, probe_windows=4, num_probes=3
    )
    for name in found.columns:
        expected = rows[name].astype(object).where(rows[name].notna(), None).tolist()
        actual = found[name].astype(object).where(found[name].notna(), None).tolist()
        assert actual == pytest.approx(expected)


def test_metadata_takes_precedence_over_the_sidecar(trained_llama, text_file, tmp_path):
    found = go(
        trained_llama,
        text_file,
        tmp_path / "rows.parquet",
        settings=SETTINGS[:1],
        metadata={"tokens": 5e5, "family": "tiny", "lr": None},
    )
    row = table.read(tmp_path / "rows.parquet").iloc[0]
    assert (row["tokens"], row["family"], row["run"], row["lr"]) == (5e5, "tiny", "one", 0.01)
    assert row["source"] == "qscale measure"
    pd.testing.assert_frame_equal(table.read(tmp_path / "rows.parquet"), found)


def test_weights_that_are_quantized_already_are_said_to_be(trained_llama, text_file, tmp_path):
    shutil.copytree(trained_llama, tmp_path / "folder")
    said = []
    for name in ("plain.csv", "again.csv"):
        go(
            tmp_path / "folder",
            text_file,
            tmp_path / name,
            settings=SETTINGS[:1],
            on_note=said.append,
        )
        (tmp_path / "folder" / "qscale_quantization.json").write_text("{}")
    assert sum("these weights are quantized already" in sentence for sentence in said) == 1


def test_only_missing_rows_are_measured_and_curvature_is_not_repeated(
    trained_llama, text_file, tmp_path, monkeypatch
):
    out = tmp_path / "rows.csv"
    first = go(trained_llama, text_file, out, settings=SETTINGS[1:3])
    side = pd.read_parquet(tmp_path / "rows.matrices.parquet")
    assert len(side) == 14
    assert side["ggn_trace"].sum() == pytest.approx(first["ggn_trace"].iloc[0])
    assert np.hypot.reduce(side["weight_norm"]) == pytest.approx(first["weight_norm"].iloc[0])
    assert (side["n"] == side["rows"] * side["columns"]).all()

    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("curvature is on disk")

    measured = []
    monkeypatch.setattr(job, "hessian_trace", forbidden)
    monkeypatch.setattr(job, "ggn_trace", forbidden)
    monkeypatch.setattr(
        job, "compare", lambda *args, **options: measured.append(1) or compare(*args, **options)
    )
    again = go(trained_llama, text_file, out)
    assert len(measured) == 2
    pd.testing.assert_frame_equal(numbers(again.iloc[1:3]), numbers(first), check_dtype=False)
    # Columns that are the checkpoint's agree to the last bit, though read back from two files.
    assert again["quadratic_delta_se"].notna().all()
    assert len(set(again["hessian_trace_se"])) == 1
    go(trained_llama, text_file, out)
    assert len(measured) == 2
    assert len(table.read(out)) == len(SETTINGS)


def test_force_measures_again_in_place(trained_llama, text_file, tmp_path):
    out = tmp_path / "rows.csv"
    go(trained_llama, text_file, out, settings=SETTINGS[:2])
    go(trained_llama, text_file, out, settings=SETTINGS[:1], force=True, metadata={"run": "two"})
    assert sorted(table.read(out)["run"]) == ["one", "two"]


def test_another_protocol_or_other_probing_is_measured_anew(trained_llama, text_file, tmp_path):
    out = tmp_path / "rows.csv"
    one = go(trained_llama, text_file, out, settings=SETTINGS[:1])
    other = go(trained_llama, text_file, out, settings=SETTINGS[:1], context=16)
    assert len(table.read(out)) == 2
    assert one["protocol"][0] != other["protocol"][0]
    assert len(pd.read_parquet(tmp_path / "rows.matrices.parquet")) == 28
    more = go(trained_llama, text_file, out, settings=SETTINGS[1:2], num_probes=5)
    assert more["backward_passes"].tolist() == [5]
    assert len(pd.read_parquet(tmp_path / "rows.matrices.parquet")) == 28


def test_a_loss_that_is_not_finite_is_a_row(trained_llama, text_file, tmp_path, monkeypatch):
    def overflow(weight, fmt):
        # Products of such weights overflow, their sum of squares in float64 does not.
        return torch.full_like(weight, 3e38) if fmt.bits == 2 else weight

    monkeypatch.setattr("qscale.quantize.rtn.rtn", overflow)
    found = go(trained_llama, text_file, tmp_path / "rows.csv").set_index("bits")
    assert found.loc[2, "status"] == "nonfinite"
    assert "the loss of evaluation window 0 is nan" in found.loc[2, "status_reason"]
    assert found.loc[2, ["loss_q", "delta_loss", "kl", "top1_agreement"]].isna().all()
    assert found.loc[2, "loss_fp"] > 0
    assert (found.loc[[4, 8], "status"] == "ok").all()
    assert (found.loc[[4, 8], "delta_loss"] == 0).all()


def test_a_loss_no_better_than_a_uniform_guess_has_collapsed(tmp_path, text_file):
    model = build_model("llama")
    with torch.no_grad():
        model.model.norm.weight.fill_(100)  # sure of itself, and wrong
    found = go(save(model, tmp_path / "model"), text_file, tmp_path / "rows.csv")
    assert (found["status"] == "collapsed").all()
    assert found["status_reason"].str.contains(f"a uniform guess has {math.log(256):.4g}").all()
    assert found["loss_q"].notna().all()


def test_eight_bits_that_lose_much_are_flagged(trained_llama, text_file, tmp_path, monkeypatch):
    monkeypatch.setattr("qscale.quantize.rtn.rtn", lambda weight, _: weight * 0.7)
    found = go(trained_llama, text_file, tmp_path / "rows.csv").set_index("bits")
    assert found.loc[8, "status"] == "degraded"
    assert "is the checkpoint intact?" in found.loc[8, "status_reason"]
    assert (found.loc[4, "status"] == "ok").all()


def test_groups_that_do_not_divide_rows_are_recorded(trained_llama, text_file, tmp_path):
    found = go(
        trained_llama,
        text_file,
        tmp_path / "r.csv",
        settings=[Setting.parse("rtn int4 g8"), Setting.parse("rtn int4 g10")],
    )
    # Rows of 16 and 24 elements; 10 divides none of the 14.
    assert found["n_ragged"].tolist() == [0, 14]
    assert found["bits_per_weight"].tolist()[0] == 4 + 16 / 8


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"context": 4000}, "context must be at most 32"),
        ({"context": 32, "probe_windows": 500}, "are too few for 500 curvature windows"),
        ({"num_probes": 1}, "num_probes must be at least 2"),
        ({"max_hessian_probes": 1}, "max_hessian_probes must be at least 2"),
        ({"hessian_rtol": 0.0}, "hessian_rtol must be above 0"),
        ({"batch_windows": 0}, "batch_windows must be at least 1"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"metadata": {"tokens": 3}}, "metadata: 'tokens' must be between"),
        ({"metadata": {"speed": 3}}, "metadata: unknown key 'speed'"),
        (
            {"metadata": {"lr": 0.5, "lr_peak": 0.1}},
            "lr must be at most lr_peak. Got 0.5 by options",
        ),
    ],
)
def test_mistakes_write_nothing(trained_llama, text_file, tmp_path, changes, error):
    with pytest.raises(QscaleError, match=error):
        go(trained_llama, text_file, tmp_path / "rows.csv", **changes)
    assert not list(tmp_path.iterdir())


def test_an_output_that_is_no_table_of_ours_is_left_alone(trained_llama, text_file, tmp_path):
    out = tmp_path / "rows.csv"
    out.write_text("bits,delta_loss\n4,0.1\n")
    with pytest.raises(
        TableError, match=r"is not a table of qscale measure .no column 'checkpoint'"
    ):
        go(trained_llama, text_file, out, force=True)
    assert out.read_text() == "bits,delta_loss\n4,0.1\n"
    out.write_text("Dear diary,\n")
    with pytest.raises(TableError):
        go(trained_llama, text_file, out)
    with pytest.raises(TableError, match=r"rows.xlsx: a table must end in .csv"):
        go(trained_llama, text_file, tmp_path / "rows.xlsx")
    assert [p.name for p in tmp_path.iterdir()] == ["rows.csv"]


def test_writers_of_one_table_do_not_lose_each_others_rows(rows, tmp_path):
    out = tmp_path / "rows.csv"
    row = rows.iloc[0].to_dict()

    def write(name: str) -> None:
        for bits in range(2, 9):
            store.append(out, row | {"checkpoint": name, "spec": f"rtn int{bits} row"})

    writers = [threading.Thread(target=write, args=(name,)) for name in "abc"]
    for writer in writers:
        writer.start()
    lines = 0
    while any(writer.is_alive() for writer in writers):
        # Whoever reads meanwhile finds a whole file that only grows.
        content = out.read_bytes() if out.exists() else b"\n"
        assert content.endswith(b"\n")
        assert content.count(b"\n") >= lines
        lines = content.count(b"\n")
    assert len(table.read(out)) == 21


def test_a_row_takes_the_place_of_the_one_with_its_key(rows, tmp_path):
    out = tmp_path / "rows.csv"
    first = rows.iloc[0].drop("calibration", errors="ignore").to_dict()
    store.append(out, first | {"mine": "a"})
    store.append(out, first | {"loss_fp": 2.0, "calibration": None})
    assert table.read(out)["loss_fp"].tolist() == [2.0]
    store.append(out, first | {"loss_fp": 3.0, "calibration": "text"})
    store.append(out, first | {"loss_fp": 4.03125})
    store.append(out, first | {"loss_fp": 5.0, "calibration": "text"})
    back = table.read(out)
    assert back["loss_fp"].tolist() == [4.03125, 5.0]
    assert back["calibration"].tolist() == [None, "text"]
    same = [name for name in rows if name not in ("loss_fp", "calibration")]
    expected = pd.concat([rows.iloc[:1]] * 2, ignore_index=True)[same]
    pd.testing.assert_frame_equal(back[same], table.check(expected))
    whole = out.read_bytes()
    with pytest.raises(TableError, match=r"new row of .*rows.csv: row 1, column 'loss_fp' must be"):
        store.append(out, first | {"spec": "other", "loss_fp": -1.0})
    assert out.read_bytes() == whole
    damaged = whole.replace(b"4.03125", b"4.o")
    out.write_bytes(damaged)
    with pytest.raises(TableError, match=r"rows.csv: row 1, column 'loss_fp' must be a number"):
        store.append(out, first)
    assert out.read_bytes() == damaged


CHILD = """
import sys, time
from qscale.measure.run import measure
from qscale.quantize.setting import Setting
measure(
    sys.argv[1], sys.argv[2], sys.argv[3],
    settings=[Setting.parse(f"rtn int{b} g8") for b in range(2, 9)],
    context=32, probe_windows=4, num_probes=3, max_hessian_probes=8,
    on_progress=lambda *_: time.sleep(0.02),
)
"""


@pytest.mark.parametrize("rows_before_kill", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_killed_run_leaves_a_table_and_is_finished_by_the_next(
    trained_llama, text_file, tmp_path, rows_before_kill
):
    out = tmp_path / "rows.csv"
    arguments = [str(trained_llama), str(text_file), str(out)]
    child = subprocess.Popen([sys.executable, "-c", CHILD, *arguments])
    side = tmp_path / "rows.matrices.parquet"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and child.poll() is None:
        if len(store.read_rows(out)) >= rows_before_kill and side.exists():
            break
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL, "finished before it could be killed"
    left = store.read_rows(out)
    assert rows_before_kill <= len(left) < 7
    settings = [Setting.parse(f"rtn int{bits} g8") for bits in range(2, 9)]
    finished = go(trained_llama, text_file, out, settings=settings)
    assert finished["bits"].tolist() == list(range(2, 9))
    uninterrupted = go(trained_llama, text_file, tmp_path / "other.csv", settings=settings)
    pd.testing.assert_frame_equal(numbers(finished), numbers(uninterrupted), rtol=1e-6)


def test_agreement_is_over_rows_that_are_measured_well_enough():
    frame = pd.DataFrame(
        {
            "bits": [2.0, 3, 3, 4, 4, 8],
            "delta_loss": [9.0, 1, 2, 0.1, 0.1, 1e-5],
            "delta_loss_se": [0.1, 0.1, 0.1, 0.01, 0.06, 1e-6],
            "quadratic_delta": [1.0, math.e, 2, 0.1 / math.e**2, 0.1, 1e-5],
            "backward_passes": 6.0,
            "status": ["ok", "ok", "collapsed", "ok", "ok", "ok"],
        }
    )
    found = agreement(frame)
    assert (found.rows, found.left_out, found.backward_passes) == (2, 2, 6)
    assert found.by_bits == pytest.approx({3: 1, 4: 2})
    assert found.median == pytest.approx(1.5)
    assert "median |log(quadratic_delta / delta_loss)| 1.50 over 2 rows" in str(found)
    assert "6 backward passes" in str(found)
    along = frame.rename(columns={"quadratic_delta": "gauss_newton_delta"})
    alone = agreement(along.drop(columns="backward_passes"), "gauss_newton_delta")
    assert alone.median == found.median
    assert "backward" not in str(alone)
    none = agreement(frame[frame["bits"] > 6])
    assert math.isnan(none.median)
    assert "no row at 3 to 6 bits" in str(none)


def test_command_prints_rows_and_the_unfitted_prediction(
    trained_llama, text_file, tmp_path, capsys
):
    arguments = ["measure", str(trained_llama), "--text", str(text_file), "-o"]
    main([*arguments, str(tmp_path / "rows.csv"), "--bits", "3,8", "--group-size", "8,row"])
    out = capsys.readouterr().out
    for words in ("bits/weight", "Δloss ± SE", "KL", "SQNR", "Zero-fit", "6 backward passes"):
        assert words in out
    written = table.read(tmp_path / "rows.csv")
    assert written["bits"].tolist() == [3, 3, 8, 8]
    assert written["group_size"].fillna(0).tolist() == [8, 0, 8, 0]
    assert f"{written['loss_fp'][0]:.4f}" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--bits", "four"], "--bits must be numbers"),
        (["--bits", "9"], "--bits must be whole numbers from 2 to 8. Got 9 instead"),
        (["--bits", "3.5"], "--bits must be whole numbers from 2 to 8. Got 3.5 instead"),
        (["--group-size", "64,all"], "--group-size must be whole numbers or row"),
        (["--asymmetric", "--scale-rule", "full"], "--scale-rule is about symmetric levels"),
        (["--context", "99999"], "context must be at most 32"),
    ],
)
def test_command_mistakes_are_one_line(trained_llama, text_file, tmp_path, capsys, flags, message):
    with pytest.raises(SystemExit) as stopped:
        main(
            [
                "measure",
                str(trained_llama),
                "--text",
                str(text_file),
                "-o",
                f"{tmp_path}/r.csv",
                *flags,
            ]
        )
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())
