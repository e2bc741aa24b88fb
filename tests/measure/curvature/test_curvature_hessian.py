"""Hessian products and traces against dense matrices and finite differences."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import numpy as np
import pytest
import scipy.stats
import torch
from torch.nn.functional import cross_entropy

from qscale.measure.curvature import (
    TraceEstimate,
    ggn_trace,
    hessian_trace,
    hessian_vector_product,
    products,
)
from qscale.measure.curvature.hessian import _probes_to_add
from qscale.measure.curvature.loss import rademacher
from tests.checkpoints import babble, build_model, train
from tests.dense import (
    LAYER_NORM,
    assert_close,
    assert_mean,
    block_slices,
    dense_hessian,
    flatten,
    per_probe,
    rademacher_variance,
    random_vectors,
    rows_only,
)

if TYPE_CHECKING:
    from tests.measure.conftest import Tiny


class TestHessian:
    def test_product_equals_dense(self, eager: Tiny) -> None:
        hessian = dense_hessian(eager.model, eager.windows)
        vectors = random_vectors(eager)
        product = hessian_vector_product(eager.model, eager.windows, vectors)
        assert_close(flatten(product), hessian @ flatten(vectors), rtol=1e-5)

    @pytest.mark.parametrize("architecture", LAYER_NORM)
    def test_layer_norm_product_equals_finite_differences(self, architecture: str, build) -> None:
        # torch.func.hessian is off by percents here; see hessian_vector_product.
        tiny = build(architecture)
        vectors = random_vectors(tiny)
        product = hessian_vector_product(tiny.model, tiny.windows, vectors)

        def gradient(step: float) -> np.ndarray:
            model = copy.deepcopy(tiny.model)
            with torch.no_grad():
                for name, p in model.named_parameters():
                    p.add_(vectors[name], alpha=step)
            logits = model(input_ids=tiny.windows).logits[:, :-1]
            loss = cross_entropy(logits.flatten(0, 1), tiny.windows[:, 1:].flatten())
            return torch.cat(
                [g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]
            ).numpy()

        step = 1e-5
        difference = (gradient(step) - gradient(-step)) / (2 * step)
        assert_close(flatten(product), difference, rtol=1e-5)

    def test_product_restricted_to_some_parameters(self, eager: Tiny) -> None:
        hessian = dense_hessian(eager.model, eager.windows)
        chosen = [1, len(eager.names) - 2]
        vectors = random_vectors(eager)
        vectors = {eager.names[i]: vectors[eager.names[i]] for i in chosen}
        keep = np.concatenate([np.arange(len(hessian))[block_slices(eager)[i]] for i in chosen])
        product = hessian_vector_product(eager.model, eager.windows, vectors)
        assert list(product) == list(vectors)
        expected = hessian[np.ix_(keep, keep)] @ flatten(vectors)
        assert_close(flatten(product), expected, rtol=1e-5)

    def test_product_does_not_depend_on_ragged_batches(self, tiny: Tiny) -> None:
        vectors = random_vectors(tiny)
        whole, ragged = (
            flatten(hessian_vector_product(tiny.model, tiny.windows, vectors, batch_windows=size))
            for size in (3, 2)
        )
        assert_close(ragged, whole, rtol=1e-6)

    def test_trace_has_the_exact_mean_and_variance(self, eager: Tiny) -> None:
        batch_windows = 2  # three windows: a ragged split
        parts = [
            dense_hessian(eager.model, ids) * len(ids) / len(eager.windows)
            for ids in eager.windows.split(batch_windows)
        ]
        estimate = hessian_trace(
            eager.model,
            eager.windows,
            eager.names,
            rtol=0,
            max_probes=150,
            batch_windows=batch_windows,
        )
        assert estimate.values.shape == (2 * 150, len(eager.names))
        values = per_probe(estimate)
        totals = values.sum(axis=1)
        variance = sum(rademacher_variance(part) for part in parts)
        assert 0.5 < totals.var(ddof=1) / variance < 1.5
        assert_mean(totals, sum(np.trace(part) for part in parts), variance)
        for i, block in enumerate(block_slices(eager)):
            assert_mean(
                values[:, i],
                sum(np.trace(part[block, block]) for part in parts),
                sum(rademacher_variance(rows_only(part, block)) for part in parts),
            )

    def test_stops_at_the_accuracy_or_at_the_cap(self, llama: Tiny) -> None:
        def run(**options) -> TraceEstimate:
            return hessian_trace(llama.model, llama.windows, llama.names, **options)

        assert run(rtol=100.0, min_probes=3, max_probes=10).num_probes == 3
        capped = run(rtol=1e-6, min_probes=2, max_probes=13)
        assert capped.num_probes == 13
        assert capped.backward_passes == 13 + 4  # rounds of 2, 2, 4 and 5

    def test_reaches_the_accuracy(self, build) -> None:
        opt = build("opt")
        estimate = hessian_trace(opt.model, opt.windows, opt.names, rtol=0.2, min_probes=4)
        assert 4 < estimate.num_probes < 100
        assert estimate.se <= 0.2 * abs(estimate.total)

    def test_rounds_do_not_change_the_probes(self, llama: Tiny) -> None:
        one, many = (
            hessian_trace(
                llama.model, llama.windows, llama.names, rtol=0, min_probes=first, max_probes=9
            )
            for first in (9, 2)
        )
        np.testing.assert_allclose(one.values, many.values, rtol=1e-9, atol=1e-12)

    @pytest.mark.parametrize("sign", [1, -1])
    def test_rounds_follow_the_absolute_accuracy(self, sign: int) -> None:
        totals = sign * np.array([4.0, 1.0, 2.0, 5.0])
        relative = totals.std(ddof=1) / 2 / 3

        def more(rtol: float, max_probes: int = 100) -> int:
            found = TraceEstimate(("a",), totals[:, None], 1, 4)
            return _probes_to_add(found, rtol=rtol, min_probes=2, max_probes=max_probes)

        assert more(1.01 * relative) == 0
        assert more(relative / 1.2) == int(np.ceil(4 * 1.2**2)) - 4
        assert more(relative / 10) == 4  # at most double
        assert more(relative / 10, max_probes=6) == 2


def small_llama(**changes) -> tuple[torch.nn.Module, torch.Tensor, list[str]]:
    """A trained float32 model, large enough that displacements are small beside its weights."""
    model = build_model("llama", hidden_size=32, intermediate_size=48, **changes)
    train(model, steps=60)
    windows = torch.tensor(list(babble(60, seed=5).encode()[:128])).view(4, 32)
    return model, windows, [name for name, _ in model.named_parameters()]


class TestDifferences:
    @pytest.mark.parametrize(("method", "rtol"), [("central", 2e-3), ("forward", 2e-2)])
    def test_product_is_close_to_the_exact_one(self, method: str, rtol: float) -> None:
        model, windows, _ = small_llama()
        draw = torch.Generator().manual_seed(0)
        signs = {n: rademacher(p, draw) for n, p in model.named_parameters()}  # not normalised
        exact = flatten(hessian_vector_product(model, windows, signs))
        got = flatten(hessian_vector_product(model, windows, signs, method=method))
        assert_close(got, exact, rtol=rtol)
        form = flatten(signs)
        assert form @ got == pytest.approx(form @ exact, rel=rtol / 2)

    @pytest.mark.parametrize("method", ["central", "forward"])
    def test_weights_come_back_bit_for_bit_also_after_an_error(self, method: str) -> None:
        model, windows, names = small_llama()
        weights = copy.deepcopy(model.state_dict())

        def unchanged() -> bool:
            return all(torch.equal(weights[n], w) for n, w in model.state_dict().items())

        hessian_trace(model, windows, names, method=method, max_probes=2)
        assert unchanged()
        calls = iter(range(100))

        def fail_when_displaced(module, args, output) -> None:
            if not torch.equal(model.lm_head.weight, weights["lm_head.weight"]):
                next(calls)
                raise KeyboardInterrupt

        model.model.norm.register_forward_hook(fail_when_displaced)
        with pytest.raises(KeyboardInterrupt):
            hessian_vector_product(
                model, windows, {n: torch.ones_like(w) for n, w in weights.items()}, method=method
            )
        assert next(calls) == 1
        assert unchanged()

    def test_same_signs_give_the_same_trace(self) -> None:
        model, windows, names = small_llama()
        exact, central, forward = (
            hessian_trace(model, windows, names, method=method, min_probes=3, max_probes=3)
            for method in ("exact", "central", "forward")
        )
        assert central.total == pytest.approx(exact.total, rel=1e-3)
        assert forward.total == pytest.approx(exact.total, rel=1e-2)
        assert (exact.backward_passes, central.backward_passes, forward.backward_passes) == (
            4,
            6,
            4,
        )

    def test_fused_attention_needs_no_guard(self, monkeypatch) -> None:
        model, windows, names = small_llama(attn_implementation="sdpa")

        def forbidden(*_args):
            raise AssertionError("attention was changed")

        monkeypatch.setattr(products, "double_backward_attention", forbidden)
        assert hessian_trace(model, windows, names, method="forward", max_probes=2).total > 0
        with pytest.raises(AssertionError, match="attention was changed"):
            hessian_trace(model, windows, names, max_probes=2)

    def test_zero_vector(self, llama: Tiny) -> None:
        zero = {n: torch.zeros_like(p) for n, p in llama.model.named_parameters()}
        product = hessian_vector_product(llama.model, llama.windows, zero, method="central")
        assert not flatten(product).any()


class TestStandardError:
    @pytest.mark.slow
    @pytest.mark.parametrize("architecture", ["llama", "gpt2"])
    def test_unbiased_and_calibrated_over_200_seeds(self, architecture: str, build) -> None:
        """Estimates that stop by themselves, against the dense trace."""
        tiny = build(architecture)
        tiny.model.set_attn_implementation("eager")
        truth = np.trace(dense_hessian(tiny.model, tiny.windows))
        found = [
            hessian_trace(tiny.model, tiny.windows, tiny.names, rtol=0.15, seed=seed)
            for seed in range(200)
        ]
        totals = np.array([e.total for e in found])
        assert abs(totals.mean() - truth) <= 4 * totals.std() / np.sqrt(200)
        covered = [
            abs(e.total - truth) <= scipy.stats.t(e.degrees_of_freedom).ppf(0.95) * e.se
            for e in found
        ]
        assert 0.85 <= np.mean(covered) <= 0.95

    def test_compares_samples_within_microbatches_only(self) -> None:
        draw = np.random.default_rng(0)
        offsets = np.array([0.0, 100.0, -50.0])
        noise = np.array([1.0, 3.0, 2.0])
        values = offsets + noise * draw.normal(size=(2000, 3))
        estimate = TraceEstimate(("a",), values.reshape(-1, 1), 1, 2, microbatches=3)
        assert estimate.total == pytest.approx(50 / 3, abs=0.1)
        assert estimate.se == pytest.approx(np.sqrt(14 / 2000) / 3, rel=0.05)
        assert estimate.num_probes == 2000
        assert estimate.degrees_of_freedom == 3 * 1999

    def test_head_block_is_exact_and_alone_needs_no_product(self, build) -> None:
        tiny = build("neox")
        head = tiny.model.get_output_embeddings().weight
        name = next(name for name, p in tiny.model.named_parameters() if p is head)
        block = block_slices(tiny)[tiny.names.index(name)]
        tiny.model.set_attn_implementation("eager")
        exact = np.trace(dense_hessian(tiny.model, tiny.windows)[block, block])
        among = hessian_trace(tiny.model, tiny.windows, tiny.names, max_probes=2)
        alone = hessian_trace(tiny.model, tiny.windows, [name])
        assert among.per_matrix[name] == pytest.approx(exact, rel=1e-6)
        assert alone.total == pytest.approx(exact, rel=1e-6)
        assert alone.se <= 1e-12
        assert ggn_trace(tiny.model, tiny.windows, [name]).total == pytest.approx(exact, rel=1e-6)
