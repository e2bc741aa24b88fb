"""What a checkpoint folder holds, read without torch; `qscale.model` opens it.

A checkpoint is a Hugging Face folder: ``config.json``, safetensors weights, a tokenizer and,
optionally, ``qscale.toml`` with a ``[training]`` table of how it was trained.
"""

from __future__ import annotations

import hashlib
import math
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qscale.errors import CheckpointError
from qscale.shards import locate, read_json, sha256
from qscale.table import COLUMNS

if TYPE_CHECKING:
    from collections.abc import Mapping

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
    sizes = {name: t.size for name, t in tensors.items() if not is_buffer(name, ndim=len(t.shape))}
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


def is_buffer(name: str, *, ndim: int) -> bool:
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
