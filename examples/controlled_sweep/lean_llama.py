"""A Llama forward pass for training tiny models fast: the weights and logits of transformers'.

Query, key and value share one product, as do gate and up; attention is two batched products over
whole rows, which at short contexts beats tiled kernels; nothing is dispatched that is not computed.
With ``torch.compile`` on top, and products in bfloat16 where the processor has instructions for
them, a step takes half the time that transformers' own forward takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from transformers import LlamaConfig, LlamaForCausalLM

if TYPE_CHECKING:
    from collections.abc import Sequence

HEAD = 32
"""Width of an attention head."""
VOCAB = 256
PER_BLOCK = 6
"""Tensors of a block: gain, query-key-value, output, gain, gate-up, down."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model; query heads share keys by twos, the inner width is twice the outer.

    Parameters
    ----------
    width
        Width of the residual stream, a multiple of 32.
    layers
        Number of blocks.
    context
        Longest input, tokens.
    """

    width: int
    layers: int = 3
    context: int = 128

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.width // HEAD

    @property
    def key_heads(self) -> int:
        """Key and value heads."""
        return max(1, self.heads // 2)

    @property
    def n_params(self) -> int:
        """Parameters outside the embedding, which the head shares."""
        attention = 2 * self.width * HEAD * (self.heads + self.key_heads)
        return self.layers * (attention + 6 * self.width**2 + 2 * self.width) + self.width

    def config(self) -> LlamaConfig:
        """Return the configuration of the same model in transformers."""
        return LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=self.width,
            intermediate_size=2 * self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_heads,
            head_dim=HEAD,
            max_position_embeddings=self.context,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )


def initial(shape: Shape, seed: int) -> LlamaForCausalLM:
    """Initialise a model as transformers does, from a seed of its own."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(shape.config())


def fuse(model: LlamaForCausalLM) -> list[torch.Tensor]:
    """Copy a model's weights into the tensors that `logits` takes."""
    weights = [model.model.embed_tokens.weight]
    for block in model.model.layers:
        attention, mlp = block.self_attn, block.mlp
        query_key_value = (attention.q_proj, attention.k_proj, attention.v_proj)
        weights += [
            block.input_layernorm.weight,
            torch.cat([layer.weight for layer in query_key_value]),
            attention.o_proj.weight,
            block.post_attention_layernorm.weight,
            torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]),
            mlp.down_proj.weight,
        ]
    weights.append(model.model.norm.weight)
    return [weight.detach().clone() for weight in weights]


def unfuse(weights: Sequence[torch.Tensor], shape: Shape) -> LlamaForCausalLM:
    """Build transformers' model with the weights that `logits` takes."""
    model = initial(shape, 0)
    keys = HEAD * shape.key_heads
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(weights[0])
        for i, block in enumerate(model.model.layers):
            gain, qkv, output, inner_gain, gate_up, down = _block(weights, i)
            attention, mlp = block.self_attn, block.mlp
            query, key, value = qkv.split([shape.width, keys, keys])
            gate, up = gate_up.chunk(2)
            for own, new in (
                (block.input_layernorm, gain),
                (attention.q_proj, query),
                (attention.k_proj, key),
                (attention.v_proj, value),
                (attention.o_proj, output),
                (block.post_attention_layernorm, inner_gain),
                (mlp.gate_proj, gate),
                (mlp.up_proj, up),
                (mlp.down_proj, down),
            ):
                own.weight.copy_(new)
        model.model.norm.weight.copy_(weights[-1])
    return model


@dataclass(frozen=True, slots=True, eq=False)
class Tables:
    """What depends on positions alone: rotary cosines and sines, shape (tokens, 1, 16), and mask.

    The mask has the rows of the query heads that share a key below one another.
    """

    cosine: torch.Tensor
    sine: torch.Tensor
    mask: torch.Tensor


def tables(shape: Shape, theta: float = 10_000.0) -> Tables:
    """Compute the tables for inputs of the model's context."""
    position = torch.arange(shape.context)
    frequency = theta ** -(torch.arange(0, HEAD, 2).float() / HEAD)
    angle = torch.outer(position.float(), frequency)[:, None, :]
    causal = torch.full((shape.context, shape.context), -torch.inf).triu(1)
    shared = shape.heads // shape.key_heads
    return Tables(angle.cos(), angle.sin(), causal.repeat(shared, 1))


def logits(
    weights: Sequence[torch.Tensor], ids: torch.Tensor, shape: Shape, at: Tables
) -> torch.Tensor:
    """Logits of the next token, shape (windows, context, 256).

    Parameters
    ----------
    weights
        As `fuse` returns them.
    ids
        Token ids, shape (windows, context), int64.
    shape, at
        The model's sizes and tables.
    """
    stream = F.embedding(ids, weights[0])
    for i in range(shape.layers):
        gain, qkv, output, inner_gain, gate_up, down = _block(weights, i)
        mixed = _attend(F.linear(_normed(stream, gain), qkv), shape, at)
        stream = stream + F.linear(mixed, output)
        gate, up = F.linear(_normed(stream, inner_gain), gate_up).chunk(2, -1)
        stream = stream + F.linear(F.silu(gate) * up, down)
    return F.linear(_normed(stream, weights[-1]), weights[0])


def loss(
    weights: Sequence[torch.Tensor], windows: torch.Tensor, shape: Shape, at: Tables
) -> torch.Tensor:
    """Mean loss in nats per token over windows of one token more than the context."""
    found = logits(weights, windows[:, :-1], shape, at)
    return F.cross_entropy(found.reshape(-1, VOCAB).float(), windows[:, 1:].reshape(-1))


def _block(weights: Sequence[torch.Tensor], i: int) -> Sequence[torch.Tensor]:
    """Return the tensors of block ``i``."""
    return weights[1 + PER_BLOCK * i : 1 + PER_BLOCK * (i + 1)]


def _normed(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    """Divide by the root mean square and multiply by the gain."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * gain


def _attend(qkv: torch.Tensor, shape: Shape, at: Tables) -> torch.Tensor:
    """Causal attention, with the queries that share a key stacked into one product."""
    n, length = qkv.shape[:2]
    heads, keys = shape.heads, shape.key_heads
    parted = qkv.view(n, length, heads + 2 * keys, HEAD)
    turned = _rotated(parted[:, :, : heads + keys], at)
    query = turned[:, :, :heads].reshape(n, length, keys, heads // keys, HEAD)
    query = query.permute(0, 2, 3, 1, 4).reshape(n * keys, -1, HEAD)
    key = turned[:, :, heads:].transpose(1, 2).reshape(n * keys, length, HEAD)
    value = parted[:, :, heads + keys :].transpose(1, 2).reshape(n * keys, length, HEAD)
    scores = torch.baddbmm(at.mask, query, key.transpose(1, 2), alpha=HEAD**-0.5)
    mixed = torch.bmm(scores.softmax(-1), value).view(n, keys, heads // keys, length, HEAD)
    return mixed.permute(0, 3, 1, 2, 4).reshape(n, length, shape.width)


def _rotated(x: torch.Tensor, at: Tables) -> torch.Tensor:
    """Turn each pair of a head's first and second half by its position's angle."""
    first, second = x.chunk(2, -1)
    return torch.cat(
        [first * at.cosine - second * at.sine, second * at.cosine + first * at.sine], -1
    )
