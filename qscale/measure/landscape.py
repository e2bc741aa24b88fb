"""The loss along lines and planes through the weights: radial curves and two-dimensional slices."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from qscale.errors import CheckpointError, QscaleError
from qscale.measure.curvature.head import check_head
from qscale.measure.directions import direction_norm
from qscale.measure.loss import mean_and_se
from qscale.measure.perturb import displaceable, token_counts, window_losses

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from numpy.typing import NDArray
    from transformers import PreTrainedModel

    from qscale.measure.curvature.loss import Progress
    from qscale.measure.perturb import Direction

SLOPE_BAND = 2.0
"""The slope at a radius is that of a line through the points within this factor of it."""


@dataclass(frozen=True, slots=True, eq=False)
class RadialCurve:
    """Loss at points ``w + radius * direction``, window by window.

    Parameters
    ----------
    radii
        Ascending, in lengths of the direction; shape (radii,).
    direction_norm
        Euclidean length of the direction, in units of the weights.
    nll
        Negative log likelihood of each window's scored tokens at each radius, summed, nats; shape
        (radii, windows). Not finite where the loss overflows.
    nll_start
        The same at the weights themselves, shape (windows,).
    counts
        Scored tokens of each window, shape (windows,).
    vocabulary
        Size of the vocabulary.
    """

    radii: NDArray[np.float64]
    direction_norm: float
    nll: NDArray[np.float64]
    nll_start: NDArray[np.float64]
    counts: NDArray[np.int64]
    vocabulary: int

    def frame(self) -> pd.DataFrame:
        """Return the curve as a table.

        Returns
        -------
        pandas.DataFrame
            One row for each radius: ``radius``; ``distance``, the same in units of the weights;
            ``loss``, ``delta_loss`` and its standard error ``delta_loss_se``, paired over windows,
            in nats per token. Losses that overflow are null, and so is the error of one window.
        """
        rows = [_point(nll, self.nll_start, self.counts) for nll in self.nll]
        distances = self.radii * self.direction_norm
        return pd.DataFrame({"radius": self.radii, "distance": distances}).join(pd.DataFrame(rows))

    def slope(self, at: float = 1.0) -> tuple[float | None, float | None]:
        r"""Measure how steeply the loss increase grows with the radius, as a local exponent.

        It is the slope of the least-squares line of :math:`\log \Delta` against :math:`\log r`
        over the radii within a factor `SLOPE_BAND` of ``at``: 1 where the gradient rules, 2 where
        the curve is a parabola, more where it climbs a step, 0 on a plateau.

        Parameters
        ----------
        at
            Radius, in lengths of the direction; 1 is the quantized point on the way to one.

        Returns
        -------
        slope, se : float or None
            The error is a jackknife over windows. Null with fewer than two radii in the band, or
            where the loss does not rise: the error alone, if only so without some window.
        """
        band = (self.radii * SLOPE_BAND >= at) & (self.radii <= at * SLOPE_BAND)
        if band.sum() < 2:
            return None, None
        x = np.log(self.radii[band])

        def exponent(delta: NDArray[np.float64], _: float) -> float | None:
            y = delta[band]
            if not (np.isfinite(y).all() and (y > 0).all()):
                return None
            return float(np.polynomial.polynomial.polyfit(x, np.log(y), 1)[1])

        return self._jackknife(exponent)

    def step_radius(self, share: float = 0.5) -> tuple[float | None, float | None]:
        r"""Find how far the weights can go before the loss has climbed its step.

        It is the smallest radius at which the increase reaches a share of the way from the model's
        loss :math:`L` to that of a uniform guess, :math:`\Delta = s (\log V - L)`, by linear
        interpolation between radii, zero included. The loss of a damaged model often passes
        :math:`\log V`, so this is a reference height and not a limit.

        Parameters
        ----------
        share
            Share of the way, above 0.

        Returns
        -------
        radius, se : float or None
            In lengths of the direction; the error is a jackknife over windows. Null if the curve
            does not get there, or the model is no better than a uniform guess: the error alone, if
            only so without some window. A loss that overflows counts as
            infinite, so that the radius is then the last one before it.
        """

        def crossing(delta: NDArray[np.float64], loss: float) -> float | None:
            return _crossing(self.radii, delta, share * (math.log(self.vocabulary) - loss))

        return self._jackknife(crossing)

    def _jackknife(
        self, statistic: Callable[[NDArray[np.float64], float], float | None]
    ) -> tuple[float | None, float | None]:
        """Evaluate a statistic of the increases and the loss, and its error over windows."""
        nll = np.where(np.isfinite(self.nll), self.nll, np.inf)

        def without(kept: NDArray[np.bool_]) -> float | None:
            tokens = self.counts[kept].sum()
            start = self.nll_start[kept].sum()
            return statistic((nll[:, kept].sum(1) - start) / tokens, float(start / tokens))

        m = len(self.counts)
        value = without(np.ones(m, bool))
        if value is None or m < 2:
            return value, None
        parts = [without(np.arange(m) != i) for i in range(m)]
        known = np.array([part for part in parts if part is not None])
        if len(known) < m:
            return value, None
        return value, float(np.sqrt((m - 1) * np.var(known)))


def radial_loss(
    model: PreTrainedModel,
    windows: torch.Tensor,
    direction: Direction,
    radii: Sequence[float],
    *,
    batch_windows: int = 1,
    on_point: Progress | None = None,
) -> RadialCurve:
    """Evaluate the loss at several distances from the weights along one direction.

    Such a curve rises like a parabola near a minimum, then like a step; where it steps decides how
    much quantization noise a model stands (Xu et al., arXiv:2410.12119, call it the radial loss).

    Parameters
    ----------
    model
        Causal language model with float32 weights.
    windows
        Token ids, shape ``(n_windows, context)``; every token of a window but its first is scored.
    direction
        One tensor per parameter by its name, as :mod:`qscale.measure.directions` gives them; other
        parameters stay.
    radii
        Distances in lengths of the direction, one forward pass over the windows each.
    batch_windows
        Windows in one forward pass; it bounds the memory and does not change the result.
    on_point
        Called with 1 after each radius.

    Returns
    -------
    RadialCurve
        With the radii in ascending order.

    Raises
    ------
    CheckpointError
        If the loss of the model itself is not finite, or the direction names unknown parameters.
    QscaleError
        If the radii are none, not finite or not distinct.
    TextError
        If the windows have no token to score.
    """
    lengths = np.unique(np.asarray(radii, dtype=float))
    if not len(lengths) or len(lengths) != len(radii) or not np.isfinite(lengths).all():
        raise QscaleError(f"radii must be distinct finite numbers. Got {list(radii)} instead.")
    nll = np.empty((len(lengths), len(windows)))
    with displaceable(model, list(direction)) as (_, move):
        head = check_head(model, windows)
        start = _start(model, windows, batch_windows)
        for row, length in enumerate(lengths.tolist()):
            move((length, direction))
            nll[row] = window_losses(model, windows, batch_windows=batch_windows)
            if on_point:
                on_point(1.0)
    norm, counts = direction_norm(direction), token_counts(windows)
    return RadialCurve(lengths, norm, nll, start, counts, len(head.weight))


def loss_slice(
    model: PreTrainedModel,
    windows: torch.Tensor,
    direction_a: Direction,
    direction_b: Direction,
    *,
    extent: tuple[float, float] = (-0.5, 1.5),
    steps: int = 21,
    batch_windows: int = 1,
    on_point: Progress | None = None,
) -> pd.DataFrame:
    """Evaluate the loss on a grid in the plane that two directions span at the weights.

    With ``direction_a`` to the quantized weights and ``direction_b`` to an earlier checkpoint's it
    is the slice of Catalan-Tatjer et al. (arXiv:2510.06213, section 6); the weights are at (0, 0),
    the other two at (1, 0) and (0, 1). Directions need be neither orthogonal nor of equal length.

    Parameters
    ----------
    model, windows, batch_windows
        As for :func:`radial_loss`.
    direction_a, direction_b
        One tensor per parameter by its name, the same names in both.
    extent
        Lowest and highest multiple of each direction.
    steps
        Grid points along each direction, at least 2; each of their product costs a forward pass
        over the windows.
    on_point
        Called with 1 after each grid point.

    Returns
    -------
    pandas.DataFrame
        One row for each grid point, ``beta`` slowest: ``alpha`` and ``beta``, the multiples of
        ``direction_a`` and ``direction_b``; ``loss``, ``delta_loss`` and ``delta_loss_se`` as in
        :meth:`RadialCurve.frame`.

    Raises
    ------
    CheckpointError, TextError
        As for :func:`radial_loss`.
    QscaleError
        If the grid is empty or the directions name different parameters.
    """
    if not (-math.inf < extent[0] < extent[1] < math.inf) or steps < 2:
        raise QscaleError(
            "extent must go from a number to a larger one, in at least 2 steps. "
            f"Got {extent} in {steps} steps instead."
        )
    if set(direction_a) != set(direction_b):
        odd = sorted(set(direction_a) ^ set(direction_b))
        raise QscaleError(f"Both directions must name the same parameters. Not in both: {odd}.")
    axis, counts = np.linspace(*extent, steps).tolist(), token_counts(windows)
    rows = []
    with displaceable(model, list(direction_a)) as (_, move):
        check_head(model, windows)
        start = _start(model, windows, batch_windows)
        for beta, alpha in itertools.product(axis, axis):
            move((alpha, direction_a), (beta, direction_b))
            nll = window_losses(model, windows, batch_windows=batch_windows)
            rows.append({"alpha": alpha, "beta": beta} | _point(nll, start, counts))
            if on_point:
                on_point(1.0)
    return pd.DataFrame(rows)


def _start(model: PreTrainedModel, windows: torch.Tensor, batch_windows: int) -> np.ndarray:
    """Return the loss of each window at the weights themselves, which must be finite."""
    found = window_losses(model, windows, batch_windows=batch_windows)
    if not np.isfinite(found).all():
        raise CheckpointError(
            f"The loss of {type(model).__name__} is {found.sum()}: "
            "check its weights for NaN and infinite values."
        )
    return found


def _point(
    nll: NDArray[np.float64], start: NDArray[np.float64], counts: NDArray[np.int64]
) -> dict[str, float]:
    """Return the loss at a point and its increase, NaN unless finite."""
    if not np.isfinite(nll).all():
        return dict.fromkeys(("loss", "delta_loss", "delta_loss_se"), math.nan)
    delta, error = mean_and_se(nll - start, counts)
    return {"loss": float(nll.sum() / counts.sum()), "delta_loss": delta, "delta_loss_se": error}


def _crossing(
    radii: NDArray[np.float64], delta: NDArray[np.float64], target: float
) -> float | None:
    """Return the smallest positive radius at which a curve through the origin reaches a height.

    Examples
    --------
    >>> _crossing(np.array([1.0, 2.0, 4.0]), np.array([0.0, 1.0, 5.0]), 3.0)
    3.0
    """
    x, y = np.append(0.0, radii[radii > 0]), np.append(0.0, delta[radii > 0])
    reached = np.flatnonzero(y >= target)
    if target <= 0 or not len(reached):
        return None
    after = int(reached[0])
    before = after - 1
    share = (target - y[before]) / (y[after] - y[before])
    return float(x[before] + share * (x[after] - x[before]))
