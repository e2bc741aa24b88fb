"""Which factors a table supports, and which of them it cannot tell apart."""

from qscale.select.confounding import Confounding, confounding
from qscale.select.exponents import exponents_within
from qscale.select.steps import Selected, candidate, select_factors

__all__ = [
    "Confounding",
    "Selected",
    "candidate",
    "confounding",
    "exponents_within",
    "select_factors",
]
