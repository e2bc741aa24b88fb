"""Read a fit back from the JSON that it was saved as."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from qscale.errors import FitError
from qscale.fit.calibration import Calibration
from qscale.fit.effects import Effects
from qscale.fit.record import Data, Search
from qscale.fit.result import FORMAT, Fit
from qscale.laws import from_spec


def load(path: str | Path) -> Fit:
    """Read a fit that `Fit.save` wrote.

    Raises
    ------
    FitError
        If the file is missing, not a qscale fit, damaged, or of another format.
    """
    path = Path(path)
    if not path.is_file():
        raise FitError(f"{path}: no such fit. Make one with qscale fit.")
    try:
        content = json.loads(path.read_text())
        version, _ = content["format"], content["law"]  # a saved regression has no law
    except (ValueError, KeyError, TypeError) as error:
        raise FitError(f"{path}: not a fit written by qscale fit.") from error
    if version != FORMAT:
        raise FitError(
            f"{path}: format {version} is not known to this version of qscale; fit again."
        )
    try:
        _ = [content["law"][key] for key in ("name", "target", "factors")]
        fit = _rebuild(content)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise FitError(f"{path}: the fit in it is damaged ({error}); fit again.") from error
    size = len(fit.law.names)
    joint = size + len(fit.effects.values)
    shapes = fit.theta.shape, fit.cov.shape, fit.effects.cov.shape
    if shapes != ((size,), (size, size), (joint, joint)) or not np.isfinite(fit.theta).all():
        raise FitError(f"{path}: the fit in it is damaged (its parameters); fit again.")
    return fit


def from_json(text: str) -> Fit:
    """Rebuild a fit from what `Fit.to_json` returned."""
    return _rebuild(json.loads(text))


def _rebuild(content: dict[str, Any]) -> Fit:
    """Put the parts together."""
    theta = np.array(content["theta"], dtype=float)
    profiles, calibration = content["profiles"], content["calibration"]
    return Fit(
        law=from_spec(content["law"]),
        theta=theta,
        interval=content["interval"],
        cov=np.array(content["cov"], dtype=float),
        dof=np.array(content["dof"], dtype=float),
        effects=Effects.from_json(content["effects"]),
        draws=np.array(content["draws"], dtype=float).reshape(-1, len(theta)),
        profiles=None if profiles is None else np.array(profiles, dtype=float),
        calibration=None if calibration is None else Calibration.from_json(calibration),
        search=Search.from_json(content["search"]),
        data=Data.from_json(content["data"]),
        versions=content["versions"],
    )
