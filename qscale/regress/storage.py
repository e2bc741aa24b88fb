"""Save and read regressions in one file that cannot run code: JSON, and skops for estimators."""

from __future__ import annotations

import json
import zipfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import skops.io
from skops.io.exceptions import UntrustedTypesFoundException

from qscale.atomic import replacing
from qscale.errors import FitError
from qscale.fit.effects import Effects
from qscale.fit.record import Data
from qscale.laws import from_spec
from qscale.regress.inputs import Inputs, columns_in
from qscale.regress.models import LEARNED, LINEAR, Base, Learned, Linear, Predictor
from qscale.regress.regression import Regression

FORMAT = 1
_FACTS, _ESTIMATORS = "regression.json", "estimators.skops"
_KERNELS = ("ConstantKernel", "Product", "RBF", "Sum", "WhiteKernel")
TRUSTED = [
    "sklearn.ensemble._hist_gradient_boosting.predictor.TreePredictor",
    "sklearn.tree._tree.Tree",
    *(f"sklearn.gaussian_process.kernels.{name}" for name in _KERNELS),
]


def save(regression: Regression, path: str | Path) -> None:
    """Write a regression: linear kinds as JSON, others as a zip of JSON and a skops file.

    Parameters
    ----------
    regression
        What to write.
    path
        Any name; the file says itself what it is.
    """
    parts = (regression.main, *regression.refits)
    content = {
        "format": FORMAT,
        "regression": regression.kind,
        "target": regression.target,
        "predictors": [_predictor_json(part) for part in parts],
        "effects": regression.effects.to_json(),
        "typical": regression.typical,
        "median_error": regression.median_error,
        "data": asdict(regression.data),
        "notes": list(regression.notes),
        "versions": regression.versions,
    }
    text = json.dumps(content, allow_nan=False) + "\n"
    estimators = [part.model.estimator for part in parts if isinstance(part.model, Learned)]
    with replacing(path) as partial:
        if not estimators:
            partial.write_text(text, encoding="utf-8")
            return
        with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(_FACTS, text)
            archive.writestr(_ESTIMATORS, skops.io.dumps(estimators))


def is_regression(path: str | Path) -> bool:
    """Whether a file looks like a saved regression rather than a saved law."""
    path = Path(path)
    if not path.is_file():
        return False
    if zipfile.is_zipfile(path):
        return True
    try:
        return "regression" in json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, TypeError):
        return False


def load(path: str | Path) -> Regression:
    """Read a regression that `Regression.save` wrote.

    Nothing in the file is run: estimators are rebuilt from a fixed list of scikit-learn types.

    Raises
    ------
    FitError
        If the file is missing, not a regression, of a later format, or holds other types.
    """
    path = Path(path)
    if not path.is_file():
        raise FitError(f"{path}: no such regression.")
    try:
        content, payload = _read(path)
        number = content["format"]
    except (ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise FitError(f"{path}: not a regression written by qscale.") from error
    if number != FORMAT:
        raise FitError(f"{path}: format {number} is not known to this version of qscale.")
    try:
        return _rebuild(content, _estimators(payload, content, path))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise FitError(f"{path}: the regression in it is damaged ({error}).") from error


def _read(path: Path) -> tuple[dict[str, Any], bytes | None]:
    """Return the facts and the skops bytes, if any."""
    if not zipfile.is_zipfile(path):
        return json.loads(path.read_text(encoding="utf-8")), None
    with zipfile.ZipFile(path) as archive:
        return json.loads(archive.read(_FACTS)), archive.read(_ESTIMATORS)


def _estimators(payload: bytes | None, content: dict[str, Any], path: Path) -> list[Any]:
    """Rebuild the estimators, refusing every type that is not on the list."""
    kind = content["regression"]
    if kind in LINEAR:
        return []
    if payload is None or kind not in LEARNED:
        raise FitError(f"{path}: not a regression written by qscale.")
    try:
        found = skops.io.loads(payload, trusted=TRUSTED)
    except UntrustedTypesFoundException as error:
        extra = sorted(set(skops.io.get_untrusted_types(data=payload)) - set(TRUSTED))
        raise FitError(
            f"{path}: not opened, it holds types that a qscale regression never has "
            f"({', '.join(extra)}). Do not trust this file."
        ) from error
    if not isinstance(found, list) or any(type(one) is not LEARNED[kind] for one in found):
        raise FitError(f"{path}: the estimators in it are not those of {kind}.")
    return found


def _predictor_json(part: Predictor) -> dict[str, Any]:
    """Return inputs, coefficients and law as JSON-able values."""
    model, base = part.model, part.base
    linear = None
    if isinstance(model, Linear):
        linear = {"beta": model.beta.tolist(), "cov": model.cov.tolist()}
    return {
        "inputs": asdict(part.inputs),
        "linear": linear,
        "base": {"law": base.law.spec(), "theta": base.theta.tolist()} if base else None,
    }


def _predictor(content: dict[str, Any], estimator: Any) -> Predictor:
    """Rebuild from `_predictor_json`."""
    described, linear, base = content["inputs"], content["linear"], content["base"]
    columns_in(described["terms"])  # raises for what is not a term
    levels = {column: tuple(values) for column, values in described["levels"].items()}
    model: Linear | Learned
    if linear:
        model = Linear(np.array(linear["beta"]), np.array(linear["cov"]))
    else:
        model = Learned(estimator)
    return Predictor(
        Inputs(tuple(described["terms"]), levels, tuple(described["names"])),
        model,
        Base(from_spec(base["law"]), np.array(base["theta"])) if base else None,
    )


def _rebuild(content: dict[str, Any], estimators: list[Any]) -> Regression:
    """Put the parts together."""
    described = content["predictors"]
    models = estimators or [None] * len(described)
    parts = [_predictor(one, model) for one, model in zip(described, models, strict=True)]
    return Regression(
        kind=content["regression"],
        target=content["target"],
        main=parts[0],
        refits=tuple(parts[1:]),
        effects=Effects.from_json(content["effects"]),
        typical=content["typical"],
        median_error=content["median_error"],
        data=Data.from_json(content["data"]),
        notes=tuple(content["notes"]),
        versions=content["versions"],
    )
