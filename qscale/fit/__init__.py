"""Fit laws to measurement tables: solver, row selection, uncertainty and frozen results."""

from qscale.fit.estimate import fit
from qscale.fit.record import FEW_CLUSTERS, INTERVAL_MEANING, STATUS_MEANING, Fitted
from qscale.fit.result import Fit
from qscale.fit.rows import explain
from qscale.fit.storage import load

__all__ = [
    "FEW_CLUSTERS",
    "INTERVAL_MEANING",
    "STATUS_MEANING",
    "Fit",
    "Fitted",
    "explain",
    "fit",
    "load",
]
