"""The chunked LM head: derivatives, exact blocks, and no tensor of all logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
import transformers as hf
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from qscale.errors import CheckpointError
from qscale.measure.curvature import ggn_trace, grad_norm, hessian_trace, hessian_vector_product
from qscale.measure.curvature import head as head_module
from qscale.measure.curvature.head import block_traces, check_head, cross_entropy_sum
from tests.checkpoints import build_model

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.measure.conftest import Tiny

VOCABULARY, WIDTH, POSITIONS = 7, 4, 5


@pytest.fixture(params=[True, False], ids=["bias", "no bias"])
def inputs(request) -> tuple[torch.Tensor, torch.nn.Linear, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    head = torch.nn.Linear(WIDTH, VOCABULARY, bias=request.param).double()
    for parameter in head.parameters():
        parameter.data = torch.randn(parameter.shape, generator=draw, dtype=torch.double)
    hidden = torch.randn(POSITIONS, WIDTH, generator=draw, dtype=torch.double, requires_grad=True)
    return hidden, head, torch.randint(VOCABULARY, (POSITIONS,), generator=draw)


@pytest.fixture(params=[1, 2, 100])
def positions_at_once(request, monkeypatch) -> int:
    monkeypatch.setattr(head_module, "CHUNK_LOGITS", VOCABULARY * request.param)
    return request.param


@pytest.mark.parametrize("weight_wanted", [True, False])
def test_first_and_second_derivative(inputs, positions_at_once, weight_wanted: bool) -> None:
    hidden, head, targets = inputs
    head.requires_grad_(weight_wanted)
    leaves = [hidden, *(p for p in head.parameters() if p.requires_grad)]

    def loss(*_leaves: torch.Tensor) -> torch.Tensor:
        return cross_entropy_sum(hidden, head, targets)

    expected = cross_entropy(head(hidden), targets, reduction="sum")
    torch.testing.assert_close(loss(), expected)
    assert torch.autograd.gradcheck(loss, leaves)
    assert torch.autograd.gradgradcheck(loss, leaves)


def test_the_sum_is_in_double_precision(positions_at_once) -> None:
    draw = torch.Generator().manual_seed(0)
    head = torch.nn.Linear(WIDTH, VOCABULARY)
    hidden = torch.randn(3000, WIDTH, generator=draw)
    targets = torch.randint(VOCABULARY, (3000,), generator=draw)
    each = cross_entropy(head(hidden), targets, reduction="none")
    total = cross_entropy_sum(hidden, head, targets)
    assert total.dtype == torch.float64
    assert total.item() == pytest.approx(each.double().sum().item(), rel=1e-7)


def test_block_traces_are_those_of_the_dense_hessian(inputs, positions_at_once) -> None:
    hidden, head, targets = inputs
    exact = block_traces(hidden, head)
    for name, parameter in head.named_parameters():

        def loss(value: torch.Tensor, name: str = name) -> torch.Tensor:
            logits = torch.func.functional_call(head, {name: value}, (hidden.detach(),))
            return cross_entropy(logits, targets, reduction="sum")

        dense = torch.autograd.functional.hessian(loss, parameter.detach())
        trace = dense.view(parameter.numel(), parameter.numel()).trace()
        assert exact[name] == pytest.approx(trace.item(), rel=1e-12)


def estimates(tiny: Tiny) -> list[np.ndarray]:
    """Every quantity that goes through the head, for the same probes."""
    model, windows, names = tiny.model, tiny.windows, tiny.names
    vectors = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    product = hessian_vector_product(model, windows, vectors)
    return [
        ggn_trace(model, windows, names, num_probes=10).values,
        hessian_trace(model, windows, names, min_probes=2, max_probes=2).values,
        np.concatenate([part.flatten().numpy() for part in product.values()]),
        np.array(grad_norm(model, windows, names)),
    ]


@pytest.mark.parametrize("architecture", ["llama", "llama-tied"])
def test_chunks_change_nothing(architecture: str, build: Callable[[str], Tiny], monkeypatch):
    tiny = build(architecture)
    whole = estimates(tiny)
    monkeypatch.setattr(head_module, "CHUNK_LOGITS", 2 * 11)  # two positions of five
    for got, expected in zip(estimates(tiny), whole, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-9)


class Largest(TorchDispatchMode):
    """Record the size of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return out


@pytest.mark.parametrize("tied", [True, False])
def test_all_logits_never_exist_at_once(tied: bool, monkeypatch) -> None:
    monkeypatch.setattr(head_module, "CHUNK_LOGITS", 1024)
    model = build_model("llama", tie_word_embeddings=tied)
    windows = torch.randint(256, (1, 32), generator=torch.Generator().manual_seed(0))
    names = [name for name, _ in model.named_parameters()]
    vectors = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    with Largest() as seen:
        grad_norm(model, windows, names)
        ggn_trace(model, windows, names, num_probes=2)
        hessian_vector_product(model, windows, vectors)
        hessian_trace(model, windows, names, min_probes=2, max_probes=2)
    assert seen.elements == max(p.numel() for p in model.parameters()) < 31 * 256


def test_scaled_logits_are_refused() -> None:
    config = hf.GraniteConfig(
        vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=1, logits_scaling=3.0,
        num_attention_heads=2, num_key_value_heads=1, bos_token_id=None, eos_token_id=None,
        pad_token_id=None,
    )  # fmt: skip
    model = hf.GraniteForCausalLM(config).eval()
    windows = torch.arange(10)[None]
    with pytest.raises(CheckpointError, match="GraniteForCausalLM: logits are not the LM head"):
        check_head(model, windows)
    with pytest.raises(CheckpointError, match="GraniteForCausalLM: logits are not the LM head"):
        grad_norm(model, windows, ["lm_head.weight"])
