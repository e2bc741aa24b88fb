"""The result of a fit: frozen, printable elsewhere, saved as JSON that another machine can use."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from scipy.stats import t as student

from qscale.accessor import Accessor
from qscale.atomic import write_text
from qscale.errors import FitError, TableError
from qscale.fit.effects import (
    UNSEEN,
    Effects,
    Offset,
    Predictive,
    condition,
    mean_variance,
    offset_of,
    predictive,
    with_offsets,
)
from qscale.fit.face import Results
from qscale.fit.options import check_level, checked_probabilities
from qscale.fit.summary import Summary, summarize
from qscale.laws import Law, Published, columns_of, published
from qscale.table import require, require_numbers

if TYPE_CHECKING:
    from pathlib import Path

    from qscale.fit.calibration import Calibration
    from qscale.fit.effects import Kind
    from qscale.fit.record import Data, Interval, Search


@dataclass(frozen=True, slots=True, repr=False)
class Fit(Results):
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
    frame
        The usable rows it was fitted to, for figures; None in a fit that was read from a file.
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
    frame: pd.DataFrame | None = field(default=None, repr=False, compare=False)

    plot = Accessor("qscale.report.plots", "FitPlots")

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
        """Columns that must be given for a prediction, those of the law but for its offsets."""
        offsets = [f.options["column"] for f in self.law.factors if f.kind == "offset"]
        slopes = [term.slope for term in self.effects.terms if term.slope]
        return tuple(dict.fromkeys(c for c in (*self.law.columns, *slopes) if c not in offsets))

    @property
    def categories(self) -> dict[str, tuple[str, ...]]:
        """Columns of the law's offsets with their fitted levels."""
        options = [f.options for f in self.law.factors if f.kind == "offset"]
        return {o["column"]: tuple(map(str, o["levels"])) for o in options}

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on trade-offs, and on a status other than converged."""
        if self.search.status == "converged":
            return self.search.notes
        status = f"the fit's status is {self.search.status}: {self.search.detail}."
        return (*self.search.notes, status)

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
            fewer than five clusters or 20 converged refits; the ends also where percentiles of a
            bootstrap do not hold the estimate.
        """
        check_level(level)
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

    def summary(self, level: float = 0.9) -> Summary:
        """Return a table to print: data, search, parameters with intervals, scatter, notes."""
        return summarize(self, level)

    def _ends(self, level: float) -> tuple[np.ndarray, np.ndarray]:
        """Return the ends of the parameters' intervals on the internal scale."""
        edges = np.array([0.5 - level / 2, 0.5 + level / 2])
        if self.interval == "bootstrap":
            if len(self.draws) < 20:
                return (np.full(len(self.theta), np.nan),) * 2
            low, high = np.quantile(self.draws, edges, axis=0)
            near = 1e-9 * (1 + np.abs(self.theta))  # rounding of refits to data that fit exactly
            aside = (self.theta < low - near) | (self.theta > high + near)
            low, high = np.minimum(low, self.theta), np.maximum(high, self.theta)
            return np.where(aside, np.nan, low), np.where(aside, np.nan, high)
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
        frame = self.completed(frame)
        return self.law.unlinked(self._location(frame, self.theta[None])[0])

    def predictive(self, frame: pd.DataFrame, kind: Kind = "new_checkpoint") -> Predictive:
        """Distribution of predicted rows on the link's scale, see `qscale.fit.effects`."""
        frame = self.completed(frame)
        x = self._gradient(frame)
        p = len(self.theta)
        effects = self.all_effects
        if self.interval in ("sandwich", "conformal", "bootstrap") and self.cov.any():
            cov = effects.cov.copy()
            cov[:p, :p] = self.cov
            effects = replace(effects, cov=cov)
        return predictive(effects, self._location(frame, self.theta[None])[0], x, frame, kind)

    def quantiles(
        self,
        frame: pd.DataFrame,
        probabilities: np.ndarray,
        kind: Kind = "new_checkpoint",
        seed: int = 0,
    ) -> np.ndarray:
        """Quantiles of predicted rows, shape (k, n), in the target's unit.

        Those of a bootstrap fit come from its refits, all others from Student's t. For a new
        checkpoint, unseen levels of an offset add the spread of the known ones.

        Raises
        ------
        TableError
            If a column is missing or null.
        FitError
            If the kind is not one, or a probability is not between 0 and 1.
        """
        probabilities = checked_probabilities(probabilities, kind)
        frame = self.completed(frame)
        found = self.predictive(frame, kind)
        if self.interval == "bootstrap":
            edges = self._drawn(frame, found, probabilities, kind, seed)
        elif self.calibration is not None and kind == "new_checkpoint":
            edges = found.mean + self.calibration.reach(probabilities)[:, None] * found.sd
        else:
            reach = np.asarray(student.ppf(probabilities[:, None], found.dof))
            edges = found.mean + reach * found.sd
        return self.law.unlinked(edges)

    def surprise(self, rows: pd.DataFrame) -> Predictive:
        """Mean error of the measured rows of a new checkpoint or run, and its predicted spread.

        Returns
        -------
        Predictive
            One entry: the mean of observed minus predicted on the link's scale, the standard
            deviation that the fit expects of it, and the degrees of freedom of their ratio.
        """
        rows = self._measured(rows, "measured rows")
        found = mean_variance(self.all_effects, self._gradient(rows), rows)
        observed = self.law.linked(rows[self.target].to_numpy(dtype=float))
        error = float((observed - self.predictive(rows).mean).mean())
        return Predictive(np.array([error]), found.sd, found.dof)

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
                "the fit has no random effects to update with measured rows; fit again with random "
                "effects of run on a table where runs have several rows."
            )
        rows = self._measured(rows, "given rows")
        linked = self.law.linked(rows[self.law.target].to_numpy(dtype=float))
        if not np.isfinite(linked).all():
            row = int(np.flatnonzero(~np.isfinite(linked))[0]) + 1
            raise FitError(f"given rows: row {row}, {self.law.target} must be above zero.")
        x = self._gradient(rows)
        noise = np.zeros(len(rows))
        if self.law.target == "delta_loss" and "delta_loss_se" in rows.columns:
            errors = rows["delta_loss_se"].fillna(0.0)
            if (errors < 0).any():
                row = int((errors < 0).to_numpy().argmax()) + 1
                raise FitError(f"given rows: row {row}, delta_loss_se must be zero or more.")
            noise = (errors / rows["delta_loss"]).to_numpy() ** 2
        surprise = linked - self._location(rows, self.theta[None])[0]
        theta, effects = condition(self.all_effects, self.theta, x, rows, surprise, noise)
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

    def _gradient(self, frame: pd.DataFrame) -> np.ndarray:
        """Gradient of the law on the link's scale, shape (n, p)."""
        gradient = self.law.gradient(self.theta[None], columns_of(self.law, frame))[0]
        return np.broadcast_to(gradient, (len(frame), len(self.theta)))

    def _measured(self, frame: pd.DataFrame, name: str) -> pd.DataFrame:
        """Return completed rows whose target is measured."""
        rows = self.completed(frame)
        require_numbers(rows, [self.target], name)
        return rows

    @property
    def offsets(self) -> tuple[Offset, ...]:
        """Offsets of the law, with the variance of a level that was not fitted."""
        values, categories = self.values, self.categories.items()
        return tuple(offset_of(c, levels, values) for c, levels in categories if len(levels) > 1)

    @property
    def all_effects(self) -> Effects:
        """Random effects, an unseen level of each offset among them."""
        return with_offsets(self.effects, self.offsets)

    def completed(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Return rows as the law reads them, or raise naming the column that is missing or null.

        Columns of offsets may be absent; there, all levels that were not fitted are one.
        """
        require(frame, self.columns, "prediction")
        for column in self.columns:
            if frame[column].isna().any():
                row = int(np.flatnonzero(frame[column].isna())[0]) + 1
                raise TableError(f"prediction: row {row} has no value in column {column!r}.")
        own = {}
        for column, levels in self.categories.items():
            labels = frame[column].astype(str) if column in frame.columns else [""] * len(frame)
            own[column] = np.where(np.isin(labels, levels), labels, UNSEEN)
        return frame.assign(**own).reset_index(drop=True)

    def _drawn(
        self,
        frame: pd.DataFrame,
        found: Predictive,
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
        scatter = np.sqrt(np.maximum(found.sd**2 - law_only.sd**2, 0.0)) * (kind != "mean")
        noise = np.random.default_rng(seed).standard_t(max(self.data.clusters - 1, 1), drawn.shape)
        edges = np.quantile(drawn + mean + noise * scatter, probabilities, axis=0)
        side = np.sign(np.asarray(probabilities)[:, None] - 0.5)
        # The median is the law's own prediction, which percentiles of few refits need not hold.
        return found.mean + side * np.maximum(side * (edges - found.mean), 0.0)

    def published(self) -> Published | None:
        """Return the first set of constants published for the law, if there is one."""
        return next(iter(published(self.law)), None)

    def to_json(self) -> str:
        """Return the fit as JSON text."""
        from qscale.fit.storage import to_json  # noqa: PLC0415 - it reads this class

        return to_json(self)

    def save(self, path: str | Path) -> None:
        """Write the fit to a file, all or nothing."""
        write_text(path, self.to_json() + "\n")
