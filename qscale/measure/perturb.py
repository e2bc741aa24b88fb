"""Move a model's weights for a while, read its loss there, and put back the very same bits."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from qscale.measure.curvature.guard import differentiable
from qscale.measure.curvature.head import chunks, head_logits, scored_hidden
from qscale.measure.curvature.loss import microbatches, scored_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from transformers import PreTrainedModel

    Direction: TypeAlias = Mapping[str, torch.Tensor]
    Move: TypeAlias = Callable[..., None]


@contextmanager
def displaceable(
    model: PreTrainedModel, names: Sequence[str]
) -> Iterator[tuple[dict[str, torch.nn.Parameter], Move]]:
    """Let named parameters be moved and differentiated, with dropout off.

    On leaving, also by an exception, every parameter has the bits it had, and flags are as
    :func:`qscale.measure.curvature.differentiable` leaves them.

    Parameters
    ----------
    model
        Causal language model with float32 weights.
    names
        Names of the parameters; a copy of them is kept in memory meanwhile.

    Yields
    ------
    parameters : dict of str to torch.nn.Parameter
        The named parameters.
    move : callable
        ``move((r, d), ...)`` sets the parameters to their originals plus ``r * d`` for each pair of
        a number and a direction, one tensor per parameter by its name.

    Raises
    ------
    CheckpointError
        As :func:`qscale.measure.curvature.differentiable`.
    """
    with differentiable(model, names) as parameters:
        originals = {name: p.detach().clone() for name, p in parameters.items()}

        def move(*steps: tuple[float, Direction]) -> None:
            for name, parameter in parameters.items():
                parameter.data.copy_(originals[name])
                for length, direction in steps:
                    parameter.data.add_(direction[name], alpha=length)

        try:
            yield parameters, move
        finally:
            move()


def window_losses(
    model: PreTrainedModel, windows: torch.Tensor, *, batch_windows: int = 1
) -> np.ndarray:
    """Sum the loss over each window's scored tokens: every token but its first.

    Parameters
    ----------
    model
        Causal language model in evaluation mode, whose logits are its LM head applied to its last
        hidden state; see :func:`qscale.measure.curvature.head.check_head`.
    windows
        Token ids, shape ``(n_windows, context)``.
    batch_windows
        Windows in one forward pass; it bounds the memory and does not change the result.

    Returns
    -------
    numpy.ndarray
        Nats, shape ``(n_windows,)``, float64; not finite where the loss is not.

    Raises
    ------
    TextError
        If the windows have no token to score.
    """
    scored_tokens(windows)
    head = model.get_output_embeddings()
    sums = np.zeros(len(windows))
    with torch.no_grad():
        for start, ids in microbatches(windows, batch_windows, model.device):
            hidden, targets = scored_hidden(model, ids)
            nll = torch.cat(
                [
                    -head_logits(hidden[part], head.weight, head.bias)
                    .log_softmax(-1)
                    .gather(-1, targets[part, None])
                    for part in chunks(len(targets), len(head.weight))
                ]
            )
            sums[start : start + len(ids)] = nll.double().view(len(ids), -1).sum(1).cpu().numpy()
    return sums


def token_counts(windows: torch.Tensor) -> np.ndarray:
    """Scored tokens of each window, shape ``(n_windows,)``."""
    return np.full(len(windows), windows.shape[1] - 1)
