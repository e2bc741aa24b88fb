"""Kronecker factors: exact for one token, as defined otherwise, and how near the true blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from qscale.errors import CheckpointError
from qscale.measure.curvature.along import gauss_newton_along_each
from qscale.measure.curvature.kronecker import kronecker_factors
from qscale.measure.forms import quadratic_forms
from qscale.model import _swap_conv1d, quantizable
from qscale.quantize.format import Format
from qscale.quantize.rtn import rtn
from tests.checkpoints import babble, build_model, train

if TYPE_CHECKING:
    from conftest import Tiny

ARCHITECTURES = ("llama", "llama-tied", "gpt2", "neox", "opt")


@pytest.fixture(params=ARCHITECTURES)
def tiny(request: pytest.FixtureRequest, build) -> Tiny:
    found = build(request.param)
    _swap_conv1d(found.model)
    found.model.set_attn_implementation("eager")
    return found


def random_errors(model) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {
        name: 0.05 * torch.randn(w.shape, generator=draw, dtype=w.dtype)
        for name, w in quantizable(model).items()
    }


def test_exact_for_a_single_scored_token(tiny: Tiny) -> None:
    # One position: the gradient is one outer product, so probe by probe nothing is left out.
    errors = random_errors(tiny.model)
    window = tiny.windows[:1, :2]
    factors = kronecker_factors(tiny.model, window, list(errors), num_probes=5, seed=7)
    forms = quadratic_forms(
        tiny.model, window, list(errors), {"random": errors.__getitem__}, num_probes=5, seed=7
    )
    expected = forms.block_diagonal_each("random")
    for name, (value, se) in factors.quadratic(errors).items():
        assert value == pytest.approx(expected[name].value, rel=1e-5, abs=1e-12)
        assert se == pytest.approx(expected[name].probe_se, rel=1e-5, abs=1e-12)


def test_factors_are_as_defined(tiny: Tiny) -> None:
    """Input moments exactly; output moments against explicit Jacobians, within their errors."""
    names = list(quantizable(tiny.model))[-4:]
    factors = kronecker_factors(tiny.model, tiny.windows, names, num_probes=150, batch_windows=2)
    modules = {name: tiny.model.get_submodule(name.removesuffix(".weight")) for name in names}
    seen = {}
    handles = [
        module.register_forward_hook(
            lambda _, args, out, name=name: seen.update({name: (args[0], out)})
        )
        for name, module in modules.items()
    ]
    logits = tiny.model(input_ids=tiny.windows).logits[:, :-1].flatten(0, 1)
    for handle in handles:
        handle.remove()
    p = logits.detach().softmax(-1)
    rows = torch.eye(logits.numel(), dtype=logits.dtype).view(-1, *logits.shape)
    middle = torch.block_diag(*(torch.diag_embed(p) - p[:, :, None] * p[:, None, :])) / len(p)
    for name in names:
        x, out = seen[name]
        x = x.detach().view(*tiny.windows.shape, -1)[:, :-1].flatten(0, 1)
        torch.testing.assert_close(
            factors.inputs[name], x.T @ x / len(x), rtol=1e-5, atol=1e-7, check_dtype=False
        )
        (jacobian,) = torch.autograd.grad(
            logits, out, rows, is_grads_batched=True, retain_graph=True
        )
        jacobian = jacobian.reshape(len(rows), -1, out.shape[-1])  # (logits, positions, out)
        exact = torch.einsum("ipo,ij,jpq->oq", jacobian, middle, jacobian)
        probes = factors.outputs[name]
        error = probes.std(0) / len(probes) ** 0.5
        assert ((probes.mean(0) - exact).abs() <= 5 * error + 1e-9).all()
        trace = probes.diagonal(dim1=1, dim2=2).sum(1)
        assert abs(trace.mean() - exact.trace()) <= 4 * trace.std() / len(trace) ** 0.5
        assert trace.std() / len(trace) ** 0.5 <= 0.1 * exact.trace()


def test_batches_of_windows_give_the_same_inputs(tiny: Tiny) -> None:
    names = list(quantizable(tiny.model))
    one, two = (
        kronecker_factors(tiny.model, tiny.windows, names, num_probes=2, batch_windows=size)
        for size in (1, 2)
    )
    for name in names:
        torch.testing.assert_close(one.inputs[name], two.inputs[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "neox"])
def test_near_the_exact_block_of_a_trained_model(architecture: str) -> None:
    model = build_model(architecture)
    _swap_conv1d(model)
    train(model, steps=100)
    text = torch.tensor(list(babble(300, seed=5).encode()))
    windows = text[: 24 * 12].view(12, 24)
    weights = quantizable(model)
    fmt = Format("int", 4)
    errors = {name: rtn(w.detach(), fmt) - w.detach() for name, w in weights.items()}
    found = kronecker_factors(model, windows, list(errors), num_probes=8).quadratic(errors)
    exact = gauss_newton_along_each(model, windows, errors, batch_windows=12)
    ratio = np.log([found[name][0] / exact[name].gauss_newton.value for name in errors])
    assert np.median(np.abs(ratio)) < 0.4
    assert np.abs(ratio).max() < 1.4


class TestRefusals:
    @pytest.mark.parametrize(
        "name", ["lm_head.weight", "model.embed_tokens.weight", "model.layers.0.mlp.x.weight"]
    )
    def test_names(self, name: str, build) -> None:
        tiny = build("llama")
        with pytest.raises(
            CheckpointError, match=f"{name} must be the weight of a torch.nn.Linear"
        ):
            kronecker_factors(tiny.model, tiny.windows, [name])

    def test_probes(self, build) -> None:
        tiny = build("llama")
        with pytest.raises(ValueError, match="num_probes must be at least 2"):
            kronecker_factors(tiny.model, tiny.windows, tiny.names, num_probes=1)

    def test_not_finite(self, build) -> None:
        tiny = build("llama")
        name = "model.layers.1.mlp.down_proj.weight"
        tiny.model.model.norm.weight.data.fill_(float("nan"))
        with pytest.raises(CheckpointError, match="not finite"):
            kronecker_factors(tiny.model, tiny.windows, [name])
