"""Quantized checkpoints on disk: what transformers loads back is what was measured."""

from __future__ import annotations

import json
import re

import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM

from qscale.cli import main
from qscale.errors import CheckpointError, QscaleError
from qscale.model import load, quantizable
from qscale.quantize.apply import apply
from qscale.quantize.mix import parse_setting
from qscale.quantize.save import FACTS, save
from tests.checkpoints import babble, build_family, build_model
from tests.checkpoints import save as save_model
from tests.cli.test_cli import mistake, run

FAMILIES = ("llama", "gpt2", "neox", "opt", "qwen3", "olmo2", "mixtral")


def saved(family: str, folder) -> str:
    builder = build_model if family in {"llama", "gpt2", "neox"} else build_family
    save_model(builder(family).eval(), folder)
    return str(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_the_very_values(family, tmp_path):
    source = saved(family, tmp_path / "model")
    opened = load(source)
    weights = quantizable(opened.model)
    applied = apply(opened.model, weights, parse_setting("rtn int3 g8"))
    save(opened, applied.weights, tmp_path / "out", facts={"spec": "rtn int3 g8"})

    again = load(tmp_path / "out")
    found = quantizable(again.model)
    assert list(found) == list(weights)
    assert all(torch.equal(found[name], applied.weights[name]) for name in found)
    others = dict(opened.model.named_parameters())
    for name, parameter in again.model.named_parameters():
        if name not in found:
            assert torch.equal(parameter, others[name])
    tied = opened.model.get_output_embeddings().weight is opened.model.get_input_embeddings().weight
    head = again.model.get_output_embeddings().weight
    assert (head is again.model.get_input_embeddings().weight) == tied
    # An evaluator that knows nothing of us gets the same logits.
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    ids = torch.arange(12)[None]
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, again.model(ids).logits, rtol=1e-5, atol=1e-5)
    assert json.loads((tmp_path / "out" / FACTS).read_text()) == {"spec": "rtn int3 g8"}


def test_half_precision_stores_the_nearest(tmp_path):
    opened = load(saved("llama", tmp_path / "model"))
    weights = quantizable(opened.model)
    applied = apply(opened.model, weights, parse_setting("rtn int3 g8"))
    save(opened, applied.weights, tmp_path / "out", facts={}, dtype="bfloat16")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    for name, weight in quantizable(load(tmp_path / "out").model).items():
        assert torch.equal(weight, applied.weights[name].bfloat16().float())


def test_nothing_is_left_behind_by_a_failure(tmp_path):
    opened = load(saved("llama", tmp_path / "model"))
    with pytest.raises(CheckpointError, match="other: the model .* has no such weight"):
        save(opened, {"other": torch.ones(2, 2)}, tmp_path / "out", facts={})
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    with pytest.raises(QscaleError, match="exists already. Give --output a new folder"):
        save(opened, {}, tmp_path / "full", facts={})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["full", "model"]


def test_the_command_writes_a_checkpoint_that_measures_as_the_setting_did(tmp_path, capsys):
    source = saved("llama", tmp_path / "model")
    text, calibration = tmp_path / "text.txt", tmp_path / "calibration.txt"
    text.write_text(babble(2500, seed=1))
    calibration.write_text(babble(2500, seed=2))
    common = ("--text", str(text), "--context", "32", "--max-windows", "8", "--features", "")
    spec = ("--spec", "gptq int3 g8 asym", "--calibration", str(calibration))
    samples = ("--calibration-samples", "6", "--context", "32")
    run(capsys, "quantize", source, *spec, *samples, "-o", str(tmp_path / "out"))
    facts = json.loads((tmp_path / "out" / FACTS).read_text())
    assert facts["spec"] == "gptq int3 g8 asym"
    assert facts["n_quantized"] == 14
    assert facts["calibration"].startswith("calibration-")
    assert facts["damping"] == 0.01

    rows = tmp_path / "rows.csv"
    run(capsys, "measure", source, *common, *spec, "--calibration-samples", "6", "-o", str(rows))
    again = tmp_path / "again.csv"
    run(
        capsys, "measure", str(tmp_path / "out"), *common, "--spec", "rtn int8 row",
        "-o", str(again),
    )  # fmt: skip
    measured, own = pd.read_csv(rows).iloc[0], pd.read_csv(again).iloc[0]
    assert own["loss_fp"] == pytest.approx(measured["loss_q"], abs=2e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--spec", "gptq int4"), "Method gptq needs a text: give --calibration"),
        (("--spec", "gptk int4"), "method must be one of rtn, gptq, awq.* Did you mean 'gptq'"),
        (("--spec", "rtn int1"), "bits must be an integer from 2 to 8. Got 1 instead"),
        (("--spec", "rtn intel"), "A format must be int or mxint with 2 to 8 bits"),
        (("--spec", "rtn int4 g"), "After a format may come g and a group size.* Got 'g'"),
        (("--spec", "absent.toml"), "absent.toml"),
        (("--spec", "rtn int4", "--dtype", "int8"), "dtype"),
        (("--spec", "hqq int7 library=hqq"), "library=hqq has no hqq int7 row. By hqq it has"),
    ],
)
def test_mistakes(options, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved("llama", tmp_path / "model")
    capsys.readouterr()
    assert re.search(message, mistake(capsys, "quantize", "model", *options, "-o", "out"))
    assert not (tmp_path / "out").exists()


def test_the_list_of_specs_and_one_explained(capsys):
    found = run(capsys, "specs")
    for word in ("int2 to int8", "mxint2 to mxint8", "nvfp4", "llmcompressor", "autoround"):
        assert word in found
    assert "(max-min)/(2^b-1)" in run(capsys, "specs", "gptq int4 g128 asym")
    with pytest.raises(SystemExit):
        main(["specs", "gptq"])
