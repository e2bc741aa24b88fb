"""Tiny causal language models of several architectures, briefly trained, in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch
import transformers as hf

if TYPE_CHECKING:
    from collections.abc import Callable

VOCAB = 11
CONTEXT = 6
WINDOWS = 3


@dataclass(frozen=True, slots=True, eq=False)
class Tiny:
    """A model of at most 2,000 parameters, its evaluation windows and its parameter names."""

    model: hf.PreTrainedModel
    windows: torch.Tensor
    names: list[str]


LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": 8,
    "intermediate_size": 10,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
NEOX = {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"}
GPT2 = {
    "vocab_size": VOCAB,
    "n_embd": 8,
    "n_inner": 12,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": CONTEXT,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
}
OPT = {
    "vocab_size": VOCAB,
    "hidden_size": 8,
    "word_embed_proj_dim": 8,
    "ffn_dim": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": CONTEXT,
    "init_std": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

BUILDERS: dict[str, Callable[[], hf.PreTrainedModel]] = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA, tie_word_embeddings=False)),
    "llama-tied": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA, tie_word_embeddings=True)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**LLAMA, tie_word_embeddings=True)),
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2)),
    "neox": lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**NEOX)),
    "opt": lambda: hf.OPTForCausalLM(hf.OPTConfig(**OPT)),
}


def build_tiny(architecture: str) -> Tiny:
    """Build a model from a fixed seed and fit it half-way to other text than it is measured on."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = BUILDERS[architecture]().double().eval()
    draw = torch.Generator().manual_seed(1)
    train, windows = torch.randint(VOCAB, (2, WINDOWS, CONTEXT), generator=draw)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(10):
        optimizer.zero_grad()
        model(input_ids=train, labels=train).loss.backward()
        optimizer.step()
    optimizer.zero_grad()
    return Tiny(model, windows, [name for name, _ in model.named_parameters()])


@pytest.fixture(scope="session")
def build() -> Callable[[str], Tiny]:
    """Build a fresh tiny model by the name of its architecture."""
    return build_tiny
