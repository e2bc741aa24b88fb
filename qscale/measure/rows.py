"""Columns of a measured row: of the checkpoint, of the weights under a setting, of the losses."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from qscale.measure.curvature import quadratic_delta
from qscale.measure.loss import Comparison, Reference, bits_per_byte, mean_and_se
from qscale.measure.weights import ragged, sqnr_db, squared_norms
from qscale.provenance import TRAINING_COLUMNS

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from qscale.measure.store import Curvature
    from qscale.measure.subject import Subject
    from qscale.quantize.mix import Quantizer

OUTCOMES = (
    "loss_fp",
    "loss_fp_se",
    "bits_per_byte",
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


def subject_columns(subject: Subject, stated: dict[str, float | str]) -> dict[str, Any]:
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
        "scored_tokens": float(subject.evaluation.protocol.scored_tokens),
    }


def weight_columns(
    subject: Subject, setting: Quantizer, errors: Mapping[str, torch.Tensor]
) -> dict[str, Any]:
    """Columns that follow from the weights and the setting."""
    signal = sum(squared_norms(subject.weights).values())
    noise = sum(squared_norms(errors).values())
    sqnr = sqnr_db(signal, noise)
    formats = [setting.format_of(name) for name in subject.weights]
    return {
        "n_quantized": float(sum(fmt is not None for fmt in formats)),
        "bits_per_weight": setting.bits_per_weight(subject.shapes),
        "n_ragged": float(ragged(subject.weights, setting)),
        "weight_norm": math.sqrt(signal),
        "weight_rms": math.sqrt(signal / sum(subject.sizes.values())),
        "quantization_noise": noise,
        "sqnr_db": sqnr if math.isfinite(sqnr) else None,
    }


def curvature_columns(
    subject: Subject, curvature: Curvature, errors: Mapping[str, torch.Tensor]
) -> dict[str, Any]:
    """Columns that follow from the curvature, and from it and the quantization error."""
    predicted, predicted_se = quadratic_delta(curvature.ggn, squared_norms(errors), subject.sizes)
    return {
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


def outcome_columns(
    subject: Subject, setting: Quantizer, full: Reference, outcome: Comparison
) -> dict[str, Any]:
    """Losses, their differences with standard errors, and whether the row is usable."""
    counts = full.counts
    loss_fp, loss_fp_se = mean_and_se(full.nll, counts)
    per_byte = bits_per_byte(full.nll, full.windows)
    columns: dict[str, Any] = dict.fromkeys(OUTCOMES) | {
        "loss_fp": loss_fp,
        "loss_fp_se": _known(loss_fp_se),
        "bits_per_byte": None if per_byte is None else per_byte[0],
    }
    bad = np.flatnonzero(~np.isfinite(outcome.nll))
    if len(bad):
        reason = f"the loss of evaluation window {bad[0]} is {outcome.nll[bad[0]]}"
        return columns | {"status": "nonfinite", "status_reason": reason}
    loss_q, _ = mean_and_se(outcome.nll, counts)
    delta, delta_se = mean_and_se(outcome.nll - full.nll, counts)
    kl, kl_se = mean_and_se(outcome.kl, counts)
    uniform = math.log(subject.checkpoint.model.get_output_embeddings().weight.shape[0])
    formats = [fmt for fmt in map(setting.format_of, subject.weights) if fmt]
    bits = min(fmt.bits for fmt in formats)
    status, reason = _status(bits, loss_q, delta, delta_se, uniform)
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
    bits: int, loss_q: float, delta: float, delta_se: float, uniform: float
) -> tuple[str, str]:
    """Judge a finite outcome: status and, unless it is ok, the reason."""
    if loss_q >= uniform:
        return "collapsed", f"loss_q is {loss_q:.4g}, a uniform guess has {uniform:.4g}"
    if bits == 8 and delta > max(EIGHT_BIT_LIMIT, 3 * delta_se):
        return "degraded", f"8 bits raise the loss by {delta:.3g}; is the checkpoint intact?"
    return "ok", ""


def _known(value: float) -> float | None:
    """Turn the NaN of an error that one window cannot have into a null."""
    return None if math.isnan(value) else value
