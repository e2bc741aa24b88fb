"""Read a fit back from the JSON that it was saved as."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from qscale.errors import FitError
from qscale.fit.calibration import Calibration
from qscale.fit.effects import Effects, shortened
from qscale.fit.record import Data, Search
from qscale.fit.result import Fit
from qscale.laws import from_spec

FORMAT = 2


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
        # Of a law, a missing part is damage; what else is wrong with one says so itself.
        _ = [content["law"][part] for part in ("name", "target", "factors")]
        fit = _rebuild(content)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise FitError(f"{path}: the fit in it is damaged ({error}); fit again.") from error
    size = len(fit.law.names)
    joint = size + len(fit.effects.values)
    shapes = fit.theta.shape, fit.cov.shape, fit.effects.cov.shape
    if shapes != ((size,), (size, size), (joint, joint)) or not np.isfinite(fit.theta).all():
        raise FitError(f"{path}: the fit in it is damaged (its parameters); fit again.")
    return fit


def to_json(fit: Fit) -> str:
    """Return what `from_json` reads; parameters and their intervals are for other readers."""
    content = {
        "format": FORMAT,
        "law": fit.law.spec(),
        "parameters": fit.values,
        "intervals_90": json.loads(fit.parameters().to_json(orient="index")),
        "search": asdict(fit.search),
        "data": asdict(fit.data),
        "interval": fit.interval,
        "cov": shortened(fit.cov),
        "dof": shortened(fit.dof),
        "effects": fit.effects.to_json(),
        "profiles": None if fit.profiles is None else shortened(fit.profiles),
        "calibration": None if fit.calibration is None else fit.calibration.to_json(),
        "theta": fit.theta.tolist(),
        "draws": shortened(fit.draws),
        "versions": fit.versions,
    }
    return json.dumps(_nulled(content), indent=None, allow_nan=False)


def _nulled(value: Any) -> Any:
    """Put null for numbers that are not finite, such as the delta of least squares."""
    if isinstance(value, dict):
        return {key: _nulled(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_nulled(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


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
