"""The sweep's task: measure one checkpoint of the controlled sweep on two texts; see plan.toml."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from runs import SMALL

from qscale.measure.run import measure
from qscale.quantize.mix import parse_setting

if TYPE_CHECKING:
    from collections.abc import Sequence

    from qscale.quantize.mix import Quantizer

BITS = range(2, 9)
KEPT_TABLES = ("matrices", "weights", "blocks", "errors", "eigenvalues")
PROTOCOL = {"context": 128, "probe_windows": 16, "max_windows": 192, "batch_windows": 32}
EFFORT = {"num_probes": 6, "hessian_rtol": 0.1, "max_hessian_probes": 100}
"""Six probes give the Gauss-Newton trace to about one percent on the probe windows."""


def groups(width: int) -> tuple[str, ...]:
    """Group sizes for one size of model: rows of the smallest have 64 weights."""
    return ("g32", "row") if width == SMALL else ("g32", "g128", "row")


def settings(bits: Sequence[int], sizes: Sequence[str]) -> list[Quantizer]:
    """Round-to-nearest and GPTQ at each bit width and group size."""
    return [
        parse_setting(f"{method} int{b} {size}")
        for method in ("rtn", "gptq")
        for b in bits
        for size in sizes
    ]


def measure_checkpoint(params: dict[str, Any], scratch: Path) -> dict[str, pd.DataFrame]:
    """Measure a checkpoint on held-out books, and at 3 and 4 bits on Python's documentation.

    Parameters
    ----------
    params
        ``checkpoint``, its run and name; ``width`` of the model; ``checkpoints`` and ``texts``,
        folders that start from where the sweep is run; ``seed`` of the probes.
    scratch
        Where the table grows.

    Returns
    -------
    dict
        Rows, and side tables by matrix and block. Features of the quantized model are at 3 and 4
        bits in groups of 32 only.
    """
    out = scratch / "rows.parquet"
    texts = Path(params["texts"])
    sizes = groups(params["width"])

    def on(text: str, wanted: list[Quantizer], features: tuple[str, ...]) -> pd.DataFrame:
        return measure(
            Path(params["checkpoints"]) / params["checkpoint"],
            texts / f"{text}.txt",
            out,
            settings=wanted,
            features=features,
            calibration=texts / "calibration.txt",
            calibration_samples=64,
            seed=params["seed"],
            **PROTOCOL,
            **EFFORT,
        )

    own = ("curvature", "weights", "sharpness")
    on("books", settings(BITS, sizes), own)
    on("books", settings((3, 4), sizes[:1]), (*own, "second_order", "hidden", "head"))
    on("python-docs", settings((3, 4), sizes), ("curvature",))
    prefix = len(out.stem) + 1
    sides = {path.stem[prefix:]: path for path in scratch.glob(f"{out.stem}.*.parquet")}
    kept = {kind: pd.read_parquet(sides[kind]) for kind in KEPT_TABLES if kind in sides}
    return {"rows": pd.read_parquet(out)} | kept
