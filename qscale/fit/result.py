"""The result of a fit: frozen, printable elsewhere, saved as JSON that another machine can use."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from qscale.errors import FitError
from qscale.fit.inference import Scatter
from qscale.fit.rows import SetAside
from qscale.laws import LAWS, Law, Published, from_spec

FORMAT = 1

STATUS_MEANING = {
    "converged": "The gradient is zero to tolerance and every parameter is determined.",
    "bound_hit": "A parameter ended on its bound: its interval is one-sided and the data ask for "
    "another form.",
    "not_identified": "Some parameters cannot be told apart: only their combination is known.",
    "failed": "No start converged: do not use the numbers.",
}


@dataclass(frozen=True, slots=True)
class Search:
    """How the minimum was found.

    Parameters
    ----------
    status
        One of `STATUS_MEANING`.
    detail
        What a user should know about the status, in words.
    starts, agreeing
        Number of starting points, and of those that ended at the best objective.
    objective
        Sum of losses at the minimum.
    huber_delta
        Log residual at which the loss turns linear.
    condition_number
        Of the information matrix scaled to unit diagonal; above 1e8 is not identified.
    boots, boots_converged
        Bootstrap refits asked for and converged.
    """

    status: str
    detail: str
    starts: int
    agreeing: int
    objective: float
    huber_delta: float
    condition_number: float
    boots: int
    boots_converged: int


@dataclass(frozen=True, slots=True)
class Data:
    """What a law was fitted on.

    Parameters
    ----------
    name
        Path or dataset name.
    sha256
        Hash of the usable rows' columns, in order.
    rows, clusters, cluster
        Usable rows, their clusters and the column that marks them.
    set_aside
        Rows that took no part, with reasons.
    ranges
        ``{column: (lowest, highest)}`` of numeric columns in the usable rows.
    levels
        ``{column: values}`` of text columns in the usable rows.
    options
        Options that reproduce the fit: where, mapping, offset, fixed, seed.
    """

    name: str
    sha256: str
    rows: int
    clusters: int
    cluster: str
    set_aside: tuple[SetAside, ...]
    ranges: dict[str, tuple[float, float]]
    levels: dict[str, tuple[str, ...]]
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Fit:
    """A fitted law with its uncertainty.

    Parameters
    ----------
    law
        The law, offsets included.
    theta
        Internal parameters, shape (p,); `parameters` has them on the natural scale.
    draws
        Internal parameters of the bootstrap refits, shape (B, p).
    scatter
        Log residuals between and within clusters.
    search, data
        How the minimum was found and on what.
    versions
        Versions of the packages that computed it.
    """

    law: Law
    theta: np.ndarray
    draws: np.ndarray
    scatter: Scatter
    search: Search
    data: Data
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def values(self) -> dict[str, float]:
        """Estimates on the natural scale by parameter name."""
        natural = self.law.to_natural(self.theta)
        return dict(zip(self.law.names, map(float, natural), strict=True))

    def parameters(self, level: float = 0.9) -> pd.DataFrame:
        """Return estimates with bootstrap standard errors and percentile intervals.

        Parameters
        ----------
        level
            Probability of the interval.

        Returns
        -------
        pandas.DataFrame
            Indexed by parameter: ``estimate``, ``se``, ``low``, ``high`` on the natural scale.
            Without at least 20 converged refits the last three are null.
        """
        natural = self.law.to_natural(self.draws)
        enough = len(natural) >= 20
        edges = [(1 - level) / 2, (1 + level) / 2]
        nothing = np.full(len(self.theta), np.nan)
        low, high = np.quantile(natural, edges, axis=0) if enough else (nothing, nothing)
        return pd.DataFrame(
            {
                "estimate": self.law.to_natural(self.theta),
                "se": natural.std(axis=0, ddof=1) if enough else nothing,
                "low": low,
                "high": high,
            },
            index=pd.Index(self.law.names, name="parameter"),
        )

    def published(self) -> Published | None:
        """Return the first set of constants published for the law, if there is one."""
        sets = LAWS[self.law.name].published if self.law.name in LAWS else ()
        return sets[0] if sets and self.law.target == LAWS[self.law.name].target else None

    def to_json(self) -> str:
        """Return the fit as JSON text."""
        content = {
            "format": FORMAT,
            "law": self.law.spec(),
            "parameters": self.values,
            "intervals_90": json.loads(self.parameters().to_json(orient="index")),
            "search": asdict(self.search),
            "data": asdict(self.data),
            "scatter": {
                "between": _short(self.scatter.between),
                "within": _short(self.scatter.within),
            },
            "theta": self.theta.tolist(),
            "draws": [_short(draw) for draw in self.draws],
            "versions": self.versions,
        }
        return json.dumps(content, indent=None, allow_nan=False)

    def save(self, path: str | Path) -> None:
        """Write the fit to a file, all or nothing."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(prefix=".", suffix=path.name, dir=path.parent)
        with os.fdopen(handle, "w") as file:
            file.write(self.to_json() + "\n")
        Path(partial).chmod(0o644)
        Path(partial).replace(path)


def _short(values: np.ndarray) -> list[float]:
    """Round to ten significant digits, far below any uncertainty, to keep files small."""
    return [float(f"{value:.10g}") for value in values]


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
        version = content["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise FitError(f"{path}: not a fit written by qscale fit.") from error
    if version != FORMAT:
        raise FitError(f"{path}: format {version} is not known to this version of qscale.")
    data = content["data"]
    data["set_aside"] = tuple(SetAside(**entry) for entry in data["set_aside"])
    data["ranges"] = {name: tuple(pair) for name, pair in data["ranges"].items()}
    data["levels"] = {name: tuple(values) for name, values in data["levels"].items()}
    return Fit(
        law=from_spec(content["law"]),
        theta=np.array(content["theta"]),
        draws=np.array(content["draws"]).reshape(-1, len(content["theta"])),
        scatter=Scatter(*(np.array(content["scatter"][part]) for part in ("between", "within"))),
        search=Search(**content["search"]),
        data=Data(**data),
        versions=content["versions"],
    )
