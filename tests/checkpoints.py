"""Tiny models, a byte tokenizer and text to build checkpoint folders from in tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers

if TYPE_CHECKING:
    from pathlib import Path

LEXICON = (
    "the",
    "of",
    "and",
    "a",
    "to",
    "in",
    "he",
    "was",
    "that",
    "it",
    "his",
    "with",
    "for",
    "not",
)
SIZES = {
    "llama": {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2},
    "gpt2": {"n_embd": 16, "n_inner": 24, "n_layer": 2, "n_head": 4, "n_positions": 32},
    "neox": {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2},
}
HEADS = {"num_attention_heads": 4, "max_position_embeddings": 32}
SPECIAL = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def build_model(architecture: str, **changes: Any) -> Any:
    """Initialise a causal language model over bytes from a fixed seed."""
    sizes = {"vocab_size": 256, **SIZES[architecture], **SPECIAL, **changes}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if architecture == "gpt2":
            return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes))
        if architecture == "neox":
            return hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**HEADS, **sizes))
        return hf.LlamaForCausalLM(hf.LlamaConfig(num_key_value_heads=2, **HEADS, **sizes))


FAMILIES = {
    "llama": (hf.LlamaForCausalLM, hf.LlamaConfig, {}),
    "mistral": (hf.MistralForCausalLM, hf.MistralConfig, {"head_dim": 4}),
    "qwen2": (hf.Qwen2ForCausalLM, hf.Qwen2Config, {}),
    "qwen3": (hf.Qwen3ForCausalLM, hf.Qwen3Config, {"head_dim": 4}),
    "olmo2": (hf.Olmo2ForCausalLM, hf.Olmo2Config, {}),
    "gemma": (hf.GemmaForCausalLM, hf.GemmaConfig, {"head_dim": 4}),
    "gemma3": (hf.Gemma3ForCausalLM, hf.Gemma3TextConfig, {"head_dim": 4}),
    "mixtral": (hf.MixtralForCausalLM, hf.MixtralConfig, {"head_dim": 4, "num_local_experts": 4}),
    "olmoe": (hf.OlmoeForCausalLM, hf.OlmoeConfig, {"num_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": (
        hf.Qwen3MoeForCausalLM,
        hf.Qwen3MoeConfig,
        {
            "head_dim": 4,
            "moe_intermediate_size": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "qwen2-moe": (
        hf.Qwen2MoeForCausalLM,
        hf.Qwen2MoeConfig,
        {
            "moe_intermediate_size": 8,
            "shared_expert_intermediate_size": 24,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "gemma2": (hf.Gemma2ForCausalLM, hf.Gemma2Config, {"head_dim": 4}),
}
"""Families configured as Llama is: model, configuration, what else it needs."""


def build_family(name: str, **changes: Any) -> Any:
    """Initialise a causal language model of one more family over bytes from a fixed seed."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if name == "opt":
            sizes = {"hidden_size": 16, "ffn_dim": 24, "num_hidden_layers": 2, **HEADS, **SPECIAL}
            return hf.OPTForCausalLM(hf.OPTConfig(vocab_size=256, **sizes, **changes))
        if name == "bloom":
            sizes = {"hidden_size": 16, "n_layer": 2, "n_head": 4, **SPECIAL}
            return hf.BloomForCausalLM(hf.BloomConfig(vocab_size=256, **sizes, **changes))
        model, config, extra = FAMILIES[name]
        sizes = {"vocab_size": 256, **SIZES["llama"], **HEADS, **SPECIAL, "num_key_value_heads": 2}
        return model(config(**{**sizes, **extra, **changes}))


def byte_tokenizer(bos: str | None = None) -> Any:
    """Build a tokenizer whose ids are bytes, if wanted with a BOS token behind them."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    alphabet = {chr(b if b in plain else next(spare)): b for b in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos)


def babble(words: int, seed: int) -> str:
    """Write text of words drawn with unequal odds: something a tiny model can learn from."""
    odds = 1 / np.arange(1, len(LEXICON) + 1)
    return " ".join(np.random.default_rng(seed).choice(LEXICON, words, p=odds / odds.sum()))


def train(model: Any, steps: int = 120) -> None:
    """Fit a model to babble, enough that its loss is well below a uniform guess."""
    model.eval()  # without dropout, which would draw from the global generator
    data = torch.tensor(list(babble(2000, seed=1).encode()))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    draw = torch.Generator().manual_seed(2)
    for _ in range(steps):
        starts = torch.randint(len(data) - 24, (16,), generator=draw)
        ids = torch.stack([data[s : s + 24] for s in starts])
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()


def save(model: Any, folder: Path, **options: Any) -> Path:
    """Write a model and a byte tokenizer to a folder."""
    model.save_pretrained(folder, **options)
    byte_tokenizer().save_pretrained(folder)
    return folder
