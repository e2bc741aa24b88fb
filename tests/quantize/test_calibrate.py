"""Calibration block by block against whole forward passes, on several families."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from qscale.errors import CheckpointError, TextError
from qscale.model import _swap_conv1d, load, quantizable
from qscale.quantize.calibrate import gptq_model, require_disjoint
from qscale.quantize.gptq import gptq
from qscale.quantize.setting import Setting
from tests.checkpoints import build_family, build_model

SETTING = Setting.parse("gptq int3 g8 asym act_order=no")


def built(family: str):
    builder = build_model if family in {"llama", "gpt2", "neox"} else build_family
    model = builder(family).eval()
    _swap_conv1d(model)
    return model


def windows(count: int = 7, context: int = 24) -> torch.Tensor:
    draw = torch.Generator().manual_seed(3)
    return torch.randint(256, (count, context), generator=draw)


def inputs_of(model, name: str, ids: torch.Tensor) -> torch.Tensor:
    """Gram matrix of a Linear's inputs in one whole forward pass."""
    caught = []
    module = model.get_submodule(name.removesuffix(".weight"))
    handle = module.register_forward_pre_hook(lambda _, args: caught.append(args[0].double()))
    with torch.no_grad():
        model(input_ids=ids)
    handle.remove()
    rows = caught[0].flatten(0, -2)
    return rows.T @ rows


@pytest.mark.parametrize(
    "family", ["llama", "gpt2", "neox", "opt", "qwen2", "qwen3", "olmo2", "gemma3"]
)
def test_each_matrix_is_quantized_on_its_inputs_behind_quantized_blocks(family):
    model, ids = built(family), windows()
    weights = quantizable(model)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    pointers = {n: w.data_ptr() for n, w in weights.items()}
    seen = []
    found = gptq_model(
        model, weights, ids, SETTING, batch_windows=3, on_block=lambda *at: seen.append(at)
    )
    assert seen == [(1, 2), (2, 2)]
    assert list(found.weights) == list(weights)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert pointers == {n: w.data_ptr() for n, w in weights.items()}
    assert (found.windows, found.tokens) == (7, 168)
    first = [n for n in weights if ".0." in n]
    grams = {n: inputs_of(model, n, ids) for n in first}
    for n in first:
        weights[n].data = found.weights[n]
    grams |= {n: inputs_of(model, n, ids) for n in weights if n not in first}
    for n, gram in grams.items():
        expected = gptq(before[n], gram, SETTING.weights).weight
        assert ((found.weights[n] - expected).abs() < 1e-5).double().mean() > 0.98, n


def test_model_is_restored_after_an_error():
    model, ids = built("llama"), windows()
    weights = quantizable(model)
    before = {n: w.detach().clone() for n, w in weights.items()}

    def fail(done: int, of: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gptq_model(model, weights, ids, SETTING, on_block=fail)
    assert all(torch.equal(w, before[n]) for n, w in weights.items())
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_what_cannot_be_calibrated_is_refused():
    model, ids = built("llama"), windows()
    with pytest.raises(CheckpointError, match="evaluation mode"):
        gptq_model(model.train(), quantizable(model), ids, SETTING)
    mixture = built("mixtral")
    inner = {n: p for n, p in mixture.named_parameters() if "experts" in n and p.ndim >= 2}
    with pytest.raises(CheckpointError, match="must be the weight of a Linear"):
        gptq_model(mixture, inner, ids, SETTING)


def test_calibration_text_must_not_be_evaluated_on():
    text = np.random.default_rng(0).integers(500, size=4000)
    early, late = text[:2000].reshape(-1, 100), text[2000:].reshape(-1, 100)
    require_disjoint(early, late)
    shifted = text[1950:2050][None]  # half a window of it
    require_disjoint(shifted, late)
    for start in (2000, 2037, 3900):
        calibration = np.concatenate([early, text[start : start + 100][None]])
        with pytest.raises(TextError, match="1 of 21 calibration windows"):
            require_disjoint(calibration, text[1990:][None])


def test_first_block_is_quantized_as_by_llm_compressor():
    """Its default: columns by decreasing input norm, grids of the original groups."""
    root = Path(__file__).parents[2]
    model = load(root / "examples/checkpoints/tiny-wsd-decayed").model
    stored = np.load(root / "tests/fixtures/gptq_llmcompressor.npz")
    ids = torch.from_numpy(stored["ids"].astype(np.int64))
    weights = quantizable(model)
    for bits, rule in ((4, "full"), (3, "asym")):
        setting = Setting.parse(f"gptq int{bits} g32 {rule}")
        found = gptq_model(model, weights, ids, setting).weights
        for name in ("self_attn.q_proj", "mlp.up_proj"):
            expected = torch.from_numpy(stored[f"{name}-{bits}"])
            own = found[f"model.layers.0.{name}.weight"][: len(expected)]
            assert ((own - expected).abs() < 1e-6).double().mean() > 0.99
