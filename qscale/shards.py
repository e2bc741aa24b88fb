"""Locate, hash and stream the tensors in a checkpoint's safetensors files, in bounded memory.

The format (github.com/huggingface/safetensors): eight bytes of little-endian header length, a JSON
header with dtype, shape and offsets of every tensor, then the data.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from qscale.errors import CheckpointError

if TYPE_CHECKING:
    import io
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    Bits = NDArray[np.int16] | NDArray[np.int32] | NDArray[np.int64]

_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.gguf", "*.msgpack", "*.h5")
_CHUNK_BYTES = 1 << 22

# numpy knows no bfloat16, so that weights are read as integers that hold their bits.
_BITS: dict[str, np.dtype[Any]] = {
    "BF16": np.dtype("<i2"),
    "F16": np.dtype("<i2"),
    "F32": np.dtype("<i4"),
    "F64": np.dtype("<i8"),
}


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
    sharded = index.is_file() and not (folder / shards[0]).is_file()  # as transformers chooses
    promised: dict[str, str] = {}
    if sharded:
        try:
            promised = dict(read_json(index)["weight_map"].items())
            shards = sorted(set(promised.values()))
        except (KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(
                f"{index}: 'weight_map' must name the file of each weight."
            ) from error
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing and sharded:
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


def bits_dtype(tensor: StoredTensor) -> np.dtype[Any]:
    """Integer type that holds the bits of one element of a tensor.

    Raises
    ------
    CheckpointError
        If the tensor is not stored in a floating-point format that weights are trained in.
    """
    if (found := _BITS.get(tensor.dtype)) is None:
        raise CheckpointError(
            f"{tensor.file}: weights must be stored as {', '.join(_BITS)}. "
            f"Got {tensor.dtype} instead. Give the full-precision checkpoint."
        )
    return found


def read_blocks(
    tensor: StoredTensor, elements: int, *, transposed: bool = False
) -> Iterator[tuple[int, Bits]]:
    """Stream a matrix as blocks of whole rows.

    Parameters
    ----------
    tensor
        Matrix of shape (rows, columns).
    elements
        Size of a block; at least one row is read.
    transposed
        Whether the rows to stream are the stored columns.

    Yields
    ------
    int
        First row of the block.
    numpy.ndarray
        Bits of its elements, shape (rows of the block, columns). The next block overwrites it.

    Raises
    ------
    CheckpointError
        If the file ends early or the storage format is not supported.
    """
    dtype = bits_dtype(tensor)
    rows, columns = tensor.shape[::-1] if transposed else tensor.shape
    height = max(1, elements // max(1, columns))
    if transposed:
        for first in range(0, rows, height):
            yield first, _mapped(tensor)[:, first : first + height].T.copy()
        return
    buffer = np.empty((min(height, rows), columns), dtype)
    with tensor.file.open("rb", buffering=0) as file:
        file.seek(tensor.start)
        for first in range(0, rows, height):
            block = buffer[: min(height, rows - first)]
            _fill(file, block, tensor)
            yield first, block


def read_rows(tensor: StoredTensor, rows: Sequence[int], *, transposed: bool = False) -> Bits:
    """Read some rows of a matrix; arguments and result as for `read_blocks`."""
    mapped = _mapped(tensor)
    return np.stack([mapped[:, row] if transposed else mapped[row] for row in rows])


def _mapped(tensor: StoredTensor) -> Bits:
    """Map a tensor's bytes; pages that were touched can be dropped by the system at any time."""
    return np.memmap(tensor.file, bits_dtype(tensor), "r", tensor.start, tensor.shape)


def _fill(file: io.FileIO, block: Bits, tensor: StoredTensor) -> None:
    """Read the next bytes of a file into an array; a read may return fewer than asked for."""
    rest = block.data.cast("B")
    while rest:
        count = file.readinto(rest)
        if not count:
            raise CheckpointError(f"{tensor.file}: truncated while it was being read.")
        rest = rest[count:]
