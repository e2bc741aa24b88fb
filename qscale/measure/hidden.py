"""Growth of the hidden-state error over a quantized model's blocks, and how much of it they undo.

Chen et al. (arXiv:2609.11716) follow the error of the residual stream from block to block. What a
block adds is split exactly into new error, its interaction with the error that came in, and the
growth of the stream itself; a negative interaction is error that later blocks cancel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import torch

from qscale.errors import CheckpointError, QscaleError
from qscale.measure.curvature.loss import microbatches
from qscale.measure.loss import mean_and_se
from qscale.measure.residual import decoder_blocks, replaceable, rerun, run_blocks, swapped

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray
    from transformers import PreTrainedModel

NORM_CHANGE_LIMIT = 0.5
"""Largest relative change of a position's norm over blocks in the paper's statistics."""


@dataclass(frozen=True, slots=True, eq=False)
class ErrorGrowth:
    """Error of the residual stream after each block, and where it comes from.

    Parameters
    ----------
    blocks
        One row per block, means over positions within a window and then over windows with equal
        weight; each column has its standard error over windows in ``<column>_se``. Null where
        nothing defines a value, as the angle to an error of zero. With ``h`` the stream after a
        block, ``u`` what the block adds, and ``dh``, ``du`` the errors of both:

        - ``block``: 1 for the first;
        - ``relative_error``, ``relative_error_sq``: ``|dh| / |h|`` and its square;
        - ``error_cosine``: of the error that came in and the new one, ``du``;
        - ``t_add``, ``t_inter``, ``t_align``: their sum is the growth of ``relative_error_sq``;
        - ``cancelled_inter``, ``cancelled``: share of all ``t_add`` so far that ``t_inter``, or
          ``t_inter`` and ``t_align`` together, have taken back;
        - ``abs_add``, ``abs_inter``, ``cancelled_abs``: the same for ``|dh|^2``, in squared units
          of the stream, where nothing stands for ``t_align``;
        - ``update_size``, ``update_error``: ``|u| / |h|`` and ``|du| / |u|``;
        - if asked for, ``du`` as the effect of the weights on the right input plus the response to
          the wrong one: ``weight_cosine``, ``weight_inter`` and ``weight_error`` of the first,
          ``response_cosine``, ``response_inter`` and ``response_error`` of the second, as
          ``error_cosine``, ``t_inter`` and ``update_error`` of both.
    mean_cosine, mean_cosine_se
        ``error_cosine`` averaged over blocks, and its standard error over windows.
    kept
        Share of positions in the statistics.
    positions, windows
        Positions in the statistics; windows.
    """

    blocks: pd.DataFrame
    mean_cosine: float
    mean_cosine_se: float
    kept: float
    positions: int
    windows: int

    def columns(self) -> dict[str, float | None]:
        """Return the values of the whole model under the measurement table's column names."""
        last = self.blocks.iloc[-1]
        found = {
            f"hidden_{name}{se}": float(last[f"{name}{se}"])
            for name in ("relative_error", "cancelled_inter", "cancelled", "cancelled_abs")
            for se in ("", "_se")
        }
        found |= {
            "hidden_error_cosine": self.mean_cosine,
            "hidden_error_cosine_se": self.mean_cosine_se,
            "hidden_kept": self.kept,
        }
        return {name: None if np.isnan(value) else value for name, value in found.items()}


def error_growth(
    model: PreTrainedModel,
    windows: torch.Tensor,
    quantized: Mapping[str, torch.Tensor],
    *,
    max_norm_change: float | None = NORM_CHANGE_LIMIT,
    split: bool = False,
    batch_windows: int = 1,
    on_windows: Callable[[int], None] | None = None,
) -> ErrorGrowth:
    r"""Follow the hidden-state error of a quantized model from block to block.

    Both models read the same tokens. With :math:`h^l = h^{l-1} + u^l` the residual stream after
    block :math:`l`, :math:`\delta` the quantized model's value less the model's own and
    :math:`R^l = \lVert \delta h^l \rVert / \lVert h^l \rVert`, Chen et al. (arXiv:2609.11716,
    Theorem 1) show that :math:`(R^l)^2 - (R^{l-1})^2` is the sum of

    .. math::
        T_\text{add} &= \frac{\lVert \delta u^l \rVert^2 - \lVert u^l \rVert^2 (R^{l-1})^2}
                             {\lVert h^l \rVert^2}, \\
        T_\text{inter} &= \frac{2 \langle \delta h^{l-1}, \delta u^l \rangle}
                               {\lVert h^l \rVert^2}, \\
        T_\text{align} &= -\frac{2 \langle h^{l-1}, u^l \rangle}{\lVert h^l \rVert^2} (R^{l-1})^2 .

    Without relative norms (Proposition 1), :math:`\lVert \delta h^l \rVert^2` grows by
    :math:`\lVert \delta u^l \rVert^2 + 2 \langle \delta h^{l-1}, \delta u^l \rangle`.

    Parameters
    ----------
    model
        Causal language model in evaluation mode. A block that computes attention and MLP in
        parallel counts as one, like any other.
    windows
        Token ids, shape ``(n_windows, context)``. The first position of a window is left out, as
        its state is like no other's in most models; all others count, scored or not.
    quantized
        Dequantized matrices by parameter name, in the dtype and on the device of the model's.
    max_norm_change
        Leave out positions where the relative change of the stream's norm exceeds this after any
        block; None for no such limit. A few in a thousand positions can carry most of the error.
    split
        Also split new error into the effect of the weights and the response to incoming error, at
        the cost of running the quantized blocks twice.
    batch_windows
        Windows in one forward pass; it bounds the memory and does not change the result.
    on_windows
        Called after each batch with the number of its windows.

    Returns
    -------
    ErrorGrowth
        Shares of ``t_add`` are ratios of means, with standard errors as of
        :func:`qscale.measure.loss.mean_and_se`.

    Raises
    ------
    CheckpointError
        If the model is in training mode, its blocks do not pass one hidden state on to the next,
        or a hidden state is not finite.
    QscaleError
        If a window, a matrix or the limit cannot be used, or no position is within the limit.

    Notes
    -----
    Each batch runs through the model and then through the same model with the quantized matrices
    in place of its own, which are put back as they were. So beside the model there are only the
    quantized matrices and, of one batch, the states of both runs:
    ``2 * (n_blocks + 1) * batch_windows * context * width`` elements, half as many more if
    ``split``, and about ten states in float64. Sums are in float64.
    """
    blocks = decoder_blocks(model)
    _check(model, windows, quantized, max_norm_change)
    parts, kept = [], []
    for start, ids in microbatches(windows, batch_windows, model.device):
        with torch.inference_mode():
            states, calls = run_blocks(model, blocks, ids)
        with swapped(model, quantized), torch.inference_mode():
            moved, _ = run_blocks(model, blocks, ids)
            reran = [rerun(*pair) for pair in zip(blocks, calls, strict=True)] if split else None
        _require_finite(states, start, "")
        _require_finite(moved, start, " of the quantized model")
        inside = _inside(states, moved, max_norm_change)
        parts.append(_window_means(states, moved, reran, inside))
        kept.append(inside.sum(1).cpu().numpy())
        if on_windows is not None:
            on_windows(len(ids))
    counts = np.concatenate(kept)
    if not counts.any():
        raise QscaleError(
            f"max_norm_change must leave a position to measure. Got {max_norm_change} instead."
        )
    means = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    cosine, cosine_se = _mean(_nanmean(means["error_cosine"]))
    share = float(counts.mean() / (windows.shape[1] - 1))
    return ErrorGrowth(_table(means), cosine, cosine_se, share, int(counts.sum()), len(counts))


def _check(
    model: PreTrainedModel,
    windows: torch.Tensor,
    quantized: Mapping[str, torch.Tensor],
    max_norm_change: float | None,
) -> None:
    """Refuse what would fail late or give a wrong result."""
    if model.training:
        raise CheckpointError(
            f"{type(model).__name__} must be in evaluation mode, or dropout adds to the error: "
            "call model.eval()."
        )
    if windows.ndim != 2 or not len(windows) or windows.shape[1] < 2:
        raise QscaleError(
            "windows must hold at least one window of 2 tokens. "
            f"Got shape {tuple(windows.shape)} instead."
        )
    if max_norm_change is not None and not max_norm_change > 0:
        raise QscaleError(f"max_norm_change must be above 0. Got {max_norm_change} instead.")
    replaceable(model, quantized)


def _require_finite(states: list[torch.Tensor], start: int, whose: str) -> None:
    """Refuse states that overflow."""
    for block, state in enumerate(states):
        bad = (~torch.isfinite(state)).flatten(1).any(1).nonzero()
        if len(bad):
            raise CheckpointError(
                f"The hidden state{whose} after block {block} is not finite in window "
                f"{start + int(bad[0, 0])}: its error cannot be measured."
            )


def _inside(
    states: list[torch.Tensor], moved: list[torch.Tensor], max_norm_change: float | None
) -> torch.Tensor:
    """Tell which positions count, shape (windows, context - 1)."""
    inside = torch.ones_like(states[0][:, 1:, 0], dtype=torch.bool)
    if max_norm_change is not None:
        for state, other in zip(states[1:], moved[1:], strict=True):
            norm, changed = (_square(x[:, 1:].double()).sqrt() for x in (state, other))
            inside &= (changed - norm).abs() <= max_norm_change * norm
    return inside


def _window_means(
    states: list[torch.Tensor],
    moved: list[torch.Tensor],
    reran: list[torch.Tensor] | None,
    inside: torch.Tensor,
) -> dict[str, NDArray[np.float64]]:
    """Average each block's terms over the positions that count, shape (windows, blocks)."""
    found: dict[str, list[NDArray[np.float64]]] = {}
    for block in range(len(states) - 1):
        before, after, q_before, q_after = (
            run[i][:, 1:].double() for run in (states, moved) for i in (block, block + 1)
        )
        values = block_terms(before, after, q_before, q_after)
        if reran is not None:
            right = reran[block][:, 1:].double()
            values |= _source_terms(before, after, q_before, q_after, right)
        for name, value in values.items():
            usable = inside & torch.isfinite(value)
            sums = torch.where(usable, value, 0.0).sum(1)
            found.setdefault(name, []).append((sums / usable.sum(1)).cpu().numpy())
    return {name: np.stack(columns, axis=1) for name, columns in found.items()}


def block_terms(
    before: torch.Tensor, after: torch.Tensor, q_before: torch.Tensor, q_after: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Account for the growth of the error in one block, position by position.

    Parameters
    ----------
    before, after
        Residual stream before and after the block, shape (..., width).
    q_before, q_after
        The same in the quantized model.

    Returns
    -------
    dict of str to torch.Tensor
        Terms of :class:`ErrorGrowth`, each of shape (...); not finite where undefined.
    """
    came_in, error = q_before - before, q_after - after
    update, new = after - before, error - came_in
    norm = _square(after)
    relative_in = _square(came_in) / _square(before)
    inter = 2 * _dot(came_in, new)
    return {
        "relative_error": (_square(error) / norm).sqrt(),
        "relative_error_sq": _square(error) / norm,
        "error_cosine": _cosine(came_in, new),
        "t_add": (_square(new) - _square(update) * relative_in) / norm,
        "t_inter": inter / norm,
        "t_align": -2 * _dot(before, update) / norm * relative_in,
        "abs_add": _square(new),
        "abs_inter": inter,
        "update_size": (_square(update) / norm).sqrt(),
        "update_error": (_square(new) / _square(update)).sqrt(),
    }


def _source_terms(
    before: torch.Tensor,
    after: torch.Tensor,
    q_before: torch.Tensor,
    q_after: torch.Tensor,
    reran: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """Split a block's new error by source, given the quantized block's output on the right input.

    The quantized block less the block itself, both on the right input, is the weights' effect; the
    quantized block on the wrong input less the same on the right one is the response.
    """
    came_in, update, q_update = q_before - before, after - before, reran - before
    parts = {"weight": q_update - update, "response": q_after - q_before - q_update}
    found = {}
    for name, part in parts.items():
        found[f"{name}_cosine"] = _cosine(came_in, part)
        found[f"{name}_inter"] = 2 * _dot(came_in, part) / _square(after)
        found[f"{name}_error"] = (_square(part) / _square(update)).sqrt()
    return found


def _table(means: Mapping[str, NDArray[np.float64]]) -> pd.DataFrame:
    """Average windows, and form shares of the error added up to each block."""
    n_blocks = means["t_add"].shape[1]
    found = {name: [_mean(column) for column in values.T] for name, values in means.items()}
    so_far = {n: np.cumsum(v, axis=1) for n, v in means.items() if n.startswith(("t_", "abs_"))}
    for name, taken, added in (
        ("cancelled_inter", so_far["t_inter"], so_far["t_add"]),
        ("cancelled", so_far["t_inter"] + so_far["t_align"], so_far["t_add"]),
        ("cancelled_abs", so_far["abs_inter"], so_far["abs_add"]),
    ):
        found[name] = [_share(*pair) for pair in zip(-taken.T, added.T, strict=True)]
    columns: dict[str, object] = {"block": np.arange(1, n_blocks + 1)}
    for name, pairs in found.items():
        columns[name], columns[f"{name}_se"] = np.transpose(pairs)
    return pd.DataFrame(columns)


def _mean(values: NDArray[np.float64]) -> tuple[float, float]:
    """Mean over windows that have a value, and its standard error; NaN where there are too few."""
    known = values[np.isfinite(values)]
    return mean_and_se(known, np.ones(len(known))) if len(known) else (np.nan, np.nan)


def _share(taken: NDArray[np.float64], added: NDArray[np.float64]) -> tuple[float, float]:
    """Ratio of two means over windows, and its standard error; NaN unless anything was added."""
    known = np.isfinite(taken) & np.isfinite(added)
    if added[known].sum() <= 0:
        return np.nan, np.nan
    return mean_and_se(taken[known], added[known])


def _nanmean(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Average over blocks that have a value, shape (windows,); NaN where none has."""
    known = np.isfinite(values)
    counts = known.sum(1)
    sums = np.where(known, values, 0.0).sum(1)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def _dot(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Inner product along the last axis."""
    return (left * right).sum(-1)


def _square(x: torch.Tensor) -> torch.Tensor:
    """Squared norm along the last axis."""
    return x.square().sum(-1)


def _cosine(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Cosine along the last axis; NaN where either is zero."""
    return _dot(left, right) / (_square(left) * _square(right)).sqrt()
