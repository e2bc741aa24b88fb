"""Cost of each matrix: against forms and losses computed on their own, and across stops."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from qscale import table
from qscale.cli import main
from qscale.errors import QscaleError, TableError, TextError
from qscale.measure import sensitivity as module
from qscale.measure.curvature.along import gauss_newton_along
from qscale.measure.loss import compare, reference
from qscale.measure.sensitivity import sensitivity
from qscale.measure.subject import open_subject
from qscale.measure.weights import fake_quantized, squared_errors
from qscale.quantize.format import Format
from qscale.quantize.mix import Mix
from qscale.quantize.setting import Setting

THREE = Setting.parse("rtn int3 g8")
EXAMPLES = Path(__file__).parents[2] / "examples"
OPTIONS: dict[str, Any] = {"context": 32, "probe_windows": 16}


@pytest.fixture(scope="module")
def found(trained, text_file, tmp_path_factory):
    """Sensitivity of a trained model, with many probes, and where it was written."""
    out = tmp_path_factory.mktemp("sensitivity") / "matrices.csv"
    return sensitivity(trained, text_file, out, setting=THREE, num_probes=16, **OPTIONS), out


def test_what_is_measured_is_one_matrix_quantized(found, trained, text_file):
    matrices = found[0].matrices.set_index("matrix")
    subject = open_subject(trained, text_file, **OPTIONS)
    model = subject.checkpoint.model
    assert set(matrices.index) == set(subject.weights)
    full = reference(model, subject.evaluation)
    tokens = full.counts.sum()
    for name in list(subject.weights)[::3]:
        with fake_quantized({name: subject.weights[name]}, THREE):
            one = compare(model, full)
        row = matrices.loc[name]
        assert row["kl"] == pytest.approx(one.kl.sum() / tokens)
        assert row["delta_loss"] == pytest.approx((one.nll - full.nll).sum() / tokens, abs=1e-7)
        assert row["n"] == subject.weights[name].numel()
        assert row["bits_per_weight"] == 3 + 16 / 8
    with fake_quantized(subject.weights, THREE):
        whole = compare(model, full)
    assert found[0].joint["kl"] == pytest.approx(whole.kl.sum() / tokens)
    expected = squared_errors(subject.weights, THREE)
    assert matrices["squared_error"].to_dict() == pytest.approx(expected, rel=1e-5)


def test_predictions_are_the_exact_forms_within_their_errors(found, trained, text_file):
    matrices = found[0].matrices.set_index("matrix")
    subject = open_subject(trained, text_file, **OPTIONS)
    ids = torch.from_numpy(subject.probe.ids)
    scores = []
    for name, weight in subject.weights.items():
        with fake_quantized({name: weight}, THREE):
            error = weight.detach().clone()
        error -= weight.detach()
        exact = gauss_newton_along(subject.checkpoint.model, ids, {name: error})
        # Both are means over the same windows: they differ by the noise of probes alone, a part
        # of the standard error, which is over windows.
        row = matrices.loc[name]
        distance = row["gauss_newton_delta"] - exact.gauss_newton.value
        scores.append(distance / row["gauss_newton_delta_se"])
    assert np.abs(scores).max() < 3
    assert matrices["share"].sum() == pytest.approx(1)
    assert found[0].matrices["gauss_newton_delta"].is_monotonic_decreasing


def test_predictions_order_what_is_measured(found):
    """To second order the KL divergence is the Gauss-Newton form: sizes and ranks agree."""
    sens = found[0]
    assert sens.agreement("gauss_newton_delta", "kl") > 0.85
    assert sens.agreement("quadratic_delta", "kl") > 0.6
    matrices = sens.matrices
    ratio = matrices["gauss_newton_delta"] / matrices["kl"]
    assert ratio.median() == pytest.approx(1, abs=0.25)
    assert (matrices["kl"] > 0).all()
    assert matrices["kl"].sum() == pytest.approx(sens.joint["kl"], rel=0.5)


def test_the_table_is_read_back_and_the_rest_is_measured(
    found, trained, text_file, tmp_path, monkeypatch
):
    sens, out = found
    read = table.read(out)
    pd.testing.assert_frame_equal(
        read.drop(columns="calibration"), sens.matrices.drop(columns="calibration"),
        check_dtype=False,
    )  # fmt: skip
    stopped = tmp_path / "stopped.csv"
    read.loc[3:, ["delta_loss", "delta_loss_se", "kl", "kl_se"]] = math.nan
    read.loc[0, "kl"] = 0.125  # kept, as it is there
    table.write(read, stopped)
    counted = []

    def counting(*args, **options):
        counted.append(args)
        return compare(*args, **options)

    monkeypatch.setattr(module, "compare", counting)
    again = sensitivity(trained, text_file, stopped, setting=THREE, num_probes=16, **OPTIONS)
    assert len(counted) == len(read) - 3 + 1  # the joint error once more
    assert again.matrices.loc[0, "kl"] == 0.125
    pd.testing.assert_frame_equal(again.matrices[1:], sens.matrices[1:])
    assert table.read(stopped)["kl"].notna().all()


def test_a_stop_keeps_what_was_done(trained_llama, text_file, tmp_path, monkeypatch):
    out = tmp_path / "matrices.parquet"
    calls = []

    def failing(*args, **options):
        calls.append(args)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return compare(*args, **options)

    monkeypatch.setattr(module, "compare", failing)
    with pytest.raises(KeyboardInterrupt):
        sensitivity(trained_llama, text_file, out, setting=THREE, **OPTIONS)
    kept = table.read(out)
    assert kept["kl"].notna().sum() == 2  # after the joint error
    assert kept["quadratic_delta"].notna().all()
    assert [path.name for path in tmp_path.iterdir()] == ["matrices.parquet"]
    for change in ({"setting": Setting.parse("rtn int4 g8")}, {"context": 16}):
        with pytest.raises(TableError, match="holds (spec|protocol) .*Choose another output"):
            sensitivity(trained_llama, text_file, out, **{"setting": THREE, **OPTIONS, **change})
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(TableError, match="other.csv: exists and is not a table"):
        sensitivity(trained_llama, text_file, tmp_path / "other.csv", setting=THREE, **OPTIONS)


def test_a_mix_leaves_matrices_out_and_has_its_bits(trained_llama, text_file, tmp_path):
    mix = Mix((("*.0.*", None), ("*down*", Format("int", 8, 8)), ("*", Format("int", 2, 8))))
    out = tmp_path / "mix.csv"
    found = sensitivity(trained_llama, text_file, out, setting=mix, measured=False, **OPTIONS)
    matrices = found.matrices.set_index("matrix")
    assert not any(".0." in name for name in matrices.index)
    assert matrices["bits"].to_dict() == {n: 8.0 if "down" in n else 2.0 for n in matrices.index}
    assert matrices.index[-1].endswith("down_proj.weight")
    assert not {"kl", "delta_loss"} & set(matrices)
    assert (table.read(out)["spec"] == str(mix)).all()


def test_errors_of_a_calibrated_method_are_its_own(trained_llama, text_file, tmp_path):
    from tests.checkpoints import babble  # noqa: PLC0415

    text = tmp_path / "calibration.txt"
    text.write_text(babble(400, seed=9))
    gptq = Setting.parse("gptq int3 g8")
    options = OPTIONS | {"measured": False}
    with pytest.raises(TextError, match="give --calibration"):
        sensitivity(trained_llama, text_file, tmp_path / "a.csv", setting=gptq, **options)
    frames = {
        setting.method: sensitivity(
            trained_llama, text_file, tmp_path / f"{setting.method}.csv",
            setting=setting, calibration=text, calibration_samples=16, **options,
        ).matrices
        for setting in (THREE, gptq)
    }  # fmt: skip
    # GPTQ has the larger error and the smaller cost along it.
    assert frames["gptq"]["squared_error"].sum() > frames["rtn"]["squared_error"].sum()
    assert frames["gptq"]["gauss_newton_delta"].sum() < frames["rtn"]["gauss_newton_delta"].sum()
    assert frames["gptq"]["calibration"].str.startswith("calibration-").all()
    assert frames["rtn"]["calibration"].isna().all()


def test_activations_a_matrix_reads_are_rounded_with_it(trained_llama, text_file, tmp_path):
    kl = [
        sensitivity(
            trained_llama, text_file, tmp_path / f"{i}.csv",
            setting=Setting.parse(spec), num_probes=2, **OPTIONS,
        ).matrices.set_index("matrix")["kl"]
        for i, spec in enumerate(("rtn int8 g8", "rtn int8 g8 acts=int3/row"))
    ]  # fmt: skip
    assert (kl[1] > 5 * kl[0]).all()


def test_command_ranks_and_says_how_well_it_predicts(trained_llama, text_file, tmp_path, capsys):
    out = tmp_path / "matrices.csv"
    call = (
        "sensitivity", str(trained_llama), "--text", str(text_file), "--spec", "rtn int3 g8",
        "--context", "32", "-o", str(out),
    )  # fmt: skip
    main([*call, "--predicted-only"])
    printed = capsys.readouterr().out
    assert "KL" not in printed
    main([*call, "--export", str(tmp_path / "layers.json"), "--export-for", "auto-round"])
    layers = json.loads((tmp_path / "layers.json").read_text())
    assert len(layers) == 14
    assert layers["model.layers.1.mlp.down_proj"]["group_size"] == 8
    printed = capsys.readouterr().out
    rows = table.read(out)
    first = rows["matrix"].iloc[0].removesuffix(".weight").removeprefix("model.layers.")
    assert first in printed.split("┡")[1].splitlines()[1]
    assert "all at once" in printed
    assert "Rank correlation of gauss_newton_delta over 14 matrices" in printed
    assert f"{1000 * rows['kl'].sum():.3g} ± <" in printed


def test_a_mix_that_does_not_fit_is_refused_before_any_work(
    trained_llama, text_file, tmp_path, monkeypatch
):
    monkeypatch.delattr(module, "apply")
    mix = Mix((("model.layers.0.*", Format("int", 4)),))
    with pytest.raises(QscaleError, match="no pattern matches model.layers.1"):
        sensitivity(trained_llama, text_file, tmp_path / "m.csv", setting=mix, **OPTIONS)


@pytest.mark.slow
def test_predictions_of_a_trained_model_hold_matrix_by_matrix(tmp_path):
    """On the shipped model at three bits, under rounding to nearest and under GPTQ."""
    text = (EXAMPLES / "texts" / "austen-wilde-darwin.txt").read_text()
    cut = len(text) // 3
    (tmp_path / "calibration.txt").write_text(text[:cut])
    (tmp_path / "rest.txt").write_text(text[cut:])
    for spec in ("rtn int3 g64", "gptq int3 g64"):
        found = sensitivity(
            EXAMPLES / "checkpoints" / "tiny-wsd-decayed", tmp_path / "rest.txt",
            tmp_path / f"{spec[:4].strip()}.csv", setting=Setting.parse(spec),
            calibration=tmp_path / "calibration.txt", max_windows=64,
        )  # fmt: skip
        matrices = found.matrices
        assert found.agreement("gauss_newton_delta", "kl") > 0.95
        ratio = (matrices["gauss_newton_delta"] / matrices["kl"]).map(math.log).abs()
        assert ratio.median() < 0.15
        total = matrices["kl"].sum()
        assert matrices["gauss_newton_delta"].sum() == pytest.approx(total, rel=0.1)
        # Without direction rounding to nearest is met as well, and GPTQ is missed by far.
        plain = matrices["quadratic_delta"].sum() / total
        assert plain == pytest.approx(1, abs=0.1) if spec.startswith("rtn") else plain > 3
