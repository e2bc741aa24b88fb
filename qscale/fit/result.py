"""The result of a fit: frozen, printable elsewhere, saved as JSON that another machine can use."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import pandas as pd
from scipy.stats import t as student

from qscale.errors import FitError, TableError
from qscale.fit.calibration import Calibration
from qscale.fit.effects import Effects, Kind, Predictive, condition, predictive
from qscale.fit.grouping import Term
from qscale.fit.rows import SetAside
from qscale.laws import LAWS, Law, Published, columns_of, from_spec
from qscale.table import require

FORMAT = 2

Interval = Literal["model", "sandwich", "bootstrap", "profile", "conformal"]

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
    notes
        What else a user should know, in sentences: random terms that could not be estimated,
        parameters that trade off.
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
    notes: tuple[str, ...] = ()


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


class Fitted(Protocol):
    """What laws and regressions have in common once fitted."""

    @property
    def name(self) -> str:
        """Name of the law or model."""

    @property
    def target(self) -> str:
        """Column that is predicted."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that must be given for a prediction."""

    @property
    def data(self) -> Data:
        """What it was fitted on."""

    def center(self, frame: pd.DataFrame) -> np.ndarray:
        """Prediction in the target's unit for the average group, shape (n,)."""

    def quantiles(
        self, frame: pd.DataFrame, probabilities: np.ndarray, kind: Kind, seed: int = 0
    ) -> np.ndarray:
        """Quantiles of the prediction in the target's unit, shape (k, n)."""

    def given(self, rows: pd.DataFrame) -> Fitted:
        """Return what is known after some rows of a new checkpoint have been measured."""

    def save(self, path: str | Path) -> None:
        """Write it to a file, all or nothing."""


@dataclass(frozen=True, slots=True)
class Fit:
    """A fitted law with its uncertainty.

    Parameters
    ----------
    law
        The law, offsets included.
    theta
        Internal parameters, shape (p,); `parameters` has them on the natural scale.
    interval
        Where parameter intervals come from: ``model`` (restricted likelihood), ``sandwich``
        (cluster-robust), ``bootstrap`` (cluster), ``profile`` (likelihood) or ``conformal``
        (sandwich for parameters, predictions calibrated on left-out clusters).
    cov
        Covariance of ``theta`` by that choice, shape (p, p).
    dof
        Degrees of freedom of each parameter's t interval, shape (p,).
    effects
        Random effects and the scatter of rows.
    draws
        Internal parameters of the bootstrap refits, shape (B, p); none unless it is a bootstrap.
    profiles
        Ends of 90 % profile intervals on the internal scale, shape (p, 2), or none.
    calibration
        Scores of left-out clusters for conformal predictions.
    search, data
        How the minimum was found and on what.
    versions
        Versions of the packages that computed it.
    """

    law: Law
    theta: np.ndarray
    interval: Interval
    cov: np.ndarray
    dof: np.ndarray
    effects: Effects
    draws: np.ndarray
    profiles: np.ndarray | None
    calibration: Calibration | None
    search: Search
    data: Data
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the law."""
        return self.law.name

    @property
    def target(self) -> str:
        """Column that is predicted."""
        return self.law.target

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that must be given for a prediction: those of the law but for its offsets."""
        offsets = [f.options["column"] for f in self.law.factors if f.kind == "offset"]
        slopes = [term.slope for term in self.effects.terms if term.slope]
        return tuple(dict.fromkeys(c for c in (*self.law.columns, *slopes) if c not in offsets))

    @property
    def values(self) -> dict[str, float]:
        """Estimates on the natural scale by parameter name."""
        natural = self.law.to_natural(self.theta)
        return dict(zip(self.law.names, map(float, natural), strict=True))

    def parameters(self, level: float = 0.9) -> pd.DataFrame:
        """Return estimates with standard errors and intervals.

        Parameters
        ----------
        level
            Probability of the interval; profile intervals exist at 0.9.

        Returns
        -------
        pandas.DataFrame
            Indexed by parameter: ``estimate``, ``se``, ``low``, ``high`` on the natural scale. The
            last three are null for parameters that are held or at a bound, and for a bootstrap of
            fewer than 20 converged refits.
        """
        estimate = self.law.to_natural(self.theta)
        low, high = self._ends(level)
        ends = np.stack([self.law.to_natural(low), self.law.to_natural(high)])
        return pd.DataFrame(
            {
                "estimate": estimate,
                "se": self._standard_errors(estimate),
                "low": ends.min(axis=0),
                "high": ends.max(axis=0),
            },
            index=pd.Index(self.law.names, name="parameter"),
        )

    def _ends(self, level: float) -> tuple[np.ndarray, np.ndarray]:
        """Return the ends of the parameters' intervals on the internal scale."""
        edges = np.array([0.5 - level / 2, 0.5 + level / 2])
        if self.interval == "bootstrap":
            if len(self.draws) < 20:
                return (np.full(len(self.theta), np.nan),) * 2
            low, high = np.quantile(self.draws, edges, axis=0)
            return low, high
        if self.profiles is not None and abs(level - 0.9) < 1e-9:
            return self.profiles[:, 0], self.profiles[:, 1]
        se = np.sqrt(np.where(np.diag(self.cov) > 0, np.diag(self.cov), np.nan))
        reach = student.ppf(edges[1], self.dof) * se
        return self.theta - reach, self.theta + reach

    def _standard_errors(self, estimate: np.ndarray) -> np.ndarray:
        """Return standard errors on the natural scale, by the delta method unless drawn."""
        if self.interval == "bootstrap":
            if len(self.draws) < 20:
                return np.full(len(self.theta), np.nan)
            return self.law.to_natural(self.draws).std(axis=0, ddof=1)
        slope = {
            "linear": np.ones_like(estimate),
            "log": estimate,
            "reciprocal": estimate**2,
        }
        per = np.array([slope[p.scale][i] for i, p in enumerate(self.law.parameters)])
        se = np.sqrt(np.where(np.diag(self.cov) > 0, np.diag(self.cov), np.nan))
        return np.abs(per) * se

    def center(self, frame: pd.DataFrame) -> np.ndarray:
        """Prediction of the law for the average group, shape (n,), in the target's unit."""
        frame = self._complete(frame)
        return self.law.unlinked(self._location(frame, self.theta[None])[0])

    def predictive(self, frame: pd.DataFrame, kind: Kind = "new_checkpoint") -> Predictive:
        """Distribution of predicted rows on the link's scale, see `qscale.fit.effects`."""
        frame = self._complete(frame)
        data = columns_of(self.law, frame)
        x = np.broadcast_to(
            self.law.gradient(self.theta[None], data)[0], (len(frame), len(self.theta))
        )
        p = len(self.theta)
        cov = self.effects.cov.copy()
        if self.interval in ("sandwich", "conformal", "bootstrap") and self.cov.any():
            cov[:p, :p] = self.cov
        effects = replace(self.effects, cov=cov)
        return predictive(effects, self._location(frame, self.theta[None])[0], x, frame, kind)

    def quantiles(
        self,
        frame: pd.DataFrame,
        probabilities: np.ndarray,
        kind: Kind = "new_checkpoint",
        seed: int = 0,
    ) -> np.ndarray:
        """Quantiles of predicted rows, shape (k, n), in the target's unit.

        Those of a bootstrap fit come from its refits, all others from Student's t; unseen levels
        of an offset add the spread of the known ones.
        """
        frame = self._complete(frame)
        found = self.predictive(frame, kind)
        extra = self._unseen_variance(frame)
        if self.interval == "bootstrap":
            edges = self._drawn(frame, found, extra, probabilities, kind, seed)
        elif self.calibration is not None and kind == "new_checkpoint":
            reach = self.calibration.reach(probabilities)
            edges = found.mean + reach[:, None] * np.sqrt(found.sd**2 + extra)
        else:
            reach = np.asarray(student.ppf(probabilities[:, None], found.dof))
            edges = found.mean + reach * np.sqrt(found.sd**2 + extra)
        return self.law.unlinked(edges)

    def given(self, rows: pd.DataFrame) -> Fit:
        """Return the fit conditioned on measured rows of a new checkpoint.

        The checkpoint's random effects, and a little the parameters, move to what the rows say;
        other settings of it are then predicted more narrowly. Rows are told apart and matched to
        predictions by the grouping columns, such as ``run``; a column that is absent counts as one
        level, the checkpoint at hand.

        Parameters
        ----------
        rows
            Measured rows with the law's columns, its target and, if known, ``delta_loss_se``.

        Raises
        ------
        TableError
            If a column is missing.
        FitError
            If the fit has no random effects, or a target is not above zero.
        """
        if not self.effects.terms:
            raise FitError(
                "the fit has no random effects to update with measured rows; fit again with "
                "--random run on a table where runs have several rows."
            )
        rows = self._complete(rows)
        require(rows, [self.law.target], "given rows")
        linked = self.law.linked(rows[self.law.target].to_numpy(dtype=float))
        if not np.isfinite(linked).all():
            row = int(np.flatnonzero(~np.isfinite(linked))[0]) + 1
            raise FitError(f"given rows: row {row}, {self.law.target} must be above zero.")
        x = np.broadcast_to(
            self.law.gradient(self.theta[None], columns_of(self.law, rows))[0],
            (len(rows), len(self.theta)),
        )
        noise = np.zeros(len(rows))
        if self.law.target == "delta_loss" and "delta_loss_se" in rows.columns:
            noise = (rows["delta_loss_se"].fillna(0.0) / rows["delta_loss"]).to_numpy() ** 2
        surprise = linked - self._location(rows, self.theta[None])[0]
        theta, effects = condition(self.effects, self.theta, x, rows, surprise, noise)
        low, high = np.array([p.bounds for p in self.law.parameters]).T
        return replace(
            self,
            theta=np.clip(theta, low, high),
            effects=effects,
            interval="model",
            cov=effects.cov[: len(theta), : len(theta)],
            calibration=None,
        )

    def _location(self, frame: pd.DataFrame, theta: np.ndarray) -> np.ndarray:
        """Law on the link's scale, shape (S, n)."""
        location = self.law.location(theta, columns_of(self.law, frame))
        return np.broadcast_to(location, (len(theta), len(frame)))

    def _complete(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Check the columns; those of offsets may be absent and are filled with no level."""
        absent = {c: "" for c in self.law.columns if c not in (*self.columns, *frame.columns)}
        require(frame, self.columns, "prediction")
        for column in self.columns:
            if frame[column].isna().any():
                row = int(np.flatnonzero(frame[column].isna())[0]) + 1
                raise TableError(f"prediction: row {row} has no value in column {column!r}.")
        return frame.assign(**absent).reset_index(drop=True)

    def _unseen_variance(self, frame: pd.DataFrame) -> np.ndarray:
        """Variance between the known levels of each offset whose level is not known, shape (n,)."""
        variance = np.zeros(len(frame))
        for factor in self.law.factors:
            if factor.kind == "offset":
                column, levels = factor.options["column"], factor.options["levels"]
                logs = [self.values[f"{column}[{level}]"] for level in levels[:-1]]
                spread = float(np.var([*logs, -sum(logs)], ddof=1))
                unseen = ~np.isin(frame[column].astype(str).to_numpy(), levels)
                variance += spread * (1 + 1 / len(levels)) * unseen
        return variance

    def _drawn(
        self,
        frame: pd.DataFrame,
        found: Predictive,
        extra: np.ndarray,
        probabilities: np.ndarray,
        kind: Kind,
        seed: int,
    ) -> np.ndarray:
        """Quantiles over bootstrap refits, plus the scatter of new rows, on the link's scale."""
        if len(self.draws) < 20:
            return np.full((len(probabilities), len(frame)), np.nan)
        theta = np.tile(self.draws, (-(-400 // len(self.draws)), 1))
        drawn = self._location(frame, theta)
        mean = found.mean - self._location(frame, self.theta[None])[0]
        law_only = self.predictive(frame, "mean")
        scatter = np.sqrt(np.maximum(found.sd**2 - law_only.sd**2, 0.0) * (kind != "mean") + extra)
        noise = np.random.default_rng(seed).standard_t(max(self.data.clusters - 1, 1), drawn.shape)
        edges = np.quantile(drawn + mean + noise * scatter, probabilities, axis=0)
        return np.where(np.asarray(probabilities)[:, None] == 0.5, found.mean, edges)

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
            "interval": self.interval,
            "cov": _short_matrix(self.cov),
            "dof": _short(self.dof),
            "effects": _effects_json(self.effects),
            "profiles": None if self.profiles is None else _short_matrix(self.profiles),
            "calibration": None if self.calibration is None else self.calibration.to_json(),
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


def _short_matrix(matrix: np.ndarray) -> list[list[float]]:
    """Round every entry as `_short` does."""
    return [_short(row) for row in matrix]


def _effects_json(effects: Effects) -> dict[str, Any]:
    """Return random effects as JSON-able values."""
    return {
        "terms": [asdict(term) for term in effects.terms],
        "values": _short(effects.values),
        "variances": _short(effects.variances),
        "residual": effects.residual,
        "cov": _short_matrix(effects.cov),
        "scales_cov": _short_matrix(effects.scales_cov),
        "cov_slopes": [_short_matrix(slope) for slope in effects.cov_slopes],
    }


def _effects(content: dict[str, Any], p: int) -> Effects:
    """Rebuild random effects from JSON."""
    terms = tuple(
        Term(**{**term, "columns": tuple(term["columns"]), "levels": tuple(term["levels"])})
        for term in content["terms"]
    )
    count = len(terms) + 1
    return Effects(
        terms=terms,
        values=np.array(content["values"], dtype=float),
        variances=np.array(content["variances"], dtype=float),
        residual=content["residual"],
        cov=np.array(content["cov"], dtype=float),
        scales_cov=np.array(content["scales_cov"], dtype=float).reshape(count, count),
        cov_slopes=np.array(content["cov_slopes"], dtype=float).reshape(count, p, p),
    )


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
    search = content["search"]
    theta = np.array(content["theta"])
    profiles, calibration = content["profiles"], content["calibration"]
    return Fit(
        law=from_spec(content["law"]),
        theta=theta,
        interval=content["interval"],
        cov=np.array(content["cov"]),
        dof=np.array(content["dof"]),
        effects=_effects(content["effects"], len(theta)),
        draws=np.array(content["draws"]).reshape(-1, len(theta)),
        profiles=None if profiles is None else np.array(profiles),
        calibration=None if calibration is None else Calibration.from_json(calibration),
        search=Search(**{**search, "notes": tuple(search["notes"])}),
        data=Data(**data),
        versions=content["versions"],
    )
