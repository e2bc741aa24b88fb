"""Test models on rows they have not seen: splits, scores, and a league table with paired tests."""

from qscale.validate.league import League, compare
from qscale.validate.scores import held_out, score, summarize
from qscale.validate.splits import Split, expanding, largest, leave_one_out, lowest, parse

__all__ = [
    "League",
    "Split",
    "compare",
    "expanding",
    "held_out",
    "largest",
    "leave_one_out",
    "lowest",
    "parse",
    "score",
    "summarize",
]
