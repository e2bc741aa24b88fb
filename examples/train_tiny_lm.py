"""Train a byte-level Llama of about half a million parameters and keep two checkpoints of the run.

The run follows a warmup-stable-decay (WSD) schedule: a constant learning rate, then a linear decay
to zero over the last quarter of the tokens. One checkpoint is saved where the decay begins
(``<out>/tiny-wsd-stable``) and one where it ends (``<out>/tiny-wsd-decayed``), each a Hugging Face
folder with a ``qscale.toml`` that records how it was trained. The two differ only in the decay,
which is what moves quantization error (arXiv:2510.06213).

Any plain text file will do, also compressed with xz or gzip. The shipped checkpoints in
``examples/checkpoints`` were trained on 78.5 MB of 19th-century English books from the public
repository mlschmitt/classic-books-markdown (all titles in the public domain), with Jane Austen,
Oscar Wilde and Charles Darwin kept out as the source of the evaluation text::

    python examples/train_tiny_lm.py books-train.txt.xz --out examples/checkpoints

It takes about a quarter of an hour on two CPU cores.
"""

from __future__ import annotations

import argparse
import gzip
import lzma
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.progress import Progress
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Recipe:
    """One training run; the defaults are those of the shipped checkpoints."""

    tokens: int = 12_000_000
    lr_peak: float = 3e-3
    warmup_share: float = 0.02
    decay_share: float = 0.25
    weight_decay: float = 0.1
    batch_windows: int = 32
    context: int = 256
    seed: int = 0

    @property
    def batch_tokens(self) -> int:
        """Tokens per optimizer step."""
        return self.batch_windows * self.context

    @property
    def steps(self) -> int:
        """Optimizer steps in the whole run."""
        return self.tokens // self.batch_tokens

    @property
    def decay_start(self) -> int:
        """Number of steps taken before the learning rate begins to fall."""
        return round(self.steps * (1 - self.decay_share))

    def lr(self, step: int) -> float:
        """Learning rate of optimizer step ``step``, counted from zero."""
        warmup = max(1, round(self.steps * self.warmup_share))
        left = (self.steps - step) / (self.steps - self.decay_start)
        return self.lr_peak * min((step + 1) / warmup, left, 1.0)


def read_bytes(path: Path) -> torch.Tensor:
    """Read a text file, plain or compressed, as a vector of byte values."""
    opener = {".xz": lzma.open, ".gz": gzip.open}.get(path.suffix, open)
    with opener(path, "rb") as file:
        return torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer whose token ids are the byte values of UTF-8 text."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    alphabet = {chr(b if b in printable else next(spare)): b for b in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def build_model(recipe: Recipe) -> LlamaForCausalLM:
    """Initialise the model: 442,368 parameters in block matrices, 32,768 in tied embeddings."""
    torch.manual_seed(recipe.seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=recipe.context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config)


def optimizer_for(model: PreTrainedModel, recipe: Recipe) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    gains = [p for p in model.parameters() if p.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": gains, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.lr_peak, betas=(0.9, 0.95))


def sidecar(recipe: Recipe, step: int, text: str, name: str = "tiny-llama-bytes") -> str:
    """Describe the checkpoint after ``step`` optimizer steps in the format qscale reads."""
    decayed = max(0, step - recipe.decay_start) / (recipe.steps - recipe.decay_start)
    lr_sum = sum(recipe.lr(s) for s in range(step))
    run = "tiny-wsd" if name == "tiny-llama-bytes" else name
    return f"""# How this checkpoint was trained; read by qscale measure and qscale predict.
[training]
family = "{name}"
run = "{run}-{recipe.lr_peak:g}-seed{recipe.seed}"
tokens = {step * recipe.batch_tokens}
lr_peak = {recipe.lr_peak:g}
lr = {recipe.lr_peak * (1 - decayed):g}
lr_schedule = "wsd"
decay_fraction = {decayed:g}
lr_sum = {lr_sum:.6g}
weight_decay = {recipe.weight_decay:g}
batch_tokens = {recipe.batch_tokens}
optimizer = "adamw"
averaging = "none"
source = "examples/train_tiny_lm.py on {text}"
"""


def save(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path, description: str
) -> None:
    """Write model, tokenizer and sidecar to one folder."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "qscale.toml").write_text(description)


def train(
    model: PreTrainedModel,
    data: torch.Tensor,
    recipe: Recipe,
    at_decay_start: Callable[[], None] = lambda: None,
) -> None:
    """Run the recipe on a vector of token ids, in place."""
    optimizer = optimizer_for(model, recipe)
    draw = torch.Generator().manual_seed(recipe.seed)
    with Progress() as progress:
        task = progress.add_task("training", total=recipe.steps)
        for step in range(recipe.steps):
            if step == recipe.decay_start:
                at_decay_start()
            starts = torch.randint(
                len(data) - recipe.context, (recipe.batch_windows,), generator=draw
            )
            ids = torch.stack([data[s : s + recipe.context] for s in starts]).long()
            for group in optimizer.param_groups:
                group["lr"] = recipe.lr(step)
            loss = model(input_ids=ids, labels=ids).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if step % 50 == 0:
                progress.update(
                    task, description=f"training, loss {loss.item():.3f} nats per token"
                )
            progress.advance(task)


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path, help="training text (.txt, .txt.xz or .txt.gz)")
    parser.add_argument("--out", type=Path, default=Path("checkpoints"), help="folder to write to")
    for name in ("tokens", "lr_peak", "seed"):
        default = getattr(Recipe, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    args = parser.parse_args()
    recipe = Recipe(tokens=args.tokens, lr_peak=args.lr_peak, seed=args.seed)
    data = read_bytes(args.text)
    if len(data) <= recipe.context:
        parser.error(
            f"{args.text} holds {len(data)} bytes; at least {recipe.context + 1} are needed"
        )
    model, tokenizer = build_model(recipe), byte_tokenizer()

    def keep(name: str, step: int) -> None:
        save(model, tokenizer, args.out / name, sidecar(recipe, step, args.text.name))

    train(model, data, recipe, lambda: keep("tiny-wsd-stable", recipe.decay_start))
    keep("tiny-wsd-decayed", recipe.steps)


if __name__ == "__main__":
    main()
