"""Rounded inputs of matrices: which numbers they become, and that nothing stays behind."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils.helpers import compute_dynamic_scales_and_zp

from qscale.errors import CheckpointError, QscaleError
from qscale.measure.loss import compare, mean_and_se, reference
from qscale.measure.subject import open_subject
from qscale.measure.weights import fake_quantized
from qscale.model import _split_experts, quantizable
from qscale.quantize.activations import quantized_inputs, rounded_tokens
from qscale.quantize.format import Format
from tests.checkpoints import build_family

FORMATS = (
    "int8 row", "int4 row asym", "int4 g16 full", "int3 row mse", "fp8 row", "fp8 g16", "mxint4",
    "mxfp4", "mxfp8 even", "nvfp4", "nf4",
)  # fmt: skip


def activations(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values whose tokens differ in scale, one of them all zeros."""
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(*shape, generator=draw, dtype=dtype)
    scale = torch.randn(*shape[:-1], 1, generator=draw, dtype=dtype).mul(3).exp()
    scale[..., -1, :] = 0
    return values * scale


def test_a_linear_reads_rounded_tokens_by_hand():
    linear = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.ones_(linear.weight)
    model = torch.nn.Sequential(linear)
    # Largest magnitudes 7 and 0.7: steps of 1 and 0.1 at four bits.
    tokens = torch.tensor([[[7.0, 2.4, -3.6, 0.2], [0.14, -0.7, 0.06, 0.0]]])
    with quantized_inputs(model, ["0.weight"], Format("int", 4)):
        assert model(tokens)[0, :, 0].tolist() == pytest.approx([7 + 2 - 4, 0.1 - 0.7 + 0.1])
    assert model(tokens)[0, :, 0].tolist() == pytest.approx([6, -0.5])


@pytest.mark.parametrize("spec", FORMATS)
def test_a_token_is_the_same_in_any_batch(spec):
    fmt = Format.parse(spec)
    values = activations(3, 5, 40)  # groups of 16 and 32 do not divide a token
    together = rounded_tokens(values, fmt)
    assert together.isfinite().all()
    assert not torch.equal(together, values)
    for window, rounded in zip(values, together, strict=True):
        for position in range(5):
            alone = rounded_tokens(window[position : position + 1], fmt)
            assert torch.equal(alone[0], rounded[position])
    # Nor does a window's neighbour matter.
    assert torch.equal(rounded_tokens(values[1:].flip(0), fmt), together[1:].flip(0))


@pytest.mark.parametrize(
    ("spec", "args"),
    [
        ("int8 row full", {"num_bits": 8, "type": "int", "strategy": "token"}),
        ("int8 row asym", {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": False}),
        ("int4 row full", {"num_bits": 4, "type": "int", "strategy": "token"}),
        ("fp8 row", {"num_bits": 8, "type": "float", "strategy": "token"}),
        ("int8 g16 full", {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 16}),
    ],
)
def test_values_are_those_of_compressed_tensors_dynamic_quantization(spec, args):
    theirs = QuantizationArgs(dynamic=True, **args)
    linear = torch.nn.Linear(48, 8)
    values = activations(3, 5, 48)
    scale, zero = compute_dynamic_scales_and_zp(values, theirs, linear)
    expected = fake_quantize(values, scale, zero, theirs)
    with quantized_inputs(torch.nn.Sequential(linear), ["0.weight"], Format.parse(spec)):
        found = linear(values)
    assert torch.equal(found, linear(expected))
    assert not torch.equal(found, linear(values))


def test_rounding_activations_too_costs_more(trained, text_file):
    subject = open_subject(trained, text_file, context=32, probe_windows=4)
    model = subject.checkpoint.model
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    full = reference(model, subject.evaluation)
    kl = {}
    with fake_quantized(subject.weights, Format("int", 4, 8)):
        kl["none"] = compare(model, full).kl
        for spec in ("int8 row", "int4 row", "nvfp4", "mxfp4"):
            with quantized_inputs(model, subject.weights, Format.parse(spec)):
                kl[spec] = compare(model, full).kl
                again = compare(model, full, batch_windows=3).kl
            # Rounding is the same in any batch; sums of products differ in the last bits, which a
            # value half-way between two levels may turn into a step.
            assert again.sum() == pytest.approx(kl[spec].sum(), rel=0.05)
    counts = full.counts
    for spec in ("int4 row", "nvfp4", "mxfp4"):
        more, se = mean_and_se(kl[spec] - kl["none"], counts)
        assert more > 5 * se, spec
        assert kl[spec].sum() > 2 * kl["int8 row"].sum()
    # Eight bits add little: within a tenth, where four bits multiply.
    assert kl["int8 row"].sum() == pytest.approx(kl["none"].sum(), rel=0.1)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_hooks_are_removed_whatever_happens():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))

    def inside() -> None:
        with quantized_inputs(model, ["0.weight"], Format("int", 4)):
            assert model[0]._forward_pre_hooks
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        inside()
    assert not model[0]._forward_pre_hooks


def test_what_is_not_read_by_a_linear_is_refused_by_name():
    model = build_family("mixtral").eval()
    _split_experts(model)
    fmt = Format("int", 8)
    with (
        pytest.raises(CheckpointError, match=r"experts\.\w+\.0 must be the weight of a Linear"),
        quantized_inputs(model, quantizable(model), fmt),
    ):
        pass
    norm = "model.layers.0.input_layernorm.weight"
    with pytest.raises(CheckpointError, match=norm), quantized_inputs(model, [norm], fmt):
        pass
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_module_that_never_runs_is_named():
    model = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)])

    def inside() -> None:
        with quantized_inputs(model, ["0.weight", "1.weight"], Format("int", 8)):
            model[0](torch.zeros(1, 4))

    with pytest.raises(CheckpointError, match=r"1\.weight: the model never ran"):
        inside()


def test_one_scale_for_all_tokens_is_refused():
    with (
        pytest.raises(QscaleError, match="token by token"),
        quantized_inputs(torch.nn.Linear(4, 4), [], Format.parse("fp8 tensor")),
    ):
        pass
