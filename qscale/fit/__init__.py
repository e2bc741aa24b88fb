"""Fit laws to measurement tables: solver, row selection, uncertainty and frozen results."""

from qscale.fit.estimate import fit
from qscale.fit.record import STATUS_MEANING, Fitted
from qscale.fit.result import Fit
from qscale.fit.rows import explain
from qscale.fit.storage import load

__all__ = ["STATUS_MEANING", "Fit", "Fitted", "explain", "fit", "load"]
