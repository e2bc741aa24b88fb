"""Foretell the time and memory of curvature estimates from one gradient of one microbatch."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.autograd.graph import saved_tensors_hooks

from qscale.measure.curvature.guard import differentiable
from qscale.measure.curvature.head import CHUNK_LOGITS
from qscale.measure.curvature.loss import loss_gradient, microbatch_count, scored_tokens
from qscale.measure.curvature.parallel import processes
from qscale.measure.curvature.products import attention_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

    from qscale.measure.curvature.products import Method

# Gradient-times of a probe, and of what the probes of a round share: a gradient is three forward
# passes, and the rest was measured on Llamas of one to seven million parameters on one core.
GGN_PROBE, GGN_SHARED = 0.7, 0.5
PROBE = {"exact": 2.2, "central": 2.1, "forward": 1.1}
SHARED = {"exact": 1.3, "central": 0.0, "forward": 1.0}
# Copies of the parameters, and multiples of a forward pass's saved activations, held at once.
COPIES = {"exact": 3, "central": 5, "forward": 5}
ACTIVATIONS = {"exact": 3.0, "central": 1.0, "forward": 1.0}
CHUNKS = 4


@dataclass(frozen=True, slots=True)
class Cost:
    """What curvature estimates will take in each process, roughly.

    Parameters
    ----------
    gradient_seconds
        One gradient over all windows.
    ggn_seconds, hessian_seconds
        The estimates, if the Hessian trace takes one round of probes.
    peak_bytes
        Peak memory above the loaded model.
    """

    gradient_seconds: float
    ggn_seconds: float
    hessian_seconds: float
    peak_bytes: int

    def __str__(self) -> str:
        """Return one line for a user."""
        return (
            f"about {self.ggn_seconds:.0f} s for the Gauss-Newton trace, "
            f"{self.hessian_seconds:.0f} s for the Hessian trace and "
            f"{self.peak_bytes / 2**30:.1f} GiB above the model"
        )


def cost(
    model: PreTrainedModel,
    windows: torch.Tensor,
    names: Sequence[str],
    *,
    ggn_probes: int,
    hessian_probes: int,
    method: Method = "exact",
    batch_windows: int = 1,
) -> Cost:
    """Time one gradient on the first microbatch and foretell what all probes will take.

    Parameters
    ----------
    model
        Causal language model with float32 weights.
    windows
        Token ids, shape ``(n_windows, context)``.
    names
        Names of the parameters.
    ggn_probes, hessian_probes
        Number of probes of each trace.
    method
        How Hessian products are formed.
    batch_windows
        Windows in one microbatch.

    Raises
    ------
    CheckpointError
        If the loss cannot be differentiated or is not finite, or memory runs out.
    TextError
        If the windows have no token to score.
    """
    scored_tokens(windows)
    parts = microbatch_count(windows, batch_windows)
    ids = windows[:batch_windows].to(model.device)
    with attention_for(model, method), differentiable(model, names) as parameters:
        tokens = scored_tokens(ids)
        fixed = {p.untyped_storage().data_ptr() for p in model.parameters()}
        saved: dict[int, int] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        with saved_tensors_hooks(note, lambda tensor: tensor):
            loss_gradient(model, ids, parameters, tokens=tokens)
        _synchronize(model.device)
        start = time.perf_counter()
        loss_gradient(model, ids, parameters, tokens=tokens)
        _synchronize(model.device)
        seconds = (time.perf_counter() - start) * parts / processes()
        weights = sum(p.nbytes for p in parameters.values())
    activations = sum(size for at, size in saved.items() if at not in fixed)
    head = model.get_output_embeddings().weight
    chunk = min(CHUNK_LOGITS, ids.numel() * len(head)) * head.element_size()
    peak = COPIES[method] * weights + ACTIVATIONS[method] * activations + CHUNKS * chunk
    return Cost(
        gradient_seconds=seconds,
        ggn_seconds=seconds * (GGN_SHARED + GGN_PROBE * ggn_probes),
        hessian_seconds=seconds * (SHARED[method] + PROBE[method] * hessian_probes),
        peak_bytes=int(peak),
    )


def _synchronize(device: torch.device) -> None:
    """Wait for a device's queue, so that the clock tells what it did."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
