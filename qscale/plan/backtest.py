"""Back-test of promised tolerances: how often settings chosen for left-out rows keep them."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from qscale.errors import FitError, QscaleError
from qscale.plan.bits import check, stored_bits_per_weight

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from qscale.fit import Fitted
    from qscale.validate.splits import Split

    Array = np.ndarray

_BROKEN = ("collapsed", "nonfinite")
_USED = ("ok", *_BROKEN)


def decisions(
    frame: pd.DataFrame,
    refit: Callable[[pd.DataFrame], Fitted],
    splits: Sequence[Split],
    *,
    tolerances: Sequence[float],
    confidences: Sequence[float] = (0.5, 0.7, 0.8, 0.9, 0.95),
    choice: Sequence[str] = ("run", "source", "protocol", "method"),
    cluster: str = "run",
    target: str = "delta_loss",
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Choose settings for rows that the fit has not seen, and look up what they cost.

    The measured settings of one checkpoint are what can be chosen from, as `qscale.plan.bits`
    chooses: the fewest bits per weight whose upper bound is within the tolerance.

    Parameters
    ----------
    frame
        A measurement table. Rows of status ``collapsed`` or ``nonfinite`` keep no tolerance.
    refit
        Fits a model to training rows.
    splits
        Which rows are left out.
    tolerances
        In the target's unit.
    confidences
        Promised probabilities.
    choice
        Columns whose values mark what is chosen from: the settings of one checkpoint as one source
        measured them. Those that the table lacks do not count.
    cluster
        Column whose values mark rows with shared errors; its value is kept as ``cluster``.
    target
        Column that is predicted.

    Returns
    -------
    chosen : pandas.DataFrame
        One row for each checkpoint, tolerance and confidence: ``split``, ``cluster``,
        ``tolerance``, ``confidence``, ``answered`` (a setting was chosen), ``kept`` (its measured
        target is within the tolerance; null without a choice), ``covered`` (it is under the
        setting's own bound), ``bits_per_weight`` chosen and ``fewest`` (of those measured within
        the tolerance; null if there is none).
    rows : pandas.DataFrame
        One row for each left-out row and confidence: ``split``, ``cluster``, ``confidence`` and
        ``covered`` (the measured target is under the bound).

    Raises
    ------
    FitError
        If a column is missing or no row can be predicted.
    QscaleError
        If an option is empty or out of its range.
    """
    if not (len(tolerances) and len(confidences) and len(choice)):
        raise QscaleError("tolerances, confidences and choice must hold one value or more each.")
    for tolerance, confidence in itertools.product(tolerances, confidences):
        check(tolerance, confidence)
    if missing := [c for c in (target, cluster, "bits") if c not in frame.columns]:
        raise FitError(f"a back-test needs column {missing[0]!r}, which the table does not have.")
    frame = frame.assign(
        bits_per_weight=stored_bits_per_weight(frame), _observed=_observed(frame, target)
    )
    keys = [column for column in choice if column in frame.columns]
    chosen: list[dict[str, object]] = []
    rows: list[pd.DataFrame] = []
    for split in splits:
        fitted = refit(frame[split.training].drop(columns="_observed"))
        test = _predictable(fitted, frame[split.test])
        if test.empty:
            continue
        bounds = fitted.quantiles(test, np.asarray(confidences, dtype=float), "new_checkpoint")
        _require_bounds(fitted, bounds)
        rows += [_covered(split, test, cluster, *pair) for pair in _pairs(confidences, bounds)]
        for _, group in test.groupby(keys, sort=False, dropna=False):
            for confidence, bound in _pairs(confidences, bounds[:, group.index]):
                named: dict[str, object] = {
                    "split": split.name,
                    "cluster": str(group[cluster].iloc[0]),
                    "confidence": confidence,
                }
                chosen += [named | _decision(group, bound, tolerance) for tolerance in tolerances]
    if not rows:
        raise FitError("no left-out row can be predicted and compared.")
    return pd.DataFrame(chosen), pd.concat(rows, ignore_index=True)


def _observed(frame: pd.DataFrame, target: str) -> Array:
    """Measured targets, infinite where the model broke, shape (n,)."""
    observed = frame[target].to_numpy(dtype=float, na_value=np.nan)
    if "status" not in frame.columns:
        return observed
    return np.where(frame["status"].isin(_BROKEN), np.inf, observed)


def _predictable(fitted: Fitted, test: pd.DataFrame) -> pd.DataFrame:
    """Rows with a known outcome and a value in each column that the fit reads, numbered anew."""
    read = [c for c in (*fitted.columns, "bits_per_weight", "_observed") if c in test.columns]
    known = test[read].notna().all(axis=1)
    if "status" in test.columns:
        known &= test["status"].isna() | test["status"].isin(_USED)
    return test[known].reset_index(drop=True)


def _require_bounds(fitted: Fitted, bounds: Array) -> None:
    """Raise if a fit has no prediction intervals."""
    if np.isnan(bounds).any():
        raise QscaleError(f"{fitted.name}: the fit has no intervals, so that nothing is promised.")


def _pairs(confidences: Sequence[float], bounds: Array) -> list[tuple[float, Array]]:
    """Pair each confidence with its bounds."""
    return list(zip(confidences, bounds, strict=True))


def _covered(
    split: Split, test: pd.DataFrame, cluster: str, confidence: float, bound: Array
) -> pd.DataFrame:
    """Say of each left-out row whether it is under its bound."""
    return pd.DataFrame(
        {
            "split": split.name,
            "cluster": test[cluster].astype(str),
            "confidence": confidence,
            "covered": (test["_observed"].to_numpy() <= bound).astype(float),
        }
    )


def _decision(group: pd.DataFrame, bound: Array, tolerance: float) -> dict[str, object]:
    """Choose among the settings of one checkpoint and look up what the choice cost."""
    size = group["bits_per_weight"].to_numpy()
    observed = group["_observed"].to_numpy()
    within = observed <= tolerance
    order = np.lexsort((bound, size))
    passing = order[bound[order] <= tolerance]
    answered = len(passing) > 0
    return {
        "tolerance": tolerance,
        "answered": answered,
        "kept": float(within[passing[0]]) if answered else np.nan,
        "covered": float((observed <= bound)[passing[0]]) if answered else np.nan,
        "bits_per_weight": size[passing[0]] if answered else np.nan,
        "fewest": size[within].min() if within.any() else np.nan,
    }


def realised(chosen: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """Compare realised shares with what was promised, over all left-out checkpoints.

    Standard errors are of a ratio over clusters (Cochran 1977, Sampling Techniques, section 6.3).

    Parameters
    ----------
    chosen, rows
        As `decisions` returns them.

    Returns
    -------
    pandas.DataFrame
        One row for each promised ``confidence``: ``questions`` (checkpoint and tolerance),
        ``answered`` (share with a choice), ``answerable`` (share with a measured setting within the
        tolerance), ``kept`` and ``kept_se`` (share of choices that kept the tolerance), ``excess``
        (mean bits per weight above the fewest that were needed, over answered questions that have
        an answer), ``covered`` and ``covered_se`` (share of single rows under their bound),
        ``selected`` (the same over chosen rows: lower if choosing favours bounds that are too low)
        and ``selected_se``, ``clusters``.
    """
    found = []
    for confidence, asked in chosen.groupby("confidence"):
        own = rows[rows["confidence"] == confidence]
        answered = asked[asked["answered"]]
        kept, kept_se = share(answered["kept"], answered["cluster"])
        covered, covered_se = share(own["covered"], own["cluster"])
        selected, selected_se = share(answered["covered"], answered["cluster"])
        found.append(
            {
                "confidence": confidence,
                "questions": len(asked),
                "answerable": float(asked["fewest"].notna().mean()),
                "answered": float(asked["answered"].mean()),
                "kept": kept,
                "kept_se": kept_se,
                "excess": float((answered["bits_per_weight"] - answered["fewest"]).mean()),
                "covered": covered,
                "covered_se": covered_se,
                "selected": selected,
                "selected_se": selected_se,
                "clusters": int(own["cluster"].nunique()),
            }
        )
    return pd.DataFrame(found)


def share(hits: pd.Series, clusters: pd.Series) -> tuple[float, float]:
    """Mean of ones and zeros and its standard error over clusters, NaN below two clusters."""
    if hits.empty:
        return np.nan, np.nan
    mean = float(hits.mean())
    sums = (hits - mean).groupby(clusters.to_numpy()).sum().to_numpy()
    groups = len(sums)
    if groups < 2:
        return mean, np.nan
    return mean, float(np.sqrt(groups / (groups - 1) * (sums**2).sum()) / len(hits))
