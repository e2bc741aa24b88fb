"""Measure a checkpoint under quantizer settings, one table row each, kept as soon as it is done.

Features of the full-precision model come first and go to side tables, then the model's own losses,
then each setting in turn. A run that was stopped picks up where it was.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from qscale import table
from qscale.errors import CheckpointError, QscaleError
from qscale.measure import features as measuring
from qscale.measure.job import Job, Probing, counter, measured
from qscale.measure.loss import reference
from qscale.measure.rows import subject_columns
from qscale.measure.store import read_rows, row_key
from qscale.measure.subject import calibration_id, calibration_windows, open_subject
from qscale.provenance import Statement, Training, combine, training_metadata
from qscale.quantize.save import FACTS
from qscale.text import adds_bos

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import pandas as pd

    from qscale.measure.job import Progress
    from qscale.measure.subject import Subject
    from qscale.quantize.mix import Quantizer
    from qscale.text import Bos, Windows

DEFAULT_FEATURES = ("curvature", "weights")


def measure(
    checkpoint: str | Path,
    text: str | Path,
    out: str | Path,
    *,
    settings: Sequence[Quantizer],
    features: Sequence[str] = DEFAULT_FEATURES,
    revision: str | None = None,
    calibration: str | Path | None = None,
    calibration_samples: int = 64,
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
    on_note: Callable[[str], None] | None = None,
    on_row: Callable[[Mapping[str, Any]], None] | None = None,
) -> pd.DataFrame:
    """Measure what the table does not hold yet, and return the rows that were asked for.

    Parameters
    ----------
    checkpoint, revision
        Hugging Face folder, ``.gguf`` file or hub id; see :func:`qscale.checkpoint.describe`.
    text
        UTF-8 text file for evaluation and curvature.
    out
        Measurement table to append to, ``.csv`` or ``.parquet``. Side tables lie beside it:
        curvature by matrix in ``<out>.matrices.parquet``, and so on.
    settings
        Quantizer settings.
    features
        Names of features, among `qscale.measure.features.FEATURES`.
    calibration, calibration_samples
        UTF-8 text file that GPTQ calibrates on, which must share no text with the other, and the
        number of windows to take, evenly spaced.
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
        Training metadata by column name; takes precedence over what the checkpoint says.
    force
        Measure also what the table holds, and replace it.
    on_progress
        Called with the name of the stage, the work done and, where known, the work in all.
    on_note
        Called with sentences that a user should read.
    on_row
        Called with each row that was asked for as soon as the table holds all of it, those that it
        held before first.

    Returns
    -------
    pandas.DataFrame
        One row for each setting, in their order.

    Raises
    ------
    QscaleError
        If the checkpoint, the text, the table or an option cannot be used. Nothing is written if
        this is known before the work; rows measured before are kept in any case.
    """
    out = Path(out)
    report = on_progress or (lambda *_: None)
    note = on_note or (lambda _: None)
    tell = on_row or (lambda _: None)
    probing = Probing(num_probes, hessian_rtol, max_hessian_probes, seed)
    asked = measuring.parse(features)
    if batch_windows < 1:
        raise QscaleError(f"batch_windows must be at least 1. Got {batch_windows} instead.")
    stated = training_metadata(metadata or {}, "metadata")
    done = {row_key(row): row for row in read_rows(out)}
    subject = open_subject(
        checkpoint,
        text,
        revision=revision,
        context=context,
        stride=stride,
        bos=bos,
        probe_windows=probe_windows,
        max_windows=max_windows,
        device=device,
    )
    training = combine((Statement("options", stated), *subject.checkpoint.description.statements))
    _check_rates(training)
    for sentence in (*training.remarks, _origins(training), *_cautions(subject, bos)):
        note(sentence)
    if any(setting.activations for setting in settings):
        note("Rounded activations count in losses and KL; other features are of the weights alone.")
    shared = subject_columns(subject, training.values)
    calibration_text = calibration_windows(subject, settings, calibration, calibration_samples)
    wanted = {
        row_key(
            shared | setting.columns(subject.shapes) | _calibrated(setting, calibration_text)
        ): setting
        for setting in settings
    }
    todo = {
        key: setting
        for key, setting in wanted.items()
        if force or key not in done or not set(asked) <= set(measured(done[key]))
    }
    for key in wanted:
        if key not in todo:
            tell(done[key])
    if todo:
        job = Job(subject, out, asked, seed, report, note, force, calibration_text)
        own = job.of_checkpoint(probing)
        full = reference(
            subject.checkpoint.model,
            subject.evaluation,
            batch_windows=batch_windows,
            on_windows=counter(report, "full precision", len(subject.evaluation)),
        )
    for number, (key, setting) in enumerate(todo.items(), start=1):
        old = {} if force else done.get(key, {})
        stage = f"setting {number} of {len(todo)}"
        done[key] = job.of_setting(shared | old, setting, own, full, stage, batch_windows)
        tell(done[key])
    return table.check(table.from_rows([done[key] for key in wanted]), str(out))


def _calibrated(setting: Quantizer, calibration: Windows | None) -> dict[str, Any]:
    """Name the text that a setting is calibrated on, if it is."""
    used = calibration if setting.calibrated else None
    return {"calibration": None if used is None else calibration_id(used)}


def _check_rates(training: Training) -> None:
    """Raise if the learning rate is above its peak."""
    lr, peak = (training.values.get(name) for name in ("lr", "lr_peak"))
    if isinstance(lr, float) and isinstance(peak, float) and lr > peak:
        raise CheckpointError(
            f"lr must be at most lr_peak. Got {lr:g} by {training.origins['lr']} above {peak:g} by "
            f"{training.origins['lr_peak']}; correct one of them."
        )


def _origins(training: Training) -> str:
    """Say where the training metadata come from."""
    said = [
        f"{name} {training.values[name]} ({origin})" for name, origin in training.origins.items()
    ]
    return f"Training: {', '.join(said) or 'nothing is said of it'}."


def _cautions(subject: Subject, bos: Bos) -> list[str]:
    """Say what of checkpoint and text makes the numbers less than they seem."""
    opened = subject.checkpoint
    cautions = []
    if opened.description.gguf:
        stored = opened.description.storage
        cautions.append(f"Weights are dequantized from {stored}: what they lost is not counted.")
    if (opened.description.folder / FACTS).is_file():
        cautions.append(
            f"{FACTS} says that these weights are quantized already: the loss before is theirs, "
            "and what they lost is not counted."
        )
    if bos == "none" and adds_bos(opened.tokenizer):
        cautions.append("The tokenizer puts a BOS token first by default, the protocol puts none.")
    if not subject.evaluation.protocol.detokenised:
        cautions.append("The text has spaces before its commas and full stops, unlike plain text.")
    return cautions
