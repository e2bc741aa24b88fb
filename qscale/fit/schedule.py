"""Fit the multi-power law to loss curves under known learning-rate schedules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from qscale.errors import FitError
from qscale.fit.solver import Problem, solve
from qscale.laws import schedule

if TYPE_CHECKING:
    from collections.abc import Mapping

    from qscale.laws.schedule import Exposure, MultiPower

    Array = np.ndarray


@dataclass(frozen=True, slots=True)
class ScheduleFit:
    """A fitted multi-power law and how its minimum was found.

    Parameters
    ----------
    law
        The law with its estimates.
    converged
        Whether the best start's gradient is zero to tolerance.
    starts, agreeing
        Number of starting points, and of those that ended within 0.1 % of the best objective.
    objective
        Sum of Huber losses of log residuals.
    """

    law: MultiPower
    converged: bool
    starts: int
    agreeing: int
    objective: float


HELD = {"beta": 1.0, "gamma": 0.5}


def fit_multi_power(
    exposure: Exposure,
    loss: Array,
    fixed: Mapping[str, float] | None = None,
    huber_delta: float = 1e-3,
) -> ScheduleFit:
    """Fit the multi-power law by the Huber loss of log residuals from many starts.

    A few schedules do not determine the shape of a drop's effect: on the three of Luo et al.
    (arXiv:2503.12811) the minimum in all seven parameters lies well below the published constants
    yet predicts other schedules worse, so that fit owes its success to stopping early near its
    start. Here the shape is held at a hyperbola, ``G(x) = C x / (1 + C x)``, half-way between
    progress by steps (``gamma`` 1) and by summed rate (0), unless asked otherwise.

    Parameters
    ----------
    exposure
        Of the n steps at which the loss is known, see `qscale.laws.schedule`; stack several runs.
    loss
        Loss in nats per token, shape (n,).
    fixed
        Natural-scale values of parameters that are held; None holds `HELD`, ``{}`` nothing.
    huber_delta
        Log residual at which the loss turns from quadratic to linear.

    Returns
    -------
    ScheduleFit
        Points of one run share their noise, so no interval is given.

    Raises
    ------
    FitError
        If a loss is not above zero, no learning rate ever drops, there are too few steps or a fixed
        parameter is unknown.
    """
    loss = np.asarray(loss, dtype=float)
    fixed = HELD if fixed is None else fixed
    low, high = _bounds(fixed)
    if not np.all(loss > 0):
        raise FitError("column 'loss_fp' must be above zero to have a logarithm.")
    free = int((low < high).sum())
    if len(loss) <= free:
        raise FitError(f"{len(loss)} steps cannot determine {free} parameters. Add steps.")
    if not exposure.drop.any():
        raise FitError(
            "column 'lr' is constant after warm-up, so B, C, beta and gamma of the multi-power law "
            "are not determined. Add a run whose rate decays."
        )
    problem = Problem(
        value=lambda theta: schedule.log_loss(theta, exposure)[0],
        gradient=lambda theta: schedule.log_loss(theta, exposure)[1],
        observed=np.log(loss),
        low=low,
        high=high,
        huber_delta=huber_delta,
    )
    starts = np.unique(np.clip(schedule.starts(), low, high), axis=0)
    found = solve(problem, starts, np.ones(len(loss)))
    best = int(np.argmin(found.objective))
    agree = found.objective <= found.objective[best] * 1.001
    return ScheduleFit(
        law=schedule.from_internal(found.theta[best]),
        converged=bool(found.converged[best]),
        starts=len(found.theta),
        agreeing=int(agree.sum()),
        objective=float(found.objective[best]),
    )


def _bounds(fixed: Mapping[str, float]) -> tuple[Array, Array]:
    """Return internal bounds, shape (7,) each; equal where a parameter is held."""
    for name in fixed:
        if name not in schedule.NAMES:
            raise FitError(
                f"fixed {name!r}: the multi-power law has no such parameter. "
                f"Its parameters are: {', '.join(schedule.NAMES)}."
            )
    held = [
        (p.internal(fixed[p.name]),) * 2 if p.name in fixed else p.bounds
        for p in schedule.PARAMETERS
    ]
    low, high = np.array(held).T
    return low, high
