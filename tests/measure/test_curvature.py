"""Curvature estimates against dense matrices, finite differences, losses and other libraries."""

from __future__ import annotations

import copy
import itertools
import warnings
from typing import TYPE_CHECKING

import hessian_eigenthings as he
import numpy as np
import pyhessian
import pytest
import scipy.stats
import torch
from torch.nn.functional import cross_entropy, kl_div, log_softmax

from qscale.errors import CheckpointError, TextError
from qscale.measure.curvature import (
    TraceEstimate,
    differentiable,
    double_backward_attention,
    ggn_trace,
    grad_norm,
    hessian_trace,
    hessian_vector_product,
    quadratic_delta,
)
from qscale.measure.curvature.ggn import fisher_root
from qscale.measure.curvature.hessian import _probes_to_add
from qscale.measure.curvature.loss import loss_gradient

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from conftest import Tiny

ARCHITECTURES = ("llama", "llama-tied", "qwen2", "gpt2", "neox", "opt")
LAYER_NORM = ("gpt2", "neox", "opt")


@pytest.fixture(scope="module", params=ARCHITECTURES)
def tiny(request: pytest.FixtureRequest, build: Callable[[str], Tiny]) -> Tiny:
    """One model of each architecture; tests must leave it as it is."""
    return build(request.param)


@pytest.fixture
def llama(build: Callable[[str], Tiny]) -> Tiny:
    """A Llama that the test may change."""
    return build("llama")


# Dense references. They share nothing with the estimators: Hugging Face's own loss, its eager
# attention, all columns at once.


@pytest.fixture
def eager(tiny: Tiny) -> Iterator[Tiny]:
    before = tiny.model.config._attn_implementation
    tiny.model.set_attn_implementation("eager")
    yield tiny
    tiny.model.set_attn_implementation(before)


def flat(tensors) -> torch.Tensor:
    return torch.cat([t.reshape(t.shape[0], -1) for t in tensors], dim=1)


def dense_hessian(model, ids: torch.Tensor) -> np.ndarray:
    """Every column by a batched backward pass through the gradient of HF's loss."""
    parameters = list(model.parameters())
    loss = model(input_ids=ids, labels=ids).loss
    gradient = torch.autograd.grad(loss, parameters, create_graph=True)
    gradient = torch.cat([g.flatten() for g in gradient])
    rows = torch.autograd.grad(
        gradient,
        parameters,
        torch.eye(len(gradient), dtype=gradient.dtype),
        is_grads_batched=True,
    )
    return flat(rows).numpy()


def dense_ggn_factor(model, ids: torch.Tensor) -> np.ndarray:
    """J^T R with R R^T the softmax Hessian of the mean loss, by an explicit Jacobian."""
    parameters = list(model.parameters())
    logits = model(input_ids=ids).logits[:, :-1]
    rows = torch.eye(logits.numel(), dtype=logits.dtype).view(-1, *logits.shape)
    jacobian = flat(torch.autograd.grad(logits, parameters, rows, is_grads_batched=True))
    p = logits.detach().softmax(-1).flatten(0, 1)
    blocks = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    blocks = torch.linalg.cholesky(blocks / len(p) + 1e-14 * torch.eye(p.shape[-1]))
    return (jacobian.T @ torch.block_diag(*blocks)).numpy()


def block_slices(tiny: Tiny) -> list[slice]:
    ends = np.cumsum([p.numel() for p in tiny.model.parameters()])
    return [slice(a, b) for a, b in itertools.pairwise([0, *ends.tolist()])]


def random_vectors(tiny: Tiny, seed: int = 0) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(p.shape, generator=draw, dtype=p.dtype)
        for name, p in tiny.model.named_parameters()
    }


def flatten(vectors: dict[str, torch.Tensor]) -> np.ndarray:
    return torch.cat([v.flatten() for v in vectors.values()]).detach().numpy()


def assert_close(got: np.ndarray, expected: np.ndarray, *, rtol: float) -> None:
    assert np.linalg.norm(got - expected) <= rtol * np.linalg.norm(expected)


def assert_mean(samples: np.ndarray, mean: float, variance: float) -> None:
    """Independent samples of this variance have this mean, within 4 standard errors."""
    rounding = 1e-9  # a key bias has no effect, so its exact trace is zero
    error = np.sqrt(variance / len(samples))
    assert abs(samples.mean() - mean) <= 4 * error + 1e-6 * abs(mean) + rounding


def rademacher_variance(matrix: np.ndarray) -> float:
    """Variance of v'Mv over random signs v: 2 (||S||^2 - sum S_ii^2), S the symmetric part."""
    symmetric = (matrix + matrix.T) / 2
    return 2 * float(np.sum(symmetric**2) - np.sum(np.diag(symmetric) ** 2))


def rows_only(matrix: np.ndarray, rows: slice) -> np.ndarray:
    kept = np.zeros_like(matrix)
    kept[rows] = matrix[rows]
    return kept


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
        assert estimate.values.shape == (150, len(eager.names))
        totals = estimate.values.sum(axis=1)
        variance = sum(rademacher_variance(part) for part in parts)
        assert 0.5 < totals.var(ddof=1) / variance < 1.5
        assert_mean(totals, sum(np.trace(part) for part in parts), variance)
        for i, block in enumerate(block_slices(eager)):
            assert_mean(
                estimate.values[:, i],
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
            return _probes_to_add(totals, rtol=rtol, min_probes=2, max_probes=max_probes)

        assert more(1.01 * relative) == 0
        assert more(relative / 1.2) == int(np.ceil(4 * 1.2**2)) - 4
        assert more(relative / 10) == 4  # at most double
        assert more(relative / 10, max_probes=6) == 2


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
        totals = estimate.values.sum(axis=1)
        variance = sum(rademacher_variance(part.T @ part) for part in parts)
        assert 0.5 < totals.var(ddof=1) / variance < 1.5
        assert_mean(totals, sum(np.sum(part**2) for part in parts), variance)
        for i, block in enumerate(block_slices(eager)):
            assert_mean(
                estimate.values[:, i],
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


def hessian_trace_of_few(*args, num_probes: int = 8, **options) -> TraceEstimate:
    """Hessian trace with a fixed number of probes, to stand beside the Gauss-Newton one."""
    return hessian_trace(*args, min_probes=num_probes, max_probes=num_probes, **options)


@pytest.mark.parametrize("estimator", [ggn_trace, hessian_trace_of_few])
class TestEstimators:
    def test_seed_decides(self, llama: Tiny, estimator) -> None:
        first, same, other = (
            estimator(llama.model, llama.windows, llama.names, seed=seed).values
            for seed in (3, 3, 4)
        )
        np.testing.assert_array_equal(first, same)
        probed = [name != "lm_head.weight" for name in llama.names]  # that one is exact
        assert not np.any((first == other)[:, probed])

    def test_microbatches_have_signs_of_their_own(self, llama: Tiny, estimator) -> None:
        """On equal windows, four microbatches have half the noise of one batch of four."""
        windows = llama.windows[:1].repeat(4, 1)
        apart, together = (
            estimator(llama.model, windows, llama.names, num_probes=100, batch_windows=size).se
            for size in (1, 4)
        )
        assert 0.3 < apart / together < 0.75

    def test_global_generator_is_left_alone(self, llama: Tiny, estimator) -> None:
        before = torch.random.get_rng_state()
        estimator(llama.model, llama.windows, llama.names)
        assert torch.equal(before, torch.random.get_rng_state())

    def test_a_block_does_not_depend_on_the_order_of_names(self, llama: Tiny, estimator) -> None:
        name = "model.layers.1.mlp.up_proj.weight"
        alone = estimator(llama.model, llama.windows, [name], num_probes=100)
        among = estimator(llama.model, llama.windows, llama.names[::-1], num_probes=100)
        error = np.hypot(alone.se, among.per_matrix_se[name])
        assert abs(alone.total - among.per_matrix[name]) <= 4 * error

    def test_progress_adds_up_to_the_probes(self, llama: Tiny, estimator) -> None:
        shares: list[float] = []
        estimate = estimator(
            llama.model, llama.windows, llama.names, batch_windows=2, on_probe=shares.append
        )
        assert sum(shares) == pytest.approx(estimate.num_probes)
        assert len(shares) == 2 * estimate.num_probes
        assert estimate.tokens == llama.windows[:, 1:].numel()

    def test_float32_agrees_with_float64(self, llama: Tiny, estimator) -> None:
        single = copy.deepcopy(llama.model).float()
        exact = estimator(llama.model, llama.windows, llama.names)
        rounded = estimator(single, llama.windows, llama.names)
        # The streams differ between precisions, the traces do not.
        assert abs(exact.total - rounded.total) <= 4 * np.hypot(exact.se, rounded.se)

    def test_nan_weights(self, llama: Tiny, estimator) -> None:
        with torch.no_grad():
            llama.model.lm_head.weight[0, 0] = float("nan")
        with pytest.raises(CheckpointError, match="check its weights for NaN"):
            estimator(llama.model, llama.windows, llama.names)

    def test_short_windows(self, llama: Tiny, estimator) -> None:
        for windows in (llama.windows[:, :1], llama.windows[:0], llama.windows[0]):
            with pytest.raises(TextError, match="at least one window of 2 tokens"):
                estimator(llama.model, windows, llama.names)

    def test_unusable_options(self, llama: Tiny, estimator) -> None:
        for options in ({"num_probes": 1}, {"batch_windows": 0}):
            with pytest.raises(ValueError, match="must be at least"):
                estimator(llama.model, llama.windows, llama.names, **options)


def test_overflowing_hessian_trace(llama: Tiny) -> None:
    """The loss is finite, its second derivative is not: 1e-22 is squared by the norm's backward."""
    model = llama.model.float()
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(1e-19)
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 1e-38
    with pytest.raises(CheckpointError, match="Hessian trace of LlamaForCausalLM is not finite"):
        hessian_trace(model, llama.windows, ["model.embed_tokens.weight"])


class OnceOnly(torch.autograd.Function):
    """Square with a backward pass that cannot be differentiated, as in a hand-written kernel."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad


class Square(torch.nn.Module):
    def forward(self, x):
        return OnceOnly.apply(x)


class ForwardOnly(torch.autograd.Function):
    """A kernel for inference: no backward pass at all."""

    @staticmethod
    def forward(_ctx, x):
        return x * x


class Forward(torch.nn.Module):
    def forward(self, x):
        return ForwardOnly.apply(x)


class Cut(torch.nn.Module):
    def forward(self, x):
        return x.detach() ** 2


class TestGuards:
    def test_a_model_is_left_as_it_was(self, llama: Tiny) -> None:
        model = llama.model
        model.train()
        model.model.layers[0].mlp.eval()
        model.model.embed_tokens.requires_grad_(False)
        weights = copy.deepcopy(model.state_dict())
        before = self._state(model)
        ggn_trace(model, llama.windows, llama.names)
        hessian_trace(model, llama.windows, llama.names[:2])
        grad_norm(model, llama.windows, llama.names)
        assert self._state(model) == before
        assert all(p.grad is None for p in model.parameters())
        assert all(torch.equal(weights[name], now) for name, now in model.state_dict().items())

    @pytest.mark.parametrize("implementation", ["flex_attention", "sdpa", "eager"])
    def test_an_exception_restores_everything(self, llama: Tiny, implementation: str) -> None:
        model = llama.model.train()
        model.set_attn_implementation(implementation)
        model.lm_head.requires_grad_(False)
        before = self._state(model)

        def fail_inside() -> None:
            with double_backward_attention(model), differentiable(model, ["lm_head.weight"]):
                assert model.config._attn_implementation in ("eager", "sdpa")
                assert not torch.backends.cuda.flash_sdp_enabled()
                assert not any(module.training for module in model.modules())
                wanted = [name for name, p in model.named_parameters() if p.requires_grad]
                assert wanted == ["lm_head.weight"]
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            fail_inside()
        assert self._state(model) == before
        assert torch.backends.cuda.flash_sdp_enabled()

    @staticmethod
    def _state(model) -> tuple:
        return (
            model.config._attn_implementation,
            [module.training for module in model.modules()],
            [p.requires_grad for p in model.parameters()],
        )

    def test_dropout_is_off(self, build) -> None:
        tiny = build("gpt2")  # dropout 0.1
        quiet = hessian_trace(tiny.model, tiny.windows, tiny.names)
        tiny.model.train()
        np.testing.assert_array_equal(
            hessian_trace(tiny.model, tiny.windows, tiny.names).values, quiet.values
        )

    def test_works_under_no_grad(self, llama: Tiny) -> None:
        with torch.no_grad():
            assert ggn_trace(llama.model, llama.windows, llama.names).total > 0
            assert hessian_trace(llama.model, llama.windows, llama.names).se > 0

    def test_the_module_without_second_derivative_is_named(self, llama: Tiny) -> None:
        llama.model.model.layers[1].mlp.act_fn = Square()
        assert ggn_trace(llama.model, llama.windows, llama.names).total > 0
        with pytest.raises(CheckpointError, match=r"^model.layers.1.mlp.act_fn \(Square\) cannot"):
            hessian_trace(llama.model, llama.windows, llama.names)

    def test_the_module_without_derivative_is_named(self, llama: Tiny) -> None:
        llama.model.model.layers[1].mlp.act_fn = Forward()
        with pytest.raises(CheckpointError, match=r"^model.layers.1.mlp.act_fn \(Forward\) cannot"):
            ggn_trace(llama.model, llama.windows, llama.names)

    def test_a_matrix_that_no_derivative_reaches_is_named(self, llama: Tiny) -> None:
        llama.model.model.layers[1].mlp.act_fn = Cut()
        for measure in (ggn_trace, hessian_trace, grad_norm):
            with pytest.raises(CheckpointError, match=r"^model.layers.1.mlp.gate_proj.weight has"):
                measure(llama.model, llama.windows, llama.names)
        llama.model.model.norm.register_forward_hook(lambda *args: args[-1].detach())
        with pytest.raises(CheckpointError, match=r"^model.embed_tokens.weight has no gradient"):
            ggn_trace(llama.model, llama.windows, llama.names[:1])

    def test_fused_attention_without_the_guard_is_named(self, llama: Tiny) -> None:
        def gradient() -> None:
            with differentiable(llama.model, llama.names) as parameters:
                loss_gradient(llama.model, llama.windows, parameters, tokens=1, create_graph=True)

        with pytest.raises(CheckpointError, match=r"^model.layers.0.self_attn \(LlamaAttention\)"):
            gradient()
        with double_backward_attention(llama.model):
            gradient()

    def test_other_errors_pass(self, llama: Tiny) -> None:
        with (
            pytest.raises(RuntimeError, match="out of memory"),
            differentiable(llama.model, llama.names),
        ):
            raise RuntimeError("out of memory")

    @pytest.mark.parametrize(
        ("names", "message"),
        [
            ([], "has no matrix"),
            (["lm_head.bias"], "has no parameter 'lm_head.bias'"),
            (["lm_head.weight", "model.embed_tokens.weight"], "are one parameter: name it once"),
            (["lm_head.weight", "lm_head.weight"], "are one parameter: name it once"),
        ],
    )
    def test_unusable_names(self, names: list[str], message: str, build) -> None:
        tiny = build("llama-tied")
        with pytest.raises(CheckpointError, match=message):
            ggn_trace(tiny.model, tiny.windows, names)

    def test_a_tied_matrix_goes_by_either_name(self, build) -> None:
        tiny = build("llama-tied")
        one, other = (
            ggn_trace(tiny.model, tiny.windows, [name]).total
            for name in ("lm_head.weight", "model.embed_tokens.weight")
        )
        assert one == other

    def test_reduced_precision(self, llama: Tiny) -> None:
        with pytest.raises(CheckpointError, match=r"Got torch.bfloat16 instead"):
            ggn_trace(llama.model.bfloat16(), llama.windows, llama.names)


class Logits(torch.nn.Module):
    """What pyhessian wants: a module from inputs to flat logits."""

    def __init__(self, model) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids).logits[:, :-1].flatten(0, 1)


class TestOtherLibraries:
    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    def test_pyhessian(self, architecture: str, build) -> None:
        tiny = build(architecture)
        tiny.model.set_attn_implementation("eager")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Using backward.. with create_graph=True")
            theirs = pyhessian.hessian(
                Logits(tiny.model),
                torch.nn.CrossEntropyLoss(),
                data=(tiny.windows, tiny.windows[:, 1:].flatten()),
                cuda=False,
            )
        vectors = random_vectors(tiny)
        product = pyhessian.utils.hessian_vector_product(
            theirs.gradsH, theirs.params, list(vectors.values())
        )
        ours = hessian_vector_product(tiny.model, tiny.windows, vectors)
        assert_close(flatten(ours), torch.cat([h.flatten() for h in product]).numpy(), rtol=1e-5)
        if architecture not in ("llama", "gpt2"):
            return
        with torch.random.fork_rng():
            torch.manual_seed(0)
            samples = np.array([theirs.trace(maxIter=1, tol=0)[0] for _ in range(60)])
        trace = hessian_trace_of_few(tiny.model, tiny.windows, tiny.names, num_probes=60)
        error = np.hypot(trace.se, samples.std(ddof=1) / np.sqrt(60))
        assert abs(trace.total - samples.mean()) <= 4 * error

    @pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
    @pytest.mark.parametrize("architecture", ["llama", "neox"])
    def test_hessian_eigenthings(self, architecture: str, build) -> None:
        tiny = build(architecture)
        tiny.model.set_attn_implementation("eager")
        batch = {"input_ids": tiny.windows, "labels": tiny.windows}
        hessian = he.HessianOperator(tiny.model, [batch], he.hf_lm_loss())
        vectors = random_vectors(tiny)
        ours = hessian_vector_product(tiny.model, tiny.windows, vectors)
        theirs = hessian.matvec(torch.from_numpy(flatten(vectors)))
        assert_close(flatten(ours), theirs.numpy(), rtol=1e-5)

        ggn = he.GGNOperator(tiny.model, [batch], he.hf_lm_forward(), he.hf_lm_loss_of_output())
        factor = dense_ggn_factor(tiny.model, tiny.windows)
        product = ggn.matvec(torch.from_numpy(flatten(vectors))).detach().numpy()
        assert_close(factor @ (factor.T @ flatten(vectors)), product, rtol=1e-5)
        theirs = he.trace(ggn, method="hutchinson", num_matvecs=60, seed=0)
        trace = ggn_trace(tiny.model, tiny.windows, tiny.names, num_probes=60)
        assert abs(trace.total - theirs.estimate) <= 4 * np.hypot(trace.se, theirs.stderr)
