"""Relative flatness against dense Hessians, exact expectations and the layers' free scale."""

from __future__ import annotations

import copy
import itertools
import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from qscale.errors import CheckpointError, TextError
from qscale.measure.flatness import (
    fisher_rao_norm,
    head_relative_flatness,
    relative_flatness,
    shuffled_columns,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Tiny

ARCHITECTURES = ("llama", "llama-tied", "opt", "neox")


def matrices(tiny: Tiny) -> list[str]:
    return [name for name, p in tiny.model.named_parameters() if p.ndim == 2]


def dense_relative_flatness(tiny: Tiny, name: str) -> float:
    """Sum over pairs of rows of their product times the trace of their block, by definition."""
    weight = dict(tiny.model.named_parameters())[name]
    logits = tiny.model(input_ids=tiny.windows).logits[:, :-1]
    loss = cross_entropy(logits.flatten(0, 1), tiny.windows[:, 1:].flatten())
    (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
    units = torch.eye(weight.numel(), dtype=weight.dtype).view(-1, *weight.shape)
    (rows,) = torch.autograd.grad(gradient, weight, units, is_grads_batched=True)
    blocks = rows.view(*weight.shape, *weight.shape)  # row s, column j, row s', column j'
    traces = blocks.diagonal(dim1=1, dim2=3).sum(-1)
    return float(((weight @ weight.T) * traces).sum().detach())


@pytest.fixture(scope="module", params=ARCHITECTURES)
def tiny(request: pytest.FixtureRequest, build: Callable[[str], Tiny]) -> Tiny:
    """One model of each architecture; tests must leave it as it is."""
    tiny = build(request.param)
    tiny.model.set_attn_implementation("eager")
    return tiny


@pytest.fixture
def llama(build: Callable[[str], Tiny]) -> Tiny:
    """A Llama that the test may change."""
    return build("llama")


class TestProbe:
    def test_covariance_over_all_permutations_and_signs(self, monkeypatch) -> None:
        weight = torch.randn(3, 4, dtype=torch.double, generator=torch.Generator().manual_seed(0))
        total = torch.zeros(12, 12, dtype=torch.double)
        signs = list(itertools.product([-1.0, 1.0], repeat=4))
        orders = list(itertools.permutations(range(4)))
        for order, sign in itertools.product(orders, signs):
            monkeypatch.setattr(torch, "randperm", lambda *_, o=order, **__: torch.tensor(o))
            monkeypatch.setattr(
                "qscale.measure.flatness.rademacher",
                lambda *_, s=sign: torch.tensor(s, dtype=torch.double),
            )
            probe = shuffled_columns(weight, torch.Generator()).flatten()
            total += probe[:, None] * probe
        expected = torch.kron(weight @ weight.T, torch.eye(4, dtype=torch.double))
        torch.testing.assert_close(total / (len(orders) * len(signs)), expected)

    def test_draws_every_place_and_sign(self) -> None:
        weight = torch.tensor([[1.0, 2.0, 3.0]])
        stream = torch.Generator().manual_seed(0)
        draws = torch.cat([shuffled_columns(weight, stream) for _ in range(300)])
        assert {round(x, 3) for x in (draws / math.sqrt(3)).unique().tolist()} == {
            -3.0, -2.0, -1.0, 1.0, 2.0, 3.0,
        }  # fmt: skip
        for column in draws.T:
            assert len(column.unique()) == 6


class TestRelativeFlatness:
    def test_unbiased_over_200_probes(self, tiny: Tiny) -> None:
        names = matrices(tiny)
        found = relative_flatness(tiny.model, tiny.windows, names, num_probes=200, batch_windows=3)
        exact = np.array([dense_relative_flatness(tiny, name) for name in names])
        error = found.values.std(axis=0, ddof=1) / math.sqrt(200)
        z = (found.values.mean(axis=0) - exact) / np.maximum(error, 1e-6 * np.abs(exact) + 1e-9)
        assert np.abs(z).max() < 4
        assert np.sqrt(np.mean(z**2)) < 1.5
        assert abs(found.total - exact.sum()) < 4 * found.se

    def test_a_head_of_its_own_is_exact(self, build) -> None:
        llama = build("llama")
        found = relative_flatness(llama.model, llama.windows, ["lm_head.weight"], batch_windows=2)
        exact = dense_relative_flatness(llama, "lm_head.weight")
        assert found.total == pytest.approx(exact, rel=1e-6)
        assert found.se == pytest.approx(0, abs=1e-12 * exact)
        value, se = head_relative_flatness(llama.model, llama.windows)
        assert value == pytest.approx(exact, rel=1e-6)
        each = [head_relative_flatness(llama.model, ids[None])[0] for ids in llama.windows]
        assert value == pytest.approx(np.mean(each), rel=1e-9)
        assert se == pytest.approx(np.std(each, ddof=1) / math.sqrt(len(each)), rel=1e-9)

    def test_head_a_chunk_at_a_time(self, llama: Tiny, monkeypatch) -> None:
        whole = head_relative_flatness(llama.model, llama.windows, batch_windows=3)
        monkeypatch.setattr("qscale.measure.curvature.head.CHUNK_LOGITS", 22)  # 2 positions
        parts = head_relative_flatness(llama.model, llama.windows, batch_windows=2)
        assert parts == pytest.approx(whole, rel=1e-9)

    def test_moving_scale_between_layers_changes_nothing(self, llama: Tiny) -> None:
        names = [name for name in matrices(llama) if "up_proj" in name or "down_proj" in name]
        before = relative_flatness(llama.model, llama.windows, names, num_probes=3)
        with torch.no_grad():
            for layer in llama.model.model.layers:
                layer.mlp.up_proj.weight.mul_(8)
                layer.mlp.down_proj.weight.div_(8)
        after = relative_flatness(llama.model, llama.windows, names, num_probes=3)
        np.testing.assert_allclose(after.values, before.values, rtol=1e-4, atol=1e-6)

    def test_seed_decides_and_batches_have_probes_of_their_own(self, llama: Tiny) -> None:
        def values(**options) -> np.ndarray:
            return relative_flatness(
                llama.model, llama.windows, matrices(llama), num_probes=3, **options
            ).values

        np.testing.assert_array_equal(values(), values())
        probed = values()[:, :-1]
        assert not np.any(probed == values(seed=1)[:, :-1])
        assert not np.any(probed == values(batch_windows=3)[:, :-1])

    def test_progress_and_model_left_as_it_was(self, llama: Tiny) -> None:
        before, done = copy.deepcopy(llama.model.state_dict()), []
        llama.model.train()
        llama.model.model.layers[0].eval()
        flags = [module.training for module in llama.model.modules()]
        relative_flatness(
            llama.model, llama.windows, matrices(llama), num_probes=2, on_probe=done.append
        )
        head_relative_flatness(llama.model, llama.windows)
        assert sum(done) == pytest.approx(2)
        assert [module.training for module in llama.model.modules()] == flags
        assert all(torch.equal(before[name], now) for name, now in llama.model.state_dict().items())


class TestMistakes:
    def test_vectors_have_no_rows(self, llama: Tiny) -> None:
        with pytest.raises(CheckpointError, match=r"model.norm.weight must be a matrix"):
            relative_flatness(llama.model, llama.windows, ["model.norm.weight"])

    def test_one_probe(self, llama: Tiny) -> None:
        with pytest.raises(ValueError, match="num_probes must be at least 2"):
            relative_flatness(llama.model, llama.windows, matrices(llama), num_probes=1)

    def test_short_windows(self, llama: Tiny) -> None:
        for measure in (
            lambda ids: relative_flatness(llama.model, ids, matrices(llama)),
            lambda ids: head_relative_flatness(llama.model, ids),
        ):
            with pytest.raises(TextError, match="at least one window of 2 tokens"):
                measure(llama.windows[:, :1])

    def test_nan_weights(self, llama: Tiny) -> None:
        with torch.no_grad():
            llama.model.lm_head.weight[0, 0] = float("nan")
        for name in ("lm_head.weight", "model.layers.0.mlp.up_proj.weight"):
            with pytest.raises(CheckpointError, match="check its weights for"):
                relative_flatness(llama.model, llama.windows, [name])


@pytest.mark.parametrize("architecture", ["llama", "llama-tied", "neox"])  # OPT's ReLU has kinks
def test_fisher_rao_norm_is_the_variance_of_the_change_of_log_probabilities(
    build: Callable[[str], Tiny], architecture: str
) -> None:
    """Definition 2 with labels from the model: mean of <w, grad log p>^2, by finite differences."""
    tiny = build(architecture)
    tiny.model.set_attn_implementation("eager")
    names, model = matrices(tiny), copy.deepcopy(tiny.model).double()
    parameters = dict(model.named_parameters())
    kept = {name: parameters[name].detach().clone() for name in names}

    def log_probabilities(scale: float) -> torch.Tensor:
        for name, weight in kept.items():
            parameters[name].data = scale * weight
        with torch.no_grad():
            return model(input_ids=tiny.windows).logits[:, :-1].log_softmax(-1)

    def difference(step: float) -> torch.Tensor:
        return (log_probabilities(1 + step) - log_probabilities(1 - step)) / (2 * step)

    # Attention takes its softmax in float32: a wide step, and its error of second order removed.
    slope = (4 * difference(5e-3) - difference(1e-2)) / 3
    expected = (log_probabilities(1).exp() * slope.square()).sum(-1).mean().sqrt()
    norm, se = fisher_rao_norm(tiny.model, tiny.windows, names)
    assert norm == pytest.approx(float(expected), rel=1e-4)
    assert 0 < se < norm
    # Windows one at a time: the mean of their squares, and the delta method from their spread.
    squares = np.array([fisher_rao_norm(tiny.model, w[None], names)[0] ** 2 for w in tiny.windows])
    assert norm**2 == pytest.approx(squares.mean())
    spread = squares.std(ddof=1) / math.sqrt(len(squares))
    assert se == pytest.approx(spread / (2 * norm), rel=1e-6)
