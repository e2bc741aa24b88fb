"""Open a checkpoint folder: what it holds without torch, and its model and tokenizer with torch.

A checkpoint is a Hugging Face folder: ``config.json``, safetensors weights, a tokenizer and,
optionally, ``qscale.toml`` with a ``[training]`` table of how it was trained.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from qscale.errors import CheckpointError, QscaleError
from qscale.shards import locate, read_json, sha256
from qscale.table import COLUMNS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TRAINING_COLUMNS = (
    "family",
    "run",
    "tokens",
    "step",
    "lr_peak",
    "lr",
    "lr_schedule",
    "decay_fraction",
    "decay_share",
    "lr_sum",
    "weight_decay",
    "batch_tokens",
    "optimizer",
    "averaging",
    "source",
)
"""Columns of the measurement table that a sidecar or a user states about the training."""

SIDECAR = "qscale.toml"

# Innermost module of tensors outside the transformer's body, over model families.
_EMBEDDINGS = frozenset(
    ("embed_tokens", "embed_positions", "embed_in", "wte", "wpe", "word_embeddings")
)
_HEADS = frozenset(("lm_head", "embed_out"))
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
class Description:
    """What a checkpoint folder holds, read without loading the model.

    Parameters
    ----------
    folder
        The folder.
    checkpoint
        Content hash: first 12 hexadecimal digits of the SHA-256 over all tensors in name order.
        It does not depend on how they are split over files.
    architecture
        ``model_type`` of ``config.json``.
    n_params
        Parameters without token and position embeddings and without the LM head.
    n_params_total
        All parameters; tied embeddings count once.
    vocab_size
        Rows of the token embedding, or None if the configuration does not say.
    max_context
        Longest input the configuration allows, tokens, or None if it does not say.
    training
        Training metadata under the measurement table's column names; only what is known.
    """

    folder: Path
    checkpoint: str
    architecture: str
    n_params: int
    n_params_total: int
    vocab_size: int | None
    max_context: int | None
    training: dict[str, float | str]


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


def describe(folder: str | Path) -> Description:
    """Read size, content hash and training metadata of a checkpoint folder, without torch.

    Parameters
    ----------
    folder
        Hugging Face folder with ``config.json`` and safetensors weights.

    Returns
    -------
    Description
        Every byte of the weights is read once, for the hash.

    Raises
    ------
    CheckpointError
        If the folder or a file is missing, damaged or not a causal language model.
    """
    folder = Path(folder)
    config = _config(folder)
    training = _sidecar(folder / SIDECAR)
    tensors = locate(folder)
    digests = {name: sha256(tensors[name]) for name in sorted(tensors)}
    content = hashlib.sha256()
    for name, digest in digests.items():
        content.update(f"{name} {tensors[name].dtype} {tensors[name].shape} {digest}\n".encode())
    sizes = {name: t.size for name, t in tensors.items() if not _is_buffer(name, ndim=len(t.shape))}
    outer = {name for name in sizes if _module(name) in _EMBEDDINGS | _HEADS}
    copies = _tied_copies(outer, digests, config.get("tie_word_embeddings"))
    total = sum(size for name, size in sizes.items() if name not in copies)
    return Description(
        folder=folder,
        checkpoint=content.hexdigest()[:12],
        architecture=config["model_type"],
        n_params=sum(size for name, size in sizes.items() if name not in outer),
        n_params_total=total,
        vocab_size=config.get("vocab_size"),
        max_context=config.get("max_position_embeddings") or config.get("n_positions"),
        training=training,
    )


def _config(folder: Path) -> dict[str, Any]:
    """Read ``config.json`` and refuse what is not a plain causal language model."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: not a folder. Give a Hugging Face checkpoint folder.")
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{folder}: no config.json. Give a Hugging Face checkpoint folder.")
    config = read_json(path)
    if not isinstance(config.get("model_type"), str):
        raise CheckpointError(f"{path}: 'model_type' must be the name of an architecture.")
    if "quantization_config" in config:
        raise CheckpointError(
            f"{folder}: the weights are quantized already. Give the full-precision checkpoint."
        )
    names = config.get("architectures") or []
    if names and not any(str(name).endswith(("ForCausalLM", "LMHeadModel")) for name in names):
        raise CheckpointError(f"{folder}: not a causal language model. Got {names[0]} instead.")
    return config


def _module(name: str) -> str:
    """Return the innermost module of a parameter: ``h.0.mlp.c_fc.weight`` gives ``c_fc``."""
    return name.split(".")[-2] if "." in name else ""


def _is_buffer(name: str, *, ndim: int) -> bool:
    """Whether a saved tensor is not a parameter: causal masks and rotary frequencies."""
    if name.endswith(("masked_bias", "inv_freq")):
        return True
    return name.endswith((".attn.bias", ".attention.bias")) and ndim == 4


def _tied_copies(outer: set[str], digests: dict[str, str], tied: bool | None) -> set[str]:
    """Heads that are the token embedding under a second name.

    A configuration that does not say whether they are tied is settled by the bytes.
    """
    heads = {name for name in outer if _module(name) in _HEADS and name.endswith("weight")}
    embeddings = {digests[name] for name in outer - heads}
    return {name for name in heads if tied or (tied is None and digests[name] in embeddings)}


def _sidecar(path: Path) -> dict[str, float | str]:
    """Read the training metadata beside a checkpoint; an absent file says nothing."""
    if not path.is_file():
        return {}
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # malformed TOML or bytes that are not UTF-8
        raise CheckpointError(f"{path}: not valid TOML ({error}).") from error
    unknown = [key for key in found if key != "training"]
    if unknown or not isinstance(found.get("training", {}), dict):
        raise CheckpointError(
            f"{path}: unknown key {(unknown or ['training'])[0]!r}. "
            "The file holds one table, [training]."
        )
    return training_metadata(found.get("training", {}), str(path))


def training_metadata(values: Mapping[str, Any], where: str) -> dict[str, float | str]:
    """Check training metadata against the measurement table's columns; nulls are left out.

    Parameters
    ----------
    values
        Values by column name, one of `TRAINING_COLUMNS`.
    where
        File or option group for messages.

    Returns
    -------
    dict
        Numbers as floats, text as strings.

    Raises
    ------
    CheckpointError
        If a name is unknown, or a value is of the wrong kind or out of its column's range.
    """
    unknown = [name for name in values if name not in TRAINING_COLUMNS]
    if unknown:
        raise CheckpointError(
            f"{where}: unknown key {unknown[0]!r}. Known are: {', '.join(TRAINING_COLUMNS)}."
        )
    return {name: _value(name, v, where) for name, v in values.items() if v is not None}


def _value(name: str, value: object, where: str) -> float | str:
    """Check one value of training metadata."""
    column = COLUMNS[name]
    if column.kind == "text":
        if not isinstance(value, str):
            raise CheckpointError(f"{where}: {name!r} must be text. Got {value!r} instead.")
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise CheckpointError(f"{where}: {name!r} must be a number. Got {value!r} instead.")
    low = -math.inf if column.low is None else column.low
    high = math.inf if column.high is None else column.high
    if not low <= value <= high:
        raise CheckpointError(
            f"{where}: {name!r} must be between {low:g} and {high:g}. Got {value:g} instead. "
            f"{column.hint}".rstrip()
        )
    return float(value)


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
    for name in sorted(key for key in info["unexpected_keys"] if not _is_buffer(key, ndim=4)):
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
