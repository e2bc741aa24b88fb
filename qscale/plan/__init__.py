"""Plan from fits: bit widths, mixes, sizes, training length, schedules, further measurements."""

from qscale.plan.backtest import decisions, realised
from qscale.plan.bits import Choice, fewest_bits, fewest_bits_of
from qscale.plan.mix import Allocation, allocate
from qscale.plan.next import choose
from qscale.plan.pareto import frontier
from qscale.plan.schedule import alternatives
from qscale.plan.tokens import critical_tokens

__all__ = [
    "Allocation",
    "Choice",
    "allocate",
    "alternatives",
    "choose",
    "critical_tokens",
    "decisions",
    "fewest_bits",
    "fewest_bits_of",
    "frontier",
    "realised",
]
