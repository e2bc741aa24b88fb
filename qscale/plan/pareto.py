"""Size against precision: which models and bit widths give the lowest loss for their bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from qscale.errors import QscaleError
from qscale.plan.bits import stored_bits_per_weight
from qscale.plan.total import check_pair, total, total_draws
from qscale.table import require_numbers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from qscale.fit import Fit

    Array = np.ndarray


def frontier(size: Array, loss: Array) -> Array:
    """Which points no other matches or beats in both size and loss, shape (n,).

    Of points alike in both the first counts.

    Examples
    --------
    >>> frontier(np.array([1.0, 2.0, 3.0]), np.array([3.0, 3.5, 2.0]))
    array([ True, False,  True])
    """
    order = np.lexsort((loss, size))
    best = np.minimum.accumulate(np.concatenate([[np.inf], loss[order]]))[:-1]
    on = np.zeros(len(size), dtype=bool)
    on[order] = loss[order] < best
    return on


def size_bytes(frame: pd.DataFrame) -> Array:
    """Bytes of the weights that are counted: ``n_params`` times stored bits per weight over 8."""
    require_numbers(frame, ["n_params", "bits_per_weight"], "frontier")
    return frame["n_params"].to_numpy(dtype=float) * frame["bits_per_weight"].to_numpy() / 8.0


def largest_models(settings: pd.DataFrame, memory: Sequence[float]) -> pd.DataFrame:
    """Give each setting the parameters that fill each budget, one row for both.

    Parameters
    ----------
    settings
        Rows with ``bits_per_weight``.
    memory
        Budgets, bytes.
    """
    parts = [
        settings.assign(memory=budget, n_params=8.0 * budget / settings["bits_per_weight"])
        for budget in memory
    ]
    return pd.concat(parts, ignore_index=True)


def predicted(
    loss: Fit,
    delta: Fit,
    frame: pd.DataFrame,
    *,
    level: float = 0.9,
    count: int = 1000,
    seed: int = 0,
) -> pd.DataFrame:
    """Predict the loss after quantization of sizes and settings, and find the frontier.

    As Dettmers and Zettlemoyer (arXiv:2212.09720) compare bit widths at equal total bits, with the
    uncertainty of the laws. Models of one size share their deviation from the law across settings;
    those of two sizes do not.

    Parameters
    ----------
    loss
        Fit of ``loss_fp``.
    delta
        Fit of ``delta_loss`` or ``relative_delta``.
    frame
        One row for each size and setting: the fits' columns and ``bits_per_weight``. With a column
        ``memory`` frontiers and bests are within each of its values.
    level
        Probability of the interval.
    count, seed
        Draws and their seed.

    Returns
    -------
    pandas.DataFrame
        The rows by size with ``bytes``, ``loss_q`` (nats per token, at the estimates), ``low``,
        ``high``, ``on_frontier`` and ``share_on_frontier`` (of the joint draws).
    """
    check_pair(loss, delta)
    frame = frame.reset_index(drop=True)
    # A model that fills its budget has its size exactly, without the rounding of two divisions.
    size = frame["memory"].to_numpy() if "memory" in frame.columns else size_bytes(frame)
    named = frame.assign(run=[f"{n:.15g} parameters" for n in frame["n_params"]])
    estimate = total(loss, delta, named)
    drawn = total_draws(loss, delta, named, count, np.random.default_rng(seed))
    low, high = np.quantile(drawn, [0.5 - level / 2, 0.5 + level / 2], axis=0)
    on, share = np.zeros(len(frame), dtype=bool), np.zeros(len(frame))
    for rows in _parts(frame):
        on[rows] = frontier(size[rows], estimate[rows])
        share[rows] = np.mean([frontier(size[rows], curve[rows]) for curve in drawn], axis=0)
    found = frame.assign(
        bytes=size, loss_q=estimate, low=low, high=high, on_frontier=on, share_on_frontier=share
    )
    keys = [*(["memory"] if "memory" in frame.columns else []), "bytes", "loss_q"]
    return found.sort_values(keys, kind="stable", ignore_index=True)


def measured(frame: pd.DataFrame) -> pd.DataFrame:
    """Find the frontier of a measured family.

    Parameters
    ----------
    frame
        Measured rows with ``n_params``, ``loss_q`` (or ``loss_fp`` and ``delta_loss``) and
        ``bits_per_weight`` (or ``bits`` and ``group_size``), of one protocol. Rows whose status is
        not ok, or that lack one of these, are left out.

    Returns
    -------
    pandas.DataFrame
        The usable rows by size with ``bytes``, ``loss_q`` and ``on_frontier``.

    Raises
    ------
    QscaleError
        If rows are of several protocols, whose losses do not compare, or none is usable.
    """
    if "bits" not in frame.columns:
        frame = frame.assign(bits=np.nan)
    if "loss_q" not in frame.columns:
        require_numbers(frame, ["loss_fp", "delta_loss"], "frontier")
        frame = frame.assign(loss_q=frame["loss_fp"] + frame["delta_loss"])
    require_numbers(frame, ["n_params", "loss_q"], "frontier")
    frame = frame.assign(bits_per_weight=stored_bits_per_weight(frame))
    known = frame[["n_params", "bits_per_weight", "loss_q"]].notna().all(axis=1)
    if "status" in frame.columns:
        known &= frame["status"].isna() | (frame["status"] == "ok")
    frame = frame[known].reset_index(drop=True)
    if frame.empty:
        raise QscaleError("no row has parameters, bits and a loss after quantization.")
    if "protocol" in frame.columns and len(frame["protocol"].unique()) > 1:
        raise QscaleError(
            "losses of several protocols do not compare; choose one with --where, such as "
            f"\"protocol == '{frame['protocol'].iloc[0]}'\"."
        )
    size, loss = size_bytes(frame), frame["loss_q"].to_numpy(dtype=float)
    found = frame.assign(bytes=size, on_frontier=frontier(size, loss))
    return found.sort_values(["bytes", "loss_q"], kind="stable", ignore_index=True)


def best_within(found: pd.DataFrame, memory: float) -> pd.Series | None:
    """Return the row of lowest loss among those of at most ``memory`` bytes; none if none fits."""
    fits = found[found["bytes"] <= memory * (1 + 1e-12)]
    return None if fits.empty else fits.iloc[int(fits["loss_q"].argmin())]


def _parts(frame: pd.DataFrame) -> list[Array]:
    """Rows whose sizes are compared: all, or those of one budget."""
    if "memory" not in frame.columns:
        return [np.arange(len(frame))]
    codes, budgets = pd.factorize(frame["memory"])
    return [np.flatnonzero(codes == i) for i in range(len(budgets))]
