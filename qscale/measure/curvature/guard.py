"""Make a Hugging Face model differentiable for a while, and put it back as it was."""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map

from qscale.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from transformers import PreTrainedModel

# These consist of matrix products and a softmax once the math kernel is forced.
_PLAIN_ATTENTION = ("eager", "sdpa")

_NO_DERIVATIVE_NODES = ("torch::autograd::NotImplemented", "torch::autograd::Error")


class _NoSecondDerivativeError(RuntimeError):
    """The gradient depends on the weights through an operation that has no derivative."""


@contextmanager
def double_backward_attention(model: PreTrainedModel) -> Iterator[None]:
    """Run attention as plain matrix products, which have the second derivative fused kernels lack.

    On leaving, also by an exception, the attention implementation is what it was.

    Parameters
    ----------
    model
        Causal language model.
    """
    attention = model.config._attn_implementation
    swap = attention not in _PLAIN_ATTENTION
    if swap:
        model.set_attn_implementation("eager")
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        if swap:
            model.set_attn_implementation(attention)


@contextmanager
def differentiable(
    model: PreTrainedModel, names: Sequence[str]
) -> Iterator[dict[str, torch.nn.Parameter]]:
    """Let only the named parameters need gradients, with dropout off.

    On leaving, also by an exception, the training flag of every module and the ``requires_grad``
    flag of every parameter are what they were.

    Parameters
    ----------
    model
        Causal language model.
    names
        Names of the parameters to differentiate with respect to.

    Yields
    ------
    dict of str to torch.nn.Parameter
        The named parameters, in the order of ``names``.

    Raises
    ------
    CheckpointError
        If there is no name or an unknown one, two names are one tied parameter, a parameter is in
        reduced precision, memory runs out, or an operation of the model has no derivative; the
        message then names the innermost module without one.
    """
    parameters = _named_parameters(model, names)
    training = [(module, module.training) for module in model.modules()]
    needs_grad = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        model.eval()
        model.requires_grad_(False)
        for parameter in parameters.values():
            parameter.requires_grad_(True)
        with torch.enable_grad():
            yield parameters
    except (RuntimeError, MemoryError) as error:
        if _lacks_memory(error):
            raise CheckpointError(
                f"Out of memory while differentiating {type(model).__name__}. Lower the context or "
                "batch_windows; for the Hessian, method='forward' takes no more than a gradient."
            ) from error
        twice = isinstance(error, _NoSecondDerivativeError)
        if not (twice or _lacks_derivative(error)):
            raise
        where = _culprit(model, twice=twice) or type(model).__name__
        raise CheckpointError(f"{where} cannot be differentiated: {error}") from error
    finally:
        for module, flag in training:
            module.training = flag
        for parameter, flag in needs_grad:
            parameter.requires_grad_(flag)


def _named_parameters(
    model: PreTrainedModel, names: Sequence[str]
) -> dict[str, torch.nn.Parameter]:
    """Look up parameters by name, and check that they can be differentiated twice."""
    if not names:
        raise CheckpointError(f"{type(model).__name__} has no matrix to measure the curvature of.")
    known = dict(model.named_parameters(remove_duplicate=False))
    found: dict[int, str] = {}
    for name in names:
        if name not in known:
            raise CheckpointError(f"{type(model).__name__} has no parameter {name!r}.")
        if known[name].dtype not in (torch.float32, torch.float64):
            raise CheckpointError(
                f"{name} must be float32, or its curvature is a few percent off. "
                f"Got {known[name].dtype} instead: load the checkpoint with dtype=torch.float32."
            )
        if id(known[name]) in found:
            raise CheckpointError(
                f"{found[id(known[name])]} and {name} are one parameter: name it once."
            )
        found[id(known[name])] = name
    return {name: known[name] for name in names}


def _lacks_memory(error: RuntimeError | MemoryError) -> bool:
    """Tell a lack of memory, of which torch's CPU allocator speaks in a plain RuntimeError."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return re.search("can't allocate memory|not enough memory", str(error)) is not None


def _lacks_derivative(error: Exception) -> bool:
    """Tell a missing first derivative from other run-time errors, such as a lack of memory."""
    missing = re.search("derivative for .* is not implemented", str(error))
    return missing is not None or isinstance(error, NotImplementedError)


def require_second_derivative(gradient: Sequence[torch.Tensor]) -> None:
    """Check that a gradient has no operation without a derivative in its graph.

    ``torch.autograd.grad`` visits only what lies between its outputs and inputs. The node by which
    a function marked ``once_differentiable`` would raise lies beside that path, so without this
    check its derivative would silently count as zero.

    Parameters
    ----------
    gradient
        Gradient with its own graph.

    Raises
    ------
    RuntimeError
        If there is such an operation; ``differentiable`` turns it into a ``CheckpointError``.
    """
    waiting = [g.grad_fn for g in gradient if g.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if node.name() in _NO_DERIVATIVE_NODES:
            raise _NoSecondDerivativeError("its backward pass has no derivative")
        found = {child for child, _ in node.next_functions if child is not None} - seen
        seen |= found
        waiting.extend(found)


def _culprit(model: PreTrainedModel, *, twice: bool) -> str | None:
    """Name the innermost module that lacks a derivative, by replaying each module alone."""
    calls: list[tuple[str, torch.nn.Module, Any]] = []

    def record(name: str) -> Any:
        return lambda module, args, kwargs, _: calls.append((name, module, (args, kwargs)))

    handles = [
        module.register_forward_hook(record(name), with_kwargs=True)
        for name, module in model.named_modules()
    ]
    try:
        model(input_ids=torch.zeros(1, 4, dtype=torch.long, device=model.device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    # Hooks fire when a module returns, so a module comes after everything inside it.
    for name, module, inputs in calls:
        try:
            _differentiate(module, inputs, twice=twice)
        except RuntimeError as error:
            if isinstance(error, _NoSecondDerivativeError) or _lacks_derivative(error):
                return f"{name} ({type(module).__name__})"
    return None


def _differentiate(module: torch.nn.Module, inputs: Any, *, twice: bool) -> None:
    """Run one module on recorded inputs, differentiate its output, and check the gradient."""

    def leaf(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.detach().requires_grad_(value.is_floating_point())

    def needing_grad(values: Iterable[Any]) -> list[torch.Tensor]:
        return [x for x in values if isinstance(x, torch.Tensor) and x.requires_grad]

    args, kwargs = tree_map(leaf, inputs)
    leaves = needing_grad([*tree_leaves((args, kwargs)), *module.parameters()])
    outputs = needing_grad(tree_leaves(module(*args, **kwargs)))
    if leaves and outputs:
        # The gradient of squares depends on the output, as that of the loss does.
        squares = torch.stack([(x * x).sum() for x in outputs]).sum()
        gradient = torch.autograd.grad(squares, leaves, create_graph=twice, allow_unused=True)
        if twice:
            require_second_derivative(needing_grad(gradient))
