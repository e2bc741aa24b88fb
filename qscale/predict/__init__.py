"""Predict the loss increase of an unseen checkpoint: which fit, how sure, why, and is it normal."""

from qscale.fit.prediction import predict
from qscale.predict.choose import Candidate, candidates, reasons
from qscale.predict.combine import combine, normal_log, sizes_tested, zero_fit_prediction
from qscale.predict.explain import contributions
from qscale.predict.observe import Verdict, judge, judge_interval, percentile
from qscale.predict.support import FAR, furthest, outside, unread

__all__ = [
    "FAR",
    "Candidate",
    "Verdict",
    "candidates",
    "combine",
    "contributions",
    "furthest",
    "judge",
    "judge_interval",
    "normal_log",
    "outside",
    "percentile",
    "predict",
    "reasons",
    "sizes_tested",
    "unread",
    "zero_fit_prediction",
]
