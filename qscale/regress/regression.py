"""A fitted regression: predictions with honest intervals, behind the same face as a fitted law."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from scipy.stats import t as student

from qscale.errors import FitError
from qscale.fit.effects import Effects, Kind, Offset, condition, predictive, with_offsets
from qscale.fit.face import Results
from qscale.fit.options import check_level, checked_probabilities
from qscale.fit.summary import Summary
from qscale.regress.inputs import check_numbers
from qscale.regress.models import Linear, Predictor
from qscale.table import require

if TYPE_CHECKING:
    from pathlib import Path

    from qscale.fit.record import Data

    Array = np.ndarray


_SPREAD = "exp of the spread of unseen categories"
_NO_COEFFICIENTS = pd.DataFrame(columns=["estimate", "se", "low", "high"], dtype=float)


@dataclass(frozen=True, slots=True, repr=False)
class Regression(Results):
    """A fitted regression of a log target.

    Parameters
    ----------
    kind
        One of `qscale.regress.KINDS`.
    target
        Column that is predicted.
    main
        The model fitted to all rows.
    refits
        Models fitted without a part of the clusters, whose spread is the uncertainty of a learned
        model; none for linear kinds, which have a covariance.
    effects
        Scatter of left-out clusters and rows around predictions made without them. No level is
        known: every run is predicted as a new one until `given` some of its rows.
    typical
        Mean variance of a linear model itself over the fitted rows, which the scatter already
        holds; 0 for others.
    median_error
        Median absolute log error of the fitted rows, each predicted by a model fitted without its
        cluster.
    data
        What it was fitted on.
    notes
        What else a user should know, in sentences.
    versions
        Versions of the packages that computed it.
    """

    kind: str
    target: str
    main: Predictor
    refits: tuple[Predictor, ...]
    effects: Effects
    typical: float
    median_error: float
    data: Data
    notes: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the kind."""
        return self.kind

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that must be given; those of categories may be absent or hold a new level."""
        law = self.main.base.law.columns if self.main.base else ()
        return tuple(dict.fromkeys((*self.main.inputs.columns, *law)))

    @property
    def categories(self) -> dict[str, tuple[str, ...]]:
        """Columns of categories with their fitted levels."""
        return self.main.inputs.levels

    def parameters(self, level: float = 0.9) -> pd.DataFrame:
        """Return the coefficients of a linear kind with standard errors and intervals.

        Intervals are Student's t with one degree of freedom less than there are clusters.

        Parameters
        ----------
        level
            Probability of the interval.

        Returns
        -------
        pandas.DataFrame
            Indexed by parameter: ``estimate``, ``se``, ``low``, ``high`` on the log target.

        Raises
        ------
        FitError
            If the kind has no coefficients.
        """
        check_level(level)
        model = self.main.model
        if not isinstance(model, Linear):
            raise FitError(f"{self.kind} has no coefficients.")
        se = np.sqrt(np.diag(model.cov))
        reach = student.ppf(0.5 + level / 2, self._dof) * se
        return pd.DataFrame(
            {
                "estimate": model.beta,
                "se": se,
                "low": model.beta - reach,
                "high": model.beta + reach,
            },
            index=pd.Index(self.main.inputs.names, name="parameter"),
        )

    def summary(self, level: float = 0.9) -> Summary:
        """Return a table to print: data, errors of left-out clusters, coefficients if any."""
        data, spreads = self.data, self.effects.spreads
        facts = (
            ("target", f"log {self.target}"),
            ("data", data.name),
            ("rows", str(data.rows)),
            (f"{data.cluster}s", str(data.clusters)),
            ("set aside", str(sum(part.rows for part in data.set_aside))),
            ("held-out error", f"×{np.exp(self.median_error):.3g} (median)"),
            *((f"sd of {what}", f"{sd:.4g}") for what, sd in spreads),
        )
        coefficients = self.parameters(level) if self._linear else _NO_COEFFICIENTS
        law = f"{self.main.base.law.name} + " if self.main.base else ""
        title = f"{self.kind} of log {self.target}"
        notes = (f"inputs: {law}{data.options['formula']}.", *self.notes)
        return Summary(title, facts, coefficients, level, notes)

    @property
    def _linear(self) -> bool:
        return isinstance(self.main.model, Linear)

    @property
    def _dof(self) -> float:
        return max(self.data.clusters - 1.0, 1.0)

    def center(self, frame: pd.DataFrame) -> Array:
        """Prediction for the average cluster, shape (n,), in the target's unit."""
        return self._unlogged(self.main.locate(self._complete(frame))[0])

    def quantiles(
        self,
        frame: pd.DataFrame,
        probabilities: Array,
        kind: Kind = "new_checkpoint",
        seed: int = 0,  # noqa: ARG002 - nothing is drawn
    ) -> Array:
        """Quantiles of predicted rows, shape (k, n), in the target's unit.

        ``mean`` is the uncertainty of the model itself: its covariance for linear kinds, and for
        trees and processes the delete-a-group jackknife over refits without a part of the clusters.
        ``new_checkpoint`` is how left-out runs and rows scattered around predictions made without
        them; the covariance of a linear kind enters where it is above that of the fitted rows, as
        in extrapolation; levels of a category that were not fitted add the spread of the known.
        """
        probabilities = checked_probabilities(probabilities, kind)
        frame = self._complete(frame)
        location, between = self.main.locate(frame)
        effects, frame = self._with_categories(frame, between)
        own = self.own_variance(frame) if kind == "mean" or self._linear else np.zeros(len(frame))
        # The spread of refits is too rough for this: its errors above the mean would all be added.
        beyond = np.maximum(own - self.typical, 0.0) if self._linear else 0.0
        found = predictive(effects, location, np.zeros((len(frame), 1)), frame, kind)
        if kind == "mean":
            measured = len(effects.values) > 0 and ~self.effects.unknown(frame).any(axis=1)
            variance = np.where(measured, found.sd**2 + beyond, own)
            dof = np.full(len(frame), self._dof)
        else:
            variance, dof = found.sd**2 + beyond, found.dof
        reach = student.ppf(probabilities[:, None], dof)
        return self._unlogged(found.mean + reach * np.sqrt(variance))

    def given(self, rows: pd.DataFrame) -> Regression:
        """Return the regression conditioned on measured rows of a new checkpoint.

        The checkpoint's deviation moves to what the rows say, shrunk by the scatter of rows; its
        other settings are then predicted more narrowly. Rows are matched to predictions by the
        cluster column; a column that is absent counts as one level, the checkpoint at hand.

        Parameters
        ----------
        rows
            Measured rows with the regression's columns and its target.

        Raises
        ------
        TableError
            If a column is missing.
        FitError
            If the scatter of clusters could not be told from that of rows, or a target is not
            above zero.
        """
        if not self.effects.terms:
            raise FitError(
                f"{self.kind} has no spread of {self.data.cluster} to update with measured rows; "
                f"fit it to a table where each {self.data.cluster} has several rows."
            )
        rows = self._complete(rows, "given rows")
        require(rows, [self.target], "given rows")
        target = rows[self.target].to_numpy(dtype=float)
        if not (target > 0).all():
            row = int(np.flatnonzero(~(target > 0))[0]) + 1
            raise FitError(f"given rows: row {row}, {self.target} must be above zero.")
        location, between = self.main.locate(rows, "given rows")
        effects, rows = self._with_categories(rows, between)
        nothing = np.zeros(len(rows))
        _, effects = condition(
            effects,
            np.zeros(1),
            np.zeros((len(rows), 1)),
            rows,
            np.log(target) - location,
            nothing,
        )
        return replace(self, effects=effects)

    def _with_categories(self, frame: pd.DataFrame, between: Array) -> tuple[Effects, pd.DataFrame]:
        """Add a deviation that rows of unseen categories share, its standard deviation in each."""
        if not self.categories:
            return self.effects, frame
        fewest = min(len(levels) for levels in self.categories.values())
        shared = Offset("unseen category", (), 1.0, max(fewest - 1, 1), slope=_SPREAD)
        return with_offsets(self.effects, [shared]), frame.assign(
            **{_SPREAD: np.exp(np.sqrt(between))}
        )

    def save(self, path: str | Path) -> None:
        """Write the regression to one file, all or nothing; `qscale.regress.load` reads it."""
        from qscale.regress.storage import save  # noqa: PLC0415 - it reads this class

        save(self, path)

    def own_variance(self, frame: pd.DataFrame) -> Array:
        """Variance of the model itself on the log scale, shape (n,)."""
        model = self.main.model
        if isinstance(model, Linear):
            return model.variance(self.main.averaged_design(frame))
        found = np.stack([part.locate(frame)[0] for part in self.refits])
        return (len(found) - 1) * found.var(axis=0)

    def _complete(self, frame: pd.DataFrame, name: str = "prediction") -> pd.DataFrame:
        """Check that the inputs, and what a law under a process reads, have values."""
        check_numbers(frame, self.columns, name)
        return frame.reset_index(drop=True)

    @staticmethod
    def _unlogged(location: Array) -> Array:
        with np.errstate(over="ignore"):
            return np.exp(location)
