"""Round what matrices read, token by token, as hardware that multiplies in low precision would."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from qscale.errors import CheckpointError, QscaleError
from qscale.quantize.rtn import rtn

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from qscale.quantize.format import Format


@contextmanager
def quantized_inputs(
    model: torch.nn.Module, names: Iterable[str], fmt: Format | None
) -> Iterator[None]:
    """Let the Linear modules of some matrices read rounded inputs for a while.

    Parameters
    ----------
    model
        The model; nothing in it is changed.
    names
        Parameter names of the matrices.
    fmt
        Format of the inputs, None to leave them as they are; see :func:`rounded_tokens`.

    Raises
    ------
    CheckpointError
        If a matrix is not the weight of a Linear module, as those of fused experts, or was never
        multiplied by what its module reads while the model ran.
    QscaleError
        If one scale is to serve more than a token.
    """
    if fmt is None:
        yield
        return
    if fmt.per_tensor:
        raise QscaleError("Activations are rounded token by token: tensor cannot be had.")
    modules = dict(model.named_modules())
    waiting = set(names)
    for name in sorted(waiting):
        module = modules.get(name.removesuffix(".weight"))
        if not name.endswith(".weight") or not isinstance(module, torch.nn.Linear):
            raise CheckpointError(
                f"{name} must be the weight of a Linear module for its inputs to be rounded. "
                "Leave acts= out; matrices such as fused experts are not supported."
            )

    def rounding(name: str) -> Any:
        def before(_: torch.nn.Module, args: tuple[torch.Tensor]) -> torch.Tensor:
            waiting.discard(name)
            return rounded_tokens(args[0], fmt)

        return before

    handles = [
        modules[name.removesuffix(".weight")].register_forward_pre_hook(rounding(name))
        for name in sorted(waiting)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    for name in sorted(waiting):
        raise CheckpointError(
            f"{name}: the model never ran its module, so that its inputs were not rounded."
        )


def rounded_tokens(values: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Round each token's values to a format, by scales of its own.

    Parameters
    ----------
    values
        Shape (..., features); not modified.
    fmt
        Groups run along the features. NVFP4's second scale is each token's as well, where
        libraries calibrate one for the tensor: no token's values depend on what else is in a batch.

    Returns
    -------
    torch.Tensor
        Same shape and dtype.
    """
    tokens = values.flatten(0, -2)
    whole = tokens.abs().amax(-1)[:, None, None]
    return rtn(tokens, fmt, whole).view(values.shape)
