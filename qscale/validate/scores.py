"""Held-out errors row by row, and the scores and intervals that are computed from them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from qscale.errors import FitError, QscaleError
from qscale.fit.options import check_count, check_level
from qscale.fit.rows import select
from qscale.predict import predict
from qscale.table import require

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from qscale.fit import Fit
    from qscale.laws import Law
    from qscale.validate.splits import Split

    Array = np.ndarray
    Refit = Callable[[pd.DataFrame], Any]

LEVELS = (50, 90)
_WIDEST = np.log(np.finfo(float).max)  # an interval beyond all numbers still has a mean width

SCORES = {
    "mean_abs_log_error": "mean absolute log of predicted over observed",
    "median_abs_log_error": "median absolute log of predicted over observed",
    "bias": "median log of predicted over observed",
    "coverage_50": "share of rows inside the 50 % interval for a new checkpoint",
    "coverage_90": "share of rows inside the 90 % interval for a new checkpoint",
    "width_50": "median log of high over low of the 50 % interval",
    "width_90": "median log of high over low of the 90 % interval",
    "pinball": "mean pinball loss of the log quantiles at 5, 25, 50, 75 and 95 %",
}


def held_out(
    frame: pd.DataFrame,
    refit: Refit,
    split: Split,
    *,
    target: str,
    cluster: str = "run",
    given_rows: int = 0,
    given_by: str = "run",
) -> pd.DataFrame:
    """Fit to a split's training rows and predict its test rows.

    Parameters
    ----------
    frame
        A measurement table.
    refit
        Function that fits a model to training rows and returns what `qscale.predict.predict`
        takes.
    split
        A split of ``frame``.
    target
        Column that the model predicts. Test rows whose status is not ok, or whose target is
        unknown or not above zero, have no log error and are left out.
    cluster
        Column whose values mark rows with shared errors; a row without a value stands alone.
    given_rows
        Measured rows of each test group that the fit is told (`qscale.fit.Fit.given`) before it
        predicts the others of that group: those that `measured_first` puts first. They, and groups
        without further rows, are not scored.
    given_by
        Column whose values mark those groups; rows without a value are not scored.

    Returns
    -------
    pandas.DataFrame
        One row per scored test row: ``row`` (position in ``frame``), ``cluster``, ``split`` and
        the columns of `log_errors`, null in rows that the model cannot predict.

    Raises
    ------
    FitError
        If a column is missing, the split is of another table, given_rows is below zero, or no test
        row can be scored or predicted.
    QscaleError
        If the model cannot be fitted to the training rows.
    """
    check_count("given_rows", given_rows, 0)
    if len(split.test) != len(frame):
        raise FitError(
            f"split {split.name} is of {len(split.test)} rows, the table of {len(frame)}."
        )
    for column in (target, cluster, *([given_by] if given_rows else [])):
        if column not in frame.columns:
            raise FitError(f"scoring needs column {column!r}, which the table does not have.")
    rows = np.flatnonzero(split.test & scorable(frame, target))
    if not len(rows):
        raise FitError(f"it has no row with a {target} above zero and status ok.")
    test = frame.iloc[rows].set_axis(rows)
    groups = _measured(test, given_rows, given_by) if given_rows else [(test[:0], test)]
    fitted = refit(frame[split.training])
    parts = []
    for first, rest in groups:
        known = rest[_complete(fitted, rest)]
        if len(known) and _complete(fitted, first).all():
            told = fitted.given(first) if given_rows else fitted
            parts.append(log_errors(told, known, target).set_axis(known.index))
    if not parts:
        unknown = [c for c in fitted.columns if c in test.columns and test[c].isna().any()]
        raise FitError(f"it has no row with a value in each of {', '.join(unknown)}.")
    scored = pd.concat([rest for _, rest in groups])
    labels = scored[cluster].astype(object)
    names = pd.Series([f"row {row}" for row in scored.index], index=scored.index)
    errors = pd.concat(parts).reindex(scored.index)
    errors["observed"] = scored[target].astype(float)
    errors.insert(0, "row", scored.index)
    errors.insert(1, "cluster", labels.where(labels.notna(), names).astype(str))
    errors.insert(2, "split", split.name)
    return errors.reset_index(drop=True)


def _complete(fitted: Any, rows: pd.DataFrame) -> Array:
    """Which rows have a value in every column that a model reads, shape (n,)."""
    read = [column for column in fitted.columns if column in rows.columns]
    return rows[read].notna().all(axis=1).to_numpy()


def _measured(test: pd.DataFrame, count: int, by: str) -> list[tuple[pd.DataFrame, pd.DataFrame]]:
    """Split each group that is large enough into its rows measured first and all others."""
    pairs = []
    for _, group in test.groupby(by, sort=False):
        order = measured_first(group)
        if len(order) > count:
            pairs.append((group.iloc[np.sort(order[:count])], group.iloc[np.sort(order[count:])]))
    if not pairs:
        raise FitError(f"no held-out {by} has more rows than the {count} given.")
    return pairs


def measured_first(rows: pd.DataFrame) -> Array:
    """Order the rows of one checkpoint by which a user would measure first, shape (n,).

    If there is plain rounding (method ``rtn``), those rows, with no group size before groups, and
    the nearest to 4 bits first; otherwise the nearest to the median bits, the higher of two as
    near. Rows that are alike keep their order.
    """
    bits = np.full(len(rows), np.nan)
    if "bits" in rows.columns:
        bits = rows["bits"].to_numpy(dtype=float, na_value=np.nan)
    if "method" in rows.columns and (rows["method"] == "rtn").any():
        other = (rows["method"] != "rtn").to_numpy(dtype=bool)
        grouped = rows["group_size"].notna().to_numpy() if "group_size" in rows.columns else other
        return np.lexsort((-bits, np.abs(bits - 4.0), grouped, other))
    middle = np.median(bits[~np.isnan(bits)]) if not np.isnan(bits).all() else np.nan
    return np.lexsort((-bits, np.abs(bits - middle)))


def scorable(frame: pd.DataFrame, target: str) -> Array:
    """Which rows have status ok (or none) and a target that has a logarithm, shape (n,)."""
    positive = (frame[target] > 0).to_numpy(dtype=bool)
    if "status" not in frame.columns:
        return positive
    return positive & (frame["status"].isna() | (frame["status"] == "ok")).to_numpy(dtype=bool)


def log_errors(fitted: Any, test: pd.DataFrame, target: str) -> pd.DataFrame:
    """Predict rows with a known target and set the prediction against it.

    Parameters
    ----------
    fitted
        What `qscale.predict.predict` takes.
    test
        Rows with a target above zero.
    target
        Column that ``fitted`` predicts.

    Returns
    -------
    pandas.DataFrame
        One row per test row: ``observed`` and ``predicted`` in the target's unit, ``log_error``
        (log of predicted over observed), ``inside_50``, ``inside_90`` (1 or 0), ``width_50``,
        ``width_90`` (log of high over low) and ``pinball``, the pinball loss on the log scale
        (Koenker and Bassett 1978) averaged over the quantiles at 5, 25, 50, 75 and 95 %. What
        needs an interval is null without one.
    """
    with np.errstate(divide="ignore", invalid="ignore"):  # rows out of the model's domain give nan
        predicted = predict(fitted, test, levels=[level / 100 for level in LEVELS])
        log_predicted = np.log(predicted[target].to_numpy(dtype=float))
        edges = {
            level: tuple(
                np.log(predicted[f"{side}_{level}"].to_numpy(dtype=float)).clip(-_WIDEST, _WIDEST)
                for side in ("low", "high")
            )
            for level in LEVELS
        }
    log_predicted = np.where(np.isfinite(log_predicted), log_predicted, np.nan)
    observed = test[target].to_numpy(dtype=float)
    y = np.log(observed)
    columns = {
        "observed": observed,
        "predicted": np.exp(log_predicted),
        "log_error": log_predicted - y,
    }
    losses = [_pinball(y, log_predicted, 0.5)]
    for level, (low, high) in edges.items():
        known = np.isfinite(log_predicted) & ~np.isnan(low) & ~np.isnan(high)
        columns[f"inside_{level}"] = np.where(known, (low <= y) & (y <= high), np.nan)
        columns[f"width_{level}"] = np.where(known, high - low, np.nan)
        tail = (1 - level / 100) / 2
        losses += [_pinball(y, low, tail), _pinball(y, high, 1 - tail)]
    columns["pinball"] = np.mean(losses, axis=0)
    return pd.DataFrame(columns)


def _pinball(observed: Array, quantile: Array, probability: float) -> Array:
    """Pinball loss of a predicted quantile, shape (n,)."""
    return np.maximum(
        probability * (observed - quantile), (probability - 1) * (observed - quantile)
    )


def summarize(
    errors: pd.DataFrame,
    by: Sequence[str] = ("split",),
    *,
    level: float = 0.9,
    n_boot: int = 1000,
    seed: int = 0,
) -> pd.DataFrame:
    """Compute the scores of groups of held-out rows, each with an interval over clusters.

    Parameters
    ----------
    errors
        Rows as `held_out` gives them; all must have a ``log_error``.
    by
        Columns whose values make the groups.
    level
        Probability of the percentile intervals from resampling whole clusters. They are null for
        a group of one cluster, and too narrow for a few.
    n_boot, seed
        Resamples and their seed.

    Returns
    -------
    pandas.DataFrame
        One row per group in order of appearance: ``by``, ``rows``, ``clusters`` and for each of
        `SCORES` its value and ``_low``, ``_high``.

    Raises
    ------
    FitError
        If an option is out of its range.
    TableError
        If a column is missing.
    """
    check_level(level)
    check_count("n_boot", n_boot)
    require(errors, (*by, "cluster", "log_error"), "held-out errors")
    found = []
    for key, group in errors.groupby(list(by), sort=False):
        weights, clusters = _resampled(group["cluster"], n_boot, np.random.default_rng(seed))
        row = dict(zip(by, key, strict=True)) | {"rows": len(group), "clusters": clusters}
        for name, (values, middle) in _ingredients(group).items():
            known = ~np.isnan(values)  # a row without an interval is neither in nor out
            row[name] = float(middle(values[known])) if known.any() else np.nan
            row[f"{name}_low"], row[f"{name}_high"] = np.nan, np.nan
            if known.any() and clusters > 1:
                statistic = _means if middle is np.mean else _medians
                draws = statistic(values[known], weights[:, known])
                edges = np.nanquantile(draws, [(1 - level) / 2, (1 + level) / 2])
                row[f"{name}_low"], row[f"{name}_high"] = map(float, edges)
        found.append(row)
    return pd.DataFrame(found)


def _ingredients(errors: pd.DataFrame) -> dict[str, tuple[Array, Callable[[Array], Any]]]:
    """For each score, the values of the rows and how they are averaged."""
    error = errors["log_error"].to_numpy()
    plain = {
        name: errors[column].to_numpy(dtype=float)
        for name, column in (
            ("coverage_50", "inside_50"),
            ("coverage_90", "inside_90"),
            ("width_50", "width_50"),
            ("width_90", "width_90"),
            ("pinball", "pinball"),
        )
    }
    values = {
        "mean_abs_log_error": np.abs(error),
        "median_abs_log_error": np.abs(error),
        "bias": error,
        **plain,
    }
    medians = {"median_abs_log_error", "bias", "width_50", "width_90"}
    return {name: (values[name], np.median if name in medians else np.mean) for name in SCORES}


def _resampled(labels: pd.Series, n_boot: int, rng: np.random.Generator) -> tuple[Array, int]:
    """How often each row appears when whole clusters are resampled, shape (n_boot, n)."""
    codes, names = pd.factorize(labels)
    counts = rng.multinomial(len(names), np.full(len(names), 1 / len(names)), size=n_boot)
    return counts[:, codes].astype(float), len(names)


def _means(values: Array, weights: Array) -> Array:
    """Weighted means, shape (draws,); null where a draw holds none of the rows."""
    total = weights.sum(axis=1)
    return np.divide(weights @ values, total, out=np.full(len(total), np.nan), where=total > 0)


def _medians(values: Array, weights: Array) -> Array:
    """Weighted medians, shape (draws,); null where a draw holds none of the rows."""
    order = np.argsort(values)
    cumulative = np.cumsum(weights[:, order], axis=1)
    total = cumulative[:, -1:]
    below = (cumulative < total / 2).sum(axis=1)
    at_half = (cumulative <= total / 2).sum(axis=1)  # an even split averages its two neighbours
    last = len(values) - 1
    ordered = values[order]
    middle = (ordered[np.minimum(below, last)] + ordered[np.minimum(at_half, last)]) / 2
    return np.where(total[:, 0] > 0, middle, np.nan)


def score(
    frame: pd.DataFrame,
    law: Law,
    splits: Sequence[Split],
    refit: Callable[[pd.DataFrame], Fit],
    *,
    where: str | None = None,
    cluster: str = "run",
) -> pd.DataFrame:
    """Fit a law on each split's training rows and score the predictions of its test rows.

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
        One row per split: ``held_out``, ``rows``, ``clusters``, each of `SCORES`, and ``error``
        (why a split could not be scored).
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
        errors = log_errors(refit(frame[split.training]), test.frame, law.target)
    except QscaleError as error:
        return {"held_out": split.name, "rows": int(split.test.sum()), "error": str(error)}
    scores = {
        # Without an interval for every row nothing is known about coverage: not the same as none.
        name: float(middle(values))
        for name, (values, middle) in _ingredients(errors).items()
    }
    return {
        "held_out": split.name,
        "rows": len(errors),
        "clusters": int(test.clusters.max()) + 1,
        **scores,
        "error": "",
    }
