"""The sweep's second task: both ends of a checkpoint's Hessian spectrum; see spectrum.toml."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import torch
from measuring import PROTOCOL

from qscale.measure.curvature.spectrum import top_eigenvalues
from qscale.measure.subject import open_subject

RTOL = 1e-3
"""Residual over the largest magnitude that an eigenvalue is sought to."""


def measure_spectrum(params: dict[str, Any], scratch: Path) -> dict[str, pd.DataFrame]:
    """Find the largest and the smallest eigenvalue on the windows that the trace is measured on.

    Parameters
    ----------
    params
        ``checkpoint``, its run and name; ``checkpoints`` and ``texts``, folders that start from
        where the sweep is run; ``seed`` of the first vector.
    scratch
        Not used.

    Returns
    -------
    dict
        One row. Eigenvalues are of the mean loss over a token, per squared unit of weight, over
        the matrices that are quantized; residuals are in the same unit and bound the distance to
        the nearest eigenvalue.
    """
    del scratch
    subject = open_subject(
        Path(params["checkpoints"]) / params["checkpoint"],
        Path(params["texts"]) / "books.txt",
        **{name: PROTOCOL[name] for name in ("context", "probe_windows", "max_windows")},
    )
    ids = torch.from_numpy(subject.probe.ids)
    row = {"checkpoint": params["checkpoint"]}
    for which, column in (("largest", "hessian_top"), ("smallest", "hessian_bottom")):
        found = top_eigenvalues(
            subject.checkpoint.model, ids, list(subject.weights), 1,
            which=which, rtol=RTOL, batch_windows=len(ids), seed=params["seed"],
        )  # fmt: skip
        row |= {column: found.values[0], f"{column}_residual": found.residuals[0]}
    return {"rows": pd.DataFrame([row])}
