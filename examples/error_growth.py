"""How much of the error that quantization puts on hidden states later blocks cancel.

The shipped model before and after learning-rate decay is compared with random initialisations of
its configuration: arXiv 2609.11716 finds large models cancel most of the error once trained and
none at random. The rotation of the LM head's input and its attenuation come beside it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import torch
import transformers

from qscale.measure.head_geometry import head_geometry
from qscale.measure.hidden import error_growth
from qscale.measure.loss import reference
from qscale.measure.residual import swapped
from qscale.measure.subject import open_subject
from qscale.model import quantizable
from qscale.quantize.format import Format
from qscale.quantize.rtn import rtn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from qscale.text import Windows

ROOT = Path(__file__).resolve().parent
CHECKPOINTS = ROOT / "checkpoints"
TEXT = ROOT / "texts" / "austen-wilde-darwin.txt"
FORMAT = Format("int", 4, 64)
RANDOM_SEEDS = range(10)
WINDOWS = 16


def measure(model: PreTrainedModel, windows: Windows) -> dict[str, float | None]:
    """Measure the growth of the error and the geometry of the LM head under `FORMAT`."""
    quantized = {name: rtn(w.detach(), FORMAT) for name, w in quantizable(model).items()}
    growth = error_growth(model, torch.from_numpy(windows.ids), quantized, batch_windows=8)
    full = reference(model, windows)
    with swapped(model, quantized):
        geometry = head_geometry(model, full)
    return growth.columns() | geometry.columns()


def measurements(max_windows: int = WINDOWS) -> pd.DataFrame:
    """Measure the two checkpoints and the random initialisations, one column each."""
    found = {}
    for name in ("stable", "decayed"):
        subject = open_subject(CHECKPOINTS / f"tiny-wsd-{name}", TEXT, max_windows=max_windows)
        found[name] = measure(subject.checkpoint.model, subject.evaluation)
    for seed in RANDOM_SEEDS:
        torch.manual_seed(seed)
        config = subject.checkpoint.model.config
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        found[f"random {seed}"] = measure(model.eval(), subject.evaluation)
    return pd.DataFrame(found, dtype=float)


def main() -> None:
    """Print values with standard errors: over windows, and at random over initialisations."""
    found = measurements()
    values = [name for name in found.index if not name.endswith("_se")]
    random = found.filter(like="random").loc[values]
    shown = pd.DataFrame(index=values)
    for name in ("stable", "decayed"):
        errors = found[name].reindex([f"{value}_se" for value in values])
        shown[name] = with_errors(found.loc[values, name], errors)
    of_random = random.std(axis=1, ddof=1) / np.sqrt(random.shape[1])
    shown[f"random, mean of {random.shape[1]}"] = with_errors(random.mean(axis=1), of_random)
    print(f"RTN {FORMAT.bits} bits, groups of {FORMAT.group_size}, {WINDOWS} windows")
    print(shown.to_string())


def with_errors(values: pd.Series, errors: pd.Series) -> list[str]:
    """Write values with their standard errors, where these are known."""
    pairs = zip(values, errors, strict=True)
    return [f"{v:.4f}" + (f" ± {e:.4f}" if np.isfinite(e) else "") for v, e in pairs]


if __name__ == "__main__":
    main()
