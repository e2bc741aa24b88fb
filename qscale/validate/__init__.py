"""Test models on rows they have not seen: splits, scores, and a league table with paired tests."""

from qscale.validate.league import League, compare
from qscale.validate.paired import paired
from qscale.validate.scores import held_out, log_errors, score, summarize
from qscale.validate.splits import Split, expanding, largest, leave_one_out, lowest, parse
from qscale.validate.surprise import surprises

__all__ = [
    "League",
    "Split",
    "compare",
    "expanding",
    "held_out",
    "largest",
    "leave_one_out",
    "log_errors",
    "lowest",
    "paired",
    "parse",
    "score",
    "summarize",
    "surprises",
]
