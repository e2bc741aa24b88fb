"""Gauss-Newton traces, gradient norm and the quadratic prediction against dense matrices."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import pytest
import scipy.stats
import torch
from torch.nn.functional import kl_div, log_softmax

from qscale.measure.curvature import (
    TraceEstimate,
    double_backward_attention,
    ggn_trace,
    grad_norm,
    quadratic_delta,
)
from qscale.measure.curvature.ggn import fisher_root
from tests.dense import (
    assert_mean,
    block_slices,
    dense_ggn_factor,
    flat,
    per_probe,
    rademacher_variance,
)

if TYPE_CHECKING:
    from tests.measure.conftest import Tiny


class TestGaussNewton:
    def test_trace_has_the_exact_mean_and_variance(self, eager: Tiny) -> None:
        batch_windows = 2
        estimate = ggn_trace(
            eager.model, eager.windows, eager.names, num_probes=200, batch_windows=batch_windows
        )
        # ||J^T B z||^2 is a quadratic form in the signs z, with the symmetric root B of
        # diag(p) - pp' that the estimator uses in place of the Cholesky factor.
        parts = []
        for ids in eager.windows.split(batch_windows):
            share = len(ids) / len(eager.windows)
            parts.append(np.sqrt(share) * self._jacobian_times_root(eager.model, ids))
        values = per_probe(estimate)
        totals = values.sum(axis=1)
        variance = sum(rademacher_variance(part.T @ part) for part in parts)
        assert 0.5 < totals.var(ddof=1) / variance < 1.5
        assert_mean(totals, sum(np.sum(part**2) for part in parts), variance)
        for i, block in enumerate(block_slices(eager)):
            assert_mean(
                values[:, i],
                sum(np.sum(part[block] ** 2) for part in parts),
                sum(rademacher_variance(part[block].T @ part[block]) for part in parts),
            )

    @staticmethod
    def _jacobian_times_root(model, ids: torch.Tensor) -> np.ndarray:
        parameters = list(model.parameters())
        logits = model(input_ids=ids).logits[:, :-1]
        p = logits.detach().softmax(-1)
        columns = torch.diag_embed(p.sqrt()) - p[..., :, None] * p.sqrt()[..., None, :]
        roots = torch.block_diag(*columns.flatten(0, 1)).T / np.sqrt(p[..., 0].numel())
        rows = roots.reshape(-1, *logits.shape)
        gradients = torch.autograd.grad(logits, parameters, rows, is_grads_batched=True)
        return flat(gradients).numpy().T

    def test_trace_is_that_of_the_explicit_matrix(self, eager: Tiny) -> None:
        factor = dense_ggn_factor(eager.model, eager.windows)
        estimate = ggn_trace(eager.model, eager.windows, eager.names, num_probes=100)
        assert abs(estimate.total - np.sum(factor**2)) <= 4 * estimate.se
        exact = [np.sum(factor[block] ** 2) for block in block_slices(eager)]
        # A sum that weighs every block alike, so that the small ones count too.
        value, se = estimate.combine(1 / np.array(exact))
        assert abs(value - len(exact)) <= 4 * se

    def test_standard_error_is_calibrated(self, llama: Tiny) -> None:
        probes = ggn_trace(
            llama.model, llama.windows, llama.names, num_probes=1800, batch_windows=3
        )
        groups = probes.values.reshape(300, 6, -1)
        truth = probes.total
        half_width = scipy.stats.t(df=5).ppf(0.95)
        estimates = [TraceEstimate(probes.names, values, 1, 6) for values in groups]
        covered = [abs(e.total - truth) <= half_width * e.se for e in estimates]
        assert 0.84 <= np.mean(covered) <= 0.95

    def test_root_squares_to_the_softmax_hessian(self) -> None:
        p = torch.rand(7, dtype=torch.double, generator=torch.Generator().manual_seed(0))
        p /= p.sum()
        columns = fisher_root(p.expand(7, 7), torch.eye(7, dtype=p.dtype))
        torch.testing.assert_close(columns.T @ columns, p.diag() - p[:, None] * p)

    def test_fused_and_plain_attention_agree(self, tiny: Tiny) -> None:
        fused = ggn_trace(tiny.model, tiny.windows, tiny.names)
        with double_backward_attention(tiny.model):
            plain = ggn_trace(tiny.model, tiny.windows, tiny.names)
        np.testing.assert_allclose(fused.values, plain.values, rtol=1e-5, atol=1e-12)


class TestGradNorm:
    def test_equals_backward_of_the_mean_loss(self, tiny: Tiny) -> None:
        loss = tiny.model(input_ids=tiny.windows, labels=tiny.windows).loss
        gradient = torch.autograd.grad(loss, list(tiny.model.parameters()))
        expected = torch.cat([g.flatten() for g in gradient]).norm().item()
        for size in (1, 2, 3):
            got = grad_norm(tiny.model, tiny.windows, tiny.names, batch_windows=size)
            assert got == pytest.approx(expected, rel=1e-5)


class TestQuadraticDelta:
    def test_exact_for_a_quadratic_loss_averaged_over_all_signs_of_the_noise(self) -> None:
        draw = np.random.default_rng(0)
        root = draw.normal(size=(7, 7))
        curvature = root @ root.T  # couples the two blocks
        blocks = {"a": slice(0, 3), "b": slice(3, 7)}
        scale = np.repeat([0.3, 0.05], [3, 4])
        noise = scale * np.array(list(itertools.product([-1, 1], repeat=7)))
        loss = np.einsum("ki,ij,kj->k", noise, curvature, noise) / 2

        trace = np.array([np.trace(curvature[block, block]) for block in blocks.values()])
        value, se = quadratic_delta(
            TraceEstimate(tuple(blocks), np.stack([trace, trace]), 1, 2),
            {name: float(np.sum(scale[block] ** 2)) for name, block in blocks.items()},
            {"a": 3, "b": 4},
        )
        assert value == pytest.approx(loss.mean(), rel=1e-12)
        assert se == 0

    def test_predicts_the_divergence_that_noise_causes(self, llama: Tiny) -> None:
        """Forward passes only: mean KL(p, p with noise) is half the Gauss-Newton form."""
        model, windows, names = llama.model, llama.windows, llama.names
        draw = torch.Generator().manual_seed(0)
        scales = {name: 2e-3 * (1 + i % 3) for i, name in enumerate(names)}
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}

        def log_p() -> torch.Tensor:
            with torch.no_grad():
                return log_softmax(model(input_ids=windows).logits[:, :-1].flatten(0, 1), dim=-1)

        clean, divergences = log_p(), []
        for _ in range(250):
            noise = {
                name: scales[name] * torch.randn(p.shape, generator=draw, dtype=p.dtype)
                for name, p in weights.items()
            }
            pair = []
            for sign in (1, -1):  # cancels the third order
                with torch.no_grad():
                    for name, p in model.named_parameters():
                        p.copy_(weights[name] + sign * noise[name])
                pair.append(kl_div(log_p(), clean, log_target=True, reduction="batchmean").item())
            divergences.append(np.mean(pair))
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(weights[name])

        ggn = ggn_trace(model, windows, names, num_probes=400)
        sizes = {name: p.numel() for name, p in weights.items()}
        value, se = quadratic_delta(ggn, {n: scales[n] ** 2 * sizes[n] for n in names}, sizes)
        error = np.hypot(se, np.std(divergences, ddof=1) / np.sqrt(len(divergences)))
        assert error < 0.05 * value
        assert abs(value - np.mean(divergences)) <= 4 * error

    def test_standard_error_knows_that_matrices_share_probes(self) -> None:
        values = np.array([[1.0, 9.0], [3.0, 7.0], [2.0, 8.0]])
        estimate = TraceEstimate(("a", "b"), values, 1, 3)
        assert estimate.se == pytest.approx(0, abs=1e-12)
        assert estimate.per_matrix == {"a": 2.0, "b": 8.0}
        assert estimate.per_matrix_se == pytest.approx({"a": 3**-0.5, "b": 3**-0.5})
        _, se = quadratic_delta(estimate, {"a": 2.0, "b": 0.0}, {"a": 4, "b": 4})
        assert se == pytest.approx(3**-0.5 / 4)

    def test_other_matrices_are_refused(self) -> None:
        estimate = TraceEstimate(("a",), np.ones((2, 1)), 1, 2)
        with pytest.raises(ValueError, match=r"Not in all: \['b'\]"):
            quadratic_delta(estimate, {"a": 1.0, "b": 1.0}, {"a": 1})
