"""Critical tokens: from where on more training makes the quantized model worse."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from qscale.errors import QscaleError
from qscale.fit.options import check_count, check_level
from qscale.plan.total import check_pair, total, total_draws

if TYPE_CHECKING:
    from qscale.fit import Fit

    Array = np.ndarray

SEARCHED = (1e6, 1e18)
_POINTS = 241  # twenty for each factor of ten


def critical_tokens(
    loss: Fit,
    delta: Fit,
    settings: pd.DataFrame,
    *,
    level: float = 0.9,
    count: int = 1000,
    seed: int = 0,
) -> pd.DataFrame:
    """Find the tokens at which the loss after quantization is lowest, with an interval.

    The loss before quantization falls with training tokens D, the increase may grow with them
    (Kumar et al., arXiv:2411.04330, section 3; Ouyang et al., arXiv:2411.17691); where the growth
    outruns the fall, more training hurts. With B / D^b and k D^a the minimum lies at
    D^(a + b) = b B / (a k). Intervals come from joint draws of both fits, deviations of a new
    checkpoint included: they are shared by its whole training and move the minimum.

    Parameters
    ----------
    loss
        Fit of ``loss_fp``, reading tokens.
    delta
        Fit of ``delta_loss`` or ``relative_delta``.
    settings
        One row for each quantizer setting with the fits' columns; ``tokens`` may be absent.
    level
        Probability of the interval.
    count, seed
        Draws and their seed.

    Returns
    -------
    pandas.DataFrame
        The settings with ``critical_tokens``, ``low``, ``high`` (infinite where the loss still
        falls at 1e18 tokens), ``share_without`` (share of draws that have no minimum up to there)
        and ``lowest_loss`` (at the critical tokens, nats per token; null without).

    Raises
    ------
    QscaleError
        If a fit predicts something else, or the loss does not depend on tokens.
    """
    check_pair(loss, delta)
    check_level(level)
    check_count("seed", seed, 0)
    if "tokens" not in loss.columns:
        raise QscaleError(f"{loss.name}: the law of the loss does not read tokens.")
    settings = settings.reset_index(drop=True)
    grid = np.geomspace(*SEARCHED, _POINTS)
    rng = np.random.default_rng(seed)
    found = []
    for row in range(len(settings)):
        frame = settings.iloc[np.full(len(grid), row)].reset_index(drop=True).assign(tokens=grid)
        estimate = total(loss, delta, frame)[None]
        at, lowest = (value[0] for value in minimum(grid, estimate))
        drawn = minimum(grid, total_draws(loss, delta, frame, count, rng))[0]
        low, high = np.quantile(drawn, [0.5 - level / 2, 0.5 + level / 2], method="lower")
        found.append((at, low, high, float(np.isinf(drawn).mean()), lowest))
    names = ["critical_tokens", "low", "high", "share_without", "lowest_loss"]
    return settings.drop(columns="tokens", errors="ignore").join(pd.DataFrame(found, columns=names))


def minimum(grid: Array, curves: Array) -> tuple[Array, Array]:
    """Place and value of the lowest point of curves on a logarithmic grid, refined by a parabola.

    Parameters
    ----------
    grid
        Ascending, evenly spaced in the logarithm, shape (g,).
    curves
        Shape (m, g).

    Returns
    -------
    place, value
        Shape (m,) each. The place is infinite, and the value null, where a curve still falls at the
        end of the grid; it is the grid's start where a curve rises from there on.
    """
    index = curves.argmin(axis=1)
    inner = np.clip(index, 1, len(grid) - 2)
    rows = np.arange(len(curves))
    before, here, after = (curves[rows, inner + step] for step in (-1, 0, 1))
    bend = before - 2 * here + after
    with np.errstate(divide="ignore", invalid="ignore"):
        shift = np.where(bend > 0, 0.5 * (before - after) / bend, 0.0)
    shift = np.clip(shift, -0.5, 0.5)
    step = np.log(grid[1] / grid[0])
    place = grid[inner] * np.exp(shift * step)
    value = here - 0.25 * (before - after) * shift
    place = np.where(index == 0, grid[0], place)
    value = np.where(index == 0, curves[:, 0], value)
    falls = index == len(grid) - 1
    return np.where(falls, np.inf, place), np.where(falls, np.nan, value)
