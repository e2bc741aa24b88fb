"""Taylor terms along a change of the weights, against dense matrices and the loss itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
import transformers as hf
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from qscale.errors import CheckpointError, TextError
from qscale.measure.curvature import head as head_module
from qscale.measure.curvature.along import (
    PerWindow,
    gauss_newton_along,
    gauss_newton_along_each,
    second_order_along,
)
from qscale.measure.loss import mean_and_se
from qscale.model import _split_experts, _swap_conv1d, quantizable
from tests.checkpoints import FAMILIES, build_family, build_model

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Tiny

ARCHITECTURES = ("llama", "llama-tied", "qwen2", "gpt2", "neox", "opt")


@pytest.fixture(scope="module", params=ARCHITECTURES)
def tiny(request: pytest.FixtureRequest, build: Callable[[str], Tiny]) -> Tiny:
    """One model of each architecture; tests must leave it as it is."""
    found = build(request.param)
    found.model.set_attn_implementation("eager")
    return found


def random_errors(model, names, *, scale: float = 0.05, seed: int = 0) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {
        name: scale * torch.randn(parameters[name].shape, generator=draw, dtype=torch.double)
        for name in names
    }


# References by reverse mode alone: rows of the Jacobian, double backward of Hugging Face's loss.


def dense_terms(model, ids: torch.Tensor, errors: dict[str, torch.Tensor]) -> tuple[float, ...]:
    """First-order, Gauss-Newton and Hessian terms of one text, from explicit matrices."""
    parameters = [dict(model.named_parameters(remove_duplicate=False))[name] for name in errors]
    vector = torch.cat([e.flatten() for e in errors.values()])

    logits = model(input_ids=ids).logits[:, :-1].flatten(0, 1)
    rows = torch.eye(logits.numel(), dtype=logits.dtype).view(-1, *logits.shape)
    jacobian = torch.autograd.grad(logits, parameters, rows, is_grads_batched=True)
    jacobian = torch.cat([j.reshape(len(rows), -1) for j in jacobian], dim=1)
    p = logits.detach().softmax(-1)
    middle = torch.block_diag(*(torch.diag_embed(p) - p[:, :, None] * p[:, None, :])) / len(p)
    ggn = jacobian.T @ middle @ jacobian

    loss = model(input_ids=ids, labels=ids).loss
    gradient = torch.autograd.grad(loss, parameters, create_graph=True)
    gradient = torch.cat([g.flatten() for g in gradient])
    eye = torch.eye(len(gradient), dtype=gradient.dtype)
    rows = torch.autograd.grad(gradient, parameters, eye, is_grads_batched=True)
    hessian = torch.cat([r.reshape(len(eye), -1) for r in rows], dim=1)
    return (
        float(gradient.detach() @ vector),
        float(vector @ ggn @ vector / 2),
        float(vector @ hessian @ vector / 2),
    )


def test_terms_are_those_of_dense_matrices(tiny: Tiny) -> None:
    errors = random_errors(tiny.model, tiny.names)  # embedding, norms, biases and head included
    found = second_order_along(tiny.model, tiny.windows, errors)
    total = dense_terms(tiny.model, tiny.windows, errors)
    terms = (found.first_order, found.gauss_newton, found.hessian)
    for term, expected in zip(terms, total, strict=True):
        assert term.value == pytest.approx(expected, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "neox"])
def test_terms_of_one_block_window_by_window(architecture: str, build) -> None:
    tiny = build(architecture)
    names = [name for name, p in tiny.model.named_parameters() if p.ndim == 2 and ".0." in name]
    errors = random_errors(tiny.model, names)
    found = second_order_along(tiny.model, tiny.windows, errors)
    tiny.model.set_attn_implementation("eager")
    terms = (found.first_order, found.gauss_newton, found.hessian)
    for i in range(len(tiny.windows)):
        expected = dense_terms(tiny.model, tiny.windows[i : i + 1], errors)
        got = [term.values[i] for term in terms]
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-7)


def test_a_tied_head_goes_by_either_name(build) -> None:
    tiny = build("llama-tied")
    values = [
        gauss_newton_along(tiny.model, tiny.windows, random_errors(tiny.model, [name])).gauss_newton
        for name in ("lm_head.weight", "model.embed_tokens.weight")
    ]
    assert values[0].value == values[1].value > 0


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_sum_of_single_matrices_leaves_out_their_products(architecture: str, build) -> None:
    tiny = build(architecture)
    tiny.model.set_attn_implementation("eager")
    errors = random_errors(tiny.model, tiny.names)
    each = gauss_newton_along_each(tiny.model, tiny.windows, errors)
    together = gauss_newton_along(tiny.model, tiny.windows, errors)
    assert list(each) == tiny.names
    first = sum(one.first_order.value for one in each.values())
    assert first == pytest.approx(together.first_order.value, rel=1e-6)
    for name in tiny.names[1::9]:
        expected = dense_terms(tiny.model, tiny.windows, {name: errors[name]})[1]
        assert each[name].gauss_newton.value == pytest.approx(expected, rel=1e-6, abs=1e-12)
    pair = tiny.names[1], tiny.names[-3]
    products = gauss_newton_along(
        tiny.model, tiny.windows, {name: errors[name] for name in pair}
    ).gauss_newton.value - sum(each[name].gauss_newton.value for name in pair)
    expected = dense_terms(tiny.model, tiny.windows, {name: errors[name] for name in pair})[1]
    expected -= sum(dense_terms(tiny.model, tiny.windows, {n: errors[n]})[1] for n in pair)
    assert products == pytest.approx(expected, rel=1e-5, abs=1e-12)


def test_it_is_the_loss_increase_of_a_small_step(build) -> None:
    tiny = build("gpt2")  # the others round to float32 inside, also in a float64 model
    errors = random_errors(tiny.model, tiny.names, scale=1.0)
    found = second_order_along(tiny.model, tiny.windows, errors)
    original = {name: p.detach().clone() for name, p in tiny.model.named_parameters()}

    def loss(step: float) -> float:
        moved = {name: original[name] + step * errors[name] for name in errors}
        output = torch.func.functional_call(tiny.model, moved, kwargs={"input_ids": tiny.windows})
        targets = tiny.windows[:, 1:].flatten()
        return cross_entropy(output.logits[:, :-1].flatten(0, 1), targets).item()

    slope = (loss(1e-5) - loss(-1e-5)) / 2e-5
    assert slope == pytest.approx(found.first_order.value, rel=1e-6)
    curvature = (loss(1e-4) + loss(-1e-4) - 2 * loss(0.0)) / 2e-8
    assert curvature == pytest.approx(found.hessian.value, rel=1e-3)
    assert found.second_order is not None
    value = found.first_order.value + found.hessian.value
    assert found.second_order.value == pytest.approx(value, rel=1e-12)
    increase = 1e-4 * found.first_order.value + 1e-8 * found.hessian.value
    assert loss(1e-4) - loss(0.0) == pytest.approx(increase, rel=1e-5)


def test_batches_change_nothing(tiny: Tiny) -> None:
    errors = random_errors(tiny.model, tiny.names)
    one, ragged = (
        gauss_newton_along(tiny.model, tiny.windows, errors, batch_windows=size) for size in (1, 2)
    )
    np.testing.assert_allclose(ragged.gauss_newton.values, one.gauss_newton.values, rtol=1e-6)
    np.testing.assert_allclose(ragged.first_order.values, one.first_order.values, rtol=1e-6)


def test_chunks_of_logits_change_nothing(build, monkeypatch) -> None:
    for architecture in ("llama", "llama-tied"):
        tiny = build(architecture)
        errors = random_errors(tiny.model, tiny.names)
        whole = gauss_newton_along(tiny.model, tiny.windows, errors)
        with monkeypatch.context() as patch:
            patch.setattr(head_module, "CHUNK_LOGITS", 2 * 11)  # two positions of five
            cut = gauss_newton_along(tiny.model, tiny.windows, errors)
        np.testing.assert_allclose(cut.gauss_newton.values, whole.gauss_newton.values, rtol=1e-12)
        np.testing.assert_allclose(cut.first_order.values, whole.first_order.values, rtol=1e-12)


class Largest(TorchDispatchMode):
    """Record the size of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return out


def test_all_logits_never_exist_at_once(monkeypatch) -> None:
    monkeypatch.setattr(head_module, "CHUNK_LOGITS", 1024)
    model = build_model("llama")
    windows = torch.randint(256, (1, 32), generator=torch.Generator().manual_seed(0))
    errors = {name: 0.1 * torch.ones_like(p) for name, p in quantizable(model).items()}
    with Largest() as seen:
        second_order_along(model, windows, errors)
    assert seen.elements == model.lm_head.weight.numel() < 31 * 256


@pytest.mark.parametrize("family", ["llama", "gpt2", "neox", "opt", *FAMILIES])
def test_families_in_single_precision(family: str) -> None:
    build = build_model if family in ("gpt2", "neox") else build_family
    model = build(family).eval()
    _swap_conv1d(model)
    _split_experts(model)
    windows = torch.randint(256, (2, 8), generator=torch.Generator().manual_seed(0))
    errors = random_errors(model, [n for n, p in model.named_parameters() if p.ndim == 2])
    found = gauss_newton_along(model, windows, errors)
    grads = torch.autograd.grad(
        model(input_ids=windows, labels=windows).loss,
        [dict(model.named_parameters())[name] for name in errors],
    )
    expected = sum(float((g * e).sum()) for g, e in zip(grads, errors.values(), strict=True))
    assert found.first_order.value == pytest.approx(expected, rel=1e-3, abs=1e-6)
    assert found.gauss_newton.value > 0
    assert found.gauss_newton.se > 0


def test_standard_error_is_that_over_windows() -> None:
    values = np.random.default_rng(0).normal(size=9)
    assert (PerWindow(values).value, PerWindow(values).se) == pytest.approx(
        mean_and_se(values * 5, np.full(9, 5))
    )
    assert np.isnan(PerWindow(values[:1]).se)
    total = PerWindow(values) + PerWindow(-values)
    assert (total.value, total.se) == (0, 0)


def test_leaves_the_model_as_it_was(build) -> None:
    tiny = build("gpt2")
    model = tiny.model.train()
    before = {name: p.clone() for name, p in model.state_dict().items()}
    errors = random_errors(model, tiny.names)
    noisy = second_order_along(model, tiny.windows, errors)
    assert model.training
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert all(torch.equal(before[name], now) for name, now in model.state_dict().items())
    quiet = second_order_along(model.eval(), tiny.windows, errors)
    np.testing.assert_array_equal(noisy.gauss_newton.values, quiet.gauss_newton.values)


class TestRefusals:
    def test_shape(self, build) -> None:
        tiny = build("llama")
        with pytest.raises(ValueError, match=r"errors\['lm_head.weight'\] must have shape \(11, 8"):
            gauss_newton_along(tiny.model, tiny.windows, {"lm_head.weight": torch.zeros(8, 11)})

    def test_unknown_and_no_parameter(self, build) -> None:
        tiny = build("llama")
        with pytest.raises(CheckpointError, match="has no parameter 'x'"):
            gauss_newton_along(tiny.model, tiny.windows, {"x": torch.zeros(1)})
        with pytest.raises(CheckpointError, match="has no matrix"):
            gauss_newton_along(tiny.model, tiny.windows, {})

    def test_nothing_to_score(self, build) -> None:
        tiny = build("llama")
        errors = random_errors(tiny.model, tiny.names)
        with pytest.raises(TextError, match="at least one window of 2 tokens"):
            gauss_newton_along(tiny.model, tiny.windows[:, :1], errors)

    def test_not_finite(self, build) -> None:
        tiny = build("llama")
        errors = random_errors(tiny.model, tiny.names)
        errors[tiny.names[2]][0, 0] = float("nan")
        with pytest.raises(
            CheckpointError, match="expansion of the loss in window 0 is not finite"
        ):
            second_order_along(tiny.model, tiny.windows, errors)

    def test_no_forward_mode(self) -> None:
        sizes = {"vocab_size": 11, "hidden_size": 8, "n_layer": 1, "n_head": 2}
        model = hf.BloomForCausalLM(hf.BloomConfig(**sizes)).eval()
        errors = random_errors(model, list(quantizable(model)))
        with pytest.raises(CheckpointError, match="BloomForCausalLM cannot be differentiated"):
            gauss_newton_along(model, torch.arange(10)[None], errors)
