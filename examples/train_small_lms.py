"""Train six small language models of five architectures on which the unfitted prediction is tested.

Each has its own learning rate and, but for the first, a byte-pair vocabulary learned from the
training text; one has more than five million parameters outside its embeddings. A model that is
there already is not trained again, so several processes can share the list::

    python examples/train_small_lms.py books-train.txt.xz --out small

On one CPU core the small ones take about ten minutes each and the large one about an hour.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from train_tiny_lm import Recipe, byte_tokenizer, read_bytes, save, sidecar, train

LEARN_BYTES = 4_000_000
"""Text from which the vocabulary is learned."""


@dataclass(frozen=True)
class Plan:
    """One model: its configuration class, sizes and recipe; a vocabulary of 256 is bytes."""

    config: type[hf.PretrainedConfig]
    sizes: dict[str, Any]
    recipe: Recipe
    vocab: int = 1024


def llama_sizes(hidden: int, inner: int, layers: int, *, tied: bool) -> dict[str, Any]:
    """Sizes under the names that Llama and its relatives use."""
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": tied,
    }


NEOX = {
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "tie_word_embeddings": False,
}
GPT2 = {"n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": 256}

PLANS = {
    "llama-bytes": Plan(
        hf.LlamaConfig, llama_sizes(128, 352, 4, tied=False), Recipe(6_000_000, 2e-3), vocab=256
    ),
    "gpt2-bpe": Plan(hf.GPT2Config, GPT2, Recipe(6_000_000, 3e-3)),
    "neox-bpe": Plan(hf.GPTNeoXConfig, NEOX, Recipe(6_000_000, 1e-3)),
    "qwen3-bpe": Plan(
        hf.Qwen3Config,
        {**llama_sizes(128, 352, 4, tied=True), "head_dim": 32},
        Recipe(6_000_000, 6e-3),
    ),
    "olmo2-bpe": Plan(hf.Olmo2Config, llama_sizes(128, 352, 4, tied=False), Recipe(6_000_000)),
    "llama-6m-bpe": Plan(
        hf.LlamaConfig,
        llama_sizes(288, 768, 6, tied=True),
        Recipe(3_000_000, 2e-3, batch_windows=16),
        vocab=4096,
    ),
}


def bpe_tokenizer(text: bytes, vocab: int) -> hf.PreTrainedTokenizerFast:
    """Learn a byte-level byte-pair vocabulary from the beginning of a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    learner = trainers.BpeTrainer(
        vocab_size=vocab,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text[:LEARN_BYTES].decode(errors="ignore")], learner)
    return hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def encode(text: bytes, tokenizer: hf.PreTrainedTokenizerFast, wanted: int) -> torch.Tensor:
    """Token ids of the beginning of a text, at least ``wanted`` of them if it is long enough."""
    found: list[np.ndarray] = []
    for start in range(0, len(text), 1_000_000):
        if sum(map(len, found)) >= wanted:
            break
        part = text[start : start + 1_000_000].decode(errors="ignore")
        found.append(np.array(tokenizer(part, verbose=False)["input_ids"], dtype=np.int32))
    return torch.from_numpy(np.concatenate(found))


def build(plan: Plan) -> hf.PreTrainedModel:
    """Initialise a model from its recipe's seed."""
    torch.manual_seed(plan.recipe.seed)
    config = plan.config(
        vocab_size=plan.vocab,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **plan.sizes,
        **({} if plan.config is hf.GPT2Config else {"max_position_embeddings": 256}),
    )
    return hf.AutoModelForCausalLM.from_config(config)


def main() -> None:
    """Train what is asked for and not there yet."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path, help="training text (.txt, .txt.xz or .txt.gz)")
    parser.add_argument("--out", type=Path, default=Path("small"), help="folder to write to")
    parser.add_argument("--only", nargs="+", choices=PLANS, default=list(PLANS))
    args = parser.parse_args()
    raw = read_bytes(args.text)
    text = raw.numpy().tobytes()
    for name in args.only:
        if (args.out / name / "model.safetensors").is_file():
            continue
        plan = PLANS[name]
        if plan.vocab == 256:
            tokenizer, data = byte_tokenizer(), raw
        else:
            tokenizer = bpe_tokenizer(text, plan.vocab)
            data = encode(text, tokenizer, plan.recipe.tokens)
        model = build(plan)
        train(model, data, plan.recipe)
        described = sidecar(plan.recipe, plan.recipe.steps, args.text.name, name)
        save(model, tokenizer, args.out / name, described)


if __name__ == "__main__":
    main()
