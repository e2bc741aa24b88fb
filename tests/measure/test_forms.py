"""Probes of the curvature along many errors: means, variances and errors, against exact forms."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import scipy.stats
import torch

from qscale.errors import CheckpointError
from qscale.measure.curvature import ggn_trace, quadratic_delta
from qscale.measure.curvature.along import gauss_newton_along, gauss_newton_along_each
from qscale.measure.forms import FormEstimate, QuadraticForms, quadratic_forms
from qscale.model import quantizable
from qscale.quantize.format import Format
from qscale.quantize.rtn import rtn
from tests.checkpoints import babble, build_model, train

if TYPE_CHECKING:
    from conftest import Tiny

ARCHITECTURES = ("llama", "llama-tied", "gpt2", "neox")
FORMS = ("full", "block_diagonal", "isotropic")


def random_errors(model, names, *, seed: int = 0) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {
        name: 0.05 * torch.randn(parameters[name].shape, generator=draw, dtype=torch.double)
        for name in names
    }


def exact_forms(model, windows, names, errors) -> dict[str, float]:
    """The three forms without probes: forward mode, and traces by one unit vector at a time."""
    each = gauss_newton_along_each(model, windows, errors)
    isotropic = 0.0
    for name in names:
        unit = torch.zeros_like(errors[name])
        trace = 0.0
        for i in range(unit.numel()):
            unit.view(-1)[i] = 1.0
            trace += 2 * gauss_newton_along(model, windows, {name: unit}).gauss_newton.value
            unit.view(-1)[i] = 0.0
        isotropic += trace * float(errors[name].square().sum()) / unit.numel() / 2
    return {
        "full": gauss_newton_along(model, windows, errors).gauss_newton.value,
        "block_diagonal": sum(one.gauss_newton.value for one in each.values()),
        "isotropic": isotropic,
    }


def block_matrices(tiny: Tiny) -> list[str]:
    return [name for name, p in tiny.model.named_parameters() if p.ndim == 2 and ".1." in name][:3]


def of(forms: QuadraticForms, form: str, fmt: str) -> FormEstimate:
    return getattr(forms, form)(fmt)


@pytest.mark.parametrize("architecture", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_every_form_is_unbiased_over_seeds(architecture: str, build) -> None:
    tiny = build(architecture)
    names = block_matrices(tiny)
    errors = {f"seed {i}": random_errors(tiny.model, names, seed=i) for i in range(2)}
    seeds = [
        quadratic_forms(
            tiny.model,
            tiny.windows,
            names,
            {fmt: stored.__getitem__ for fmt, stored in errors.items()},
            num_probes=2,
            batch_windows=2,  # three windows: a ragged split
            seed=seed,
        )
        for seed in range(200)
    ]
    for fmt, stored in errors.items():
        exact = exact_forms(tiny.model, tiny.windows, names, stored)
        for form in FORMS:
            values = np.array([of(forms, form, fmt).value for forms in seeds])
            error = values.std(ddof=1) / np.sqrt(len(values))
            assert abs(values.mean() - exact[form]) <= 4 * error
            assert error <= 0.1 * exact[form]  # or the line above says little
            squared_errors = np.mean([of(forms, form, fmt).probe_se ** 2 for forms in seeds])
            assert squared_errors == pytest.approx(values.var(ddof=1), rel=0.4)


def test_forms_of_all_parameters_and_of_each(build) -> None:
    for architecture in ARCHITECTURES:
        tiny = build(architecture)
        errors = random_errors(tiny.model, tiny.names)  # a head, tied or not, and an embedding
        forms = quadratic_forms(
            tiny.model, tiny.windows, tiny.names, {"random": errors.__getitem__}, num_probes=100
        )
        exact = gauss_newton_along(tiny.model, tiny.windows, errors).gauss_newton.value
        full = forms.full("random")
        assert abs(full.value - exact) <= 4 * full.probe_se
        assert full.probe_se <= 0.2 * exact
        each = gauss_newton_along_each(tiny.model, tiny.windows, errors)
        probed = forms.block_diagonal_each("random")
        for name, one in each.items():
            error = abs(probed[name].value - one.gauss_newton.value)
            assert error <= 4.5 * probed[name].probe_se + 1e-9
        total = forms.block_diagonal("random").value
        assert sum(one.value for one in probed.values()) == pytest.approx(total, rel=1e-12)


def test_isotropic_form_is_that_of_the_trace(build) -> None:
    tiny = build("llama-tied")
    names = [name for name in tiny.names if "norm" not in name]
    errors = random_errors(tiny.model, names)
    forms = quadratic_forms(
        tiny.model, tiny.windows, names, {"random": errors.__getitem__}, num_probes=4, seed=3
    )
    trace = ggn_trace(tiny.model, tiny.windows, names, num_probes=4, seed=3)
    expected, _ = quadratic_delta(
        trace,
        {name: float(e.square().sum()) for name, e in errors.items()},
        {name: e.numel() for name, e in errors.items()},
    )
    assert forms.isotropic("random").value == pytest.approx(expected, rel=1e-6)
    each = forms.isotropic_each("random")
    assert sum(one.value for one in each.values()) == pytest.approx(expected, rel=1e-6)


def test_isotropic_form_is_the_average_over_rotations(build) -> None:
    tiny = build("llama")
    names = block_matrices(tiny)
    signs = torch.Generator().manual_seed(0)
    settings = {}
    for i in range(300):
        drawn = {n: torch.randn(p.shape, generator=signs) for n, p in
                 dict(tiny.model.named_parameters()).items() if n in names}  # fmt: skip
        settings[str(i)] = {n: (e / e.norm()).__mul__(0.3) for n, e in drawn.items()}
    forms = quadratic_forms(
        tiny.model, tiny.windows, names, {k: v.__getitem__ for k, v in settings.items()},
        num_probes=60,
    )  # fmt: skip
    values = np.array([forms.block_diagonal(fmt).value for fmt in settings])
    isotropic = forms.isotropic("0").value
    assert abs(values.mean() - isotropic) <= 4 * values.std(ddof=1) / np.sqrt(len(values))


@pytest.fixture(scope="module")
def trained() -> tuple:
    """A model over bytes that has learned something, and windows of text of the same kind."""
    model = build_model("llama")
    train(model, steps=60)
    text = torch.tensor(list(babble(2400, seed=5).encode()))
    return model, text[: 8 * (len(text) // 8)].view(-1, 8)


@pytest.mark.parametrize(
    ("shape", "error"),
    [((8, 6), "probe_se"), ((2, 20), "se")],
    ids=["given the text", "over texts"],
)
def test_intervals_cover(shape: tuple[int, int], error: str, trained) -> None:
    """Draw few probes of few windows, many times, out of a pool whose mean is the truth."""
    model, windows = trained
    weights = quantizable(model)
    fmt = Format("int", 4)
    errors = {name: rtn(w.detach(), fmt) - w.detach() for name, w in weights.items()}
    probes, parts = shape
    windows = windows[:6] if error == "probe_se" else windows
    forms = quadratic_forms(
        model,
        windows,
        list(weights),
        {"4": errors.__getitem__},
        num_probes=300 if error == "probe_se" else probes,
    )
    degrees = 6 * (probes - 1) if error == "probe_se" else parts - 1
    quantile = scipy.stats.t(df=degrees).ppf(0.95)
    draw = np.random.default_rng(0)
    covered: dict[str, list[bool]] = {form: [] for form in FORMS}
    for _ in range(600):
        chosen = draw.choice(len(forms.products[0]), probes, replace=False)
        part = draw.choice(len(windows), min(parts, len(windows)), replace=False)
        some = replace(
            forms,
            products=forms.products[:, chosen][:, :, part],
            squared_norms=forms.squared_norms[chosen][:, part],
            counts=forms.counts[part],
        )
        for form, hits in covered.items():
            found = of(some, form, "4")
            hits.append(
                abs(found.value - of(forms, form, "4").value) <= quantile * getattr(found, error)
            )
    for hits in covered.values():
        assert 0.83 <= np.mean(hits) <= 0.96


def test_errors_may_be_made_when_needed(build) -> None:
    tiny = build("llama")
    names = block_matrices(tiny)
    weights = {name: p for name, p in tiny.model.named_parameters() if name in names}
    fmt = Format("int", 3)
    stored = {name: rtn(w.detach(), fmt) - w.detach() for name, w in weights.items()}

    def made(name: str) -> torch.Tensor:
        return rtn(weights[name].detach(), fmt) - weights[name].detach()

    forms = quadratic_forms(
        tiny.model, tiny.windows, names, {"made": made, "stored": stored.__getitem__}
    )
    assert forms.full("made") == forms.full("stored")
    np.testing.assert_allclose(
        forms.squared_errors[0], [float(e.square().sum()) for e in stored.values()]
    )


class TestRefusals:
    def test_shape(self, build) -> None:
        tiny = build("llama")
        with pytest.raises(ValueError, match=r"error of lm_head.weight must have shape \(11, 8\)"):
            quadratic_forms(
                tiny.model, tiny.windows, ["lm_head.weight"], {"x": lambda _: torch.zeros(3)}
            )

    def test_probes(self, build) -> None:
        tiny = build("llama")
        with pytest.raises(ValueError, match="num_probes must be at least 2"):
            quadratic_forms(tiny.model, tiny.windows, tiny.names, {}, num_probes=1)

    def test_not_finite(self, build) -> None:
        tiny = build("llama")
        with pytest.raises(CheckpointError, match="along the errors is not finite"):
            quadratic_forms(
                tiny.model,
                tiny.windows,
                ["lm_head.weight"],
                {"x": lambda _: torch.full((11, 8), torch.inf)},
            )
