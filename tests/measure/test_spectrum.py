"""Eigenvalues and spectral density against dense Hessians and other libraries."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import hessian_eigenthings as he
import numpy as np
import pyhessian
import pytest
import scipy.stats
import torch

from qscale.errors import QscaleError
from qscale.measure.curvature.spectrum import (
    SpectralDensity,
    _eigh_tridiagonal,
    _lanczos,
    spectral_density,
    top_eigenvalues,
)

if TYPE_CHECKING:
    from conftest import Tiny

ARCHITECTURES = ("llama", "llama-tied", "gpt2", "neox")


@pytest.fixture(scope="module", params=ARCHITECTURES)
def tiny(request: pytest.FixtureRequest, build) -> Tiny:
    found = build(request.param)
    found.model.set_attn_implementation("eager")
    return found


def dense_eigenvalues(tiny: Tiny) -> np.ndarray:
    """Ascending, from every column by double backward through Hugging Face's loss."""
    parameters = list(tiny.model.parameters())
    loss = tiny.model(input_ids=tiny.windows, labels=tiny.windows).loss
    gradient = torch.autograd.grad(loss, parameters, create_graph=True)
    gradient = torch.cat([g.flatten() for g in gradient])
    eye = torch.eye(len(gradient), dtype=gradient.dtype)
    rows = torch.autograd.grad(gradient, parameters, eye, is_grads_batched=True)
    hessian = torch.cat([r.reshape(len(eye), -1) for r in rows], dim=1)
    return torch.linalg.eigvalsh((hessian + hessian.T) / 2).numpy()


@pytest.fixture(scope="module")
def exact(tiny: Tiny) -> np.ndarray:
    return dense_eigenvalues(tiny)


def test_both_ends_are_those_of_the_dense_hessian(tiny: Tiny, exact: np.ndarray) -> None:
    for which, expected in (("largest", exact[::-1][:5]), ("smallest", exact[:5])):
        found = top_eigenvalues(
            tiny.model, tiny.windows, tiny.names, 5, which=which, batch_windows=3
        )
        np.testing.assert_allclose(found.values, expected, rtol=1e-6)
        assert found.converged.all()
        assert 5 <= found.steps < 100
        # An eigenvalue lies within the residual of every value found.
        distance = np.abs(found.values[:, None] - exact).min(axis=1)
        assert (distance <= found.residuals + 1e-6 * np.abs(exact).max()).all()


def test_what_has_not_converged_is_said(build) -> None:
    tiny = build("llama")
    found = top_eigenvalues(tiny.model, tiny.windows, tiny.names, 5, max_steps=8, batch_windows=3)
    assert found.steps == 8
    assert not found.converged.all()
    assert (found.residuals[~found.converged] > 1e-4 * found.values[0]).all()


def test_batches_do_not_matter(build) -> None:
    tiny = build("neox")
    one, two = (
        top_eigenvalues(tiny.model, tiny.windows, tiny.names, 2, batch_windows=size)
        for size in (1, 2)
    )
    np.testing.assert_allclose(one.values, two.values, rtol=1e-6)


def test_density_is_that_of_the_dense_spectrum(tiny: Tiny, exact: np.ndarray) -> None:
    found = spectral_density(
        tiny.model, tiny.windows, tiny.names, num_runs=4, num_steps=30, batch_windows=3
    )
    assert found.nodes.shape == found.weights.shape == (4, 30)
    assert found.size == len(exact)
    np.testing.assert_allclose(found.weights.sum(axis=1), 1)
    assert found.nodes.max() == pytest.approx(exact[-1], rel=1e-6)
    assert found.nodes.min() == pytest.approx(exact[0], rel=1e-4)
    distance = scipy.stats.wasserstein_distance(
        exact, found.nodes.ravel(), v_weights=found.weights.ravel()
    )
    assert distance <= 0.006 * np.ptp(exact)
    grid = found.grid()
    density, error = found.density(grid)
    assert np.trapezoid(density, grid) == pytest.approx(1, abs=1e-3)
    smooth = SpectralDensity(exact[None], np.full((1, len(exact)), 1 / len(exact)), len(exact))
    expected, _ = smooth.density(grid, sigma=0.01 * np.ptp(found.nodes))
    assert np.mean(np.abs(density - expected)) <= 0.25 * np.mean(expected)
    far = np.abs(density - expected) > 4 * error + 0.02 * expected.max()
    assert far.mean() < 0.1


def test_quadrature_moments_are_those_of_the_start_vectors() -> None:
    """Exactly: a Gauss rule of m nodes integrates polynomials of degree below 2m."""
    draw = torch.Generator().manual_seed(0)
    matrix = torch.randn(40, 40, generator=draw, dtype=torch.double)
    matrix = (matrix + matrix.T) / 2
    start = torch.randn(40, generator=draw, dtype=torch.double)
    *_, (alpha, beta) = _lanczos(lambda v: matrix @ v, start, 6)
    nodes, vectors = _eigh_tridiagonal(alpha, beta[:-1])
    unit = start / start.norm()
    for power in range(12):
        expected = float(unit @ torch.linalg.matrix_power(matrix, power) @ unit)
        assert (vectors[0] ** 2 * nodes**power).sum() == pytest.approx(expected, rel=1e-9)


def test_ghosts_do_not_come_up() -> None:
    """One large eigenvalue and many steps: without reorthogonalisation it is found repeatedly."""
    values = torch.cat([torch.linspace(0, 1, 199), torch.tensor([100.0])])
    start = torch.randn(200, generator=torch.Generator().manual_seed(0))
    *_, (alpha, beta) = _lanczos(lambda v: values * v, start, 100)
    ritz, _ = _eigh_tridiagonal(alpha, beta[:-1])
    assert ritz[-1] == pytest.approx(100, rel=1e-5)
    assert ritz[-2] <= 1.001


def test_an_invariant_subspace_ends_the_iteration() -> None:
    values = torch.tensor([3.0, 1.0]).repeat(10).double()
    start = torch.randn(20, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    steps = list(_lanczos(lambda v: values * v, start, 15))
    assert len(steps) == 2
    alpha, beta = steps[-1]
    np.testing.assert_allclose(_eigh_tridiagonal(alpha, beta[:-1])[0], [1, 3], rtol=1e-12)


def test_the_error_of_the_density_is_that_over_runs() -> None:
    nodes = np.array([[0.0, 1.0], [-1.0, 2.0], [0.5, 1.0]])
    weights = np.array([[0.5, 0.5], [0.2, 0.8], [0.1, 0.9]])
    density = SpectralDensity(nodes, weights, 10)
    share, error = density.negative_share()
    assert share == pytest.approx(0.2 / 3)
    assert error == pytest.approx(np.std([0, 0.2, 0], ddof=1) / 3**0.5)
    runs = [SpectralDensity(nodes[i : i + 1], weights[i : i + 1], 10) for i in range(3)]
    grid = density.grid(7)
    each = np.array([run.density(grid, sigma=0.3)[0] for run in runs])
    value, error = density.density(grid, sigma=0.3)
    np.testing.assert_allclose(value, each.mean(axis=0))
    np.testing.assert_allclose(error, each.std(axis=0, ddof=1) / 3**0.5)
    assert np.isnan(runs[0].density(grid)[1]).all()
    with pytest.raises(ValueError, match="sigma must be above 0"):
        density.density(grid, sigma=0)


def test_progress_adds_up(build) -> None:
    tiny = build("llama")
    done: list[float] = []
    spectral_density(
        tiny.model, tiny.windows, tiny.names, num_runs=2, num_steps=3, on_step=done.append
    )
    assert sum(done) == pytest.approx(1)


def test_refusals(build) -> None:
    tiny = build("llama")
    with pytest.raises(QscaleError, match=r"basis of 100 vectors over .* parameters takes 0.0 GiB"):
        top_eigenvalues(tiny.model, tiny.windows, tiny.names, max_basis_bytes=100)
    with pytest.raises(QscaleError, match="raise max_basis_bytes"):
        spectral_density(tiny.model, tiny.windows, tiny.names, max_basis_bytes=100)
    with pytest.raises(ValueError, match="k must be at least 1 and at most"):
        top_eigenvalues(tiny.model, tiny.windows, tiny.names, 0)
    with pytest.raises(ValueError, match="num_runs and num_steps must be at least 1"):
        spectral_density(tiny.model, tiny.windows, tiny.names, num_runs=0)


class Logits(torch.nn.Module):
    """What pyhessian wants: a module from inputs to flat logits."""

    def __init__(self, model) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids).logits[:, :-1].flatten(0, 1)


class TestOtherLibraries:
    @pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
    def test_hessian_eigenthings(self, tiny: Tiny) -> None:
        batch = {"input_ids": tiny.windows, "labels": tiny.windows}
        operator = he.HessianOperator(tiny.model, [batch], he.hf_lm_loss())
        theirs = he.lanczos(operator, k=3, max_iter=50, reorthogonalize=True, which="LA")
        ours = top_eigenvalues(tiny.model, tiny.windows, tiny.names, 3, batch_windows=3)
        expected = np.sort(theirs.eigenvalues.detach().numpy())[::-1]
        np.testing.assert_allclose(ours.values, expected, rtol=1e-5)

    def test_pyhessian(self, build) -> None:
        """Its top eigenvalue, by power iteration; its density() fails, torch.eig being gone."""
        tiny = build("llama")  # its largest eigenvalue is the largest in absolute value
        tiny.model.set_attn_implementation("eager")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Using backward.. with create_graph=True")
            theirs = pyhessian.hessian(
                Logits(tiny.model),
                torch.nn.CrossEntropyLoss(),
                data=(tiny.windows, tiny.windows[:, 1:].flatten()),
                cuda=False,
            )
        with torch.random.fork_rng():
            torch.manual_seed(0)
            values, _ = theirs.eigenvalues(maxIter=200, tol=1e-6, top_n=1)
        ours = top_eigenvalues(tiny.model, tiny.windows, tiny.names, 1, batch_windows=3)
        assert ours.values[0] == pytest.approx(values[0], rel=5e-3)
