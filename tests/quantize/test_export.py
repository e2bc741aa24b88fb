"""Formats of a model's matrices as other tools read them: those tools read the same back."""

from __future__ import annotations

import json

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

from qscale.errors import QscaleError
from qscale.model import quantizable
from qscale.quantize.export import auto_round, compressed_tensors
from qscale.quantize.format import Format
from qscale.quantize.mix import Mix
from qscale.quantize.setting import Setting
from tests.checkpoints import build_model

INT3 = Format.parse("int3 g8 asym")
MIX = Mix(
    (
        ("*.0.self_attn.q_proj.*", None),
        ("*.0.self_attn.*", Format("int", 8)),
        ("*.0.mlp.up_proj.*", Format.parse("nvfp4")),
        ("*.0.mlp.gate_proj.*", Format.parse("mxfp4")),
        ("*.0.*", Format.parse("fp8 tensor")),
        ("*", INT3),
    ),
    activations=Format("int", 8),
)


def through_json(content):
    return json.loads(json.dumps(content))


def test_compressed_tensors_gives_each_module_its_format():
    model = build_model("llama").eval()
    names = list(quantizable(model))
    config = QuantizationConfig.model_validate(through_json(compressed_tensors(MIX, names)))
    apply_quantization_config(model, config)
    assert len(names) == 14
    strategies = {None: "channel", 8: "group", 16: "tensor_group", 32: "group"}
    for name in names:
        module, fmt = model.get_submodule(name.removesuffix(".weight")), MIX.format_of(name)
        scheme = getattr(module, "quantization_scheme", None)
        if fmt is None:
            assert scheme is None
            continue
        weights = scheme.weights
        assert (weights.num_bits, weights.symmetric) == (fmt.bits, fmt.symmetric), name
        assert weights.type == ("int" if fmt.fmt == "int" else "float")
        assert weights.group_size == fmt.group_size
        expected = "tensor" if fmt.per_tensor else strategies[fmt.group_size]
        assert weights.strategy == expected
        inputs = scheme.input_activations
        assert (inputs.num_bits, inputs.strategy, inputs.dynamic) == (8, "token", True)
    assert not hasattr(model.lm_head, "quantization_scheme")


def test_one_format_is_one_group():
    content = compressed_tensors(Setting(INT3, "gptq"), ["a.weight", "b.weight"])
    (group,) = content["config_groups"].values()
    assert group["targets"] == ["a", "b"]
    assert group["input_activations"] is None
    scheme = QuantizationConfig.model_validate(through_json(content)).config_groups["group_0"]
    assert (scheme.weights.num_bits, scheme.weights.group_size) == (3, 8)


def test_activations_of_nvfp4_are_rounded_as_the_tool_does():
    setting = Setting.parse("rtn nvfp4 acts=nvfp4")
    content = through_json(compressed_tensors(setting, ["a.weight"]))
    inputs = QuantizationConfig.model_validate(content).config_groups["group_0"].input_activations
    assert (inputs.strategy, inputs.dynamic, inputs.group_size) == (
        "tensor_group", "local", 16,
    )  # fmt: skip


def test_auto_round_names_each_layer():
    content = auto_round(MIX, ["l.0.self_attn.q_proj.weight", "l.0.mlp.up_proj.weight", "b.weight"])
    assert content["l.0.self_attn.q_proj"] == {"bits": 16, "act_bits": 16}
    assert content["l.0.mlp.up_proj"]["data_type"] == "nv_fp"
    assert content["b"] == {
        "bits": 3, "group_size": 8, "sym": False, "data_type": "int",
        "act_bits": 8, "act_group_size": -1, "act_sym": True, "act_data_type": "int",
        "act_dynamic": True,
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the library's own
def test_auto_round_takes_its_layers():
    library = pytest.importorskip("auto_round")
    # It leaves layers alone whose sides 32 does not divide.
    model = build_model("llama", hidden_size=64, intermediate_size=96).eval()
    setting = Mix((("*.0.*", None), ("*down_proj*", Format("int", 8)), ("*", INT3)))
    layers = auto_round(setting, list(quantizable(model)))
    ids = torch.randint(256, (4, 32), generator=torch.Generator().manual_seed(0))
    rounded, _ = library.AutoRound(
        model,
        object(),
        scheme="W4A16",
        layer_config=layers,
        dataset=torch.utils.data.DataLoader([{"input_ids": window} for window in ids]),
        nsamples=4,
        seqlen=32,
        batch_size=4,
        iters=0,
        device_map="cpu",
        amp=False,
        enable_torch_compile=False,
        low_cpu_mem_usage=False,
    ).quantize()
    for name, layer in layers.items():
        module = rounded.get_submodule(name)
        assert module.bits == layer["bits"], name
        if layer["bits"] < 16:
            assert (module.group_size, module.sym) == (layer["group_size"], layer["sym"])


@pytest.mark.parametrize("tool", [compressed_tensors, auto_round])
def test_what_a_tool_lacks_is_refused(tool):
    with pytest.raises(QscaleError, match="has no nf4"):
        tool(Setting(Format.parse("nf4")), ["a.weight"])
    with pytest.raises(QscaleError, match=r"experts\.0 is not the weight of a module"):
        tool(Setting(INT3), ["experts.0"])
