"""Open a checkpoint together with a text: what every measurement starts from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qscale.errors import TextError
from qscale.model import Checkpoint, load, quantizable
from qscale.quantize.calibrate import require_disjoint
from qscale.text import Bos, Windows, split, spread, windows

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import torch

    from qscale.quantize.mix import Quantizer

DEFAULT_CONTEXT = 512


@dataclass(frozen=True, slots=True)
class Subject:
    """An opened checkpoint and its windows of a text.

    Parameters
    ----------
    checkpoint
        Model, tokenizer and description.
    weights
        Matrices to quantize, by parameter name.
    probe, evaluation
        Windows for curvature and for losses; they share no text.
    """

    checkpoint: Checkpoint
    weights: dict[str, torch.Tensor]
    probe: Windows
    evaluation: Windows

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of each matrix, by parameter name."""
        return {name: (w.shape[0], w.shape[1]) for name, w in self.weights.items()}

    @property
    def sizes(self) -> dict[str, int]:
        """Elements of each matrix, by parameter name."""
        return {name: w.numel() for name, w in self.weights.items()}


def open_subject(
    checkpoint: str | Path,
    text: str | Path,
    *,
    revision: str | None = None,
    context: int | None = None,
    stride: int | None = None,
    bos: Bos = "none",
    probe_windows: int = 16,
    max_windows: int | None = None,
    device: str = "cpu",
) -> Subject:
    """Load a checkpoint, and cut and share out the text.

    Parameters
    ----------
    checkpoint, revision
        Hugging Face folder, ``.gguf`` file or hub id; see :func:`qscale.checkpoint.describe`.
    text
        UTF-8 text file.
    context
        Tokens in a window; None takes the model's longest input, but at most 512.
    stride, bos
        See :func:`qscale.text.windows`.
    probe_windows, max_windows
        See :func:`qscale.text.split`.
    device
        Where the model goes.

    Raises
    ------
    CheckpointError, TextError
        If either cannot be used, or the context is longer than the model allows.
    """
    opened = load(checkpoint, revision=revision, device=device)
    context = usual_context(opened, context)
    found = windows(
        text,
        opened.tokenizer,
        context=context,
        vocab_size=opened.model.get_input_embeddings().weight.shape[0],
        stride=stride,
        bos=bos,
    )
    probe, evaluation = split(found, probe_windows, max_windows=max_windows)
    return Subject(opened, quantizable(opened.model), probe, evaluation)


def calibration_windows(
    subject: Subject, settings: Sequence[Quantizer], text: str | Path | None, samples: int
) -> Windows | None:
    """Cut the text that methods calibrate on; None if no setting needs one.

    Parameters
    ----------
    subject
        The checkpoint and its windows; calibration windows are as long.
    settings
        Quantizer settings.
    text
        UTF-8 text file.
    samples
        Windows to take, evenly spaced over the text.

    Raises
    ------
    TextError
        If a setting needs a text and there is none, or it shares text with the other windows.
    """
    methods = sorted({setting.method for setting in settings if setting.calibrated})
    if not methods:
        return None
    if text is None:
        raise TextError(f"method {methods[0]} needs a text to calibrate on: give --calibration.")
    protocol = subject.evaluation.protocol
    found = calibration_text(
        subject.checkpoint, text, samples, context=protocol.context, bos=protocol.bos
    )
    for others in (subject.probe, subject.evaluation):
        require_disjoint(found.ids, others.ids)
    return found


def calibration_text(
    opened: Checkpoint,
    text: str | Path,
    samples: int,
    *,
    context: int | None = None,
    bos: Bos = "none",
) -> Windows:
    """Cut a text into windows, and take some of them, evenly spaced.

    Raises
    ------
    TextError
        If the text cannot be used, or ``samples`` is below 1.
    """
    if samples < 1:
        raise TextError(f"calibration_samples must be at least 1. Got {samples} instead.")
    found = windows(
        text,
        opened.tokenizer,
        context=usual_context(opened, context),
        vocab_size=opened.model.get_input_embeddings().weight.shape[0],
        bos=bos,
    )
    return found.take(spread(len(found), samples), 0)


def usual_context(opened: Checkpoint, context: int | None) -> int:
    """Return the tokens of a window: as asked, or the model's longest input, but at most 512.

    Raises
    ------
    TextError
        If the context is longer than the model allows.
    """
    longest = opened.description.max_context
    if context is None:
        return min(longest or DEFAULT_CONTEXT, DEFAULT_CONTEXT)
    if longest is not None and context > longest:
        raise TextError(
            f"context must be at most {longest} for {opened.description.path}. "
            f"Got {context} instead."
        )
    return context


def calibration_id(found: Windows) -> str:
    """Name the windows that a method was calibrated on: text, hash, number and length."""
    protocol = found.protocol
    return f"{protocol.text}-{protocol.text_hash}/{len(found)}x{protocol.context}"
