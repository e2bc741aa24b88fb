"""Curvature and quantization loss before and after learning-rate decay, and at random weights.

Catalan-Tatjer et al. (arXiv:2510.06213, section 6) find that trace, top eigenvalue and quantization
error of a 160M model all rise while the learning rate decays. Here are the two shipped checkpoints
of one run, and a random initialisation of their configuration, on the same windows, in about three
minutes::

    python examples/decay.py
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import transformers
from error_growth import CHECKPOINTS, TEXT
from rich.console import Console
from rich.table import Table

from qscale.measure.curvature import ggn_trace, hessian_trace, quadratic_delta
from qscale.measure.curvature.spectrum import top_eigenvalues
from qscale.measure.loss import compare, mean_and_se, reference
from qscale.measure.residual import swapped
from qscale.measure.subject import open_subject
from qscale.measure.weights import squared_errors, squared_norms
from qscale.model import quantizable
from qscale.quantize.format import Format
from qscale.quantize.rtn import dequantized

if TYPE_CHECKING:
    from qscale.measure.subject import Subject

FORMAT = Format("int", 4, 64)
MAX_WINDOWS = 64


def measure(model: transformers.PreTrainedModel, subject: Subject) -> dict[str, str]:
    """Measure one model on a subject's windows; errors are over probes, or windows for losses."""
    weights = quantizable(model)
    ids, names = torch.from_numpy(subject.probe.ids), list(weights)
    ggn = ggn_trace(model, ids, names)
    hessian = hessian_trace(model, ids, names, rtol=0.03)
    top = top_eigenvalues(model, ids, names, 1)
    full = reference(model, subject.evaluation)
    with swapped(model, dequantized(weights, FORMAT)):
        moved = compare(model, full)
    sizes = {name: w.numel() for name, w in weights.items()}
    predicted = quadratic_delta(ggn, squared_errors(weights, FORMAT), sizes)
    return {
        "loss_fp": written(*mean_and_se(full.nll, full.counts)),
        "ggn_trace": written(ggn.total, ggn.se),
        "hessian_trace": written(hessian.total, hessian.se),
        "hessian_top": written(top.values[0], math.nan),
        "weight_norm": written(math.sqrt(sum(squared_norms(weights).values())), math.nan),
        "delta_loss": written(*mean_and_se(moved.nll - full.nll, full.counts)),
        "quadratic_delta": written(*predicted),
    }


def written(value: float, se: float) -> str:
    """Write a value with its standard error, where it has one."""
    return f"{value:.4g}" + (f" ± {se:.2g}" if math.isfinite(se) else "")


def main() -> None:
    """Print one column for each model."""
    found = {}
    for name in ("stable", "decayed"):
        subject = open_subject(CHECKPOINTS / f"tiny-wsd-{name}", TEXT, max_windows=MAX_WINDOWS)
        found[name] = measure(subject.checkpoint.model, subject)
    torch.manual_seed(0)
    config = subject.checkpoint.model.config
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    found["random"] = measure(model.eval(), subject)
    drawn = Table("", *found, title=f"RTN {FORMAT.bits} bits, groups of {FORMAT.group_size}")
    for row in found["random"]:
        drawn.add_row(row, *(column[row] for column in found.values()))
    Console(width=100).print(drawn)


if __name__ == "__main__":
    main()
