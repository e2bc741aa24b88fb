"""Fit the multi-power law to loss curves under known learning-rate schedules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from qscale.errors import FitError
from qscale.fit.solver import Problem, solve
from qscale.laws import schedule

if TYPE_CHECKING:
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


def fit_multi_power(exposure: Exposure, loss: Array, huber_delta: float = 1e-3) -> ScheduleFit:
    """Fit the multi-power law by the Huber loss of log residuals from many starts.

    Parameters
    ----------
    exposure
        Of the n steps at which the loss is known, see `qscale.laws.schedule`; stack several runs.
    loss
        Loss in nats per token, shape (n,).
    huber_delta
        Log residual at which the loss turns from quadratic to linear.

    Returns
    -------
    ScheduleFit
        Points of one run share their noise, so no interval is given.

    Raises
    ------
    FitError
        If a loss is not above zero, no learning rate ever drops or there are too few steps.
    """
    loss = np.asarray(loss, dtype=float)
    low, high = np.array([p.bounds for p in schedule.PARAMETERS]).T
    if not np.all(loss > 0):
        raise FitError("column 'loss_fp' must be above zero to have a logarithm.")
    if len(loss) <= len(low):
        raise FitError(f"{len(loss)} steps cannot determine {len(low)} parameters. Add steps.")
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
    found = solve(problem, schedule.starts(), np.ones(len(loss)))
    best = int(np.argmin(found.objective))
    agree = found.objective <= found.objective[best] * 1.001
    return ScheduleFit(
        law=schedule.from_internal(found.theta[best]),
        converged=bool(found.converged[best]),
        starts=len(found.theta),
        agreeing=int(agree.sum()),
        objective=float(found.objective[best]),
    )
