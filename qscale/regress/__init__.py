"""Regressions beside the laws: linear, robust, mixed and median models, trees, and a process."""

from qscale.regress.estimate import KINDS, check_kind, regress
from qscale.regress.regression import Regression
from qscale.regress.storage import is_regression, load

__all__ = ["KINDS", "Regression", "check_kind", "is_regression", "load", "regress"]
