"""The same curvature by other libraries."""

from __future__ import annotations

import warnings

import hessian_eigenthings as he
import numpy as np
import pyhessian
import pytest
import torch

from qscale.measure.curvature import (
    ggn_trace,
    hessian_vector_product,
)
from tests.dense import (
    ARCHITECTURES,
    assert_close,
    dense_ggn_factor,
    flatten,
    hessian_trace_of_few,
    random_vectors,
)


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
