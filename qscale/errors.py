"""Errors that tell a user what is wrong with the input and what to do about it."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class QscaleError(Exception):
    """A mistake in the user's input; the message names the file, column, row or option.

    The command line prints the message on one line and exits with status 2. Anything else that
    is raised is a bug.
    """


class TableError(QscaleError):
    """A table cannot be read, lacks a column or holds a value that cannot be right."""


class CheckpointError(QscaleError):
    """A checkpoint folder is incomplete, damaged or not a causal language model."""


class TextError(QscaleError):
    """A text is missing, unreadable or too short for the protocol."""


class FitError(QscaleError):
    """A law cannot be fitted to the rows that were given."""


class SweepError(QscaleError):
    """The plan of a sweep is wrong, or its folder cannot be used."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of a message that guesses which known name was meant; empty without a guess.

    Examples
    --------
    >>> did_you_mean("ouyan", ["kumar", "ouyang"])
    " Did you mean 'ouyang'?"
    """
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""
