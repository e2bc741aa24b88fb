"""Read a decoder's residual stream block by block, and let it use other matrices for a while."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from qscale.errors import CheckpointError, QscaleError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from transformers import PreTrainedModel

    Call: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


def decoder_blocks(model: PreTrainedModel) -> torch.nn.ModuleList:
    """Find the transformer blocks: of the outermost numbered children, those with most parameters.

    Parameters
    ----------
    model
        Causal language model.

    Raises
    ------
    CheckpointError
        If the model has none.
    """
    outermost = [
        module
        for name, module in model.base_model.named_modules()
        if isinstance(module, torch.nn.ModuleList) and not any(p.isdigit() for p in name.split("."))
    ]
    if not any(len(module) for module in outermost):
        raise CheckpointError(f"{type(model).__name__} has no numbered blocks.")
    return max(outermost, key=lambda module: sum(p.numel() for p in module.parameters()))


@contextmanager
def swapped(model: torch.nn.Module, replacements: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Let a model use other tensors for some parameters, then its own ones again; copies nothing.

    Parameters
    ----------
    model
        The model.
    replacements
        Tensors by parameter name; shape, dtype and device are those of the parameters.

    Raises
    ------
    QscaleError
        As :func:`replaceable`.
    """
    parameters = replaceable(model, replacements)
    originals = {name: parameter.data for name, parameter in parameters.items()}
    try:
        for name, parameter in parameters.items():
            parameter.data = replacements[name]
        yield
    finally:
        for name, parameter in parameters.items():
            parameter.data = originals[name]


def replaceable(
    model: torch.nn.Module, replacements: Mapping[str, torch.Tensor]
) -> dict[str, torch.nn.Parameter]:
    """Look up the parameters that tensors are to replace.

    Raises
    ------
    QscaleError
        If a name is unknown, or a tensor has another shape, dtype or device.
    """
    known = dict(model.named_parameters(remove_duplicate=False))
    for name, tensor in replacements.items():
        if name not in known:
            raise QscaleError(f"{type(model).__name__} has no parameter {name!r} to replace.")
        kinds = [(tuple(x.shape), x.dtype, x.device) for x in (known[name], tensor)]
        if kinds[0] != kinds[1]:
            raise QscaleError(
                f"quantized[{name!r}] must have shape, dtype and device "
                f"{', '.join(map(str, kinds[0]))}. Got {', '.join(map(str, kinds[1]))} instead."
            )
    return {name: known[name] for name in replacements}


def run_blocks(
    model: PreTrainedModel, blocks: torch.nn.ModuleList, ids: torch.Tensor
) -> tuple[list[torch.Tensor], list[Call]]:
    """Run a model up to its LM head, and keep its residual stream.

    Parameters
    ----------
    model
        Causal language model in evaluation mode.
    blocks
        Its blocks, as of :func:`decoder_blocks`.
    ids
        Token ids, shape ``(windows, context)``.

    Returns
    -------
    states : list of torch.Tensor
        Before the first block and after each, shape ``(windows, context, width)``.
    calls : list
        Arguments of each block, for :func:`rerun`; they share the memory of the states.

    Raises
    ------
    CheckpointError
        If the blocks do not pass one hidden state on to the next.
    """
    states: list[torch.Tensor] = []
    calls: list[Call] = []

    def enter(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        state = args[0] if args else kwargs["hidden_states"]
        if not states:
            states.append(state.clone())
        if not torch.equal(state.nan_to_num(), states[-1].nan_to_num()):
            raise _unsupported(model)
        rest = {name: value for name, value in kwargs.items() if name != "hidden_states"}
        calls.append(((states[-1], *args[1:]), rest))

    def leave(_: torch.nn.Module, __: tuple[Any, ...], output: Any) -> None:
        states.append(_state(output).clone())  # the model may go on to write into it

    handles = [block.register_forward_pre_hook(enter, with_kwargs=True) for block in blocks]
    handles += [block.register_forward_hook(leave) for block in blocks]
    try:
        model.base_model(input_ids=ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    if len(states) != len(blocks) + 1 or states[0].shape[:-1] != ids.shape:
        raise _unsupported(model)
    return states, calls


def rerun(block: torch.nn.Module, call: Call) -> torch.Tensor:
    """Run a block again, as it is now, on the arguments it once had; return its new state."""
    args, kwargs = call
    return _state(block(args[0].clone(), *args[1:], **kwargs))


def _state(output: Any) -> torch.Tensor:
    """Hidden state among a block's outputs."""
    return output[0] if isinstance(output, tuple | list) else output


def _unsupported(model: PreTrainedModel) -> CheckpointError:
    """Error for a model whose blocks are not a chain."""
    return CheckpointError(
        f"{type(model).__name__}: its blocks do not pass one hidden state on to the next. The "
        "hidden-state error of this architecture is not supported."
    )
