"""Cost of curvature: a Hessian product and a Gauss-Newton probe in units of one gradient.

Everything runs in one process on one core, on a Llama of about a million parameters with random
weights. The marginal cost of a probe is the difference between many probes and few, divided by the
difference of their numbers, so it leaves out the graph that the probes share; the cost with the
graph is that of the larger number. Two other libraries form the same product beside it. Each
figure is the least processor time of several interleaved repeats. For stable ratios, run it alone::

    OMP_NUM_THREADS=1 python benchmarks/curvature_cost.py
"""

from __future__ import annotations

import time
import warnings
from typing import TYPE_CHECKING

import hessian_eigenthings
import pyhessian
import torch
import transformers

from qscale.measure.curvature import ggn_trace, grad_norm, hessian_trace

if TYPE_CHECKING:
    from collections.abc import Callable

REPEATS = 8
FEW, MANY = 2, 6
WINDOWS, CONTEXT = 4, 128


class Logits(torch.nn.Module):
    """Module from token ids to flat logits, as pyhessian wants it."""

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits that predict the scored tokens, shape ``(tokens, vocab)``."""
        return self.model(input_ids=ids).logits[:, :-1].flatten(0, 1)


def build_model() -> transformers.PreTrainedModel:
    """Build a Llama of about a million parameters, with attention that every library can handle."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    return transformers.LlamaForCausalLM(config).eval()


def least_seconds(jobs: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Run the jobs in turn, several times over, and return the least processor time of each."""
    best = dict.fromkeys(jobs, float("inf"))
    for _ in range(REPEATS):
        for name, job in jobs.items():
            start = time.process_time()
            job()
            best[name] = min(best[name], time.process_time() - start)
    return best


def product_jobs(
    model: transformers.PreTrainedModel, ids: torch.Tensor
) -> dict[str, Callable[[], object]]:
    """One Hessian product by each of the other libraries, over all parameters."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using backward.. with create_graph=True")
        kept = pyhessian.hessian(
            Logits(model), torch.nn.CrossEntropyLoss(), (ids, ids[:, 1:].flatten()), cuda=False
        )
    signs = [torch.randint_like(p, 2) * 2 - 1 for p in kept.params]
    operator = hessian_eigenthings.HessianOperator(
        model, [{"input_ids": ids, "labels": ids}], hessian_eigenthings.hf_lm_loss()
    )
    flat = torch.cat([v.flatten() for v in signs])
    return {
        "pyhessian": lambda: pyhessian.utils.hessian_vector_product(
            kept.gradsH, kept.params, signs
        ),
        "hessian-eigenthings": lambda: operator.matvec(flat),
    }


def main() -> None:
    """Print seconds and ratios to one gradient."""
    torch.set_num_threads(1)
    model = build_model()
    ids = torch.randint(512, (WINDOWS, CONTEXT), generator=torch.Generator().manual_seed(0))
    names = [name for name, _ in model.named_parameters()]

    def hessian(probes: int) -> Callable[[], object]:
        return lambda: hessian_trace(
            model, ids, names, min_probes=probes, max_probes=probes, batch_windows=WINDOWS
        )

    def ggn(probes: int) -> Callable[[], object]:
        return lambda: ggn_trace(model, ids, names, num_probes=probes, batch_windows=WINDOWS)

    seconds = least_seconds(
        {
            "gradient": lambda: grad_norm(model, ids, names, batch_windows=WINDOWS),
            **{f"hessian {n}": hessian(n) for n in (FEW, MANY)},
            **{f"ggn {n}": ggn(n) for n in (FEW, MANY)},
            **product_jobs(model, ids),
        }
    )

    def marginal(kind: str) -> float:
        return (seconds[f"{kind} {MANY}"] - seconds[f"{kind} {FEW}"]) / (MANY - FEW)

    rows = {
        "gradient": seconds["gradient"],
        "Hessian product, graph kept": marginal("hessian"),
        f"Hessian probe, mean of {MANY}": seconds[f"hessian {MANY}"] / MANY,
        "  pyhessian, graph kept": seconds["pyhessian"],
        "  hessian-eigenthings": seconds["hessian-eigenthings"],
        "Gauss-Newton probe, graph kept": marginal("ggn"),
        f"Gauss-Newton probe, mean of {MANY}": seconds[f"ggn {MANY}"] / MANY,
    }
    total = sum(p.numel() for p in model.parameters())
    print(f"{total:,} parameters, {WINDOWS} x {CONTEXT} tokens, {torch.get_num_threads()} thread")
    print(f"{'':34}{'seconds':>9}{'gradients':>11}")
    for name, value in rows.items():
        print(f"{name:34}{value:9.4f}{value / seconds['gradient']:11.2f}")


if __name__ == "__main__":
    main()
