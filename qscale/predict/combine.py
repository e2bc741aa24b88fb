"""Join the prediction from a checkpoint's own curvature with a law's, by their tested errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from scipy.stats import norm

from qscale.errors import FitError
from qscale.fit.shipped import load_all
from qscale.table import require

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from qscale.fit import Fit, Fitted

_LEVELS = (0.5, 0.9)


def normal_log(fit: Fitted, frame: pd.DataFrame, *, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Centre and standard deviation of a predictive distribution on the log scale.

    The standard deviation is that of the normal distribution with the same central 90 % interval,
    so that the heavier tails of a fit to few runs count.

    Parameters
    ----------
    fit
        A fitted law or regression of a positive target.
    frame
        Rows with the fit's columns.
    seed
        Of the draws of a bootstrap fit.

    Returns
    -------
    numpy.ndarray, numpy.ndarray
        Shape (n,) each, log of the target's unit; null where the fit has no interval.
    """
    low, middle, high = np.log(
        fit.quantiles(frame, np.array([0.05, 0.5, 0.95]), "new_checkpoint", seed)
    )
    return middle, (high - low) / (2 * norm.ppf(0.95))


def zero_fit_prediction(rows: pd.DataFrame, fits: Mapping[str, Fit] | None = None) -> pd.DataFrame:
    """Correct predictions from curvature by what they were tested to be, with their error.

    The shipped fits of the law ``curvature`` with exponent one (``fits/build.py``) hold how far
    ``quadratic_delta`` was from the measured increase: a factor, the scatter of models and that of
    rows, by range of bits. A row is served by the one whose rows cover its bits, method, format
    and size of the increase; where none does, the prediction is known to fail or is untested.

    Parameters
    ----------
    rows
        ``bits``, ``method``, ``fmt`` and ``quadratic_delta`` (nats per token), and the standard
        error of the last over probes, ``quadratic_delta_se``, if known.
    fits
        Fits of ``quadratic_delta`` by name; the shipped ones by default.

    Returns
    -------
    pandas.DataFrame
        One line for each row: ``log_mean`` and ``log_sd`` of delta_loss, null where it is not to
        be used, and ``why_not``, a clause that says why, empty where it is.
    """
    require(rows, ("bits", "method", "fmt", "quadratic_delta"), "zero-fit rows")
    known = load_all() if fits is None else fits
    tested = _tested(known)
    servers = [_server(row, tested) for _, row in rows.iterrows()]
    mean, sd = np.full(len(rows), np.nan), np.full(len(rows), np.nan)
    for one in tested:
        own = np.array([server is one for server, _ in servers])
        if own.any():
            mean[own], sd[own] = normal_log(one, rows[own].reset_index(drop=True))
    if "quadratic_delta_se" in rows.columns:
        share = rows["quadratic_delta_se"] / rows["quadratic_delta"].replace(0, np.nan)
        sd = np.hypot(sd, share.to_numpy(dtype=float, na_value=0.0))
    why_not = [why for _, why in servers]
    return pd.DataFrame({"log_mean": mean, "log_sd": sd, "why_not": why_not})


def sizes_tested(fits: Mapping[str, Fit] | None = None) -> tuple[float, float] | None:
    """Smallest and largest model, parameters, on which `zero_fit_prediction` was tested.

    Parameters
    ----------
    fits
        As for `zero_fit_prediction`.

    Returns
    -------
    tuple of float, or None
        Non-embedding parameters; None if no fit says.
    """
    ranges = [fit.data.ranges for fit in _tested(load_all() if fits is None else fits)]
    edges = [edge for found in ranges for edge in found.get("n_params", ())]
    return (min(edges), max(edges)) if edges else None


def _tested(fits: Mapping[str, Fit]) -> list[Fit]:
    """Fits that hold how far the prediction from curvature was off."""
    return [fit for fit in fits.values() if fit.columns == ("quadratic_delta",)]


def _gaps(fit: Fit, value: pd.Series) -> list[str]:
    """Columns in which a fit's rows do not cover a row; the size of the increase comes last."""
    labels = ("method", "fmt")
    found = [c for c in labels if str(value[c]) not in fit.data.levels.get(c, ())]
    low, high = fit.data.ranges["bits"]
    if not low <= value["bits"] <= high:
        found.append("bits")
    # A smaller increase than any tested is only the better described by its second order.
    if value["quadratic_delta"] > fit.data.ranges["quadratic_delta"][1]:
        found.append("quadratic_delta")
    return found


def _server(row: pd.Series, tested: Sequence[Fit]) -> tuple[Fit | None, str]:
    """Return the fit whose rows cover a row, or say why there is none."""
    if not tested:
        return None, "no tested error is shipped"
    if not row["quadratic_delta"] > 0:
        return None, "quadratic_delta is zero"
    gaps = [_gaps(fit, row) for fit in tested]
    fewest = min(gaps, key=len)
    if not fewest:
        return tested[gaps.index(fewest)], ""
    return None, _why_not(row, tested, gaps, fewest)


def _why_not(
    row: pd.Series, tested: Sequence[Fit], gaps: Sequence[list[str]], fewest: list[str]
) -> str:
    """Say what of a row no fit covers."""
    column, value = fewest[0], row[fewest[0]]
    if column in ("method", "fmt"):
        labels = sorted({label for fit in tested for label in fit.data.levels.get(column, ())})
        return f"tested for {column} {', '.join(labels)} only, not {value}"
    if column == "bits":
        alike = [fit for fit, gap in zip(tested, gaps, strict=True) if gap[0] == "bits"]
        edges = [edge for fit in alike for edge in fit.data.ranges["bits"]]
        return f"tested at {min(edges):g} to {max(edges):g} bits only, not {value:g}"
    largest = tested[gaps.index(fewest)].data.ranges[column][1]
    return f"{value:.3g} is above the largest tested at these bits, {largest:.3g}"


def combine(
    first: tuple[np.ndarray, np.ndarray], second: tuple[np.ndarray, np.ndarray]
) -> pd.DataFrame:
    """Weigh two predictions of the same increases by the inverse of their variances.

    On the log scale, taking their errors to be independent. Where the two lie further apart than
    their errors allow, the standard deviation is stretched by the ratio (Birge, Physical Review 40,
    207, 1932), so that a disagreement widens the interval.

    Parameters
    ----------
    first, second
        Log means and standard deviations, shape (n,) each. Where one is null, the other stands
        alone.

    Returns
    -------
    pandas.DataFrame
        ``delta_loss`` (median), ``low_50``, ``high_50``, ``low_90``, ``high_90``, in nats per
        token; ``log_sd``, the standard deviation of its logarithm; ``weight``, that of the first,
        from 0 to 1; and ``disagreement``, the difference of the two in their joint standard
        deviations, first minus second.

    Raises
    ------
    FitError
        If a standard deviation is not above zero.

    Examples
    --------
    >>> one, other = (np.log([0.1]), np.array([0.1])), (np.log([0.2]), np.array([0.3]))
    >>> found = combine(one, other)
    >>> found[["delta_loss", "weight", "disagreement"]].round(3).loc[0].tolist()
    [0.107, 0.9, -2.192]
    """
    means = np.stack([first[0], second[0]])
    deviations = np.stack([first[1], second[1]])
    if (deviations <= 0).any():
        raise FitError("standard deviations must be above zero, or null where there is none.")
    precision = deviations**-2.0
    usable = np.isfinite(means) & np.isfinite(precision)
    weights = np.where(usable, precision, 0.0)
    total = weights.sum(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(usable, weights * means, 0.0).sum(axis=0) / total
        apart = (means[0] - means[1]) / np.hypot(first[1], second[1])
        sd = total**-0.5 * np.fmax(np.abs(apart), 1.0)
    found = {"delta_loss": np.exp(mean)}
    for level in _LEVELS:
        reach = norm.ppf(0.5 + level / 2) * sd
        found[f"low_{100 * level:g}"] = np.exp(mean - reach)
        found[f"high_{100 * level:g}"] = np.exp(mean + reach)
    with np.errstate(invalid="ignore"):
        weight = weights[0] / total
    return pd.DataFrame(found | {"log_sd": sd, "weight": weight, "disagreement": apart})
