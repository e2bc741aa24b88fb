"""Is this loss normal: a measured increase against its predicted distribution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from scipy.stats import norm

from qscale.errors import FitError
from qscale.predict.support import outside

if TYPE_CHECKING:
    import pandas as pd

    from qscale.fit import Fitted
    from qscale.fit.effects import Kind

_FINEST = 1e-9
_PARTS, _STEPS = 64, 6

_ABOVE = (
    "a protocol other than the fitted ones (text, context, BOS)",
    "a fault in conversion or quantization, or calibration text too short or too unlike",
    "more quantized than the weights, such as activations or the LM head",
    "training that makes the model fragile and that the fit does not know",
)
_BELOW = (
    "calibration text that overlaps the evaluation text",
    "weights that lie on a quantization grid already",
    "matrices left in full precision",
    "a kinder format or method than the fitted ones",
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A measured value against its predicted distribution.

    Parameters
    ----------
    observed
        The value, in the unit of the fit's target.
    percentile
        Share of newly measured checkpoints of this description that are predicted to lie below it,
        in percent.
    place
        Where it lies against the central 90 % interval.
    low_90, high_90
        That interval.
    sentences
        The verdict in words: the place, and what may lie behind a value out of the band.
    """

    observed: float
    percentile: float
    place: Literal["below", "within", "above"]
    low_90: float
    high_90: float
    sentences: tuple[str, ...]


def percentile(
    fit: Fitted,
    frame: pd.DataFrame,
    observed: float,
    *,
    kind: Kind = "new_checkpoint",
    seed: int = 0,
) -> float:
    """Percentage of a predictive distribution that lies below a measured value.

    The fit's quantile function is inverted by narrowing brackets, so that it holds for laws and
    regressions, and for Student's t, bootstrap and conformal intervals alike.

    Parameters
    ----------
    fit
        A fitted law or regression.
    frame
        One row with the fit's columns.
    observed
        Measured value in the unit of the fit's target.
    kind, seed
        See `predict`.

    Returns
    -------
    float
        From 0 to 100, to about 1e-7.

    Raises
    ------
    FitError
        If the frame does not have one row, the value is not a number, or the fit has no intervals.
    """
    if len(frame) != 1:
        raise FitError(f"a measured value belongs to one setting. Got {len(frame)} rows instead.")
    if not np.isfinite(observed):
        raise FitError(f"the measured value must be a finite number. Got {observed:g} instead.")
    low, high = _FINEST, 1 - _FINEST
    for _ in range(_STEPS):
        edges = np.linspace(low, high, _PARTS + 1)
        values = np.maximum.accumulate(fit.quantiles(frame, edges, kind, seed)[:, 0])
        if np.isnan(values).any():
            raise FitError("the fit has no intervals, so a measured value has no percentile.")
        part = int(np.clip(np.searchsorted(values, observed), 1, _PARTS))
        low, high = edges[part - 1], edges[part]
    return float(100 * (low + high) / 2)


def judge(fit: Fitted, frame: pd.DataFrame, observed: float, *, seed: int = 0) -> Verdict:
    """Say whether a measured value is normal for a checkpoint of this description.

    Parameters
    ----------
    fit, frame, observed, seed
        See `percentile`.

    Raises
    ------
    FitError
        As `percentile`.
    """
    share = percentile(fit, frame, observed, seed=seed)
    low, high = fit.quantiles(frame, np.array([0.05, 0.95]), "new_checkpoint", seed)[:, 0]
    return _verdict(observed, share, (float(low), float(high)), bool(outside(fit, frame)))


def judge_interval(
    low_90: float, high_90: float, observed: float, *, extrapolated: bool = False
) -> Verdict:
    """Say the same of a log-normal prediction, such as `qscale.predict.combine` makes.

    Parameters
    ----------
    low_90, high_90
        Its central 90 % interval.
    observed
        Measured value in the same unit.
    extrapolated
        Whether the prediction is an extrapolation.

    Raises
    ------
    FitError
        If the interval or the value is not a number, or the interval is not one above zero.
    """
    if not np.isfinite([low_90, high_90]).all():
        raise FitError("the prediction has no interval, so a measured value has no percentile.")
    if not 0 < low_90 < high_90:
        raise FitError(
            f"low_90 must be above zero and below high_90. Got {low_90:g} and {high_90:g} instead."
        )
    if not np.isfinite(observed):
        raise FitError(f"the measured value must be a finite number. Got {observed:g} instead.")
    share = 0.0
    if observed > 0:
        center, half = np.log(low_90 * high_90) / 2, np.log(high_90 / low_90) / 2
        share = float(100 * norm.cdf((np.log(observed) - center) / half * norm.ppf(0.95)))
    return _verdict(observed, share, (low_90, high_90), extrapolated)


def _verdict(
    observed: float, share: float, interval: tuple[float, float], extrapolated: bool
) -> Verdict:
    """Put a percentile and an interval in words."""
    low, high = interval
    place: Literal["below", "within", "above"] = "within"
    if not low <= observed <= high:
        place = "below" if observed < low else "above"
    said = [f"{observed:.4g} is {_where(place, share)}: 90 % of such are {low:.3g} to {high:.3g}."]
    if place != "within":
        causes = _ABOVE if place == "above" else _BELOW
        said.append(f"It may be {'; '.join(causes)}.")
    if observed <= 0:
        said.append(
            "At or below zero it may be nothing but noise: measure on more tokens, and compare "
            "with the standard error of the paired difference."
        )
    if extrapolated:
        said.append("The band is an extrapolation (see the notes): weigh the verdict accordingly.")
    return Verdict(observed, share, place, low, high, tuple(said))


def _where(place: str, share: float) -> str:
    """Say the place in words."""
    at = f"at percentile {share:.3g}" if 0.1 <= share <= 99.9 else _tail(share)
    if place == "within":
        usual = ", near the middle" if 25 <= share <= 75 else ""
        return f"within the predicted band{usual}, {at}"
    return f"{place} the predicted band, {at}"


def _tail(share: float) -> str:
    """Name a percentile that rounds to 0 or 100."""
    return "under percentile 0.1" if share < 50 else "over percentile 99.9"
