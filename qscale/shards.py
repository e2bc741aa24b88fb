"""Locate and hash the tensors in a checkpoint's safetensors files, reading none into memory.

The format (github.com/huggingface/safetensors): eight bytes of little-endian header length, a JSON
header with dtype, shape and offsets of every tensor, then the data.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qscale.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.gguf", "*.msgpack", "*.h5")
_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor's bytes lie.

    Parameters
    ----------
    file
        Safetensors file.
    dtype
        As the format spells it: ``F32``, ``BF16``, ...
    shape
        Shape of the tensor.
    start, stop
        First byte in the file and the first one behind.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises
    ------
    CheckpointError
        If the file does not hold one.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # malformed JSON or bytes that are not UTF-8
        raise CheckpointError(f"{path}: not valid JSON ({error}).") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: must hold a JSON object. Got a {type(found).__name__}.")
    return found


def locate(folder: Path) -> dict[str, StoredTensor]:
    """Locate every tensor of a checkpoint folder, over all its shards.

    Returns
    -------
    dict
        By tensor name, as the files name them.

    Raises
    ------
    CheckpointError
        If a file is missing, truncated or not safetensors.
    """
    index = folder / "model.safetensors.index.json"
    shards = ["model.safetensors"]
    promised: dict[str, str] = {}
    if index.is_file():
        try:
            promised = dict(read_json(index)["weight_map"].items())
            shards = sorted(set(promised.values()))
        except (KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(
                f"{index}: 'weight_map' must name the file of each weight."
            ) from error
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing and index.is_file():
        raise CheckpointError(f"{folder}: {missing[0]} is missing, {index.name} asks for it.")
    if missing:
        others = sorted(p.name for pattern in _OTHER_WEIGHTS for p in folder.glob(pattern))
        raise CheckpointError(
            f"{folder}: no model.safetensors"
            + (f", only {others[0]}" if others else "")
            + ". Convert the weights: load the folder with transformers and call "
            "model.save_pretrained(folder)."
        )
    tensors = {name: t for shard in shards for name, t in _header(folder / shard).items()}
    for name, shard in promised.items():
        if name not in tensors:
            raise CheckpointError(f"{folder / shard}: lacks {name!r}, which {index.name} promises.")
    return tensors


def _header(path: Path) -> dict[str, StoredTensor]:
    """Read the header of a safetensors file and check that the file is as long as it says."""
    length = path.stat().st_size
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if length < 8 or size > length - 8:
            raise CheckpointError(f"{path}: truncated or not a safetensors file.")
        try:
            header = json.loads(file.read(size))
            tensors = {
                name: StoredTensor(
                    file=path,
                    dtype=entry["dtype"],
                    shape=tuple(entry["shape"]),
                    start=8 + size + entry["data_offsets"][0],
                    stop=8 + size + entry["data_offsets"][1],
                )
                for name, entry in header.items()
                if name != "__metadata__"
            }
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path}: the safetensors header is damaged.") from error
    needed = max((t.stop for t in tensors.values()), default=0)
    if length < needed:
        raise CheckpointError(
            f"{path}: truncated. The file has {length} bytes, its header promises {needed}."
        )
    if not tensors:
        raise CheckpointError(f"{path}: holds no tensors.")
    return tensors


def sha256(tensor: StoredTensor) -> str:
    """SHA-256 of a tensor's bytes, streamed."""
    digest = hashlib.sha256()
    with tensor.file.open("rb") as file:
        file.seek(tensor.start)
        left = tensor.stop - tensor.start
        while left > 0 and (block := file.read(min(left, _CHUNK_BYTES))):
            digest.update(block)
            left -= len(block)
    return digest.hexdigest()
