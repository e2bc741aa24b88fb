"""Sharpness against dense Hessians, trust regions solved exactly, and scipy's L-BFGS-B."""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
import scipy.optimize
import torch
from torch.nn.functional import cross_entropy

from qscale.errors import CheckpointError, QscaleError, TextError
from qscale.measure.loss import mean_and_se
from qscale.measure.sharpness import (
    Ball,
    Sharpness,
    adaptive_sharpness,
    keskar_sharpness,
    sam_sharpness,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Tiny

MEASURES = (sam_sharpness, adaptive_sharpness, keskar_sharpness)


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def tiny(request: pytest.FixtureRequest, build: Callable[[str], Tiny]) -> Tiny:
    """One model of each architecture; tests must leave it as it is."""
    tiny = build(request.param)
    tiny.model.set_attn_implementation("eager")
    return tiny


@pytest.fixture(scope="module")
def settled(tiny: Tiny) -> Tiny:
    """The model fitted to its own windows, where curvature counts beside the gradient."""
    model = copy.deepcopy(tiny.model)
    settled = type(tiny)(model, tiny.windows, tiny.names)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(20):
        optimizer.zero_grad()
        losses(settled).mean().backward()
        optimizer.step()
    optimizer.zero_grad()
    return settled


@pytest.fixture
def llama(build: Callable[[str], Tiny]) -> Tiny:
    """A Llama that the test may change."""
    return build("llama")


def losses(tiny: Tiny) -> torch.Tensor:
    """Loss of every scored token, shape (windows, context - 1), with the model's own logits."""
    logits = tiny.model(input_ids=tiny.windows).logits[:, :-1]
    return cross_entropy(logits.transpose(1, 2), tiny.windows[:, 1:], reduction="none")


def gradient(tiny: Tiny, *, create_graph: bool = False) -> torch.Tensor:
    found = torch.autograd.grad(
        losses(tiny).mean(), list(tiny.model.parameters()), create_graph=create_graph
    )
    return torch.cat([part.flatten() for part in found])


def dense_hessian(tiny: Tiny) -> np.ndarray:
    flat = gradient(tiny, create_graph=True)
    rows = torch.autograd.grad(
        flat, list(tiny.model.parameters()), torch.eye(len(flat)).double(), is_grads_batched=True
    )
    return torch.cat([row.flatten(1) for row in rows], dim=1).numpy()


def weights(tiny: Tiny) -> torch.Tensor:
    return torch.nn.utils.parameters_to_vector(tiny.model.parameters()).detach()


def losses_at(tiny: Tiny, point: torch.Tensor) -> torch.Tensor:
    """Losses of a copy with other weights."""
    moved = copy.deepcopy(tiny.model)
    torch.nn.utils.vector_to_parameters(point, moved.parameters())
    with torch.no_grad():
        return losses(type(tiny)(moved, tiny.windows, tiny.names))


def trust_region_maximum(g: np.ndarray, hessian: np.ndarray, radius: float) -> float:
    """Largest value of g'e + e'He/2 over a ball, by the eigenvalues and the secular equation."""
    values, vectors = np.linalg.eigh(hessian)
    g = vectors.T @ g

    def excess(shift: float) -> float:
        return float(np.linalg.norm(g / (values[-1] + shift - values))) - radius

    shift = scipy.optimize.brentq(excess, 1e-12, 1e6)
    e = g / (values[-1] + shift - values)
    return float(g @ e + (values * e**2).sum() / 2)


class TestAgainstDense:
    def test_one_step_to_second_order(self, settled: Tiny) -> None:
        g, hessian, rho = gradient(settled).numpy(), dense_hessian(settled), 1e-3
        found = sam_sharpness(settled.model, settled.windows, settled.names, rho=rho, steps=1)
        unit = g / np.linalg.norm(g)
        second = rho**2 * (unit @ hessian @ unit) / 2
        assert found.first_order == pytest.approx(rho * np.linalg.norm(g), rel=1e-6)
        assert found.one_step - found.first_order == pytest.approx(second, rel=0.03)
        assert found.loss == pytest.approx(losses(settled).mean().item(), rel=1e-6)

    def test_ascent_reaches_the_maximum_of_the_quadratic(self, settled: Tiny) -> None:
        g, hessian, rho = gradient(settled).numpy(), dense_hessian(settled), 0.01
        found = sam_sharpness(settled.model, settled.windows, settled.names, rho=rho, steps=20)
        self.assert_maximum(found, g, hessian, rho)

    def test_adaptive_is_the_same_in_other_coordinates(self, settled: Tiny) -> None:
        rho, eta = 0.02, 0.3
        scale = (weights(settled).abs() + eta).numpy()
        g = scale * gradient(settled).numpy()
        hessian = scale[:, None] * dense_hessian(settled) * scale
        found = adaptive_sharpness(
            settled.model, settled.windows, settled.names, rho=rho, eta=eta, steps=20
        )
        self.assert_maximum(found, g, hessian, rho)

    @staticmethod
    def assert_maximum(found: Sharpness, g: np.ndarray, hessian: np.ndarray, rho: float) -> None:
        assert found.first_order == pytest.approx(rho * np.linalg.norm(g), rel=1e-6)
        beyond = trust_region_maximum(g, hessian, rho) - found.first_order
        assert beyond > 0.01 * found.first_order
        assert found.value - found.first_order == pytest.approx(beyond, rel=0.1)

    def test_standard_error_is_that_of_paired_windows(self, llama: Tiny) -> None:
        g = gradient(llama)
        there = losses_at(llama, weights(llama) + 0.1 * g / g.norm())
        rise = (there - losses(llama).detach()).sum(1).numpy()
        found = sam_sharpness(llama.model, llama.windows, llama.names, rho=0.1, steps=1)
        expected = mean_and_se(rise, np.full(len(rise), there.shape[1]))
        assert (found.value, found.value_se) == pytest.approx(expected, rel=1e-5)


class TestKeskar:
    def test_first_order_and_percent(self, tiny: Tiny) -> None:
        found = keskar_sharpness(tiny.model, tiny.windows, tiny.names, epsilon=2e-3, steps=3)
        expected = 2e-3 * ((weights(tiny).abs() + 1) * gradient(tiny).abs()).sum().item()
        assert found.first_order == pytest.approx(expected, rel=1e-6)
        assert found.percent == pytest.approx(100 * found.value / (1 + found.loss), rel=1e-12)

    def test_finds_no_less_than_ten_iterations_of_lbfgsb(self, tiny: Tiny) -> None:
        epsilon, start = 5e-3, weights(tiny)
        bounds = epsilon * (start.abs() + 1)
        moved = type(tiny)(copy.deepcopy(tiny.model), tiny.windows, tiny.names)

        def falling(z: np.ndarray) -> tuple[float, np.ndarray]:
            torch.nn.utils.vector_to_parameters(
                start + torch.from_numpy(z), moved.model.parameters()
            )
            return -losses(moved).mean().item(), -gradient(moved).numpy()

        theirs = scipy.optimize.minimize(
            falling,
            np.zeros(len(start)),
            jac=True,
            method="L-BFGS-B",
            bounds=list(zip(-bounds, bounds, strict=True)),
            options={"maxiter": 10},
        )
        rise = -theirs.fun - losses(tiny).mean().item()
        found = keskar_sharpness(
            tiny.model, tiny.windows, tiny.names, epsilon=epsilon, steps=10, batch_windows=3
        )
        assert found.value > 0.99 * rise > 0


class TestAscent:
    @pytest.mark.parametrize("measure", MEASURES)
    def test_more_steps_never_find_less(self, tiny: Tiny, measure) -> None:
        runs = [measure(tiny.model, tiny.windows, tiny.names, steps=n) for n in (1, 3, 8)]
        values = [run.value for run in runs]
        assert values == sorted(values)
        assert values[0] == runs[0].one_step == runs[2].one_step
        assert [run.steps for run in runs] == [1, 3, 8]

    @pytest.mark.parametrize(
        ("measure", "options", "norm"),
        [
            (sam_sharpness, {"rho": 0.7}, lambda e, _: float(e.norm())),
            (
                adaptive_sharpness,
                {"rho": 0.7, "eta": 0.1},
                lambda e, w: float((e / (w.abs() + 0.1)).norm()),
            ),
            (
                keskar_sharpness,
                {"epsilon": 0.7},
                lambda e, w: float((e / (w.abs() + 1)).abs().max()),
            ),
        ],
    )
    def test_every_point_is_in_the_ball(self, llama: Tiny, measure, options, norm) -> None:
        start, seen = weights(llama), []
        llama.model.model.register_forward_pre_hook(
            lambda *_: seen.append(norm(weights(llama) - start, start))
        )
        measure(llama.model, llama.windows, llama.names, steps=6, batch_windows=3, **options)
        assert max(seen) == pytest.approx(0.7, rel=1e-9)

    def test_only_named_parameters_move(self, llama: Tiny) -> None:
        name, others = llama.names[3], [n for n in llama.names if n != llama.names[3]]
        before, moved = copy.deepcopy(llama.model.state_dict()), set()

        def look(*_) -> None:
            now = llama.model.state_dict()
            moved.update(n for n in now if not torch.equal(now[n], before[n]))

        llama.model.model.register_forward_pre_hook(look)
        adaptive_sharpness(llama.model, llama.windows, [name], steps=2)
        assert moved == {name}
        assert moved.isdisjoint(others)

    @pytest.mark.parametrize("measure", MEASURES)
    def test_batches_do_not_matter(self, llama: Tiny, measure) -> None:
        whole, ragged = (
            measure(llama.model, llama.windows, llama.names, steps=3, batch_windows=size)
            for size in (3, 2)
        )
        assert ragged.value == pytest.approx(whole.value, rel=1e-6)
        assert ragged.value_se == pytest.approx(whole.value_se, rel=1e-6)
        assert ragged.first_order == pytest.approx(whole.first_order, rel=1e-6)

    def test_progress(self, llama: Tiny) -> None:
        done: list[float] = []
        sam_sharpness(llama.model, llama.windows, llama.names, steps=4, on_step=done.append)
        assert sum(done) == 4

    def test_single_window_has_no_error(self, llama: Tiny) -> None:
        assert math.isnan(sam_sharpness(llama.model, llama.windows[:1], llama.names).value_se)


class TestInvariance:
    """Llama's up and down projections can trade scale: the function stays, weights do not."""

    @pytest.fixture
    def rescaled(self, llama: Tiny) -> Tiny:
        model = copy.deepcopy(llama.model)
        with torch.no_grad():
            for layer in model.model.layers:
                layer.mlp.up_proj.weight.mul_(8)
                layer.mlp.down_proj.weight.div_(8)
        return type(llama)(model, llama.windows, llama.names)

    def test_adaptive_does_not_see_the_scale(self, llama: Tiny, rescaled: Tiny) -> None:
        before, after = (
            adaptive_sharpness(t.model, t.windows, t.names, rho=0.3, eta=0, steps=5)
            for t in (llama, rescaled)
        )
        assert after.value == pytest.approx(before.value, rel=1e-5)
        assert after.first_order == pytest.approx(before.first_order, rel=1e-5)

    @pytest.mark.parametrize("measure", [sam_sharpness, keskar_sharpness])
    def test_the_others_do(self, llama: Tiny, rescaled: Tiny, measure) -> None:
        before, after = (measure(t.model, t.windows, t.names) for t in (llama, rescaled))
        assert after.value > 1.2 * before.value


class TestBall:
    @pytest.mark.parametrize(("p", "dual"), [(2, 2), (math.inf, 1)])
    def test_steepest_direction_attains_the_dual_norm(self, p: float, dual: int) -> None:
        parts = [torch.randn(3, 4, dtype=torch.double), torch.randn(5, dtype=torch.double)]
        flat = torch.cat([part.flatten() for part in parts])
        gain = Ball(p, 0.5).steepest(parts)
        unit = torch.cat([part.flatten() for part in parts])
        assert float(torch.linalg.vector_norm(unit, p)) == pytest.approx(1)
        assert gain == pytest.approx(float(unit @ flat))
        assert gain == pytest.approx(float(torch.linalg.vector_norm(flat, dual)))

    def test_no_gradient_no_direction(self) -> None:
        for p in (2, math.inf):
            parts = [torch.zeros(3)]
            assert Ball(p, 1.0).steepest(parts) == 0
            assert not parts[0].any()

    def test_projection(self) -> None:
        inside = torch.tensor([0.3, -0.4])
        for p in (2, math.inf):
            point = inside.clone()
            Ball(p, 0.5).project([point])
            assert torch.equal(point, inside)
        point = torch.tensor([3.0, -4.0])
        Ball(2, 0.5).project([point])
        torch.testing.assert_close(point, inside)
        point = torch.tensor([3.0, -0.4])
        Ball(math.inf, 0.5).project([point])
        torch.testing.assert_close(point, torch.tensor([0.5, -0.4]))


class TestModelIsLeftAsItWas:
    @pytest.mark.parametrize("measure", MEASURES)
    def test_bit_for_bit(self, llama: Tiny, measure) -> None:
        model = llama.model.float().train()
        before = copy.deepcopy(model.state_dict())
        measure(model, llama.windows, llama.names, steps=3)
        assert all(torch.equal(before[name], now) for name, now in model.state_dict().items())
        assert model.training
        assert all(p.grad is None for p in model.parameters())

    def test_after_an_exception(self, llama: Tiny) -> None:
        def stop(_: float) -> None:
            assert not torch.equal(llama.model.lm_head.weight, before["lm_head.weight"])
            raise KeyboardInterrupt

        before = copy.deepcopy(llama.model.state_dict())
        with pytest.raises(KeyboardInterrupt):
            sam_sharpness(llama.model, llama.windows, llama.names, on_step=stop)
        assert all(torch.equal(before[name], now) for name, now in llama.model.state_dict().items())

    def test_dropout_is_off(self, build) -> None:
        tiny = build("gpt2")  # dropout 0.1
        quiet = sam_sharpness(tiny.model, tiny.windows, tiny.names, steps=2)
        tiny.model.train()
        assert sam_sharpness(tiny.model, tiny.windows, tiny.names, steps=2) == quiet


class TestMistakes:
    @pytest.mark.parametrize(
        ("measure", "options", "message"),
        [
            (sam_sharpness, {"rho": 0.0}, "rho must be above 0. Got 0.0"),
            (sam_sharpness, {"rho": math.nan}, "rho must be above 0. Got nan"),
            (sam_sharpness, {"steps": 0}, "steps must be at least 1. Got 0"),
            (adaptive_sharpness, {"eta": -1.0}, "eta must be at least 0. Got -1.0"),
            (adaptive_sharpness, {"rho": math.inf}, "rho must be above 0. Got inf"),
            (keskar_sharpness, {"epsilon": -1e-3}, "epsilon must be above 0. Got -0.001"),
        ],
    )
    def test_options(self, llama: Tiny, measure, options, message: str) -> None:
        with pytest.raises(QscaleError, match=message):
            measure(llama.model, llama.windows, llama.names, **options)

    def test_overflow_within_the_ball(self, llama: Tiny) -> None:
        mlp = [name for name in llama.names if "mlp" in name]
        with pytest.raises(QscaleError, match=r"not finite after step 1 within radius 1e\+18"):
            sam_sharpness(llama.model.float(), llama.windows, mlp, rho=1e18)

    def test_nan_weights(self, llama: Tiny) -> None:
        with torch.no_grad():
            llama.model.lm_head.weight[0, 0] = float("nan")
        with pytest.raises(CheckpointError, match="check its weights for NaN"):
            sam_sharpness(llama.model, llama.windows, llama.names)

    def test_short_windows(self, llama: Tiny) -> None:
        with pytest.raises(TextError, match="at least one window of 2 tokens"):
            sam_sharpness(llama.model, llama.windows[:, :1], llama.names)
