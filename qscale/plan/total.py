"""Loss after quantization from a law of the loss before it and a law of its increase."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qscale.errors import QscaleError
from qscale.plan.joint import draws

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

    from qscale.fit import Fit

    Array = np.ndarray


def check_pair(loss: Fit, delta: Fit) -> None:
    """Raise unless one fit predicts ``loss_fp`` and the other an increase.

    Raises
    ------
    QscaleError
        Naming the target that does not do.
    """
    if loss.target != "loss_fp":
        raise QscaleError(
            f"the law of the loss before quantization must predict loss_fp. {loss.name} predicts "
            f"{loss.target} instead."
        )
    if delta.target not in ("delta_loss", "relative_delta"):
        raise QscaleError(
            "the law of the increase must predict delta_loss or relative_delta. "
            f"{delta.name} predicts {delta.target} instead."
        )


def added(delta: Fit, loss: Array, increase: Array) -> Array:
    """Add the increase to the loss, nats per token."""
    return loss * (1.0 + increase) if delta.target == "relative_delta" else loss + increase


def total(loss: Fit, delta: Fit, frame: pd.DataFrame) -> Array:
    """Loss after quantization at both laws' estimates, nats per token, shape (n,)."""
    return added(delta, loss.center(frame), delta.center(frame))


def total_draws(
    loss: Fit, delta: Fit, frame: pd.DataFrame, count: int, rng: np.random.Generator
) -> Array:
    """Draw the loss after quantization, shape (count, n); the two fits err independently."""
    before = draws(loss, frame, count, rng, "new_checkpoint")
    return added(delta, before, draws(delta, frame, count, rng, "new_checkpoint"))
