"""Which tensors of a checkpoint are matrices to quantize, told by names and shapes; no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from qscale.checkpoint import EMBEDDINGS, HEADS, is_buffer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from qscale.shards import StoredTensor

BLOCK, EMBEDDING, HEAD, OTHER = "block", "embedding", "head", "other"
KINDS = (BLOCK, EMBEDDING, HEAD, OTHER)
"""What a matrix is for: a Linear weight in a numbered block, which is what gets quantized; a token
or position embedding; the LM head; or else a router or a projection outside the blocks."""

# Architectures that store Linear weights as (in, out), and those that do so for fused experts.
_CONV1D = frozenset(("gpt2", "openai-gpt"))
_TRANSPOSED_EXPERTS = frozenset(("gpt_oss", "llama4", "llama4_text"))

# Innermost modules that route tokens to experts. Quantizers leave them alone, and transformers
# holds them outside Linear.
_ROUTERS = frozenset(("gate", "router", "shared_expert_gate"))


@dataclass(frozen=True, slots=True)
class Matrix:
    """One matrix of a checkpoint.

    Parameters
    ----------
    name
        As the files name it; ``name[e]`` for expert ``e`` of a tensor that fuses them.
    stored
        Where its bytes lie, with a shape of two axes.
    transposed
        Whether it is stored as (in, out).
    kind
        One of `KINDS`.
    """

    name: str
    stored: StoredTensor
    transposed: bool
    kind: str

    @property
    def shape(self) -> tuple[int, int]:
        """Rows (outputs) and columns (inputs)."""
        first, second = self.stored.shape
        return (second, first) if self.transposed else (first, second)


def matrices(tensors: Mapping[str, StoredTensor], architecture: str) -> list[Matrix]:
    """List the matrices of a checkpoint in the order of its tensors.

    Parameters
    ----------
    tensors
        As `qscale.shards.locate` finds them.
    architecture
        ``model_type`` of ``config.json``; GPT-2, for one, stores Linear weights as (in, out).
    """
    found: list[Matrix] = []
    for name, tensor in tensors.items():
        if is_buffer(name, ndim=len(tensor.shape)):
            continue
        if len(tensor.shape) == 2:
            kind = _kind(name)
            flipped = kind == BLOCK and architecture in _CONV1D
            found.append(Matrix(name, tensor, flipped, kind))
        elif len(tensor.shape) == 3 and _inside(name) and "conv" not in name:
            found += _experts(name, tensor, flipped=architecture in _TRANSPOSED_EXPERTS)
    return found


def quantizable_names(tensors: Mapping[str, StoredTensor], architecture: str) -> list[str]:
    """Names of the matrices to quantize: Linear weights inside the numbered blocks.

    They are those of `qscale.model.quantizable`, under the names that the files use.

    Examples
    --------
    >>> from pathlib import Path
    >>> from qscale.shards import StoredTensor
    >>> def stored(*shape):
    ...     return StoredTensor(Path("model.safetensors"), "BF16", shape, 0, 0)
    >>> tensors = {
    ...     "model.embed_tokens.weight": stored(256, 16),
    ...     "model.layers.0.mlp.up_proj.weight": stored(32, 16),
    ...     "model.layers.0.input_layernorm.weight": stored(16),
    ... }
    >>> quantizable_names(tensors, "llama")
    ['model.layers.0.mlp.up_proj.weight']
    """
    return [m.name for m in matrices(tensors, architecture) if m.kind == BLOCK]


def _inside(name: str) -> bool:
    """Whether a tensor is in a numbered block: ``model.layers.0.mlp.up_proj.weight``."""
    return any(part.isdigit() for part in name.split("."))


def _kind(name: str) -> str:
    """Kind of a tensor of two axes."""
    *_, module, leaf = ["", *name.split(".")]
    if module in EMBEDDINGS:
        return EMBEDDING
    if module in HEADS:
        return HEAD
    return BLOCK if leaf == "weight" and _inside(name) and module not in _ROUTERS else OTHER


def _experts(name: str, tensor: StoredTensor, *, flipped: bool) -> list[Matrix]:
    """Split a tensor of fused experts, shape (experts, ., .), into one matrix each."""
    count, *shape = tensor.shape
    step = (tensor.stop - tensor.start) // count
    starts = [tensor.start + expert * step for expert in range(count)]
    return [
        Matrix(
            f"{name}[{expert}]",
            replace(tensor, shape=tuple(shape), start=start, stop=start + step),
            flipped,
            BLOCK,
        )
        for expert, start in enumerate(starts)
    ]
