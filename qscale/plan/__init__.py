"""Plan from fits: bit widths, mixes, sizes, training length, schedules, further measurements."""

from qscale.plan.backtest import decisions, realised
from qscale.plan.bits import Choice, fewest_bits

__all__ = ["Choice", "decisions", "fewest_bits", "realised"]
