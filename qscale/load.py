"""Load whatever was fitted: a law's fit, shipped or saved, or a saved regression."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from qscale.errors import FitError
from qscale.fit.shipped import find

if TYPE_CHECKING:
    from qscale.fit import Fit
    from qscale.regress import Regression


def load_fitted(name_or_path: str | Path) -> Fit | Regression:
    """Load a law's fit or a regression from a file, or a shipped fit by name.

    Raises
    ------
    FitError
        If it is none of these; the message lists the shipped names.
    """
    try:
        return find(name_or_path)
    except FitError:
        if not Path(name_or_path).is_file():
            raise
        from qscale.regress import is_regression, load  # noqa: PLC0415 - takes seconds to import

        if not is_regression(name_or_path):
            raise
        return load(name_or_path)
