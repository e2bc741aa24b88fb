"""What every fit records: how the minimum was found, on which data, and what it can be asked."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import pandas as pd

from qscale.fit.rows import SetAside

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np

    from qscale.fit.effects import Kind

Interval = Literal["model", "sandwich", "bootstrap", "profile", "conformal"]

INTERVAL_MEANING: dict[Interval, str] = {
    "model": "Intervals are Student's t around the restricted maximum likelihood estimate, with "
    "Satterthwaite's degrees of freedom.",
    "sandwich": "Intervals are Student's t with the jackknife cluster-robust covariance (CR3).",
    "bootstrap": "Intervals are percentiles of refits to resampled clusters.",
    "profile": "Intervals end where the profile likelihood has fallen by what the t distribution "
    "allows.",
    "conformal": "Parameter intervals are cluster-robust; those of predictions hold the errors of "
    "left-out clusters.",
}
FEW_CLUSTERS: dict[Interval, int] = {
    "model": 5, "sandwich": 8, "bootstrap": 10, "profile": 5, "conformal": 5,
}  # fmt: skip

# Two clusters have three distinct resamples. A third of the resamples of four clusters hold no more
# than two distinct ones, and a tenth of those of five: as many as both tails of a 90 % interval.
FEWEST_RESAMPLED = 5

STATUS_MEANING = {
    "converged": "The gradient is zero to tolerance and every parameter is determined.",
    "bound_hit": "A parameter ended on its bound: its interval is one-sided and the data ask for "
    "another form.",
    "not_identified": "Some parameters are not determined: at most a combination of them is known.",
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
    undetermined
        Parameters that the rows do not determine, if the status is ``not_identified``: they can
        take any value together, or each of them alone, without changing what is predicted.
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
    undetermined: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Search:
        """Rebuild from its fields as JSON has them: an infinite delta, or no number, is null."""
        numbers = {"huber_delta": math.inf, "condition_number": math.nan, "objective": math.nan}
        missing = {name: value for name, value in numbers.items() if content[name] is None}
        texts = {name: tuple(content.get(name, ())) for name in ("notes", "undetermined")}
        return cls(**{**content, **missing, **texts})


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
        Options that reproduce the fit, such as where, mapping, offset, random, fixed and seed.
    medians
        ``{column: median}`` of numeric columns over the usable rows; empty in fits made before it
        was recorded.
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
    medians: dict[str, float] = field(default_factory=dict)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Data:
        """Rebuild from its fields as JSON has them."""
        tuples = {
            "set_aside": tuple(SetAside(**entry) for entry in content["set_aside"]),
            "ranges": {name: tuple(pair) for name, pair in content["ranges"].items()},
            "levels": {name: tuple(values) for name, values in content["levels"].items()},
        }
        return cls(**{**content, **tuples})


def hash_of(frame: pd.DataFrame) -> str:
    """Hash the values of a frame, row order included."""
    rows = pd.util.hash_pandas_object(frame, index=False).to_numpy()
    return hashlib.sha256(rows.tobytes()).hexdigest()


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
    def categories(self) -> dict[str, tuple[str, ...]]:
        """Columns of labels with the fitted ones; where one is absent or new, their average."""

    @property
    def data(self) -> Data:
        """What it was fitted on."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know, in sentences."""

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
