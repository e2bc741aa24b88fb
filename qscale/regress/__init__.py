"""Regressions beside the laws: linear, robust, mixed and median models, trees, and a process."""

from qscale.regress.estimate import KINDS, regress
from qscale.regress.regression import Regression
from qscale.regress.storage import is_regression, load

__all__ = ["KINDS", "Regression", "is_regression", "load", "regress"]
