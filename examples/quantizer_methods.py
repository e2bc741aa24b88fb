"""What GPTQ and AWQ save over rounding to nearest, format by format, on one model.

Without options the shipped model is quantized, calibrated on 32 windows of the text that the
evaluation does not hold; any other folder and calibration text may be given::

    python examples/quantizer_methods.py
    python examples/quantizer_methods.py MODEL --calibration books.txt

Standard errors are over windows. On small models the loss may fall under quantization by chance,
while the divergence from the full-precision model orders methods reliably.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
import torch
from rich.console import Console
from rich.table import Table

from qscale.measure.loss import compare, mean_and_se, reference
from qscale.measure.residual import swapped
from qscale.measure.subject import calibration_windows, open_subject
from qscale.quantize.calibrate import calibrate
from qscale.quantize.rtn import dequantized
from qscale.quantize.setting import Setting

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from qscale.measure.subject import Subject

ROOT = Path(__file__).resolve().parent
CHECKPOINT = ROOT / "checkpoints" / "tiny-wsd-decayed"
TEXT = ROOT / "texts" / "austen-wilde-darwin.txt"
METHODS = ("rtn", "gptq", "awq")
CALIBRATION_WINDOWS = 32


def formats(subject: Subject) -> list[str]:
    """Name the formats; integers have groups of 128, or 64 if some rows are shorter."""
    size = 128 if min(columns for _, columns in subject.shapes.values()) >= 128 else 64
    integers = [f"int{bits} g{size} asym" for bits in (2, 3, 4)]
    return [*integers, "mxint3", "mxint4", "mxfp4", "nvfp4"]


def settings(subject: Subject) -> list[Setting]:
    """Every method with every format."""
    return [Setting.parse(f"{m} {fmt}") for fmt in formats(subject) for m in METHODS]


def calibration_ids(subject: Subject, text: str | Path | None) -> NDArray[np.int64]:
    """Take windows of the calibration text, or those of the evaluation text kept out of it."""
    if text is None:
        return subject.probe.ids
    found = calibration_windows(subject, settings(subject), text, CALIBRATION_WINDOWS)
    assert found is not None
    return found.ids


def quantized(
    subject: Subject, setting: Setting, ids: torch.Tensor
) -> tuple[dict[str, torch.Tensor], str]:
    """Quantize the model; say AWQ's median exponent, or how many rows GPTQ rounded instead."""
    if not setting.calibrated:
        return dequantized(subject.weights, setting.weights), ""
    found = calibrate(subject.checkpoint.model, subject.weights, ids, setting)
    if found.alpha:
        return found.weights, f"alpha {pd.Series(found.alpha).median():.2f}"
    return found.weights, f"rounded {sum(found.rounded.values())}"


def measurements(subject: Subject, ids: torch.Tensor) -> Iterator[dict[str, float | str]]:
    """Yield KL divergence and loss increase of each setting, nats per token."""
    model = subject.checkpoint.model
    full = reference(model, subject.evaluation)
    for setting in settings(subject):
        weights, said = quantized(subject, setting, ids)
        with swapped(model, weights):
            outcome = compare(model, full)
        kl, kl_se = mean_and_se(outcome.kl, full.counts)
        delta, delta_se = mean_and_se(outcome.nll - full.nll, full.counts)
        yield {
            "format": str(setting.weights),
            "bits per weight": setting.bits_per_weight(subject.shapes),
            "method": setting.method,
            "kl": kl,
            "kl_se": kl_se,
            "delta": delta,
            "delta_se": delta_se,
            "found": said,
        }


def show(rows: Sequence[dict[str, float | str]], console: Console) -> None:
    """Print the table, KL also relative to rounding to nearest in the same format."""
    names = ("format", "bits per weight", "method", "KL ± SE", "KL / rtn", "Δloss ± SE", "found")
    drawn = Table(*names, title="Nats per token", title_justify="left")
    frame = pd.DataFrame(rows)
    rounded = frame[frame["method"] == "rtn"].set_index("format")["kl"]
    for row in frame.to_dict("records"):
        drawn.add_row(
            row["format"],
            f"{row['bits per weight']:.3f}",
            row["method"],
            f"{row['kl']:.5f} ± {row['kl_se']:.5f}",
            f"{row['kl'] / rounded[row['format']]:.3f}",
            f"{row['delta']:+.5f} ± {row['delta_se']:.5f}",
            row["found"],
            end_section=row["method"] == METHODS[-1],
        )
    console.print(drawn)


def main() -> None:
    """Quantize, evaluate and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", nargs="?", type=Path, default=CHECKPOINT)
    parser.add_argument("--text", type=Path, default=TEXT, help="text to evaluate on")
    parser.add_argument("--calibration", type=Path, help="text to calibrate on")
    parser.add_argument("--max-windows", type=int, default=100, help="windows to evaluate")
    given = parser.parse_args()
    console = Console(width=120)
    subject = open_subject(
        given.checkpoint,
        given.text,
        probe_windows=CALIBRATION_WINDOWS,
        max_windows=given.max_windows,
    )
    ids = torch.from_numpy(calibration_ids(subject, given.calibration))
    console.print(
        f"{given.checkpoint.name}: {len(subject.weights)} matrices, calibrated on {ids.shape[0]} "
        f"windows of {ids.shape[1]} tokens of {(given.calibration or given.text).name}, evaluated "
        f"on {len(subject.evaluation)} windows, {subject.evaluation.scored.sum()} tokens."
    )
    show(list(measurements(subject, ids)), console)


if __name__ == "__main__":
    main()
