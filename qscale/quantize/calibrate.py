"""Quantize a model block after block, on what its matrices read from calibration text."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from qscale.errors import CheckpointError, QscaleError, TextError
from qscale.quantize.awq import awq
from qscale.quantize.gptq import gptq
from qscale.quantize.setting import AWQ, GPTQ, OWN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray
    from transformers import PreTrainedModel

    from qscale.quantize.format import Format
    from qscale.quantize.mix import Quantizer

RUN = 64
"""Tokens in a row that two texts must share to count as the same text."""


@dataclass(frozen=True, slots=True, eq=False)
class Calibrated:
    """A model's quantized matrices and what they were calibrated on.

    Parameters
    ----------
    weights
        Matrices by parameter name: dequantized, or the very tensor of one that a mix leaves alone.
    damping, dead, rounded
        Of GPTQ, by name: relative damping used, columns whose input was always zero, and rows that
        are rounded to nearest since that reconstructs them better.
    alpha
        Of AWQ, by name: exponent of the scale.
    windows, tokens
        Calibration windows and the tokens in them.
    text_hash
        First 8 hexadecimal digits of the SHA-256 of the windows' token ids.
    """

    weights: dict[str, torch.Tensor]
    damping: dict[str, float]
    dead: dict[str, int]
    rounded: dict[str, int]
    alpha: dict[str, float]
    windows: int
    tokens: int
    text_hash: str

    def columns(self) -> dict[str, object]:
        """Return the calibration's facts under the measurement table's column names."""
        return {
            "calibration_samples": float(self.windows),
            "damping": max(self.damping.values(), default=None),
        }


def calibrate(
    model: PreTrainedModel,
    weights: Mapping[str, torch.Tensor],
    ids: torch.Tensor,
    setting: Quantizer,
    *,
    batch_windows: int = 4,
    damping: float = 0.01,
    on_block: Callable[[int, int], None] | None = None,
) -> Calibrated:
    """Quantize matrices by GPTQ or AWQ, each on its inputs behind the quantized blocks before it.

    Inputs within a block are those of its own full-precision matrices. Activations are not rounded
    meanwhile, even where the setting rounds them. The model is left as it was, to the bit,
    whatever happens.

    Parameters
    ----------
    model
        Causal language model in evaluation mode.
    weights
        Weights of Linear modules in its blocks, by parameter name: the parameters themselves.
        Those that the setting leaves alone may be any.
    ids
        Token ids of the calibration windows, shape (windows, context).
    setting
        How to quantize: method ``gptq`` or ``awq``, and a format for each matrix.
    batch_windows
        Windows in one forward pass.
    damping
        Of GPTQ; see :func:`qscale.quantize.gptq.gptq`.
    on_block
        Called after each block with the number of blocks done and in all.

    Raises
    ------
    CheckpointError
        If the model is in training mode, a matrix is not a Linear's in one chain of blocks, or
        its inputs are not finite.
    QscaleError
        If there are no windows or no weights, or an option is impossible.

    Notes
    -----
    In memory at a time, beside the model: the matrices quantized so far, the hidden states of all
    windows (4 bytes x tokens x width), and for each distinct input of one block its Gram matrix
    (8 bytes x columns^2). Matrices that read the same input share it: AWQ scales them alike, GPTQ
    factorises their Gram matrix once where they have the same format.
    """
    formats = {name: setting.format_of(name) for name in weights}
    chosen = {name: fmt for name, fmt in formats.items() if fmt is not None}
    _check(model, ids, setting, chosen, batch_windows)
    blocks, members = _members(model, list(chosen))
    originals = {name: weight.data for name, weight in weights.items()}
    found = dict(originals)
    facts: dict[str, dict[str, float]] = {}
    try:
        with torch.no_grad():
            batches = ids.to(model.device).split(batch_windows)
            states, calls = _enter(model, blocks, batches)
            for number, block in enumerate(blocks):
                for read in _inputs(block, members[number], states, calls, number):
                    for name, values, said in _quantize(read, originals, chosen, setting, damping):
                        found[name] = weights[name].data = values
                        facts[name] = said
                states = [_run(block, state, calls[len(state)][number]) for state in states]
                if on_block is not None:
                    on_block(number + 1, len(blocks))
    finally:
        for name, weight in weights.items():
            weight.data = originals[name]

    def of(fact: str) -> dict[str, Any]:
        return {name: facts[name][fact] for name in chosen if fact in facts[name]}

    digest = hashlib.sha256(ids.cpu().numpy().astype("<i8").tobytes()).hexdigest()[:8]
    said_of = {fact: of(fact) for fact in ("damping", "dead", "rounded", "alpha")}
    return Calibrated(found, **said_of, windows=len(ids), tokens=ids.numel(), text_hash=digest)


def _check(
    model: PreTrainedModel,
    ids: torch.Tensor,
    setting: Quantizer,
    chosen: Mapping[str, Format],
    batch_windows: int,
) -> None:
    """Refuse what cannot be calibrated."""
    if setting.library != OWN or setting.method not in (GPTQ, AWQ):
        raise QscaleError(
            f"method must be {GPTQ} or {AWQ}, with library {OWN}. "
            f"Got {setting.method} with {setting.library} instead."
        )
    if model.training:
        raise CheckpointError("model must be in evaluation mode. Call model.eval() first.")
    if ids.ndim != 2 or not ids.numel() or not chosen or batch_windows < 1:
        raise QscaleError(
            "Calibration needs windows of token ids, weights and batch_windows of at least 1. "
            f"Got shape {tuple(ids.shape)}, {len(chosen)} weights and {batch_windows} instead."
        )


@dataclass(slots=True, eq=False)
class _Input:
    """What some matrices of a block read, summed over positions: Gram matrix, absolute values."""

    names: list[str]
    gram: torch.Tensor
    absolute: torch.Tensor
    positions: int


def _quantize(
    read: _Input,
    originals: Mapping[str, torch.Tensor],
    formats: Mapping[str, Format],
    setting: Quantizer,
    damping: float,
) -> Iterator[tuple[str, torch.Tensor, dict[str, float]]]:
    """Quantize the matrices that read one input; yield name, values and what to record."""
    if setting.method == AWQ:
        matrices = [originals[name] for name in read.names]
        mean_abs = read.absolute / read.positions
        scaled = awq(matrices, read.gram, mean_abs, [formats[name] for name in read.names])
        for name, values in zip(read.names, scaled.weights, strict=True):
            yield name, values, {"alpha": scaled.alpha}
        return
    together: dict[object, list[str]] = {}
    for name in read.names:
        together.setdefault(formats[name] if formats[name].rowwise else name, []).append(name)
    for names in together.values():
        sizes = [len(originals[name]) for name in names]
        stacked = torch.cat([originals[name] for name in names])
        fmt = formats[names[0]]
        done = gptq(stacked, read.gram, fmt, act_order=setting.act_order, damping=damping)
        parts = zip(names, done.weight.split(sizes), done.rounded.split(sizes), strict=True)
        for name, values, rounded in parts:
            said = {"dead": int(done.dead.sum()), "rounded": int(rounded.sum())}
            yield name, values.clone(), {"damping": done.damping, **said}


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
    model: PreTrainedModel, weights: Sequence[str]
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
                f"{name} must be the weight of a Linear module in a numbered block. "
                "Other matrices, such as fused experts, cannot be calibrated: quantize them by rtn."
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


def _inputs(
    block: torch.nn.Module,
    members: Mapping[str, torch.nn.Module],
    states: Sequence[torch.Tensor],
    calls: Mapping[int, Sequence[Any]],
    number: int,
) -> list[_Input]:
    """Sum up what a block's matrices read; those that read the same share one."""
    if not members:
        return []
    found: dict[str, _Input] = {}
    last: list[Any] = [None, ""]

    def hook(name: str) -> Callable[[torch.nn.Module, tuple[Any, ...]], None]:
        def read(_: torch.nn.Module, args: tuple[Any, ...]) -> None:
            if args[0] is last[0]:
                if name not in found[last[1]].names:
                    found[last[1]].names.append(name)
                return
            last[:] = args[0], name
            rows = args[0].flatten(0, -2)
            sums = (rows.T @ rows).double(), rows.abs().sum(0, dtype=torch.float64)
            if name in found:
                found[name].gram += sums[0]
                found[name].absolute += sums[1]
                found[name].positions += len(rows)
            else:
                found[name] = _Input([name], *sums, len(rows))

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
        if not any(name in read.names for read in found.values()):
            raise CheckpointError(f"{name} read nothing on the calibration windows.")
    for name, one in found.items():
        if not torch.isfinite(one.gram).all():
            raise CheckpointError(f"{name} reads NaN or infinite values on calibration windows.")
    return list(found.values())
