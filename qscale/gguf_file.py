"""Locate the tensors of a GGUF file and read what it says of the model, without torch.

GGUF is llama.cpp's format: one file with metadata, tokenizer and weights, most of them quantized in
blocks. transformers dequantizes them on loading.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qscale.errors import CheckpointError, QscaleError
from qscale.shards import StoredTensor

if TYPE_CHECKING:
    from pathlib import Path

EMBEDDINGS = frozenset(("token_embd", "position_embd"))
"""Tensors that are embeddings, as GGUF names them without their suffix."""
HEADS = frozenset(("output",))
BUFFERS = frozenset(("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"))
"""Tensors that are not parameters."""


def read_gguf(path: Path) -> tuple[dict[str, StoredTensor], dict[str, Any]]:
    """Locate every tensor of a GGUF file and read its metadata.

    Parameters
    ----------
    path
        The file.

    Returns
    -------
    tensors : dict
        By name as GGUF spells it, shapes as torch would have them; ``dtype`` is the block format,
        such as ``Q4_1``.
    config : dict
        ``model_type``, and ``vocab_size`` and ``max_position_embeddings`` where the file says so.

    Raises
    ------
    CheckpointError
        If the file is damaged or incomplete.
    QscaleError
        If the gguf package is not installed.
    """
    try:
        from gguf import GGUFReader  # noqa: PLC0415 - an optional dependency
    except ImportError as error:
        raise QscaleError(
            f"{path}: opening a GGUF file needs {error.name}. Run: pip install 'qscale[gguf]'"
        ) from error
    try:
        reader = GGUFReader(path)
        tensors = {
            tensor.name: StoredTensor(
                file=path,
                dtype=tensor.tensor_type.name,
                shape=tuple(int(n) for n in reversed(tensor.shape)),  # GGUF writes columns first
                start=int(tensor.data_offset),
                stop=int(tensor.data_offset + tensor.n_bytes),
            )
            for tensor in reader.tensors
        }
        architecture = reader.fields["general.architecture"].contents()
        context = reader.fields.get(f"{architecture}.context_length")
    except (ValueError, LookupError, OSError, TypeError, AttributeError) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise CheckpointError(
            f"{path}: truncated or not a GGUF file ({lines[0]}). Fetch it again."
        ) from error
    if "token_embd.weight" not in tensors:
        raise CheckpointError(f"{path}: holds no token embedding. Give a language model's file.")
    config = {
        "model_type": architecture,
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "max_position_embeddings": None if context is None else int(context.contents()),
    }
    return tensors, config
