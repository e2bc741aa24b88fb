"""Open a checkpoint with torch: its model and tokenizer, and the matrices to quantize."""

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

# Innermost modules that send tokens to experts. Quantizers leave them alone.
_ROUTERS = frozenset(("gate", "router", "shared_expert_gate"))

_WRONG_CONFIG = "Give the config.json that was saved with these weights."


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


def load(checkpoint: str | Path, *, revision: str | None = None, device: str = "cpu") -> Checkpoint:
    """Open a checkpoint: model in float32 and evaluation mode, tokenizer, description.

    No code of the checkpoint is run. GPT-2's ``Conv1D`` modules are replaced by the
    ``torch.nn.Linear`` they are, and the fused tensors of a mixture's experts by one parameter
    for each expert, so that every block matrix is a parameter of shape (out, in). Tied weights
    stay tied.

    Parameters
    ----------
    checkpoint, revision
        Hugging Face folder, ``.gguf`` file or hub id; see :func:`qscale.checkpoint.describe`.
    device
        Where the model goes, as torch names it.

    Raises
    ------
    CheckpointError
        If the checkpoint is unusable, a weight is missing or not finite, the tokenizer is
        missing, or the model is not a causal one.
    QscaleError
        If torch or transformers is not installed, or the device cannot be used.
    """
    require_torch()
    description = describe(checkpoint, revision)
    with quiet_transformers():
        model = _load_model(description)
        tokenizer = _load_tokenizer(description)
    _swap_conv1d(model)
    _split_experts(model)
    _check_sizes(description, model)
    try:
        model = model.to(device)
    except (RuntimeError, AssertionError) as error:  # torch asserts that it has CUDA
        raise QscaleError(
            f"device must be one torch can use, such as cpu. Got {device!r} instead "
            f"({_first_line(error)})."
        ) from error
    model = model.eval()
    _check_outputs(description, model)
    return Checkpoint(description, model, tokenizer)


def pristine(checkpoint: Checkpoint) -> PreTrainedModel:
    """Load a checkpoint's model again as transformers builds it, for writing: nothing swapped."""
    with quiet_transformers():
        return _load_model(checkpoint.description)


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
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

    path = description.path
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            description.folder,
            dtype=torch.float32,
            attn_implementation="eager",
            local_files_only=True,
            trust_remote_code=False,
            gguf_file=description.gguf,
            ignore_mismatched_sizes=True,  # reported below, in one line
            output_loading_info=True,
        )
    except _LOAD_ERRORS as error:
        raise CheckpointError(
            f"{path}: transformers cannot load this as a causal language model "
            f"({_first_line(error)})."
        ) from error
    for name in sorted(info["missing_keys"]):
        raise CheckpointError(
            f"{path}: the weights lack {name!r} of the configuration. {_WRONG_CONFIG}"
        )
    for name, *shapes in sorted(info["mismatched_keys"]):
        found, asked = (tuple(shape) for shape in shapes)
        raise CheckpointError(
            f"{path}: {name!r} has shape {found}, the configuration asks for {asked}. "
            f"{_WRONG_CONFIG}"
        )
    for name in sorted(key for key in info["unexpected_keys"] if not is_buffer(key, ndim=4)):
        raise CheckpointError(
            f"{path}: the configuration has no place for weight {name!r}. {_WRONG_CONFIG}"
        )
    for name, weight in model.named_parameters():
        if not torch.isfinite(weight).all():
            raise CheckpointError(
                f"{path}: {name!r} holds NaN or infinite weights. Fetch or save it again; if it "
                "still does, the training diverged: give an earlier checkpoint."
            )
    return model


def _load_tokenizer(description: Description) -> PreTrainedTokenizerBase:
    """Load the tokenizer that lies with the weights."""
    from transformers import AutoTokenizer  # noqa: PLC0415 - only where a model is opened

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            description.folder,
            local_files_only=True,
            trust_remote_code=False,
            gguf_file=description.gguf,
        )
    except _LOAD_ERRORS as error:
        cure = "Copy tokenizer.json and tokenizer_config.json into the folder."
        if description.gguf:
            cure = "Give the Hugging Face folder that the file was made from."
        raise CheckpointError(
            f"{description.path}: no usable tokenizer ({_first_line(error)}). {cure}"
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


def _split_experts(model: PreTrainedModel) -> None:
    """Replace fused expert tensors (experts, out, in) by one matrix for each expert, in place.

    transformers computes experts one after another from ``tensor[expert]``; a list of parameters
    answers that as well, and makes every matrix a parameter with a name of its own.
    """
    import torch  # noqa: PLC0415 - only where a model is opened

    split = False
    for module in list(model.modules()):
        if getattr(module, "is_transposed", True):  # no experts, or stored as (in, out)
            continue
        fused = [(n, p) for n, p in module.named_parameters(recurse=False) if p.ndim == 3]
        for name, tensor in fused:
            delattr(module, name)
            matrices = [torch.nn.Parameter(matrix) for matrix in tensor.detach()]
            setattr(module, name, torch.nn.ParameterList(matrices))
        if fused:
            module.register_forward_hook(_reach_every_expert)
            split = True
    if split:
        model.set_experts_implementation("eager")


def _reach_every_expert(module: torch.nn.Module, _: object, output: torch.Tensor) -> torch.Tensor:
    """Add a zero that leads to every expert, so that one without tokens has a gradient of zero."""
    return output + sum(matrix[:0].sum() for matrix in module.parameters())


def _check_outputs(description: Description, model: PreTrainedModel) -> None:
    """Refuse a model whose logits are capped or look ahead: its loss would come out wrong."""
    import torch  # noqa: PLC0415 - only where a model is opened

    cap = getattr(model.config, "final_logit_softcapping", None)
    if cap:
        raise CheckpointError(
            f"{description.path}: the model caps its logits (final_logit_softcapping is {cap:g})"
            f". Architecture {description.architecture!r} is not supported."
        )
    ids = torch.arange(8, device=model.device) % model.get_input_embeddings().weight.shape[0]
    other = ids.clone()
    other[-1] = 0
    try:
        with torch.inference_mode():
            first, second = (model(input_ids=i[None], use_cache=False).logits for i in (ids, other))
    except _LOAD_ERRORS as error:
        raise CheckpointError(
            f"{description.path}: the model cannot be run ({_first_line(error)}). {_WRONG_CONFIG}"
        ) from error
    if not torch.allclose(first[:, :-1], second[:, :-1], rtol=1e-3, atol=1e-3, equal_nan=True):
        raise CheckpointError(
            f"{description.path}: predictions change with later tokens, so this is not a causal "
            "language model."
        )


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
            f"{description.path}: the model has {counted[0]} non-embedding and {counted[1]} "
            f"parameters, the weight files {described[0]} and {described[1]}. "
            f"Architecture {description.architecture!r} is not supported."
        )


def quantizable(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Weight matrices inside the transformer blocks, by parameter name.

    Blocks are the numbered children of the model (``model.layers.0``, ``transformer.h.0``). In
    them count the weights of Linear layers and, in a mixture of experts, both matrices of each
    expert (``model.layers.0.mlp.experts.gate_up_proj.3``). Embeddings, the LM head, routers and
    projections outside the blocks are left alone.

    Raises
    ------
    CheckpointError
        If they hold less than three quarters of the blocks' parameters, as where experts are
        stored in another way: their error would say little about the model's.
    """
    import torch  # noqa: PLC0415 - only where a model is opened

    head = model.get_output_embeddings()
    found: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        *outer, inner_name = name.split(".")
        if not any(part.isdigit() for part in outer) or inner_name in _ROUTERS:
            continue
        if isinstance(module, torch.nn.Linear) and module is not head:
            found[f"{name}.weight"] = module.weight
        elif isinstance(module, torch.nn.ParameterList):
            found |= {f"{name}.{i}": p for i, p in enumerate(module) if p.ndim == 2}
    inner = sum(
        p.numel() for n, p in model.named_parameters() if any(s.isdigit() for s in n.split("."))
    )
    held = sum(p.numel() for p in found.values())
    if not found or 4 * held < 3 * inner:
        raise CheckpointError(
            f"{model.config.model_type}: only {held} of {inner} parameters of the blocks are "
            "weights of Linear layers. This architecture is not supported."
        )
    return found
