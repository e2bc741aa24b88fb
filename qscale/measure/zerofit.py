"""Predict quantization loss from curvature and weight noise alone, and score such predictions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pandas as pd
import torch

from qscale.errors import QscaleError
from qscale.measure.curvature import ggn_trace, quadratic_delta
from qscale.measure.subject import open_subject
from qscale.measure.weights import squared_errors
from qscale.table import require

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from qscale.quantize.mix import Quantizer
    from qscale.text import Bos


def zero_fit(
    folder: str | Path,
    text: str | Path,
    *,
    settings: Sequence[Quantizer],
    context: int | None = None,
    stride: int | None = None,
    bos: Bos = "none",
    probe_windows: int = 16,
    num_probes: int = 6,
    seed: int = 0,
    device: str = "cpu",
    on_probe: Callable[[float], None] | None = None,
) -> pd.DataFrame:
    """Predict the loss increase of quantizer settings with nothing fitted and no quantized run.

    A few backward passes over the text's curvature windows serve all settings, of which only the
    squared error of the weights is computed. With the same text and options the prediction is
    that of :func:`qscale.measure.run.measure`.

    Parameters
    ----------
    folder, text, context, stride, bos, probe_windows, device
        See :func:`qscale.measure.subject.open_subject`.
    settings
        Quantizer settings.
    num_probes
        Backward passes over the curvature windows, at least 2.
    seed
        Determines the probes.
    on_probe
        Called with the share of a probe that was just done.

    Returns
    -------
    pandas.DataFrame
        One row for each setting: ``bits``, ``group_size``, ``symmetric``, ``scale_rule``,
        ``bits_per_weight``, ``quadratic_delta`` and ``quadratic_delta_se`` (nats per token),
        ``backward_passes``.

    Raises
    ------
    QscaleError
        If the checkpoint, the text or an option cannot be used.
    """
    if num_probes < 2:
        raise QscaleError(f"num_probes must be at least 2. Got {num_probes} instead.")
    subject = open_subject(
        folder,
        text,
        context=context,
        stride=stride,
        bos=bos,
        probe_windows=probe_windows,
        device=device,
    )
    ggn = ggn_trace(
        subject.checkpoint.model,
        torch.from_numpy(subject.probe.ids),
        list(subject.weights),
        num_probes=num_probes,
        seed=seed,
        on_probe=on_probe,
    )
    rows = []
    for setting in settings:
        errors = squared_errors(subject.weights, setting)
        value, se = quadratic_delta(ggn, errors, subject.sizes)
        columns = setting.columns(subject.shapes)
        rows.append(
            {name: columns[name] for name in ("bits", "group_size", "symmetric", "scale_rule")}
            | {
                "bits_per_weight": setting.bits_per_weight(subject.shapes),
                "quadratic_delta": value,
                "quadratic_delta_se": se,
                "backward_passes": ggn.backward_passes,
            }
        )
    return pd.DataFrame(rows)


@dataclass(frozen=True, slots=True)
class Agreement:
    """How well unfitted predictions meet measured loss increases.

    Parameters
    ----------
    form
        Column that predicts.
    median
        Median of ``|log(prediction / delta_loss)|``; NaN if no row could be used.
    by_bits
        The same for each bit width.
    rows
        Rows used.
    left_out
        Rows of these bit widths left out: status not ok, or ``delta_loss`` within two standard
        errors of zero.
    backward_passes
        Backward passes over the curvature windows that the predictions cost, per checkpoint; 0 if
        the table has none, as along the error alone.
    between
        Lowest and highest bits that were compared.
    """

    form: str
    median: float
    by_bits: dict[float, float]
    rows: int
    left_out: int
    backward_passes: int
    between: tuple[float, float]

    def __str__(self) -> str:
        """Return one sentence for a user."""
        if not self.rows and not self.left_out:
            low, high = self.between
            return f"Zero-fit prediction: no row at {low:g} to {high:g} bits to hold it against."
        if not self.rows:
            return f"Zero-fit prediction: none of {self.left_out} rows is measured well enough."
        widths = ", ".join(f"{value:.2f} at {bits:g}" for bits, value in self.by_bits.items())
        cost = f", for {self.backward_passes} backward passes" if self.backward_passes else ""
        return (
            f"Zero-fit prediction: median |log({self.form} / delta_loss)| {self.median:.2f} "
            f"over {self.rows} rows ({widths} bits; {self.left_out} rows left out, within 2 SE of "
            f"zero or not ok){cost}."
        )


def trusted(frame: pd.DataFrame) -> pd.Series:
    """Return the prediction of ``delta_loss`` to trust for each row, null where there is none.

    Along the error itself (``gauss_newton_delta``) where that was measured. Else the one without
    direction (``quadratic_delta``), but for round-to-nearest and AWQ alone: on seven small models
    it was within about a fifth at 3 and 4 bits there in every format, and several times too high
    for GPTQ, matrix by matrix as in the sum (``examples/zero_fit.py``,
    ``examples/matrix_forms.py``).
    """
    empty = pd.Series(math.nan, index=frame.index)
    along = frame.get("gauss_newton_delta", empty)
    plain = frame.get("quadratic_delta", empty).where(frame["method"].isin(["rtn", "awq"]))
    return along.fillna(plain).astype(float)


def agreement(
    frame: pd.DataFrame, form: str = "quadratic_delta", *, low: float = 3, high: float = 6
) -> Agreement:
    """Compare a prediction with ``delta_loss`` over the rows from ``low`` to ``high`` bits.

    Parameters
    ----------
    frame
        Measurement table.
    form
        Column that predicts: ``quadratic_delta``, which takes errors without direction, or
        ``gauss_newton_delta``, which takes them as they are.
    low, high
        Bit widths to compare at, inclusive: below, the loss is far from quadratic; above, the
        increase is lost in its error.

    Returns
    -------
    Agreement
        Over rows of status ok whose ``delta_loss`` exceeds twice its standard error.

    Raises
    ------
    TableError
        If a column is missing.
    """
    require(frame, ("bits", "delta_loss", form), "table")
    rows = frame[frame["bits"].between(low, high)]
    measurable = rows["delta_loss"] > 2 * rows["delta_loss_se"]
    used = rows[(rows["status"] == "ok") & measurable & (rows[form] > 0)]
    distance = (used[form] / used["delta_loss"]).map(math.log).abs()
    widths = sorted(used["bits"].unique().tolist())
    passes = frame.get("backward_passes", pd.Series(0.0)).fillna(0).max()
    return Agreement(
        form=form,
        median=float(distance.median()),
        by_bits={bits: float(distance[used["bits"] == bits].median()) for bits in widths},
        rows=len(used),
        left_out=len(rows) - len(used),
        backward_passes=int(passes),
        between=(low, high),
    )
