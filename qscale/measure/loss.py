"""Loss of a model on windows, and how a quantized model's predictions differ from its own.

Everything is summed per window and in float64, so that every mean has a standard error over
windows and every difference a paired one. Logits exist only for a chunk of positions at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from qscale.errors import CheckpointError
from qscale.measure.curvature.head import check_head, chunks, last_hidden

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray
    from transformers import PreTrainedModel

    from qscale.text import Windows


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """A full-precision model's outputs, kept to compare quantized ones with.

    Parameters
    ----------
    windows
        Evaluation windows.
    hidden
        Input of the LM head at every scored position, shape (scored tokens, width), float32, in
        main memory: ``4 * scored tokens * width`` bytes. Logits would take vocabulary / width
        times as much; they are computed again from these where needed.
    nll
        Negative log likelihood of each window's scored tokens, summed, nats; shape (windows,).
    counts
        Scored tokens of each window, shape (windows,).
    """

    windows: Windows
    hidden: torch.Tensor
    nll: NDArray[np.float64]
    counts: NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """Sums over each window's scored tokens for a quantized model, each of shape (windows,).

    Parameters
    ----------
    nll
        Negative log likelihood, nats.
    kl
        KL(p_fp || p_q), nats.
    agreements
        Positions where both models' most likely token is the same.
    """

    nll: NDArray[np.float64]
    kl: NDArray[np.float64]
    agreements: NDArray[np.float64]


def mean_and_se(
    sums: NDArray[np.float64], counts: NDArray[np.int64] | NDArray[np.float64]
) -> tuple[float, float]:
    r"""Mean per token from sums per window, and its standard error over windows.

    With :math:`d_i` the sum over the :math:`n_i` tokens of window :math:`i` of :math:`m`,

    .. math:: \hat\Delta = \frac{\sum_i d_i}{\sum_i n_i}, \qquad
              \mathrm{se}^2 = \frac{m}{m-1}
              \frac{\sum_i (d_i - \hat\Delta n_i)^2}{(\sum_i n_i)^2},

    the ratio estimator of a cluster sample (Cochran, Sampling Techniques, 1977, eq. 6.13), windows
    being the clusters. Given the difference of two models' sums, it is the paired error.

    Parameters
    ----------
    sums
        Shape (windows,).
    counts
        Tokens of each window, shape (windows,), or whatever else the sums are divided by.

    Returns
    -------
    mean, se : float
        The error is NaN for a single window.

    Examples
    --------
    >>> mean, se = mean_and_se(np.array([1.0, 3.0]), np.array([1, 1]))
    >>> mean, round(se, 12)
    (2.0, 1.0)
    """
    total, m = float(counts.sum()), len(counts)
    mean = float(sums.sum() / total)
    if m < 2:
        return mean, float("nan")
    squares = float(((sums - mean * counts) ** 2).sum())
    return mean, float(np.sqrt(m / (m - 1) * squares) / total)


def bits_per_byte(nll: NDArray[np.float64], windows: Windows) -> tuple[float, float] | None:
    """Loss in bits per UTF-8 byte of text, and its standard error over windows.

    Unlike nats per token it compares between tokenizers: it divides by the bytes that the scored
    tokens stand for, counted by the tokenizer's own offsets.

    Parameters
    ----------
    nll
        Negative log likelihood of each window's scored tokens, summed, nats; shape (windows,).
    windows
        The windows.

    Returns
    -------
    value, error : float
        As of :func:`mean_and_se`; None if the tokenizer does not say where its tokens lie.
    """
    if windows.scored_bytes is None:
        return None
    return mean_and_se(nll / math.log(2), windows.scored_bytes)


def reference(
    model: PreTrainedModel,
    windows: Windows,
    *,
    batch_windows: int = 8,
    on_windows: Callable[[int], None] | None = None,
) -> Reference:
    """Evaluate the full-precision model and keep what a comparison needs.

    Parameters
    ----------
    model
        Causal language model in evaluation mode.
    windows
        Evaluation windows.
    batch_windows
        Windows in one forward pass; it does not change the result beyond rounding.
    on_windows
        Called after each batch with the number of its windows.

    Raises
    ------
    CheckpointError
        If the model's logits are not its LM head applied to its last hidden state, or its loss is
        not finite.
    """
    head = check_head(model, torch.from_numpy(windows.ids))
    nll = torch.zeros(len(windows), dtype=torch.float64)
    kept = []
    with torch.inference_mode():
        for owner, hidden, targets in scored_positions(model, windows, batch_windows, on_windows):
            kept.append(hidden.cpu())
            for part in chunks(len(targets), len(head.weight)):
                logp = head(hidden[part]).float().log_softmax(-1)
                add_by_window(nll, owner[part], _nll(logp, targets[part]))
    counts = windows.scored.sum(axis=1)
    found = Reference(windows, torch.cat(kept), nll.numpy(), counts)
    bad = np.flatnonzero(~np.isfinite(found.nll))
    if len(bad):
        raise CheckpointError(
            f"{type(model).__name__}: the full-precision loss of evaluation window {bad[0]} is "
            f"{found.nll[bad[0]]}. The checkpoint cannot be measured."
        )
    return found


def compare(
    model: PreTrainedModel,
    full: Reference,
    *,
    batch_windows: int = 8,
    on_windows: Callable[[int], None] | None = None,
) -> Comparison:
    """Evaluate a quantized model against the full-precision one in a single pass.

    Parameters
    ----------
    model
        The model with quantized block matrices; its LM head is that of the reference.
    full
        Outputs of the full-precision model.
    batch_windows, on_windows
        As for :func:`reference`.

    Returns
    -------
    Comparison
        Sums of a window whose loss is not finite are not finite.
    """
    head = model.get_output_embeddings()
    nll, kl, same = (torch.zeros(len(full.windows), dtype=torch.float64) for _ in range(3))
    done = 0
    with torch.inference_mode():
        for owner, hidden, targets in scored_positions(
            model, full.windows, batch_windows, on_windows
        ):
            kept = full.hidden[done : done + len(targets)].to(hidden.device)
            done += len(targets)
            for part in chunks(len(targets), len(head.weight)):
                logq = head(hidden[part]).float().log_softmax(-1)
                logp = head(kept[part]).float().log_softmax(-1)
                add_by_window(nll, owner[part], _nll(logq, targets[part]))
                add_by_window(same, owner[part], logp.argmax(-1) == logq.argmax(-1))
                add_by_window(kl, owner[part], (logp.exp() * (logp - logq)).sum(-1))
    return Comparison(nll.numpy(), kl.numpy(), same.numpy())


def scored_positions(
    model: PreTrainedModel,
    windows: Windows,
    batch_windows: int,
    on_windows: Callable[[int], None] | None,
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield batch by batch, at scored positions: window index, hidden state and next token."""
    for start in range(0, len(windows), batch_windows):
        ids = torch.from_numpy(windows.ids[start : start + batch_windows]).to(model.device)
        scored = torch.from_numpy(windows.scored[start : start + batch_windows]).to(model.device)
        hidden = last_hidden(model, ids)
        owner = scored.nonzero()[:, 0].cpu() + start
        yield owner, hidden[:, :-1][scored], ids[:, 1:][scored]
        if on_windows is not None:
            on_windows(len(ids))


def _nll(logp: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Negative log likelihood of the targets."""
    return -logp.gather(-1, targets[:, None])[:, 0]


def add_by_window(sums: torch.Tensor, owner: torch.Tensor, values: torch.Tensor) -> None:
    """Add the values of positions to the sums of the windows they lie in."""
    sums.index_add_(0, owner, values.double().cpu())
