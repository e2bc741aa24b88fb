"""Hessian products and traces against dense matrices and finite differences."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from qscale.measure.curvature import (
    TraceEstimate,
    hessian_trace,
    hessian_vector_product,
)
from qscale.measure.curvature.hessian import _probes_to_add
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
