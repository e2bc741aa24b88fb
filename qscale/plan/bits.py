"""The smallest quantizer setting that keeps a loss tolerance with a stated probability."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy.stats import norm

from qscale.errors import QscaleError
from qscale.table import require_numbers

if TYPE_CHECKING:
    import pandas as pd

    from qscale.fit import Fitted

    Array = np.ndarray

SCALE_BITS = 16  # of one scale, where a table does not say what is stored
_GRID = np.arange(1, 200) / 200  # probabilities at which a predicted distribution is tabulated


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """The settings that were asked about, and the smallest that keeps the tolerance.

    Parameters
    ----------
    settings
        One row for each setting, the fewest ``bits_per_weight`` first: the columns given, the
        predicted median under the name of the target, ``bound`` (what the target stays under with
        the stated confidence), ``probability`` (that it stays within the tolerance) and ``kept``
        (whether the bound is within the tolerance).
    target
        Column that is predicted.
    tolerance
        Largest target that is accepted, in its unit.
    confidence
        Probability of the bound.
    """

    settings: pd.DataFrame
    target: str
    tolerance: float
    confidence: float

    @property
    def chosen(self) -> pd.Series | None:
        """The kept setting of fewest bits per weight; none if no setting is kept."""
        kept = self.settings[self.settings["kept"]]
        return None if kept.empty else kept.iloc[0]


def fewest_bits(
    fit: Fitted,
    frame: pd.DataFrame,
    tolerance: float,
    confidence: float = 0.9,
    *,
    seed: int = 0,
) -> Choice:
    """Find the setting of fewest bits per weight that keeps a tolerance.

    A setting is kept if the one-sided upper prediction bound of a newly measured checkpoint, at the
    stated confidence, is within the tolerance (Meeker, Hahn and Escobar 2017, Statistical
    Intervals, section 2.2). Which setting is chosen depends on what is known of the checkpoint and
    never on what is measured later, so that exact quantiles keep their promise whichever setting
    is chosen; where quantiles err, those that are too low are the likelier to be chosen
    (`qscale.plan.backtest`). The bound of a fit with conformal intervals is the end of a central
    one, so that errors must be as often too low as too high for its promise.

    Parameters
    ----------
    fit
        A fitted law or regression.
    frame
        One row for each setting, with the fit's columns and ``bits_per_weight``.
    tolerance
        Largest target that is accepted, in the target's unit (nats per token for ``delta_loss``).
    confidence
        Probability that the chosen setting's target is within the tolerance, between 0 and 1.
    seed
        Of the draws of a bootstrap fit.

    Raises
    ------
    QscaleError
        If an option is out of its range, or the fit has no intervals.
    TableError
        If a column is missing or null.
    """
    check(tolerance, confidence)
    require_numbers(frame, ["bits_per_weight"], "settings")
    frame = frame.reset_index(drop=True)
    found = fit.quantiles(frame, np.array([0.5, confidence, *_GRID]), "new_checkpoint", seed)
    if np.isnan(found[1]).any():
        raise QscaleError(
            f"{fit.name}: the fit has no interval for some setting, so that no tolerance can be "
            "promised. Fit again with --interval model or sandwich."
        )
    return _choice(frame, fit.target, found, tolerance, confidence)


def fewest_bits_of(predictions: pd.DataFrame, tolerance: float, confidence: float = 0.9) -> Choice:
    """Find the setting of fewest bits per weight that keeps a tolerance, from predictions.

    As `fewest_bits`, of log-normal predictions such as those of a checkpoint's own curvature, alone
    or joined with a law's (`qscale.predict.combine`).

    Parameters
    ----------
    predictions
        One row for each setting: ``bits_per_weight``, ``delta_loss`` (median, nats per token) and
        ``log_sd``, the standard deviation of its logarithm.
    tolerance
        Largest loss increase that is accepted, nats per token.
    confidence
        Probability that the chosen setting's increase is within the tolerance, between 0 and 1.

    Raises
    ------
    QscaleError
        If an option is out of its range, or a median or its spread not above zero.
    TableError
        If a column is missing or null.

    Examples
    --------
    >>> import pandas as pd
    >>> found = pd.DataFrame({"bits_per_weight": [3.125, 4.125], "delta_loss": [0.2, 0.04]})
    >>> fewest_bits_of(found.assign(log_sd=0.3), 0.1).settings["kept"].tolist()
    [False, True]
    """
    check(tolerance, confidence)
    require_numbers(predictions, ["bits_per_weight", "delta_loss", "log_sd"], "predictions")
    frame = predictions.reset_index(drop=True)
    for column in ("delta_loss", "log_sd"):
        if not (frame[column] > 0).all():
            row = int((~(frame[column] > 0)).to_numpy().argmax()) + 1
            raise QscaleError(f"predictions: row {row}, {column} must be above zero.")
    reach = norm.ppf(np.array([0.5, confidence, *_GRID]))[:, None] * frame["log_sd"].to_numpy(float)
    found = frame["delta_loss"].to_numpy(float) * np.exp(reach)
    return _choice(frame, "delta_loss", found, tolerance, confidence)


def _choice(
    frame: pd.DataFrame, target: str, found: Array, tolerance: float, confidence: float
) -> Choice:
    """Sort settings and say which are kept, from quantiles at 0.5, the confidence and the grid."""
    settings = frame.assign(
        **{target: found[0]},
        bound=found[1],
        probability=[share_below(found[2:, i], tolerance) for i in range(len(frame))],
        kept=found[1] <= tolerance,
    )
    settings = settings.sort_values(["bits_per_weight", "bound"], kind="stable", ignore_index=True)
    return Choice(settings, target, tolerance, confidence)


def share_below(quantiles: Array, tolerance: float) -> float:
    """Probability that a value is at most ``tolerance``, from its quantiles on a fixed grid.

    Between 0.005 and 0.995, the ends of the grid.
    """
    return float(np.interp(tolerance, quantiles, _GRID))


def check(tolerance: float, confidence: float) -> None:
    """Raise unless a tolerance is above zero and a confidence between 0 and 1.

    Raises
    ------
    QscaleError
        Naming the option and its value.
    """
    if not (math.isfinite(tolerance) and tolerance > 0):
        raise QscaleError(f"tolerance must be a number above zero. Got {tolerance:g} instead.")
    if not 0 < confidence < 1:
        raise QscaleError(f"confidence must be between 0 and 1. Got {confidence:g} instead.")


def in_unit_of(target: str, tolerance: float, loss_fp: float | None) -> float:
    """Express a tolerance of the loss increase, nats per token, in the unit of a fit's target.

    Parameters
    ----------
    target
        ``delta_loss``, ``kl`` (taken as it is) or ``relative_delta``.
    tolerance
        Nats per token.
    loss_fp
        Loss before quantization, nats per token, which ``relative_delta`` needs.

    Raises
    ------
    QscaleError
        If the target is none of them, or ``loss_fp`` is needed and not given.

    Examples
    --------
    >>> in_unit_of("relative_delta", 0.03, 3.0)
    0.01
    """
    if target in ("delta_loss", "kl"):
        return tolerance
    if target != "relative_delta":
        raise QscaleError(
            f"a tolerance is in nats per token, and the fit predicts {target}. Use a fit of "
            "delta_loss, relative_delta or kl."
        )
    if loss_fp is None or not loss_fp > 0:
        raise QscaleError(
            "the fit predicts relative_delta (a share of the loss); give --loss-fp, so that a "
            "tolerance in nats per token can be compared with it."
        )
    return tolerance / loss_fp


def stored_bits_per_weight(frame: pd.DataFrame) -> Array:
    """Bits stored for each weight, shape (n,).

    What ``bits_per_weight`` says where it is known; else ``bits`` and one 16-bit scale for each
    group, without zero points. The scale of a whole row is left out: 16 bits over thousands of
    weights.

    Examples
    --------
    >>> import pandas as pd
    >>> stored_bits_per_weight(pd.DataFrame({"bits": [3.0, 4.0], "group_size": [128.0, None]}))
    array([3.125, 4.   ])
    """
    bits = frame["bits"].to_numpy(dtype=float, na_value=np.nan)
    if "group_size" in frame.columns:
        groups = frame["group_size"].to_numpy(dtype=float, na_value=np.nan)
        bits = bits + np.where(np.isnan(groups), 0.0, SCALE_BITS / groups)
    if "bits_per_weight" not in frame.columns:
        return bits
    known = frame["bits_per_weight"].to_numpy(dtype=float, na_value=np.nan)
    return np.where(np.isnan(known), bits, known)
