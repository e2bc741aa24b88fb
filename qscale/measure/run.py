"""Measure a checkpoint under quantizer settings, one table row each, kept as soon as it is done.

Curvature of the full-precision model comes first and goes to a side table, then the model's own
losses, then each setting in turn. A run that was stopped picks up where it was.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from qscale import table
from qscale.checkpoint import TRAINING_COLUMNS, training_metadata
from qscale.errors import QscaleError
from qscale.measure.curvature import ggn_trace, grad_norm, hessian_trace, quadratic_delta
from qscale.measure.loss import Comparison, Reference, compare, mean_and_se, reference
from qscale.measure.store import (
    Curvature,
    append,
    load_curvature,
    read_rows,
    row_key,
    save_curvature,
)
from qscale.measure.subject import Subject, open_subject
from qscale.measure.weights import (
    fake_quantized,
    ragged,
    sqnr_db,
    squared_errors,
    squared_norms,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import pandas as pd

    from qscale.quantize.setting import Setting
    from qscale.text import Bos

    Progress = Callable[[str, float, float | None], None]

OUTCOMES = (
    "loss_fp",
    "loss_fp_se",
    "loss_q",
    "delta_loss",
    "delta_loss_se",
    "relative_delta",
    "kl",
    "kl_se",
    "top1_agreement",
)
"""Columns that are null where a quantized model has no finite loss, but for its own."""

EIGHT_BIT_LIMIT = 0.05
"""Nats per token. Published 8-bit losses stay well below; above, something else is broken."""


@dataclass(frozen=True, slots=True)
class Probing:
    """Effort spent on curvature.

    Parameters
    ----------
    num_probes
        Probes of the Gauss-Newton trace, at least 2.
    hessian_rtol
        Relative standard error of the Hessian trace to stop at.
    max_hessian_probes
        Probes of the Hessian trace to stop at in any case, at least 2.
    seed
        Determines the probes.

    Raises
    ------
    QscaleError
        If a value is impossible.
    """

    num_probes: int
    hessian_rtol: float
    max_hessian_probes: int
    seed: int

    def __post_init__(self) -> None:
        """Refuse what would fail only after work was done."""
        for name, low in (("num_probes", 2), ("max_hessian_probes", 2), ("seed", 0)):
            if getattr(self, name) < low:
                raise QscaleError(
                    f"{name} must be at least {low}. Got {getattr(self, name)} instead."
                )
        if not 0 < self.hessian_rtol < math.inf:
            raise QscaleError(f"hessian_rtol must be above 0. Got {self.hessian_rtol} instead.")


def measure(
    folder: str | Path,
    text: str | Path,
    out: str | Path,
    *,
    settings: Sequence[Setting],
    context: int | None = None,
    stride: int | None = None,
    bos: Bos = "none",
    probe_windows: int = 16,
    num_probes: int = 6,
    hessian_rtol: float = 0.1,
    max_hessian_probes: int = 100,
    max_windows: int | None = None,
    batch_windows: int = 8,
    seed: int = 0,
    device: str = "cpu",
    metadata: Mapping[str, Any] | None = None,
    force: bool = False,
    on_progress: Progress | None = None,
) -> pd.DataFrame:
    """Measure what the table does not hold yet, and return the rows that were asked for.

    Parameters
    ----------
    folder
        Hugging Face checkpoint folder.
    text
        UTF-8 text file for evaluation and curvature.
    out
        Measurement table to append to, ``.csv`` or ``.parquet``. Curvature by matrix goes to
        ``<out>.matrices.parquet`` beside it.
    settings
        Quantizer settings.
    context, stride, bos, probe_windows, max_windows
        Protocol; see :func:`qscale.measure.subject.open_subject`.
    num_probes
        Probes of the Gauss-Newton trace, one backward pass over the probe windows each.
    hessian_rtol, max_hessian_probes
        Relative standard error of the Hessian trace to stop at, and the probes to stop at anyway.
    batch_windows
        Evaluation windows in one forward pass; changes speed and memory only.
    seed
        Determines the probes.
    device
        Where the model runs.
    metadata
        Training metadata by column name; takes precedence over the checkpoint's sidecar.
    force
        Measure also what the table holds, and replace it.
    on_progress
        Called with the name of the stage, the work done and, where known, the work in all.

    Returns
    -------
    pandas.DataFrame
        One row for each setting, in their order.

    Raises
    ------
    QscaleError
        If the checkpoint, the text, the table or an option cannot be used; nothing is written.
    """
    out = Path(out)
    report = on_progress or (lambda *_: None)
    probing = Probing(num_probes, hessian_rtol, max_hessian_probes, seed)
    if batch_windows < 1:
        raise QscaleError(f"batch_windows must be at least 1. Got {batch_windows} instead.")
    stated = training_metadata(metadata or {}, "metadata")
    done = {row_key(row): row for row in read_rows(out)}
    subject = open_subject(
        folder,
        text,
        context=context,
        stride=stride,
        bos=bos,
        probe_windows=probe_windows,
        max_windows=max_windows,
        device=device,
    )
    shared = _subject_columns(subject, stated)
    wanted = {row_key(shared | setting.columns()): setting for setting in settings}
    missing = {key: s for key, s in wanted.items() if force or key not in done}
    if missing:
        curvature = _curvature(subject, out, probing, report, force=force)
        full = reference(
            subject.checkpoint.model,
            subject.evaluation,
            batch_windows=batch_windows,
            on_windows=_counter(report, "full precision", len(subject.evaluation)),
        )
    for number, (key, setting) in enumerate(missing.items(), start=1):
        stage = f"setting {number} of {len(missing)}"
        with fake_quantized(subject.weights, setting):
            outcome = compare(
                subject.checkpoint.model,
                full,
                batch_windows=batch_windows,
                on_windows=_counter(report, stage, len(full.windows)),
            )
        done[key] = (
            shared
            | setting.columns()
            | _weight_columns(subject, setting, curvature)
            | _outcome_columns(subject, setting, full, outcome)
        )
        append(out, done[key])
    return table.check(table.from_rows([done[key] for key in wanted]), str(out))


def _counter(report: Progress, stage: str, total: float | None) -> Callable[[float], None]:
    """Return a function that adds to the work done in a stage and reports it."""
    done = 0.0
    report(stage, done, total)

    def add(amount: float) -> None:
        nonlocal done
        done += amount
        report(stage, done, total)

    return add


def _curvature(
    subject: Subject, out: Path, probing: Probing, report: Progress, *, force: bool
) -> Curvature:
    """Take curvature from the side table, or measure it and put it there."""
    shared = {
        "checkpoint": subject.checkpoint.description.checkpoint,
        "protocol": subject.evaluation.protocol.id,
        **asdict(probing),
    }
    names = list(subject.weights)
    found = None if force else load_curvature(out, names, shared)
    if found is None:
        found = _measure_curvature(subject, probing, report)
        norms = squared_norms(subject.weights)
        columns: dict[str, list[Any]] = {
            "rows": [rows for rows, _ in subject.shapes],
            "columns": [columns for _, columns in subject.shapes],
            "n": [subject.sizes[name] for name in names],
            "weight_norm": [math.sqrt(norms[name]) for name in names],
        }
        save_curvature(out, found, shared, columns)
    return found


def _measure_curvature(subject: Subject, probing: Probing, report: Progress) -> Curvature:
    """Estimate the traces of every matrix's block, and the gradient's norm, on the probe windows.

    Windows go through one by one, which is where the estimators are least noisy.
    """
    model, names = subject.checkpoint.model, list(subject.weights)
    ids = torch.from_numpy(subject.probe.ids)
    return Curvature(
        ggn=ggn_trace(
            model,
            ids,
            names,
            num_probes=probing.num_probes,
            seed=probing.seed,
            on_probe=_counter(report, "Gauss-Newton trace", probing.num_probes),
        ),
        hessian=hessian_trace(
            model,
            ids,
            names,
            rtol=probing.hessian_rtol,
            min_probes=min(8, probing.max_hessian_probes),
            max_probes=probing.max_hessian_probes,
            seed=probing.seed,
            on_probe=_counter(report, "Hessian trace", None),
        ),
        grad_norm=grad_norm(model, ids, names),
    )


def _subject_columns(subject: Subject, stated: dict[str, float | str]) -> dict[str, Any]:
    """Columns that all settings share and that need no computation."""
    description = subject.checkpoint.description
    return {
        **dict.fromkeys(TRAINING_COLUMNS),
        "source": "qscale measure",
        **description.training,
        **stated,
        "checkpoint": description.checkpoint,
        "protocol": subject.evaluation.protocol.id,
        "n_params": float(description.n_params),
        "n_params_total": float(description.n_params_total),
        "method_kind": "ptq",
        "n_quantized": float(len(subject.weights)),
        "scored_tokens": float(subject.evaluation.protocol.scored_tokens),
    }


def _weight_columns(subject: Subject, setting: Setting, curvature: Curvature) -> dict[str, Any]:
    """Columns that follow from the weights, the setting and the curvature."""
    signal = sum(squared_norms(subject.weights).values())
    errors = squared_errors(subject.weights, setting)
    predicted, predicted_se = quadratic_delta(curvature.ggn, errors, subject.sizes)
    noise = sum(errors.values())
    sqnr = sqnr_db(signal, noise)
    return {
        "bits_per_weight": setting.bits_per_weight(subject.shapes),
        "n_ragged": float(ragged(subject.weights, setting)),
        "weight_norm": math.sqrt(signal),
        "weight_rms": math.sqrt(signal / sum(subject.sizes.values())),
        "quantization_noise": noise,
        "sqnr_db": sqnr if math.isfinite(sqnr) else None,
        "quadratic_delta": predicted,
        "quadratic_delta_se": predicted_se,
        "grad_norm": curvature.grad_norm,
        "ggn_trace": curvature.ggn.total,
        "ggn_trace_se": curvature.ggn.se,
        "hessian_trace": curvature.hessian.total,
        "hessian_trace_se": curvature.hessian.se,
        "curvature_tokens": float(curvature.ggn.tokens),
        "backward_passes": float(curvature.ggn.backward_passes),
    }


def _outcome_columns(
    subject: Subject, setting: Setting, full: Reference, outcome: Comparison
) -> dict[str, Any]:
    """Losses, their differences with standard errors, and whether the row is usable."""
    counts = full.counts
    loss_fp, loss_fp_se = mean_and_se(full.nll, counts)
    columns: dict[str, Any] = dict.fromkeys(OUTCOMES) | {
        "loss_fp": loss_fp,
        "loss_fp_se": _known(loss_fp_se),
    }
    bad = np.flatnonzero(~np.isfinite(outcome.nll))
    if len(bad):
        reason = f"the loss of evaluation window {bad[0]} is {outcome.nll[bad[0]]}"
        return columns | {"status": "nonfinite", "status_reason": reason}
    loss_q, _ = mean_and_se(outcome.nll, counts)
    delta, delta_se = mean_and_se(outcome.nll - full.nll, counts)
    kl, kl_se = mean_and_se(outcome.kl, counts)
    uniform = math.log(subject.checkpoint.model.get_output_embeddings().weight.shape[0])
    status, reason = _status(setting, loss_q, delta, delta_se, uniform)
    return columns | {
        "loss_q": loss_q,
        "delta_loss": delta,
        "delta_loss_se": _known(delta_se),
        "relative_delta": delta / loss_fp,
        "kl": kl,
        "kl_se": _known(kl_se),
        "top1_agreement": mean_and_se(outcome.agreements, counts)[0],
        "status": status,
        "status_reason": reason or None,
    }


def _status(
    setting: Setting, loss_q: float, delta: float, delta_se: float, uniform: float
) -> tuple[str, str]:
    """Judge a finite outcome: status and, unless it is ok, the reason."""
    if loss_q >= uniform:
        return "collapsed", f"loss_q is {loss_q:.4g}, a uniform guess has {uniform:.4g}"
    if setting.bits == 8 and delta > max(EIGHT_BIT_LIMIT, 3 * delta_se):
        return "degraded", f"8 bits raise the loss by {delta:.3g}; is the checkpoint intact?"
    return "ok", ""


def _known(value: float) -> float | None:
    """Turn the NaN of an error that one window cannot have into a null."""
    return None if math.isnan(value) else value
