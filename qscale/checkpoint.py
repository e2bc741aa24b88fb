"""What a checkpoint holds, read without torch; `qscale.model` opens it.

A checkpoint is a Hugging Face folder (``config.json``, safetensors weights and a tokenizer), a
model on the hub, or a GGUF file. How it was trained is read by `qscale.provenance`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qscale import gguf_file
from qscale.errors import CheckpointError
from qscale.hub import Source, find
from qscale.provenance import Statement, combine, from_name, statements
from qscale.shards import StoredTensor, locate, read_json, sha256

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

EMBEDDINGS = frozenset(
    ("embed_tokens", "embed_positions", "embed_in", "wte", "wpe", "word_embeddings")
)
HEADS = frozenset(("lm_head", "embed_out"))
"""Innermost modules of tensors outside the transformer's body, over model families."""

_FLOATS = frozenset(("F64", "F32", "F16", "BF16"))


@dataclass(frozen=True, slots=True)
class Description:
    """What a checkpoint holds, read without loading the model.

    Parameters
    ----------
    folder
        The folder that holds the files; for a model on the hub, the one in the cache.
    checkpoint
        Content hash: first 12 hexadecimal digits of the SHA-256 over all tensors in name order.
        It does not depend on how they are split over files.
    architecture
        ``model_type`` of ``config.json``.
    n_params
        Parameters without token and position embeddings and without the LM head. Of a mixture of
        experts, those of all experts.
    n_params_total
        All parameters; tied embeddings count once.
    vocab_size
        Rows of the token embedding, or None if the configuration does not say.
    max_context
        Longest input the configuration allows, tokens, or None if it does not say.
    storage
        Number formats of the stored parameters, that of the most first: ``BF16``.
    statements
        What sidecar, trainer state, names and hub id say about the training, the most trusted
        first; see :func:`qscale.provenance.combine`.
    gguf
        Name of the GGUF file, whose weights are dequantized on loading, or None.
    """

    folder: Path
    checkpoint: str
    architecture: str
    n_params: int
    n_params_total: int
    vocab_size: int | None
    max_context: int | None
    storage: str
    statements: tuple[Statement, ...]
    gguf: str | None = None

    @property
    def path(self) -> Path:
        """The folder, or the GGUF file."""
        return self.folder / self.gguf if self.gguf else self.folder

    @property
    def training(self) -> dict[str, float | str]:
        """Training metadata under the measurement table's column names; only what is known."""
        return combine(self.statements).values


def describe(checkpoint: str | Path, revision: str | None = None) -> Description:
    """Read size, content hash and training metadata of a checkpoint, without torch.

    Parameters
    ----------
    checkpoint
        Hugging Face folder with ``config.json`` and safetensors weights, a ``.gguf`` file, or a
        hub id, ``org/name`` or ``org/name@revision``.
    revision
        Branch, tag or commit on the hub, if the id does not end in one.

    Returns
    -------
    Description
        Every byte of the weights is read once, for the hash.

    Raises
    ------
    CheckpointError
        If the checkpoint or a file is missing, damaged or not a causal language model.
    """
    source = find(checkpoint, revision)
    if source.path.suffix == ".gguf" and source.path.is_file():
        folder, gguf = source.path.parent, source.path.name
        tensors, config = gguf_file.read_gguf(source.path)
        embeddings, heads = gguf_file.EMBEDDINGS, gguf_file.HEADS
        stated = statements(folder, from_name(source.path.stem, "file name"))
    else:
        folder, gguf = source.path, None
        config = read_config(folder)
        stated = _stated(source)
        tensors = locate(folder)
        _check_dtypes(tensors)
        embeddings, heads = EMBEDDINGS, HEADS
    digests = {name: sha256(tensors[name]) for name in sorted(tensors)}
    content = hashlib.sha256()
    for name, digest in digests.items():
        content.update(f"{name} {tensors[name].dtype} {tensors[name].shape} {digest}\n".encode())
    sizes = {name: t.size for name, t in tensors.items() if not is_buffer(name, ndim=len(t.shape))}
    outer = {name for name in sizes if _module(name) in embeddings | heads}
    copies = _tied_copies(
        {name: digests[name] for name in outer}, heads, config.get("tie_word_embeddings")
    )
    return Description(
        folder=folder,
        checkpoint=content.hexdigest()[:12],
        architecture=config["model_type"],
        n_params=sum(size for name, size in sizes.items() if name not in outer),
        n_params_total=sum(size for name, size in sizes.items() if name not in copies),
        vocab_size=config.get("vocab_size"),
        max_context=config.get("max_position_embeddings") or config.get("n_positions"),
        storage=_storage(tensors, sizes),
        statements=stated,
        gguf=gguf,
    )


def _stated(source: Source) -> tuple[Statement, ...]:
    """Read what a folder and its name, or a hub id and revision, say about the training."""
    if source.repo is None or source.revision is None:
        return statements(source.path, from_name(source.path.resolve().name, "folder name"))
    # Revisions of one model are taken for one training run.
    origin = {"run": source.repo, "source": f"{source.repo}@{source.revision}"}
    named = from_name(source.revision, "revision")
    return (*statements(source.path, named), Statement("hub id", origin))


def read_config(folder: Path) -> dict[str, Any]:
    """Read ``config.json`` of a folder.

    Raises
    ------
    CheckpointError
        If it is missing, damaged or not that of a causal language model in full precision.
    """
    path = folder / "config.json"
    if not path.is_file():
        cure = "Give a Hugging Face checkpoint folder."
        if files := sorted(file.name for file in folder.glob("*.gguf")):
            cure = f"Give the file {files[0]} itself."
        elif (folder / "adapter_config.json").is_file():
            cure = "It holds an adapter: merge it into its base model and save that."
        raise CheckpointError(f"{folder}: no config.json. {cure}")
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


def _check_dtypes(tensors: Mapping[str, StoredTensor]) -> None:
    """Refuse parameters stored as anything but plain floating-point numbers."""
    for name, tensor in tensors.items():
        if tensor.dtype not in _FLOATS and not is_buffer(name, ndim=len(tensor.shape)):
            raise CheckpointError(
                f"{tensor.file}: {name!r} must be stored as one of {', '.join(sorted(_FLOATS))}. "
                f"Got {tensor.dtype} instead. Give the checkpoint before quantization."
            )


def _storage(tensors: Mapping[str, StoredTensor], sizes: Mapping[str, int]) -> str:
    """Name the number formats of the parameters, that of the most first."""
    held: dict[str, int] = {}
    for name, size in sizes.items():
        held[tensors[name].dtype] = held.get(tensors[name].dtype, 0) + size
    return ", ".join(sorted(held, key=lambda dtype: -held[dtype]))


def _module(name: str) -> str:
    """Return the innermost module of a parameter: ``h.0.mlp.c_fc.weight`` gives ``c_fc``."""
    return name.split(".")[-2] if "." in name else ""


def is_buffer(name: str, *, ndim: int) -> bool:
    """Whether a saved tensor is not a parameter: causal masks, frequencies, routers' counters."""
    ends = ("masked_bias", "inv_freq", "e_score_correction_bias")
    if name.endswith(ends) or name in gguf_file.BUFFERS:
        return True
    return name.endswith((".attn.bias", ".attention.bias")) and ndim == 4


def _tied_copies(
    outer: Mapping[str, str], head_modules: frozenset[str], tied: bool | None
) -> set[str]:
    """Heads that are the token embedding under a second name, from names and digests.

    A configuration that does not say whether they are tied is settled by the bytes.
    """
    heads = {name for name in outer if _module(name) in head_modules and name.endswith("weight")}
    embeddings = {digest for name, digest in outer.items() if name not in heads}
    return {name for name in heads if tied or (tied is None and outer[name] in embeddings)}
