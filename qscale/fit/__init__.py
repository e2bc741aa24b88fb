"""Fit laws to measurement tables: solver, row selection, uncertainty and frozen results."""

from qscale.fit.estimate import fit
from qscale.fit.result import STATUS_MEANING, Fit, Fitted, load
from qscale.fit.rows import explain

__all__ = ["STATUS_MEANING", "Fit", "Fitted", "explain", "fit", "load"]
