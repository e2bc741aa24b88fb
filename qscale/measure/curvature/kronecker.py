"""Kronecker-factored blocks of the Gauss-Newton matrix: moments of inputs and output gradients."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from qscale.errors import CheckpointError
from qscale.measure.curvature.ggn import pulled_back
from qscale.measure.curvature.guard import differentiable
from qscale.measure.curvature.head import check_head, last_hidden
from qscale.measure.curvature.loss import microbatches, scored_tokens, stream
from qscale.measure.curvature.parallel import add_up, add_up_array, processes, share

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from transformers import PreTrainedModel

    from qscale.measure.curvature.loss import Progress


@dataclass(frozen=True, slots=True, eq=False)
class KroneckerFactors:
    r"""Factors of :math:`G_{ll} \approx B \otimes A`, the block of a weight matrix.

    Parameters
    ----------
    inputs
        :math:`A = E[x x^T]` over the positions that the matrix is applied to, shape ``(in, in)``,
        by parameter name.
    outputs
        One estimate of :math:`B` for each probe, shape ``(probes, out, out)``, by parameter name:
        the sum of :math:`\delta \delta^T` over positions, divided by the number of scored tokens,
        with :math:`\delta` the gradient at the matrix's output.
    """

    inputs: dict[str, torch.Tensor]
    outputs: dict[str, torch.Tensor]

    def quadratic(self, errors: Mapping[str, torch.Tensor]) -> dict[str, tuple[float, float]]:
        r"""Estimate each matrix's :math:`\tfrac12 \epsilon_l^T G_{ll} \epsilon_l`.

        Parameters
        ----------
        errors
            The change :math:`\epsilon_l` of each matrix, shape ``(out, in)``, by parameter name.

        Returns
        -------
        dict of str to tuple of float
            :math:`\tfrac12 \operatorname{tr}(\epsilon A \epsilon^T B)` in nats per token, and its
            standard error over probes. What the factorisation itself leaves out has no error bar.
        """
        return {name: self._one(name, error) for name, error in errors.items()}

    def _one(self, name: str, error: torch.Tensor) -> tuple[float, float]:
        a, b = self.inputs[name], self.outputs[name]
        error = error.detach().to(a)
        moved = error @ a @ error.T
        values = (b * moved).sum(-1).sum(-1, dtype=torch.float64).cpu().numpy() / 2
        return float(values.mean()), float(values.std(ddof=1) / np.sqrt(len(values)))


def kronecker_factors(
    model: PreTrainedModel,
    windows: torch.Tensor,
    names: Sequence[str],
    *,
    num_probes: int = 4,
    batch_windows: int = 1,
    seed: int = 0,
    on_probe: Progress | None = None,
) -> KroneckerFactors:
    r"""Measure Kronecker factors of each matrix's block of the Gauss-Newton matrix.

    A probe's gradient of a weight matrix is :math:`\sum_s \delta_s x_s^T` over positions, with
    inputs :math:`x_s` and gradients :math:`\delta_s` at the outputs. If products between positions
    average out and the two moments are independent, the block is :math:`B \otimes A` (K-FAC,
    Martens & Grosse, arXiv:1503.05671; with weights shared over positions its "expand" setting,
    Eschenhagen et al., arXiv:2311.00636). The gradients are those of
    :func:`~qscale.measure.curvature.ggn.ggn_trace`, random vectors at the logits, so that the
    factors belong to the model's own predictions and not to the targets.

    Parameters
    ----------
    model
        Causal language model with float32 weights.
    windows
        Token ids, shape ``(n_windows, context)``; every token of a window but its first is scored.
    names
        Names of the weights of Linear layers inside the model's body.
    num_probes
        Number of probes, at least 2. Each costs one backward pass over the windows.
    batch_windows
        Windows in one microbatch; it bounds the memory.
    seed
        Determines the signs, together with ``batch_windows``.
    on_probe
        Called after each microbatch of each probe with the share of a probe that it is.

    Returns
    -------
    KroneckerFactors
        By name; a matrix that no token reached, as in an unused expert, has factors of zero.

    Raises
    ------
    CheckpointError
        If a name is not the weight of a Linear layer that the body calls, the logits cannot be
        differentiated, or a factor is not finite.
    TextError
        If the windows have no token to score.
    ValueError
        If ``num_probes`` is below 2.

    Notes
    -----
    Memory of the factors: ``in**2 + num_probes * out**2`` elements for each matrix.
    """
    if num_probes < 2:
        raise ValueError(f"num_probes must be at least 2. Got {num_probes} instead.")
    tokens = scored_tokens(windows)
    layers = _linear_layers(model, names)
    inputs, outputs, counts = {}, {}, dict.fromkeys(names, 0)
    with differentiable(model, names):
        head = check_head(model, windows)
        for name, layer in layers.items():
            rows, columns = layer.weight.shape
            inputs[name] = layer.weight.new_zeros(columns, columns)
            outputs[name] = layer.weight.new_zeros(num_probes, rows, rows)
        for start, ids in share(microbatches(windows, batch_windows, model.device)):
            with _recorded(layers) as calls:
                # The last token of a window predicts nothing that is scored.
                hidden = last_hidden(model, ids[:, :-1]).flatten(0, 1)
            for name, x, _ in calls:
                inputs[name].addmm_(x.T, x)
                counts[name] += len(x)
            streams = [stream(model.device, seed, probe, start) for probe in range(num_probes)]
            vectors = pulled_back(hidden.detach(), head, streams, of_weight=False)
            for probe, (vector, _) in enumerate(vectors):
                deltas = _at_outputs(hidden, calls, vector, retain=probe + 1 < num_probes)
                for (name, _, _), delta in zip(calls, deltas, strict=True):
                    outputs[name][probe].addmm_(delta.T, delta, alpha=1 / tokens)
                if on_probe:
                    on_probe(processes() * len(ids) / len(windows))
    add_up([*inputs.values(), *outputs.values()])
    counted = add_up_array(np.array(list(counts.values())), model.device)
    if not counted.any():
        raise CheckpointError(f"{type(model).__name__}: its body calls none of {list(names)}.")
    for name, count in zip(counts, counted.tolist(), strict=True):
        inputs[name] /= max(count, 1)
    if not all(torch.isfinite(m).all() for m in [*inputs.values(), *outputs.values()]):
        raise CheckpointError(
            f"{type(model).__name__}: the moments of its inputs and gradients are not finite: "
            "check its weights for NaN and infinite values."
        )
    return KroneckerFactors(inputs, outputs)


def _linear_layers(model: PreTrainedModel, names: Sequence[str]) -> dict[str, torch.nn.Linear]:
    """Find the layers by the names of their weights."""
    modules = dict(model.base_model.named_modules())
    prefix = "" if model.base_model is model else f"{model.base_model_prefix}."
    found = {}
    for name in names:
        module = modules.get(name.removeprefix(prefix).removesuffix(".weight"))
        if not isinstance(module, torch.nn.Linear) or not name.endswith(".weight"):
            raise CheckpointError(
                f"{name} must be the weight of a torch.nn.Linear in the body of "
                f"{type(model).__name__} to have Kronecker factors."
            )
        found[name] = module
    return found


@contextmanager
def _recorded(
    layers: Mapping[str, torch.nn.Linear],
) -> Iterator[list[tuple[str, torch.Tensor, torch.Tensor]]]:
    """Record name, inputs ``(positions, in)`` and output of each call of some layers."""
    calls: list[tuple[str, torch.Tensor, torch.Tensor]] = []

    def record(name: str, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        if len(output):
            calls.append((name, args[0].detach().flatten(0, -2), output))

    handles = [
        layer.register_forward_hook(lambda _, args, output, name=name: record(name, args, output))
        for name, layer in layers.items()
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _at_outputs(
    hidden: torch.Tensor,
    calls: Sequence[tuple[str, torch.Tensor, torch.Tensor]],
    vector: torch.Tensor,
    *,
    retain: bool,
) -> list[torch.Tensor]:
    """Carry a vector from the hidden states back to each layer's output, ``(positions, out)``."""
    if not calls or not hidden.requires_grad:
        return [torch.zeros_like(output).flatten(0, -2) for _, _, output in calls]
    gradients = torch.autograd.grad(
        hidden, [output for _, _, output in calls], vector, retain_graph=retain, allow_unused=True
    )
    for (name, _, _), gradient in zip(calls, gradients, strict=True):
        if gradient is None:
            raise CheckpointError(f"{name} has no gradient: no derivative of the loss reaches it.")
    return [gradient.flatten(0, -2) for gradient in gradients if gradient is not None]
