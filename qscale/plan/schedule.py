"""What another peak rate, longer training or another decay would do to the loss increase."""

from __future__ import annotations

from numbers import Real
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from qscale.errors import QscaleError
from qscale.fit.options import check_count, check_level
from qscale.plan.joint import draws

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from qscale.fit import Fit

AS_GIVEN = "as given"


def changed(row: pd.DataFrame, change: Mapping[str, float]) -> pd.DataFrame:
    """Return rows with columns replaced.

    With ``lr_peak`` alone the whole schedule is scaled: ``lr`` keeps its share of the peak.

    Examples
    --------
    >>> row = pd.DataFrame({"lr_peak": [1e-3], "lr": [5e-4]})
    >>> changed(row, {"lr_peak": 4e-3})["lr"].tolist()
    [0.002]
    """
    new = dict(change)
    if "lr_peak" in new and "lr" not in new and {"lr", "lr_peak"} <= set(row.columns):
        return row.assign(**new, lr=row["lr"] * (new["lr_peak"] / row["lr_peak"]))
    return row.assign(**new)


def alternatives(
    fit: Fit,
    rows: pd.DataFrame,
    changes: Sequence[Mapping[str, float]],
    *,
    level: float = 0.9,
    count: int = 4000,
    seed: int = 0,
) -> pd.DataFrame:
    """Predict a training run as given and with changes, and the ratio between them.

    The ratio is of the law: what is common to both runs cancels, and so does much of the
    uncertainty of the parameters. Two real runs also differ by the spread of runs.

    Parameters
    ----------
    fit
        A fitted law that reads the learning rate, tokens or decay.
    rows
        One row for each quantizer setting, with the law's columns.
    changes
        For each alternative, new values by column; see `changed`.
    level
        Probability of intervals.
    count, seed
        Draws of the ratio and their seed.

    Returns
    -------
    pandas.DataFrame
        For each row first ``as given``, then each change: the columns, ``schedule`` (its name), the
        predicted median under the target's name, ``low`` and ``high`` for a new checkpoint,
        ``ratio`` to the run as given with ``ratio_low`` and ``ratio_high``, and ``share_less``
        (share of draws in which the change lowers the target).

    Raises
    ------
    QscaleError
        If a change is empty, names a column that the fit does not read, or is not above zero where
        the law takes its logarithm.
    """
    check_level(level)
    check_count("seed", seed, 0)
    for change in changes:
        _check(fit, change)
    names = [AS_GIVEN, *(", ".join(f"{c}={v:g}" for c, v in change.items()) for change in changes)]
    parts = []
    for i in range(len(rows)):
        base = rows.iloc[[i]].reset_index(drop=True)
        frame = pd.concat([base, *(changed(base, change) for change in changes)], ignore_index=True)
        parts.append(_one(fit, frame.assign(schedule=names), level, count, seed))
    return pd.concat(parts, ignore_index=True)


def _one(fit: Fit, frame: pd.DataFrame, level: float, count: int, seed: int) -> pd.DataFrame:
    """Predict the alternatives of one row, the first being the run as given."""
    edges = np.array([0.5 - level / 2, 0.5, 0.5 + level / 2])
    with np.errstate(divide="ignore", invalid="ignore"):
        low, median, high = fit.quantiles(frame, edges, "new_checkpoint", seed)
        drawn = draws(fit, frame, count, np.random.default_rng(seed), "mean")
        center = fit.center(frame)
    if not np.isfinite(drawn).all():
        bad = frame["schedule"].iloc[int((~np.isfinite(drawn)).any(axis=0).argmax())]
        raise QscaleError(f"{bad}: law {fit.name} has no value there; change it.")
    ratios = drawn / drawn[:, :1]
    ratio_low, ratio_high = np.quantile(ratios, edges[[0, 2]], axis=0)
    return frame.assign(
        **{fit.target: median},
        low=low,
        high=high,
        ratio=center / center[0],
        ratio_low=ratio_low,
        ratio_high=ratio_high,
        share_less=(ratios < 1).mean(axis=0),
    )


def _check(fit: Fit, change: Mapping[str, float]) -> None:
    """Raise unless a change concerns the fit."""
    if not change:
        raise QscaleError("an alternative must change something, such as lr_peak=1e-3.")
    for column, value in change.items():
        if column not in fit.columns:
            raise QscaleError(
                f"{column}: law {fit.name} does not read it, so that the prediction would not "
                f"change. It reads {', '.join(fit.columns)}."
            )
        if not isinstance(value, Real) or not np.isfinite(float(value)) or value < 0:
            raise QscaleError(f"{column} must be a number, zero or more. Got {value!r} instead.")
