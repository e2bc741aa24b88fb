"""Open a checkpoint folder with torch: its model and tokenizer, and the matrices to quantize."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from qscale.checkpoint import describe, is_buffer
from qscale.errors import CheckpointError, QscaleError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from qscale.checkpoint import Description

# What transformers raises for a folder it cannot use.
_LOAD_ERRORS = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    RuntimeError,
    ImportError,
    SafetensorError,
)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened checkpoint.

    Parameters
    ----------
    description
        What the folder holds.
    model
        The causal language model, float32, evaluation mode, eager attention.
    tokenizer
        Its tokenizer.
    """

    description: Description
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def require_torch() -> None:
    """Raise unless torch and transformers can be imported.

    Raises
    ------
    QscaleError
        Naming the extra to install.
    """
    try:
        import torch  # noqa: F401, PLC0415 - only where a model is opened
        import transformers  # noqa: F401, PLC0415
    except ImportError as error:
        raise QscaleError(
            f"Opening a checkpoint needs {error.name}. Run: pip install 'qscale[measure]'"
        ) from error


def load(folder: str | Path, *, device: str = "cpu") -> Checkpoint:
    """Open a checkpoint folder: model in float32 and evaluation mode, tokenizer, description.

    Nothing is fetched: only files in the folder are read, and no code from it is run. GPT-2's
    ``Conv1D`` modules are replaced by the ``torch.nn.Linear`` they are, so that every block
    matrix is a Linear weight of shape (out, in). Tied weights stay tied.

    Parameters
    ----------
    folder
        Hugging Face folder.
    device
        Where the model goes, as torch names it.

    Raises
    ------
    CheckpointError
        If the folder is unusable, a weight is missing or not finite, or the tokenizer is missing.
    QscaleError
        If torch or transformers is not installed, or the device cannot be used.
    """
    require_torch()
    description = describe(folder)
    with _quiet_transformers():
        model = _load_model(description)
        tokenizer = _load_tokenizer(description.folder)
    _swap_conv1d(model)
    _check_sizes(description, model)
    try:
        model = model.to(device)
    except (RuntimeError, AssertionError) as error:  # torch asserts that it has CUDA
        raise QscaleError(
            f"device must be one torch can use, such as cpu. Got {device!r} instead "
            f"({_first_line(error)})."
        ) from error
    return Checkpoint(description, model.eval(), tokenizer)


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Silence transformers' progress bars and warnings, then restore both settings."""
    from transformers.utils import logging  # noqa: PLC0415 - only where a model is opened

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _load_model(description: Description) -> PreTrainedModel:
    """Load the weights and refuse any that are missing, left over, misshapen or not finite."""
    import torch  # noqa: PLC0415 - only where a model is opened
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    folder = description.folder
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation="eager",
            local_files_only=True,
            ignore_mismatched_sizes=True,  # reported below, in one line
            output_loading_info=True,
        )
    except _LOAD_ERRORS as error:
        raise CheckpointError(
            f"{folder}: transformers cannot load this as a causal language model "
            f"({_first_line(error)})."
        ) from error
    for name in sorted(info["missing_keys"]):
        raise CheckpointError(f"{folder}: the weights lack {name!r} of the configuration.")
    for name, *shapes in sorted(info["mismatched_keys"]):
        found, asked = (tuple(shape) for shape in shapes)
        raise CheckpointError(
            f"{folder}: {name!r} has shape {found}, the configuration asks for {asked}."
        )
    for name in sorted(key for key in info["unexpected_keys"] if not is_buffer(key, ndim=4)):
        raise CheckpointError(f"{folder}: the configuration has no place for weight {name!r}.")
    for name, weight in model.named_parameters():
        if not torch.isfinite(weight).all():
            raise CheckpointError(f"{folder}: {name!r} holds NaN or infinite weights.")
    return model


def _load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder."""
    from transformers import AutoTokenizer  # noqa: PLC0415 - only where a model is opened

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except _LOAD_ERRORS as error:
        raise CheckpointError(
            f"{folder}: no usable tokenizer ({_first_line(error)}). "
            "Copy tokenizer.json and tokenizer_config.json into the folder."
        ) from error
    return tokenizer


def _first_line(error: Exception) -> str:
    """First line of an error message, without its full stop."""
    lines = str(error).strip().splitlines()
    return lines[0].strip().rstrip(".") if lines else type(error).__name__


def _swap_conv1d(model: PreTrainedModel) -> None:
    """Replace every transposed ``Conv1D`` by an equal ``Linear``, in place."""
    import torch  # noqa: PLC0415 - only where a model is opened
    from transformers.pytorch_utils import Conv1D  # noqa: PLC0415

    found = [(name, m) for name, m in model.named_modules() if isinstance(m, Conv1D)]
    for name, module in found:
        rows, columns = module.weight.shape
        linear = torch.nn.Linear(rows, columns, device="meta")
        linear.weight = torch.nn.Parameter(module.weight.detach().T.contiguous())
        linear.bias = module.bias
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, linear)


def _check_sizes(description: Description, model: PreTrainedModel) -> None:
    """Check that counting by tensor names, which needs no model, agrees with the model.

    The counts are features that laws are fitted on; they must not depend on how they were read.
    """
    import torch  # noqa: PLC0415 - only where a model is opened

    head = model.get_output_embeddings()
    outer = {id(p) for p in head.parameters()} if head is not None else set()
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            outer |= {id(p) for p in module.parameters()}
    sizes = {id(p): p.numel() for p in model.parameters()}
    counted = (sum(n for key, n in sizes.items() if key not in outer), sum(sizes.values()))
    described = (description.n_params, description.n_params_total)
    if counted != described:
        raise CheckpointError(
            f"{description.folder}: the model has {counted[0]} non-embedding and {counted[1]} "
            f"parameters, the weight files {described[0]} and {described[1]}. "
            f"Architecture {description.architecture!r} is not supported."
        )


def quantizable(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Weight matrices of the Linear layers inside the transformer blocks, by parameter name.

    Blocks are the numbered children of the model (``model.layers.0``, ``transformer.h.0``);
    embeddings, the LM head and projections outside the blocks are left alone.

    Raises
    ------
    CheckpointError
        If they hold less than half of the non-embedding parameters, as in models that fuse
        their experts into one tensor: their error would say little about the model's.
    """
    import torch  # noqa: PLC0415 - only where a model is opened

    head = model.get_output_embeddings()
    found: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        inside = any(part.isdigit() for part in name.split("."))
        if isinstance(module, torch.nn.Linear) and inside and module is not head:
            found[f"{name}.weight"] = module.weight
    inner = sum(
        p.numel() for n, p in model.named_parameters() if any(s.isdigit() for s in n.split("."))
    )
    held = sum(p.numel() for p in found.values())
    if not found or 2 * held < inner:
        raise CheckpointError(
            f"{model.config.model_type}: only {held} of {inner} parameters of the blocks are "
            "weights of Linear layers. This architecture is not supported."
        )
    return found
