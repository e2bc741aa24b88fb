"""Test a law on rows it has not seen: groups left out, the largest sizes held out, and scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from qscale.errors import FitError, QscaleError
from qscale.fit.rows import select
from qscale.predict import predict

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from qscale.fit import Fit
    from qscale.laws import Law


@dataclass(frozen=True, slots=True)
class Split:
    """One held-out test.

    Parameters
    ----------
    name
        What is held out, such as ``family OPT``.
    test
        Boolean mask of the held-out rows, shape (n,); all others train.
    """

    name: str
    test: np.ndarray


def leave_one_out(frame: pd.DataFrame, column: str) -> list[Split]:
    """Return one split per value of a column, such as ``family``; rows without a value only train.

    Raises
    ------
    FitError
        If the column has fewer than two values.
    """
    values = sorted(frame[column].dropna().unique()) if column in frame.columns else []
    if len(values) < 2:
        raise FitError(f"leaving one {column} out needs at least two of them; found {len(values)}.")
    return [Split(f"{column} {value}", (frame[column] == value).to_numpy()) for value in values]


def largest(frame: pd.DataFrame, column: str = "n_params", share: float = 0.25) -> Split:
    """Return the split that holds out the highest quarter of a column's distinct values.

    Raises
    ------
    FitError
        If the column has fewer than three distinct values.
    """
    values = np.unique(frame[column].dropna())
    if len(values) < 3:
        raise FitError(f"holding out the largest {column} needs three distinct values.")
    cut = values[-max(1, int(share * len(values)))]
    return Split(f"{column} >= {cut:.3g}", (frame[column] >= cut).to_numpy())


def score(
    frame: pd.DataFrame,
    law: Law,
    splits: Sequence[Split],
    refit: Callable[[pd.DataFrame], Fit],
    *,
    where: str | None = None,
    cluster: str = "run",
) -> pd.DataFrame:
    """Fit on each split's training rows and score the predictions of its test rows.

    Parameters
    ----------
    frame
        A measurement table; rows the law cannot use are set aside as in a fit.
    law
        The law, without offsets.
    splits
        Splits of ``frame``.
    refit
        Function that fits the law to training rows, for example a partial of `qscale.fit.fit`.
    where, cluster
        As in `qscale.fit.fit`, applied to the test rows.

    Returns
    -------
    pandas.DataFrame
        One row per split: ``held_out``, ``rows``, ``clusters``, ``median_abs_log_error``, ``bias``
        (median log of predicted over observed), ``coverage_50``, ``coverage_90`` (shares of rows
        inside the interval for a new checkpoint), ``width_90`` (median log of high over low) and
        ``error`` (why a split could not be scored).
    """
    return pd.DataFrame([_score_one(frame, law, s, refit, where, cluster) for s in splits])


def _score_one(
    frame: pd.DataFrame,
    law: Law,
    split: Split,
    refit: Callable[[pd.DataFrame], Fit],
    where: str | None,
    cluster: str,
) -> dict[str, object]:
    """Score one split; a user-level failure becomes a row that says so."""
    try:
        test = select(frame[split.test], law, where=where, cluster=cluster, name=split.name)
        fitted = refit(frame[~split.test])
        predicted = predict(fitted, test.frame)
    except QscaleError as error:
        return {"held_out": split.name, "rows": int(split.test.sum()), "error": str(error)}
    observed = test.frame[law.target].to_numpy()
    log_error = np.log(predicted[law.target].to_numpy() / observed)
    inside = {
        level: ((predicted[f"low_{level}"] <= observed) & (observed <= predicted[f"high_{level}"]))
        for level in (50, 90)
    }
    # Without intervals nothing is known about coverage, which is not the same as none.
    covered = {
        level: float(hits.mean()) if predicted[f"low_{level}"].notna().all() else np.nan
        for level, hits in inside.items()
    }
    return {
        "held_out": split.name,
        "rows": len(observed),
        "clusters": int(test.clusters.max()) + 1,
        "median_abs_log_error": float(np.median(np.abs(log_error))),
        "bias": float(np.median(log_error)),
        **{f"coverage_{level}": share for level, share in covered.items()},
        "width_90": float(np.median(np.log(predicted["high_90"] / predicted["low_90"]))),
        "error": "",
    }
