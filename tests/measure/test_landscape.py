"""Curves and slices against derivatives, quantized models and curves of known shape."""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from qscale.errors import CheckpointError, QscaleError, TextError
from qscale.measure.curvature import double_backward_attention, hessian_vector_product
from qscale.measure.curvature.loss import differentiable, loss_gradient
from qscale.measure.directions import (
    direction_norm,
    direction_to,
    filter_normalized_direction,
    quantization_direction,
)
from qscale.measure.landscape import RadialCurve, loss_slice, radial_loss
from qscale.measure.loss import mean_and_se
from qscale.measure.perturb import displaceable, window_losses
from qscale.measure.weights import fake_quantized
from qscale.model import quantizable
from qscale.quantize.format import Format

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Tiny

THREE_BITS = Format("int", 3, group_size=4)


@pytest.fixture
def llama(build: Callable[[str], Tiny]) -> Tiny:
    """A Llama that the test may change."""
    return build("llama")


@pytest.fixture
def direction(llama: Tiny) -> dict[str, torch.Tensor]:
    """To the Llama's weights in three bits."""
    return quantization_direction(quantizable(llama.model), THREE_BITS)


def curve(
    delta: np.ndarray, radii: np.ndarray, *, noise: np.ndarray | float = 0.0, loss: float = 2.0
) -> RadialCurve:
    """A curve of known increase over 40 windows of 100 tokens, with noise of its own per window."""
    counts = np.full(40, 100)
    nll = 100 * (loss + delta[:, None] + np.broadcast_to(noise, 40))
    return RadialCurve(radii, 1.0, nll, np.full(40, 100 * loss), counts, vocabulary=50)


class TestRadialLoss:
    @pytest.mark.parametrize("architecture", ["llama", "llama-tied", "neox"])
    def test_radius_one_is_the_quantized_model(self, architecture: str, build) -> None:
        tiny = build(architecture)
        found = quantizable(tiny.model)
        way = quantization_direction(found, THREE_BITS)
        got = radial_loss(tiny.model, tiny.windows, way, [1.0, 0.5]).frame()
        before = window_losses(tiny.model, tiny.windows)
        with fake_quantized(found, THREE_BITS):
            after = window_losses(tiny.model, tiny.windows)
            loss = tiny.model(input_ids=tiny.windows, labels=tiny.windows).loss.item()
        counts = np.full(len(before), tiny.windows.shape[1] - 1)
        row = got.iloc[1]
        assert list(got["radius"]) == [0.5, 1.0]
        assert row["loss"] == pytest.approx(loss, rel=1e-6)
        assert (row["delta_loss"], row["delta_loss_se"]) == pytest.approx(
            mean_and_se(after - before, counts), rel=1e-5
        )
        norm = torch.cat([d.flatten() for d in way.values()]).norm().item()
        assert list(got["distance"]) == pytest.approx([norm / 2, norm])

    @pytest.mark.parametrize("architecture", ["llama", "gpt2"])
    def test_starts_with_the_derivatives_along_the_direction(self, architecture, build) -> None:
        tiny = build(architecture)
        way = filter_normalized_direction(dict(tiny.model.named_parameters()), seed=1)
        h = 1e-2
        below, above = radial_loss(tiny.model, tiny.windows, way, [h, -h]).frame()["delta_loss"]
        product = hessian_vector_product(tiny.model, tiny.windows, way)
        curvature = sum(float((way[name] * product[name]).sum()) for name in way)
        assert (above + below) / h**2 == pytest.approx(curvature, rel=1e-2)
        with differentiable(tiny.model, tiny.names) as parameters:
            gradient = loss_gradient(
                tiny.model, tiny.windows, parameters, tokens=tiny.windows[:, 1:].numel()
            )
        slope = sum(float((way[n] * g).sum()) for n, g in zip(way, gradient, strict=True))
        assert (above - below) / (2 * h) == pytest.approx(slope, rel=1e-2)

    def test_batches_do_not_matter(self, llama: Tiny, direction) -> None:
        whole, ragged = (
            radial_loss(llama.model, llama.windows, direction, [0.3, 2.0], batch_windows=size)
            for size in (3, 2)
        )
        np.testing.assert_allclose(ragged.nll, whole.nll, rtol=1e-6)

    def test_overflow_is_null(self, llama: Tiny) -> None:
        llama.model.float()
        mlp = {n: p for n, p in llama.model.named_parameters() if "mlp" in n}
        way = filter_normalized_direction(mlp, seed=0)
        got = radial_loss(llama.model, llama.windows, way, [1e-3, 1e18])
        assert got.frame().isna().sum().tolist() == [0, 0, 1, 1, 1]
        assert got.slope(at=1e18) == (None, None)

    def test_progress_and_restoration(self, llama: Tiny, direction) -> None:
        before, done = copy.deepcopy(llama.model.state_dict()), []
        llama.model.train()
        radial_loss(llama.model, llama.windows, direction, [1.0, 2.0], on_point=done.append)
        assert done == [1.0, 1.0]
        assert llama.model.training
        assert all(torch.equal(before[name], now) for name, now in llama.model.state_dict().items())


class TestSlope:
    radii = np.geomspace(0.25, 4, 9)

    @pytest.mark.parametrize("power", [1.0, 2.0, 3.5])
    def test_is_the_exponent_of_a_power(self, power: float) -> None:
        for at in (0.5, 1.0, 2.0):
            slope, se = curve(0.01 * self.radii**power, self.radii).slope(at)
            assert slope == pytest.approx(power, rel=1e-9)
            assert se == pytest.approx(0, abs=1e-9)

    def test_is_local(self) -> None:
        step = curve(3 / (1 + self.radii**-4.0), self.radii)
        assert step.slope(0.5)[0] > step.slope(1.0)[0] > step.slope(2.0)[0] > 0

    def test_null_where_there_is_no_rise(self) -> None:
        assert curve(0.1 - self.radii, self.radii).slope() == (None, None)
        assert curve(self.radii, self.radii).slope(at=40.0) == (None, None)

    def test_error_is_null_where_a_window_decides(self) -> None:
        noise = np.append(8.0, np.full(39, -0.1))  # without the first window the loss falls
        slope, se = curve(0.01 * self.radii, self.radii, noise=noise).slope()
        assert slope is not None
        assert se is None


class TestStepRadius:
    radii = np.linspace(0.05, 4, 80)

    def test_of_a_step(self) -> None:
        height = math.log(50) - 2.0
        delta = 1.3 * height / (1 + (self.radii / 1.7) ** -6)
        expected = 1.7 * (1.3 / 0.5 - 1) ** (-1 / 6)
        assert curve(delta, self.radii).step_radius()[0] == pytest.approx(expected, rel=1e-3)

    def test_of_a_parabola_between_its_points(self) -> None:
        coarse = np.array([1.0, 3.0])
        height = 0.5 * (math.log(50) - 2.0)
        found, _ = curve(np.array([0.0, 2 * height]), coarse).step_radius()
        assert found == pytest.approx(2.0)
        first, _ = curve(np.array([2 * height, 3 * height]), coarse).step_radius()
        assert first == pytest.approx(0.5)  # from the weights themselves

    def test_takes_the_first_crossing(self) -> None:
        delta = np.where(self.radii < 1, 3.0, -3.0)
        assert curve(delta, self.radii).step_radius()[0] < self.radii[0]

    def test_null_if_not_reached(self) -> None:
        flat = curve(0.1 * self.radii, self.radii)
        assert flat.step_radius(0.5) == (None, None)
        assert flat.step_radius(0.1)[0] is not None
        no_better_than_a_guess = curve(self.radii, self.radii, loss=math.log(50) + 0.1)
        assert no_better_than_a_guess.step_radius() == (None, None)

    def test_overflow_counts_as_infinite(self) -> None:
        for worst in (math.nan, math.inf):
            found = curve(np.array([0.1, 0.2, worst]), np.array([1.0, 2.0, 4.0]))
            assert found.step_radius()[0] == 2

    def test_ignores_the_other_side(self) -> None:
        radii = np.linspace(-4, 4, 81)
        delta = np.where(radii < 0, 9.0, radii)
        assert curve(delta, radii).step_radius(0.5)[0] == pytest.approx(0.5 * (math.log(50) - 2))


class TestStandardErrors:
    @pytest.mark.parametrize("feature", ["slope", "step_radius"])
    def test_match_the_spread_over_texts(self, feature: str) -> None:
        """Windows differ in loss and in curvature; the jackknife knows what that does."""
        radii, draw = np.geomspace(0.25, 4, 17), np.random.default_rng(0)
        values, errors = [], []
        for _ in range(300):
            start = 100 * draw.normal(2.0, 0.3, 40)
            curvature, power = draw.gamma(4, 0.1, 40), draw.normal(2, 0.4, 40)
            nll = start + 100 * curvature * radii[:, None] ** power
            found = RadialCurve(radii, 1.0, nll, start, np.full(40, 100), vocabulary=50)
            value, se = getattr(found, feature)()
            values.append(value)
            errors.append(se)
        assert np.mean(errors) == pytest.approx(np.std(values, ddof=1), rel=0.15)
        covered = np.abs(np.array(values) - np.mean(values)) <= 1.685 * np.array(errors)
        assert 0.85 <= covered.mean() <= 0.95

    def test_null_for_a_single_window(self, llama: Tiny, direction) -> None:
        got = radial_loss(llama.model, llama.windows[:1], direction, [0.5, 1.0, 60.0])
        assert got.frame()["delta_loss_se"].isna().all()
        assert got.slope()[1] is None


class TestDirections:
    def test_filter_normalized_rows_are_as_long_as_the_weights(self, llama: Tiny) -> None:
        weights = dict(llama.model.named_parameters())
        way = filter_normalized_direction(weights, seed=3)
        assert list(way) == list(weights)
        for name, w in weights.items():
            if w.ndim == 2:
                torch.testing.assert_close(way[name].norm(dim=1), w.detach().norm(dim=1))
                cosine = (way[name] * w).sum() / w.norm() ** 2
                assert abs(cosine.item()) < 5 / math.sqrt(w.numel())
            else:
                assert not way[name].any()

    def test_seed_decides(self, llama: Tiny) -> None:
        weights = dict(llama.model.named_parameters())
        before = torch.random.get_rng_state()
        one, same, other = (filter_normalized_direction(weights, seed) for seed in (3, 3, 4))
        name = "lm_head.weight"
        assert torch.equal(one[name], same[name])
        assert not torch.equal(one[name], other[name])
        assert torch.equal(before, torch.random.get_rng_state())

    def test_curves_do_not_see_the_scale_of_filters(self, llama: Tiny) -> None:
        def delta(model) -> list[float]:
            way = filter_normalized_direction(dict(model.named_parameters()), seed=0)
            found = radial_loss(model, llama.windows, way, [0.2, 0.5])
            return found.frame()["delta_loss"].tolist()

        rescaled = copy.deepcopy(llama.model)
        with torch.no_grad():
            for layer in rescaled.model.layers:
                layer.mlp.up_proj.weight.mul_(8)
                layer.mlp.down_proj.weight.div_(8)
        assert delta(rescaled) == pytest.approx(delta(llama.model), rel=1e-5)

    def test_norm(self) -> None:
        way = {"a": torch.tensor([[3.0]]), "b": torch.tensor([4.0, 12.0])}
        assert direction_norm(way) == pytest.approx(13)

    def test_radius_one_is_the_other_checkpoint(self, llama: Tiny, build) -> None:
        other = build("llama").model
        with torch.no_grad():
            for p in other.parameters():
                p.add_(0.1 * torch.ones_like(p))
        way = direction_to(dict(llama.model.named_parameters()), other.float().state_dict())
        got = radial_loss(llama.model, llama.windows, way, [1.0])
        expected = window_losses(other.double(), llama.windows)
        np.testing.assert_allclose(got.nll[0], expected, rtol=1e-5)

    def test_a_checkpoint_of_another_shape(self, llama: Tiny) -> None:
        name = "lm_head.weight"
        weights = {name: llama.model.lm_head.weight}
        with pytest.raises(CheckpointError, match=r"lm_head.weight must have shape \(11, 8\)"):
            direction_to(weights, {name: torch.zeros(11, 9)})
        with pytest.raises(CheckpointError, match="Got none in the other one"):
            direction_to(weights, {})


class TestSlice:
    def test_centre_axes_and_corner(self, llama: Tiny, direction) -> None:
        random = filter_normalized_direction(quantizable(llama.model), seed=0)
        got = loss_slice(llama.model, llama.windows, direction, random, extent=(-1.0, 1.0), steps=3)
        assert got["alpha"].tolist() == [-1, 0, 1] * 3
        assert got["beta"].tolist() == [-1] * 3 + [0] * 3 + [1] * 3
        grid = got.set_index(["alpha", "beta"])
        loss = llama.model(input_ids=llama.windows, labels=llama.windows).loss.item()
        assert grid.loc[(0, 0), "loss"] == pytest.approx(loss, rel=1e-6)
        assert grid.loc[(0, 0), "delta_loss"] == 0
        for way, points in ((direction, [(-1, 0), (1, 0)]), (random, [(0, -1), (0, 1)])):
            line = radial_loss(llama.model, llama.windows, way, [-1.0, 1.0]).frame()
            for column in ("loss", "delta_loss", "delta_loss_se"):
                values = [grid.loc[point, column] for point in points]
                assert values == pytest.approx(line[column].tolist(), rel=1e-9)
        both = {name: direction[name] + random[name] for name in direction}
        corner = radial_loss(llama.model, llama.windows, both, [1.0]).frame()
        assert grid.loc[(1, 1), "loss"] == pytest.approx(corner["loss"][0], rel=1e-9)

    def test_bit_for_bit_also_after_an_exception(self, llama: Tiny, direction) -> None:
        model = llama.model
        before = copy.deepcopy(model.state_dict())
        name = next(iter(direction))
        seen: list[float] = []

        def stop(amount: float) -> None:
            seen.append(amount)
            assert not torch.equal(model.state_dict()[name], before[name])
            if len(seen) == 2:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            loss_slice(model, llama.windows, direction, direction, on_point=stop)
        assert seen == [1.0, 1.0]
        assert all(torch.equal(before[key], now) for key, now in model.state_dict().items())

    def test_float32_weights_come_back(self, llama: Tiny) -> None:
        model = llama.model.float()
        before = copy.deepcopy(model.state_dict())
        way = filter_normalized_direction(dict(model.named_parameters()), seed=0)
        loss_slice(model, llama.windows, way, way, steps=2, extent=(0.1, 1e6))
        assert all(torch.equal(before[name], now) for name, now in model.state_dict().items())


class TestWindowLosses:
    @pytest.mark.parametrize("architecture", ["llama", "gpt2", "opt"])
    def test_sum_to_the_models_own_loss(self, architecture: str, build, monkeypatch) -> None:
        tiny = build(architecture)
        monkeypatch.setattr("qscale.measure.curvature.head.CHUNK_LOGITS", 22)  # 2 positions
        sums = window_losses(tiny.model, tiny.windows, batch_windows=2)
        for ids, value in zip(tiny.windows, sums, strict=True):
            loss = tiny.model(input_ids=ids[None], labels=ids[None]).loss.item()
            assert value / (len(ids) - 1) == pytest.approx(loss, rel=1e-6)

    def test_gradients_pass_under_the_guard(self, llama: Tiny) -> None:
        names = llama.names[:2]
        with (
            double_backward_attention(llama.model),
            displaceable(llama.model, names) as (parameters, move),
        ):
            move((1.0, {name: torch.ones_like(p) for name, p in parameters.items()}))
            gradient = loss_gradient(llama.model, llama.windows, parameters, tokens=1)
        assert all(g.abs().sum() > 0 for g in gradient)


class TestMistakes:
    @pytest.mark.parametrize("radii", [[], [1.0, 1.0], [math.nan], [math.inf]])
    def test_radii(self, llama: Tiny, direction, radii: list[float]) -> None:
        with pytest.raises(QscaleError, match="radii must be distinct finite numbers"):
            radial_loss(llama.model, llama.windows, direction, radii)

    @pytest.mark.parametrize("options", [{"extent": (1.0, 1.0)}, {"steps": 1}])
    def test_grid(self, llama: Tiny, direction, options) -> None:
        with pytest.raises(QscaleError, match="in at least 2 steps"):
            loss_slice(llama.model, llama.windows, direction, direction, **options)

    def test_directions_of_different_parameters(self, llama: Tiny, direction) -> None:
        other = dict(direction)
        gone = other.popitem()[0]
        with pytest.raises(QscaleError, match=f"Not in both: \\['{gone}'\\]"):
            loss_slice(llama.model, llama.windows, direction, other)

    def test_unknown_parameter(self, llama: Tiny) -> None:
        with pytest.raises(CheckpointError, match="has no parameter 'nothing'"):
            radial_loss(llama.model, llama.windows, {"nothing": torch.zeros(1)}, [1.0])

    def test_nan_weights(self, llama: Tiny, direction) -> None:
        with torch.no_grad():
            llama.model.lm_head.weight[0, 0] = float("nan")
        for measure in (
            lambda: radial_loss(llama.model, llama.windows, direction, [1.0]),
            lambda: loss_slice(llama.model, llama.windows, direction, direction),
        ):
            with pytest.raises(CheckpointError, match="check its weights for NaN"):
                measure()

    def test_short_windows(self, llama: Tiny, direction) -> None:
        with pytest.raises(TextError, match="at least one window of 2 tokens"):
            radial_loss(llama.model, llama.windows[:, :1], direction, [1.0])
