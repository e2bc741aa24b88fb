"""Curvature along many quantizers' errors at once, from the same random vectors at the logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from qscale.errors import CheckpointError
from qscale.measure.curvature.ggn import pulled_back
from qscale.measure.curvature.guard import differentiable
from qscale.measure.curvature.head import check_head, own_parameters, scored_hidden
from qscale.measure.curvature.loss import (
    differentiate,
    inner_products,
    microbatch_count,
    microbatches,
    scored_tokens,
    stream,
)
from qscale.measure.curvature.parallel import add_up_array, processes, share
from qscale.measure.loss import mean_and_se

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray
    from transformers import PreTrainedModel

    from qscale.measure.curvature.loss import Progress

    Errors: TypeAlias = Callable[[str], torch.Tensor]


@dataclass(frozen=True, slots=True)
class FormEstimate:
    """Estimate of a quadratic form, nats per token.

    Parameters
    ----------
    value
        The estimate.
    se
        Standard error over microbatches: that of the text and of the probes together. NaN for a
        single microbatch.
    probe_se
        Standard error over probes: the text is taken as given.
    """

    value: float
    se: float
    probe_se: float


@dataclass(frozen=True, slots=True, eq=False)
class QuadraticForms:
    r"""What probes say of :math:`\tfrac12 \epsilon^T G \epsilon` for the errors of many settings.

    A probe of microbatch :math:`b` is a gradient :math:`g` with :math:`E[g g^T] = T_b G_b`, where
    :math:`G_b` is the Gauss-Newton matrix of the mean loss over its :math:`T_b` tokens.

    Parameters
    ----------
    settings
        Names of the settings.
    names
        Parameter names of the matrices.
    products
        :math:`\langle g_l, \epsilon_l \rangle`, shape ``(settings, probes, microbatches, names)``.
    squared_norms
        :math:`\lVert g_l \rVert^2`, shape ``(probes, microbatches, names)``.
    squared_errors
        :math:`\lVert \epsilon_l \rVert^2`, shape ``(settings, names)``.
    sizes
        Weights of each matrix, shape ``(names,)``.
    counts
        Scored tokens of each microbatch, shape ``(microbatches,)``.
    """

    settings: tuple[str, ...]
    names: tuple[str, ...]
    products: NDArray[np.float64]
    squared_norms: NDArray[np.float64]
    squared_errors: NDArray[np.float64]
    sizes: NDArray[np.int64]
    counts: NDArray[np.int64]

    def full(self, setting: str) -> FormEstimate:
        r"""Estimate :math:`\tfrac12 \epsilon^T G \epsilon`, products between matrices included."""
        return self._estimate(self.products[self._row(setting)].sum(axis=-1) ** 2)

    def block_diagonal(self, setting: str) -> FormEstimate:
        r"""Estimate :math:`\tfrac12 \sum_l \epsilon_l^T G_{ll} \epsilon_l`."""
        return self._estimate((self.products[self._row(setting)] ** 2).sum(axis=-1))

    def isotropic(self, setting: str) -> FormEstimate:
        r"""Estimate :math:`\sum_l \operatorname{tr} G_{ll} \lVert \epsilon_l \rVert^2 / 2 n_l`.

        It is the block-diagonal form averaged over all rotations of each matrix's error.
        """
        return self._estimate(self._isotropic(setting).sum(axis=-1))

    def block_diagonal_each(self, setting: str) -> dict[str, FormEstimate]:
        """Estimate each matrix's term of the block-diagonal form."""
        return self._each(self.products[self._row(setting)] ** 2)

    def isotropic_each(self, setting: str) -> dict[str, FormEstimate]:
        """Estimate each matrix's term of the isotropic form."""
        return self._each(self._isotropic(setting))

    def _row(self, setting: str) -> int:
        return self.settings.index(setting)

    def _isotropic(self, setting: str) -> NDArray[np.float64]:
        return self.squared_norms * self.squared_errors[self._row(setting)] / self.sizes

    def _each(self, samples: NDArray[np.float64]) -> dict[str, FormEstimate]:
        return {name: self._estimate(samples[..., i]) for i, name in enumerate(self.names)}

    def _estimate(self, samples: NDArray[np.float64]) -> FormEstimate:
        """Estimate a form from samples of each microbatch's sum over tokens, ``(probes, parts)``.

        Squares of microbatches are added. The square of their summed gradients would have the same
        mean and, from the products between microbatches, more noise.
        """
        value, se = mean_and_se(samples.mean(axis=0) / 2, self.counts)
        variance = samples.var(axis=0, ddof=1).sum() / len(samples)
        return FormEstimate(value, se, float(np.sqrt(variance) / (2 * self.counts.sum())))


def quadratic_forms(
    model: PreTrainedModel,
    windows: torch.Tensor,
    names: Sequence[str],
    errors: Mapping[str, Errors],
    *,
    num_probes: int = 6,
    batch_windows: int = 1,
    seed: int = 0,
    on_probe: Progress | None = None,
) -> QuadraticForms:
    r"""Estimate the loss increase that curvature predicts, for the errors of many settings at once.

    The probes are those of :func:`qscale.measure.curvature.ggn_trace`: gradients :math:`g` from
    random vectors at the logits, whose second moment is the Gauss-Newton matrix. One gradient
    serves every setting's error :math:`\epsilon` and three approximations of what it costs, each
    unbiased for its own: :math:`\langle g, \epsilon \rangle^2` for the whole form,
    :math:`\sum_l \langle g_l, \epsilon_l \rangle^2` for the blocks of single matrices, and
    :math:`\sum_l \lVert g_l \rVert^2 \lVert \epsilon_l \rVert^2 / n_l` for errors without preferred
    direction.

    Parameters
    ----------
    model
        Causal language model with float32 weights.
    windows
        Token ids, shape ``(n_windows, context)``; every token of a window but its first is scored.
    names
        Names of the parameters, all of which every setting changes.
    errors
        For each setting a function from a parameter's name to its error: ``kept.__getitem__`` of a
        dict of tensors, or one that quantizes the matrix again, once for each microbatch, and
        needs no memory.
    num_probes
        Number of probes of each microbatch, at least 2. Each costs one backward pass over the
        windows, about 0.7 of a gradient.
    batch_windows
        Windows in one microbatch. More take more memory and make probes noisier, not cheaper.
    seed
        Determines the signs, together with ``batch_windows``.
    on_probe
        Called after each microbatch of each probe with the share of a probe that it is.

    Returns
    -------
    QuadraticForms
        A sample of the whole or of a block's form is a square of something nearly normal, with a
        standard deviation of about 1.4 times its mean; one of the isotropic form is far less noisy.

    Raises
    ------
    CheckpointError
        If the logits cannot be differentiated, or a value is not finite.
    TextError
        If the windows have no token to score.
    ValueError
        If ``num_probes`` is below 2, or an error has another shape than its parameter.

    Notes
    -----
    The gradients of one microbatch are held together: ``num_probes`` times the memory of the named
    parameters, beside the activations of a microbatch.
    """
    if num_probes < 2:
        raise ValueError(f"num_probes must be at least 2. Got {num_probes} instead.")
    tokens = scored_tokens(windows)
    parts = microbatch_count(windows, batch_windows)
    products = np.zeros((len(errors), num_probes, parts, len(names)))
    squared_norms = np.zeros((num_probes, parts, len(names)))
    squared_errors = np.zeros((len(errors), len(names)))
    with differentiable(model, names) as parameters:
        head = check_head(model, windows)
        for start, ids in share(microbatches(windows, batch_windows, model.device)):
            part = start // batch_windows
            streams = [stream(model.device, seed, probe, start) for probe in range(num_probes)]
            gradients = [torch.empty(num_probes, *p.shape).to(p) for p in parameters.values()]
            for probe, found in enumerate(_gradients(model, ids, parameters, head, streams)):
                for rows, gradient in zip(gradients, found, strict=True):
                    rows[probe] = gradient
                squared_norms[probe, part] = inner_products(found, found)
                if on_probe:
                    on_probe(processes() * len(ids) / len(windows))
            for setting, error in enumerate(errors.values()):
                products[setting, :, part], squares = _along(parameters, gradients, error)
                if part == 0:  # in one process only
                    squared_errors[setting] = squares
    counts = [len(ids) for _, ids in microbatches(windows, batch_windows, torch.device("cpu"))]
    forms = QuadraticForms(
        tuple(errors),
        tuple(names),
        add_up_array(products, model.device),
        add_up_array(squared_norms, model.device),
        add_up_array(squared_errors, model.device),
        np.array([p.numel() for p in parameters.values()]),
        np.array(counts) * (tokens // len(windows)),
    )
    if not (np.isfinite(forms.products).all() and np.isfinite(forms.squared_norms).all()):
        raise CheckpointError(
            f"{type(model).__name__}: the curvature along the errors is not finite: "
            "check the weights and their errors for NaN and infinite values."
        )
    return forms


def _gradients(
    model: PreTrainedModel,
    ids: torch.Tensor,
    parameters: Mapping[str, torch.nn.Parameter],
    head: torch.nn.Linear,
    streams: Sequence[torch.Generator],
) -> Iterator[list[torch.Tensor]]:
    """Yield each probe's gradient of a microbatch, one tensor per parameter."""
    own = own_parameters(model, parameters)
    if "bias" in own.values():
        raise CheckpointError(f"{type(model).__name__}: errors of the LM head's bias have no form.")
    body = {name: p for name, p in parameters.items() if name not in own}
    at_head = next((name for name, p in parameters.items() if p is head.weight), None)
    hidden, _ = scored_hidden(model, ids)
    vectors = pulled_back(hidden.detach(), head, streams, of_weight=at_head is not None)
    for probe, (of_hidden, of_weight) in enumerate(vectors):
        more = probe + 1 < len(streams)
        parts = differentiate(hidden, body, of_hidden, retain_graph=more) if body else ()
        found = dict(zip(body, parts, strict=True))
        if at_head is not None and of_weight is not None:
            found[at_head] = found[at_head] + of_weight if at_head in found else of_weight
        yield [found[name] for name in parameters]


def _along(
    parameters: Mapping[str, torch.nn.Parameter], gradients: Sequence[torch.Tensor], error: Errors
) -> tuple[NDArray[np.float64], list[float]]:
    """Return products with the errors, ``(probes, names)``, and the errors' squared norms."""
    products, squares = [], []
    for (name, parameter), rows in zip(parameters.items(), gradients, strict=True):
        one = error(name).detach().to(rows)
        if one.shape != parameter.shape:
            raise ValueError(
                f"The error of {name} must have shape {tuple(parameter.shape)}. "
                f"Got {tuple(one.shape)} instead."
            )
        # A sum over all elements in float32 would lose digits: rows first, then in float64.
        dots = torch.einsum("p...i,...i->p...", rows, one).view(len(rows), -1)
        products.append(dots.sum(1, dtype=torch.float64).cpu().numpy())
        squares.append(inner_products([one], [one])[0])
    return np.array(products).T, squares
