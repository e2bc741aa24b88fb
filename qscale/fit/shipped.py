"""Fits that come with the package, found by name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from qscale.errors import FitError, did_you_mean
from qscale.fit.storage import load

if TYPE_CHECKING:
    from qscale.fit.result import Fit

_HERE = Path(__file__).resolve().parent.parent


def folder() -> Path:
    """Return the folder of shipped fits, inside an installed package or beside a checkout's."""
    inside = _HERE / "fits"
    return inside if inside.is_dir() else _HERE.parent / "fits"


def names() -> tuple[str, ...]:
    """Return the names of the shipped fits."""
    return tuple(sorted(path.parent.name for path in folder().glob("*/fit.json")))


def load_all() -> dict[str, Fit]:
    """Load every shipped fit, by name."""
    return {name: load(folder() / name / "fit.json") for name in names()}


def find(name_or_path: str | Path) -> Fit:
    """Load a fit from a file, or a shipped one by name.

    Raises
    ------
    FitError
        If it is neither; the message lists the shipped names.
    """
    name = str(name_or_path)
    if name in names() and not Path(name).is_file():
        return load(folder() / name / "fit.json")
    if not Path(name).is_file() and not name.endswith(".json"):
        raise FitError(
            f"{name}: no such fit file, nor a shipped fit. Shipped: {', '.join(names())}."
            f"{did_you_mean(name, names())}"
        )
    return load(name)
