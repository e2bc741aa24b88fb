"""One measuring job: features of a checkpoint, then each setting's losses and features.

Whatever is done is on disk at once, and what is on disk is not done again.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from qscale.errors import QscaleError
from qscale.measure import features as measuring
from qscale.measure.curvature import ggn_trace, grad_norm, hessian_trace
from qscale.measure.curvature.budget import cost
from qscale.measure.curvature.kronecker import kronecker_factors
from qscale.measure.features import Found, Quantized
from qscale.measure.loss import compare
from qscale.measure.residual import swapped
from qscale.measure.rows import curvature_columns, outcome_columns, weight_columns
from qscale.measure.store import (
    Curvature,
    append,
    load_columns,
    load_curvature,
    save_columns,
    save_curvature,
    save_side,
)
from qscale.measure.subject import calibration_id
from qscale.measure.weights import squared_norms
from qscale.quantize.activations import quantized_inputs
from qscale.quantize.apply import apply

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from qscale.measure.curvature.kronecker import KroneckerFactors
    from qscale.measure.loss import Reference
    from qscale.measure.subject import Subject
    from qscale.quantize.mix import Quantizer
    from qscale.text import Windows

    Progress = Callable[[str, float, float | None], None]

FIRST_PROBES = 2
"""Probes of the Hessian trace's first round on eight windows or more."""


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


@dataclass(frozen=True, slots=True, eq=False)
class OwnFeatures:
    """What was found of the full-precision model: curvature where asked for, and columns."""

    curvature: Curvature | None
    factors: KroneckerFactors | None
    columns: dict[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One call's subject, output and options."""

    subject: Subject
    out: Path
    asked: tuple[str, ...]
    seed: int
    report: Progress
    note: Callable[[str], None]
    force: bool
    calibration: Windows | None

    @property
    def _key(self) -> dict[str, Any]:
        """What side tables tell checkpoints and protocols apart by."""
        return {
            "checkpoint": self.subject.checkpoint.description.checkpoint,
            "protocol": self.subject.evaluation.protocol.id,
        }

    def of_checkpoint(self, probing: Probing) -> OwnFeatures:
        """Measure the full-precision model, or take from the side tables what is there."""
        curvature: Curvature | None = None
        columns: dict[str, Any] = {}
        if "curvature" in self.asked:
            curvature = self._curvature(probing)
        for name in self.asked:
            if name not in measuring.OF_CHECKPOINT:
                continue
            key = self._key | {"feature": name, "seed": self.seed}
            known = None if self.force else load_columns(self.out, key)
            if known is None:
                tick = counter(self.report, name, None)
                found = measuring.OF_CHECKPOINT[name](self.subject, self.seed, tick)
                self._keep(found, {})
                save_columns(self.out, found.columns, key)
                known = found.columns
            columns |= known
        factors = None
        # Experts are slices of one tensor: no layer of their own shows their inputs.
        linear = all(name.endswith(".weight") for name in self.subject.weights)
        if "second_order" in self.asked and not linear:
            self.note("kronecker_delta is left empty: experts have no Kronecker factors.")
        if "second_order" in self.asked and linear:
            ids = torch.from_numpy(self.subject.probe.ids)
            factors = kronecker_factors(
                self.subject.checkpoint.model,
                ids,
                list(self.subject.weights),
                num_probes=probing.num_probes,
                seed=probing.seed,
                on_probe=counter(self.report, "Kronecker factors", probing.num_probes),
            )
        return OwnFeatures(curvature, factors, columns)

    def of_setting(
        self,
        row: dict[str, Any],
        setting: Quantizer,
        own: OwnFeatures,
        full: Reference,
        stage: str,
        batch_windows: int,
    ) -> dict[str, Any]:
        """Complete one row and write it, again after each further feature."""
        subject, model = self.subject, self.subject.checkpoint.model
        quantized, calibrated = self._quantize(setting, stage)
        errors = {name: quantized[name] - w.detach() for name, w in subject.weights.items()}
        row = (
            row
            | setting.columns(subject.shapes)
            | calibrated
            | weight_columns(subject, setting, errors)
            | own.columns
        )
        if own.curvature is not None:
            row |= curvature_columns(subject, own.curvature, errors)
        if row.get("loss_fp") is None:
            read = [name for name in subject.weights if setting.format_of(name)]
            with swapped(model, quantized), quantized_inputs(model, read, setting.activations):
                ticks = counter(self.report, stage, len(full.windows))
                outcome = compare(model, full, batch_windows=batch_windows, on_windows=ticks)
            row |= outcome_columns(subject, setting, full, outcome)
        before = {"curvature", *measuring.OF_CHECKPOINT} & set(self.asked)
        row = _marked(row, *before)
        append(self.out, row)
        lacking = [n for n in self.asked if n in measuring.OF_SETTING and n not in measured(row)]
        for name in lacking:
            if row["status"] != "nonfinite":
                tick = counter(self.report, f"{stage}, {name}", None)
                found = measuring.OF_SETTING[name](
                    subject,
                    Quantized(quantized, errors, full, own.factors, batch_windows),
                    self.seed,
                    tick,
                )
                key = setting.columns(subject.shapes) | {"calibration": row.get("calibration")}
                self._keep(found, key)
                row |= found.columns
            row = _marked(row, name)
            append(self.out, row)
        return row

    def _quantize(
        self, setting: Quantizer, stage: str
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Return dequantized matrices and the columns that a calibration fills."""
        ids = None
        columns: dict[str, Any] = {}
        if setting.calibrated and self.calibration is not None:
            ids = torch.from_numpy(self.calibration.ids)
            columns["calibration"] = calibration_id(self.calibration)
        found = apply(
            self.subject.checkpoint.model,
            self.subject.weights,
            setting,
            ids,
            on_block=lambda done, total: self.report(f"{stage}, calibrating", done, total),
        )
        return found.weights, columns | found.columns

    def _keep(self, found: Found, setting: Mapping[str, Any]) -> None:
        """Write a feature's side tables and pass its notes on."""
        for kind, frame in found.tables.items():
            save_side(self.out, kind, frame, self._key | dict(setting))
        for sentence in found.notes:
            self.note(sentence)

    def _curvature(self, probing: Probing) -> Curvature:
        """Take curvature from the side table, or measure it and put it there."""
        subject, shared = self.subject, self._key | asdict(probing)
        names = list(subject.weights)
        found = None if self.force else load_curvature(self.out, names, shared)
        if found is None:
            found = _measure_curvature(subject, probing, self.report, self.note)
            norms = squared_norms(subject.weights)
            columns: dict[str, list[Any]] = {
                "rows": [rows for rows, _ in subject.shapes.values()],
                "columns": [columns for _, columns in subject.shapes.values()],
                "n": [subject.sizes[name] for name in names],
                "weight_norm": [math.sqrt(norms[name]) for name in names],
            }
            save_curvature(self.out, found, shared, columns)
        return found


def measured(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the features that a row holds."""
    return tuple((row.get("features") or "").split(","))


def _marked(row: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Note in a row that it holds features."""
    held = {*measured(row), *names}
    return dict(row) | {"features": ",".join(n for n in measuring.FEATURES if n in held)}


def counter(report: Progress, stage: str, total: float | None) -> Callable[[float], None]:
    """Return a function that adds to the work done in a stage and reports it."""
    done = 0.0
    report(stage, done, total)

    def add(amount: float) -> None:
        nonlocal done
        done += amount
        report(stage, done, total)

    return add


def _measure_curvature(
    subject: Subject, probing: Probing, report: Progress, note: Callable[[str], None]
) -> Curvature:
    """Estimate the traces of every matrix's block, and the gradient's norm, on the probe windows.

    Windows go through one by one, which is where the estimators are least noisy.
    """
    model, names = subject.checkpoint.model, list(subject.weights)
    ids = torch.from_numpy(subject.probe.ids)
    expected = cost(
        model,
        ids,
        names,
        ggn_probes=probing.num_probes,
        hessian_probes=min(FIRST_PROBES, probing.max_hessian_probes),
    )
    note(f"Curvature will take {expected}, more if the Hessian needs more probes.")
    return Curvature(
        ggn=ggn_trace(
            model,
            ids,
            names,
            num_probes=probing.num_probes,
            seed=probing.seed,
            on_probe=counter(report, "Gauss-Newton trace", probing.num_probes),
        ),
        hessian=hessian_trace(
            model,
            ids,
            names,
            rtol=probing.hessian_rtol,
            max_probes=probing.max_hessian_probes,
            seed=probing.seed,
            on_probe=counter(report, "Hessian trace", None),
        ),
        grad_norm=grad_norm(model, ids, names),
    )
