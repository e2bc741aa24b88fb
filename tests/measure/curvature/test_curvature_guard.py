"""What both trace estimators share, and models they cannot or must not change."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from qscale.errors import CheckpointError, TextError
from qscale.measure.curvature import (
    differentiable,
    double_backward_attention,
    ggn_trace,
    grad_norm,
    hessian_trace,
)
from qscale.measure.curvature.loss import loss_gradient
from tests.dense import (
    hessian_trace_of_few,
)

if TYPE_CHECKING:
    from tests.measure.conftest import Tiny


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
            pytest.raises(RuntimeError, match="out of ideas"),
            differentiable(llama.model, llama.names),
        ):
            raise RuntimeError("out of ideas")

    @pytest.mark.parametrize("estimator", [ggn_trace, hessian_trace])
    def test_out_of_memory(self, llama: Tiny, estimator) -> None:
        class Huge(torch.nn.Module):
            def forward(self, x):
                return x * torch.empty(1 << 60)

        llama.model.model.layers[1].mlp.act_fn = Huge()
        with pytest.raises(CheckpointError, match="Out of memory .* Lower the context"):
            estimator(llama.model, llama.windows, llama.names)

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
