"""Which matrices a quantizer hurts: the loss increase that each one alone costs, ranked."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from scipy.stats import spearmanr

from qscale import table
from qscale.atomic import check_place
from qscale.errors import QscaleError, TableError
from qscale.measure.forms import quadratic_forms
from qscale.measure.job import counter
from qscale.measure.loss import compare, mean_and_se, reference
from qscale.measure.residual import swapped
from qscale.measure.subject import calibration_id, calibration_windows, open_subject
from qscale.quantize.activations import quantized_inputs
from qscale.quantize.apply import apply

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from qscale.measure.job import Progress
    from qscale.measure.loss import Reference
    from qscale.measure.subject import Subject
    from qscale.quantize.mix import Quantizer
    from qscale.text import Bos

KEY = ("checkpoint", "protocol", "spec", "calibration")
MEASURED = ("delta_loss", "delta_loss_se", "kl", "kl_se")


@dataclass(frozen=True, slots=True, eq=False)
class Sensitivity:
    """What quantizing one matrix at a time costs, and all of them together.

    Parameters
    ----------
    matrices
        One row for each quantized matrix, the one with the largest ``gauss_newton_delta`` first:

        - ``matrix``, its number of weights ``n``, nominal ``bits`` and stored ``bits_per_weight``;
        - ``squared_error``: ``||W - Q(W)||^2``;
        - ``quadratic_delta``: half the mean curvature of its weights times the squared error;
        - ``gauss_newton_delta``: half the Gauss-Newton form of the error itself, and ``share`` of
          its sum over matrices;
        - ``delta_loss`` and ``kl``, if measured: with that matrix alone quantized.

        Costs are in nats per token, each with a standard error ``_se``: of predictions over probe
        windows and probes, of what is measured over evaluation windows.
    joint
        The same costs with all matrices quantized at once.
    names
        Parameter names of all of the model's matrices, in its order; a mix may leave some alone.
    """

    matrices: pd.DataFrame
    joint: dict[str, float]
    names: tuple[str, ...]

    def agreement(self, predicted: str, measured: str) -> float:
        """Spearman's rank correlation of two columns over matrices; NaN below three matrices."""
        if len(self.matrices) < 3:
            return math.nan
        return float(spearmanr(self.matrices[predicted], self.matrices[measured]).statistic)


def sensitivity(
    checkpoint: str | Path,
    text: str | Path,
    out: str | Path,
    *,
    setting: Quantizer,
    measured: bool = True,
    calibration: str | Path | None = None,
    calibration_samples: int = 64,
    revision: str | None = None,
    context: int | None = None,
    bos: Bos = "none",
    probe_windows: int = 16,
    num_probes: int = 6,
    max_windows: int | None = None,
    batch_windows: int = 8,
    seed: int = 0,
    device: str = "cpu",
    force: bool = False,
    on_progress: Progress | None = None,
) -> Sensitivity:
    r"""Rank the matrices of a model by what quantizing each costs, predicted and measured.

    To second order quantizing one matrix raises the mean KL divergence from the full-precision
    model by :math:`\tfrac12 \epsilon_l^T G_{ll} \epsilon_l`, with :math:`G` the Gauss-Newton matrix
    of the loss (Martens, arXiv:1412.1193, section 9), and the loss by as much and the gradient's
    part. A few backward passes predict that for all matrices; measuring it takes one forward pass
    over the evaluation windows for each.

    Parameters
    ----------
    checkpoint, text, revision, context, bos, probe_windows, max_windows, device
        See :func:`qscale.measure.subject.open_subject`.
    out
        Table to write, ``.csv`` or ``.parquet``, again after each matrix. What an earlier call
        measured there under the same setting is not measured again.
    setting
        How to quantize. Where activations are rounded, so are those that the matrix reads; the
        predictions are of weights alone.
    measured
        Whether to measure, or to predict only.
    calibration, calibration_samples
        See :func:`qscale.measure.subject.calibration_windows`.
    num_probes
        Backward passes over the probe windows, at least 2.
    batch_windows
        Evaluation windows in one forward pass.
    seed
        Determines the probes.
    force
        Measure again what the table holds.
    on_progress
        Called with the stage, work done in it, and all its work or None.

    Raises
    ------
    QscaleError
        If the checkpoint, the text, the table or an option cannot be used.
    """
    out = Path(out)
    check_place(out)
    table.check_path(out)
    for name, count, low in (("num_probes", num_probes, 2), ("batch_windows", batch_windows, 1)):
        if count < low:
            raise QscaleError(f"{name} must be at least {low}. Got {count} instead.")
    report = on_progress or (lambda *_: None)
    known = _read(out) if out.exists() and not force else None
    subject = open_subject(
        checkpoint,
        text,
        revision=revision,
        context=context,
        bos=bos,
        probe_windows=probe_windows,
        max_windows=max_windows,
        device=device,
    )
    chosen = calibration_windows(subject, [setting], calibration, calibration_samples)
    key: dict[str, Any] = {
        "checkpoint": subject.checkpoint.description.checkpoint,
        "protocol": subject.evaluation.protocol.id,
        "spec": str(setting),
        "calibration": None if chosen is None else calibration_id(chosen),
    }
    setting.columns(subject.shapes)  # a mix that does not fit the model is refused before any work
    if known is not None:
        _require_same(known, key, out)
    quantized = apply(
        subject.checkpoint.model,
        subject.weights,
        setting,
        None if chosen is None else torch.from_numpy(chosen.ids),
        on_block=lambda done, total: report("quantizing", done, total),
    ).weights
    ticks = counter(report, "Gauss-Newton forms", num_probes)
    found = predicted(subject, setting, quantized, num_probes=num_probes, seed=seed, on_probe=ticks)
    frame = found.matrices.assign(**key)
    if known is not None and set(MEASURED) <= set(known):
        frame = frame.join(known.set_index("matrix")[list(MEASURED)], on="matrix")
    table.write(frame, out)
    if not measured:
        return Sensitivity(frame, found.joint, found.names)
    full = reference(
        subject.checkpoint.model,
        subject.evaluation,
        batch_windows=batch_windows,
        on_windows=counter(report, "full precision", len(subject.evaluation)),
    )

    def cost(*names: str) -> dict[str, float]:
        some = {name: quantized[name] for name in names}
        return costs(subject, setting, some, full, batch_windows=batch_windows)

    joint = cost(*frame["matrix"])
    for name in MEASURED:
        frame[name] = frame.get(name, math.nan)
    lacking = frame.index[frame["kl"].isna()]
    for done, row in enumerate(lacking):
        report("one matrix at a time", done, len(lacking))
        for name, value in cost(frame.loc[row, "matrix"]).items():
            frame.loc[row, name] = value
        table.write(frame, out)
    return Sensitivity(frame, found.joint | joint, found.names)


def predicted(
    subject: Subject,
    setting: Quantizer,
    quantized: Mapping[str, torch.Tensor],
    *,
    num_probes: int = 6,
    seed: int = 0,
    on_probe: Callable[[float], None] | None = None,
) -> Sensitivity:
    """Predict from curvature what quantizing each matrix costs.

    Parameters
    ----------
    subject
        The checkpoint and its windows.
    setting
        What the matrices were quantized by.
    quantized
        Dequantized matrices by parameter name.
    num_probes, seed, on_probe
        See :func:`qscale.measure.forms.quadratic_forms`.
    """
    formats = {name: fmt for name in subject.weights if (fmt := setting.format_of(name))}
    errors = {name: quantized[name] - subject.weights[name].detach() for name in formats}
    forms = quadratic_forms(
        subject.checkpoint.model,
        torch.from_numpy(subject.probe.ids),
        list(errors),
        {"": errors.__getitem__},
        num_probes=num_probes,
        seed=seed,
        on_probe=on_probe,
    )
    isotropic, along = forms.isotropic_each(""), forms.block_diagonal_each("")
    rows = [
        {
            "matrix": name,
            "n": subject.sizes[name],
            "bits": float(fmt.bits),
            "bits_per_weight": fmt.bits_per_weight([subject.shapes[name]]),
            "squared_error": squares,
            "quadratic_delta": isotropic[name].value,
            "quadratic_delta_se": isotropic[name].se,
            "gauss_newton_delta": along[name].value,
            "gauss_newton_delta_se": along[name].se,
        }
        for (name, fmt), squares in zip(formats.items(), forms.squared_errors[0], strict=True)
    ]
    frame = pd.DataFrame(rows).sort_values("gauss_newton_delta", ascending=False, kind="stable")
    total = frame["gauss_newton_delta"].sum()
    frame["share"] = frame["gauss_newton_delta"] / total if total else math.nan
    one, whole = forms.isotropic(""), forms.full("")
    joint = {
        "quadratic_delta": one.value,
        "quadratic_delta_se": one.se,
        "gauss_newton_delta": whole.value,
        "gauss_newton_delta_se": whole.se,
    }
    return Sensitivity(frame.reset_index(drop=True), joint, tuple(subject.weights))


def costs(
    subject: Subject,
    setting: Quantizer,
    quantized: Mapping[str, torch.Tensor],
    full: Reference,
    *,
    batch_windows: int = 8,
) -> dict[str, float]:
    """Measure the model with some of its matrices quantized: loss increase and KL, with errors.

    What is not finite is NaN.
    """
    model = subject.checkpoint.model
    read = [name for name in quantized if setting.format_of(name)]
    with swapped(model, quantized), quantized_inputs(model, read, setting.activations):
        found = compare(model, full, batch_windows=batch_windows)
    values = (*mean_and_se(found.nll - full.nll, full.counts), *mean_and_se(found.kl, full.counts))
    finite = (value if math.isfinite(value) else math.nan for value in values)
    return dict(zip(MEASURED, finite, strict=True))


def _read(out: Path) -> pd.DataFrame:
    """Read what an earlier call wrote."""
    frame = table.read(out)
    if not {"matrix", *KEY[:-1]} <= set(frame):
        raise TableError(
            f"{out}: exists and is not a table of qscale sensitivity. Choose another output."
        )
    return frame


def _require_same(known: pd.DataFrame, key: Mapping[str, Any], out: Path) -> None:
    """Refuse to go on with a table of something else."""
    for name, value in key.items():
        old = known[name].iloc[0] if name in known else None
        if (None if pd.isna(old) else old) != value:
            raise TableError(
                f"{out}: holds {name} {old}, not {value}. Choose another output, or --force."
            )
