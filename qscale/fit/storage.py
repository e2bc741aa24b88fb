"""Read a fit back from the JSON that it was saved as."""

from __future__ import annotations

import json
from pathlib import Path

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
        If the file is missing, not a qscale fit, or of a later format.
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
        raise FitError(f"{path}: format {version} is not known to this version of qscale.")
    search = content["search"]
    if search["huber_delta"] is None:
        search["huber_delta"] = np.inf
    theta = np.array(content["theta"])
    profiles, calibration = content["profiles"], content["calibration"]
    return Fit(
        law=from_spec(content["law"]),
        theta=theta,
        interval=content["interval"],
        cov=np.array(content["cov"]),
        dof=np.array(content["dof"]),
        effects=Effects.from_json(content["effects"]),
        draws=np.array(content["draws"]).reshape(-1, len(theta)),
        profiles=None if profiles is None else np.array(profiles, dtype=float),
        calibration=None if calibration is None else Calibration.from_json(calibration),
        search=Search(**{**search, "notes": tuple(search["notes"])}),
        data=Data.from_json(content["data"]),
        versions=content["versions"],
    )
