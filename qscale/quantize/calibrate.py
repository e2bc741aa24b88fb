"""Quantize a model by GPTQ block after block, on what its matrices read from calibration text."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from qscale.errors import CheckpointError, QscaleError, TextError
from qscale.quantize.gptq import gptq

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray
    from transformers import PreTrainedModel

    from qscale.quantize.setting import Setting

RUN = 64
"""Tokens in a row that two texts must share to count as the same text."""


@dataclass(frozen=True, slots=True, eq=False)
class Calibrated:
    """A model's quantized matrices and what they were calibrated on.

    Parameters
    ----------
    weights
        Dequantized matrices by parameter name.
    damping
        Relative damping used for each matrix.
    dead
        Number of columns of each matrix whose input was always zero.
    windows, tokens
        Calibration windows and the tokens in them.
    text_hash
        First 8 hexadecimal digits of the SHA-256 of the windows' token ids.
    """

    weights: dict[str, torch.Tensor]
    damping: dict[str, float]
    dead: dict[str, int]
    windows: int
    tokens: int
    text_hash: str

    def columns(self) -> dict[str, object]:
        """Return the calibration's facts under the measurement table's column names."""
        return {
            "calibration_samples": float(self.windows),
            "calibration_tokens": float(self.tokens),
            "calibration_text": self.text_hash,
            "damping": max(self.damping.values()),
        }


def gptq_model(
    model: PreTrainedModel,
    weights: Mapping[str, torch.Tensor],
    ids: torch.Tensor,
    setting: Setting,
    *,
    batch_windows: int = 4,
    damping: float = 0.01,
    on_block: Callable[[int, int], None] | None = None,
) -> Calibrated:
    """Quantize matrices by GPTQ, each on its inputs behind the quantized blocks before it.

    Inputs within a block are those of its own full-precision matrices. The model is left as it
    was, to the bit, whatever happens.

    Parameters
    ----------
    model
        Causal language model in evaluation mode.
    weights
        Weights of Linear modules in its blocks, by parameter name: the parameters themselves.
    ids
        Token ids of the calibration windows, shape (windows, context).
    setting
        How to quantize.
    batch_windows
        Windows in one forward pass.
    damping
        See :func:`qscale.quantize.gptq.gptq`.
    on_block
        Called after each block with the number of blocks done and in all.

    Raises
    ------
    CheckpointError
        If the model is in training mode, a matrix is not a Linear's in one chain of blocks, or
        its inputs are not finite.
    QscaleError
        If there are no windows or no weights, or an option is impossible.
    """
    if model.training:
        raise CheckpointError("model must be in evaluation mode. Call model.eval() first.")
    if ids.ndim != 2 or not ids.numel() or not weights or batch_windows < 1:
        raise QscaleError(
            "gptq_model needs windows of token ids, weights and batch_windows of at least 1. "
            f"Got shape {tuple(ids.shape)}, {len(weights)} weights and {batch_windows} instead."
        )
    blocks, members = _members(model, weights)
    originals = {name: weight.data for name, weight in weights.items()}
    found: dict[str, torch.Tensor] = {}
    used: dict[str, float] = {}
    dead: dict[str, int] = {}
    try:
        with torch.no_grad():
            batches = ids.to(model.device).split(batch_windows)
            states, calls = _enter(model, blocks, batches)
            for number, block in enumerate(blocks):
                for readers, gram in _grams(block, members[number], states, calls, number):
                    together = [readers] if setting.weights.rowwise else [[n] for n in readers]
                    for names in together:
                        stacked = torch.cat([originals[name] for name in names])
                        result = gptq(
                            stacked,
                            gram,
                            setting.weights,
                            act_order=setting.act_order,
                            damping=damping,
                        )
                        parts = result.weight.split([len(originals[name]) for name in names])
                        for name, part in zip(names, parts, strict=True):
                            found[name] = weights[name].data = part.clone()
                            used[name], dead[name] = result.damping, int(result.dead.sum())
                states = [_run(block, state, calls[len(state)][number]) for state in states]
                if on_block is not None:
                    on_block(number + 1, len(blocks))
    finally:
        for name, weight in weights.items():
            weight.data = originals[name]
    digest = hashlib.sha256(ids.cpu().numpy().astype("<i8").tobytes()).hexdigest()[:8]
    ordered = {name: found[name] for name in weights}
    return Calibrated(ordered, used, dead, len(ids), ids.numel(), digest)


def require_disjoint(calibration: NDArray[np.int64], evaluation: NDArray[np.int64]) -> None:
    """Refuse calibration windows that evaluation windows hold too, wherever they were cut.

    Parameters
    ----------
    calibration, evaluation
        Token ids of one tokenizer, shape (windows, context).

    Raises
    ------
    TextError
        If of a calibration window more than half of all runs of `RUN` tokens occur in evaluation
        windows. Single runs may, as of a licence that many files share.
    """
    length = min(RUN, calibration.shape[1], evaluation.shape[1])
    seen = np.unique(_runs(evaluation, length))
    shares = np.isin(_runs(calibration, length), seen).mean(axis=1)
    bad = int((shares > 0.5).sum())
    if bad:
        raise TextError(
            f"Calibration text must not be evaluated on. {bad} of {len(calibration)} calibration "
            "windows are in the evaluation windows; give another text."
        )


def _runs(ids: NDArray[np.int64], length: int) -> NDArray[np.uint64]:
    """Hash every run of tokens within each window."""
    odd = np.random.default_rng(0).integers(2**63, size=length, dtype=np.uint64) * 2 + 1
    views = np.lib.stride_tricks.sliding_window_view(ids.astype(np.uint64), length, axis=1)
    hashed = np.zeros(views.shape[:2], np.uint64)
    for place in range(length):
        hashed += (views[..., place] + 1) * odd[place]
    return hashed


def _members(
    model: PreTrainedModel, weights: Mapping[str, torch.Tensor]
) -> tuple[Sequence[torch.nn.Module], list[dict[str, torch.nn.Module]]]:
    """Find the chain of blocks that matrices are in, and each block's modules by parameter name."""
    modules = dict(model.named_modules())
    stems = set()
    for name in weights:
        parts = name.split(".")
        first = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        module = modules.get(name.removesuffix(".weight"))
        if first is None or not isinstance(module, torch.nn.Linear):
            raise CheckpointError(
                f"{name} must be the weight of a Linear module in a numbered block. GPTQ of "
                "other matrices, such as fused experts, is not supported."
            )
        stems.add(".".join(parts[:first]))
    if len(stems) != 1:
        raise CheckpointError(f"Blocks must form one chain. Got {', '.join(sorted(stems))}.")
    stem = stems.pop()
    blocks = list(model.get_submodule(stem).children())
    members = [
        {
            name: modules[name.removesuffix(".weight")]
            for name in weights
            if name.startswith(f"{stem}.{number}.")
        }
        for number in range(len(blocks))
    ]
    return blocks, members


class _EnteredError(Exception):
    """Ends a forward pass at the first block."""


def _enter(
    model: PreTrainedModel, blocks: Sequence[torch.nn.Module], batches: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], dict[int, list[tuple[tuple[Any, ...], dict[str, Any]]]]]:
    """Return what enters the first block for each batch, and all blocks' other arguments.

    These are the same for all batches of as many windows, as no window is padded, but may differ
    between blocks: a mask of a sliding window, say.
    """
    states: list[torch.Tensor] = []
    calls: dict[int, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {}
    full = False

    def enter(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kwargs = dict(kwargs)
        state = args[0] if args else kwargs.pop("hidden_states")
        if module is blocks[0]:
            states.append(state.clone())
        if not full:
            raise _EnteredError
        calls[len(state)].append((args[1:], kwargs))

    handles = [block.register_forward_pre_hook(enter, with_kwargs=True) for block in blocks]
    try:
        for batch in batches:
            full = len(batch) not in calls
            calls.setdefault(len(batch), [])
            try:
                model.base_model(input_ids=batch, use_cache=False)
            except _EnteredError:
                continue
    finally:
        for handle in handles:
            handle.remove()
    if any(len(found) != len(blocks) for found in calls.values()):
        raise CheckpointError(f"{type(model).__name__} does not run its blocks once each.")
    return states, calls


def _run(block: torch.nn.Module, state: torch.Tensor, call: Any) -> torch.Tensor:
    """Run a block on a hidden state and its other arguments; return the new state."""
    args, kwargs = call
    output = block(state.clone(), *args, **kwargs)
    return output[0] if isinstance(output, tuple | list) else output


def _grams(
    block: torch.nn.Module,
    members: Mapping[str, torch.nn.Module],
    states: Sequence[torch.Tensor],
    calls: Mapping[int, Sequence[Any]],
    number: int,
) -> list[tuple[list[str], torch.Tensor]]:
    """Sum the Gram matrices of a block's inputs; matrices that read the same share one."""
    grams: dict[str, torch.Tensor] = {}
    readers: dict[str, list[str]] = {}
    last: list[Any] = [None, ""]

    def hook(name: str) -> Callable[[torch.nn.Module, tuple[Any, ...]], None]:
        def read(_: torch.nn.Module, args: tuple[Any, ...]) -> None:
            if args[0] is last[0]:
                if name not in readers[last[1]]:
                    readers[last[1]].append(name)
                return
            last[:] = args[0], name
            readers.setdefault(name, [name])
            rows = args[0].flatten(0, -2)
            product = (rows.T @ rows).double()
            grams[name] = grams[name] + product if name in grams else product

        return read

    handles = [m.register_forward_pre_hook(hook(name)) for name, m in members.items()]
    try:
        for state in states:
            _run(block, state, calls[len(state)][number])
            last[:] = None, ""
    finally:
        for handle in handles:
            handle.remove()
    for name in members:
        if not any(name in names for names in readers.values()):
            raise CheckpointError(f"{name} read nothing on the calibration windows.")
    for name, gram in grams.items():
        if not torch.isfinite(gram).all():
            raise CheckpointError(f"{name} reads NaN or infinite values on calibration windows.")
    return [(readers[name], grams[name]) for name in grams]
