"""What a command predicts, and by which fit: the one named, or the shipped one that covers it."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from qscale.cli.described import completed, described, measured, parted, settings_of
from qscale.errors import QscaleError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

    import pandas as pd

    from qscale.cli.facts import Facts, Settings
    from qscale.fit import Fit
    from qscale.predict import Candidate
    from qscale.regress import Regression


@dataclass(frozen=True, slots=True, eq=False)
class Subject:
    """What is to be predicted, and by what.

    Parameters
    ----------
    fitted
        What predicts.
    checkpoint
        Folder, file or hub id; None if the checkpoint is described only.
    flags
        Facts that were given as options.
    known
        All facts.
    settings
        Values of each column of the quantizer settings.
    symbols
        Size of the checkpoint's vocabulary, if known.
    ranked
        The shipped fits it was chosen from; empty if it was named.
    """

    fitted: Fit | Regression
    checkpoint: str | None
    flags: dict[str, Any]
    known: dict[str, Any]
    settings: dict[str, Any]
    symbols: int | None
    ranked: tuple[Candidate, ...]

    @property
    def usable(self) -> bool:
        """Whether all that the fit needs is known, so far as that decided its choice."""
        return not self.ranked or self.ranked[0].usable

    @property
    def reads_curvature(self) -> bool:
        """Whether the fit needs the prediction from curvature, and it is not given."""
        lacks = self.known.get("quadratic_delta") is None
        return not self.ranked and lacks and "quadratic_delta" in self.fitted.columns

    @property
    def chosen(self) -> list[str]:
        """Why the fit was taken, in one sentence; empty if it was named."""
        from qscale.predict import reasons  # noqa: PLC0415

        return reasons(self.ranked)[:1] if self.ranked else []


def subject_of(
    first: str | None,
    second: str | None,
    facts: Facts,
    settings: Settings,
    *,
    given: Path | None = None,
    of_rounding: bool = False,
    reading: Collection[str] = (),
    solved: Mapping[str, Any] = MappingProxyType({}),
) -> Subject:
    """Join what is known of the checkpoint, and take the fit that was named or the best shipped.

    Parameters
    ----------
    first, second
        Fit and checkpoint as they were named: both, one or none.
    facts, settings
        What flags say.
    given
        Table of measured rows, whose facts count too.
    of_rounding
        The prediction is to be joined with that of rounding to nearest: where no method is asked
        for or measured, the fit is chosen for it.
    reading
        Columns that a shipped fit must read to be chosen.
    solved
        What the command varies or solves for, with values that stand in for them in the choice.

    Raises
    ------
    QscaleError
        If an option is wrong, or no shipped fit reads those columns.
    """
    named, checkpoint = parted(first, second)
    fitted: Fit | Regression | None = None
    if named is not None:
        from qscale.load import load_fitted  # noqa: PLC0415

        fitted = load_fitted(named)
    flags = facts.flags(fitted)
    description = None
    if checkpoint is not None:
        from qscale.checkpoint import describe  # noqa: PLC0415

        description = describe(checkpoint)
    symbols = None if description is None else description.vocab_size
    known, values = described(description, flags), settings.values()
    if given is not None:
        known, values = completed(known, values, given)
    ranked: tuple[Candidate, ...] = ()
    if fitted is None:
        wanted = {**known, **values, **solved}
        if of_rounding and not values["method"]:
            wanted["method"] = ["rtn"]
        ranked = _ranked(wanted, reading)
        fitted = ranked[0].fit
    return Subject(fitted, checkpoint, flags, known, values, symbols, ranked)


def _ranked(wanted: dict[str, Any], reading: Collection[str]) -> tuple[Candidate, ...]:
    """Rank the shipped fits that read some columns."""
    from qscale.fit.shipped import load_all  # noqa: PLC0415
    from qscale.predict import candidates  # noqa: PLC0415

    fits = {name: fit for name, fit in load_all().items() if set(reading) <= set(fit.columns)}
    ranked = candidates(wanted, fits)
    if not ranked:
        raise QscaleError(
            f"no shipped fit reads {' and '.join(sorted(reading))}: name one of yours that does."
        )
    return ranked


def with_measured(
    subject: Subject, frame: pd.DataFrame, given: Path | None
) -> tuple[Fit | Regression, pd.DataFrame, pd.DataFrame | None]:
    """Update a fit by measured rows of the checkpoint.

    Returns
    -------
    Fit or Regression, pandas.DataFrame, pandas.DataFrame or None
        The fit as it is then, the settings with the levels of the measured run, and the rows.
    """
    if given is None:
        return subject.fitted, frame, None
    rows, frame = measured(subject.fitted, subject.known, subject.settings, frame, given)
    return subject.fitted.given(rows), frame, rows


def with_facts(subject: Subject, rows: pd.DataFrame) -> pd.DataFrame:
    """Add what is known of the checkpoint to what its curvature predicts, setting by setting."""
    return rows.assign(**{c: v for c, v in subject.known.items() if c not in rows.columns})


@dataclass(frozen=True, slots=True, eq=False)
class Law:
    """Predictions of a fit.

    Parameters
    ----------
    fitted, informed
        The fit, and what it is after measured rows.
    frame
        The settings.
    rows
        The measured rows, if any.
    result
        What is predicted.
    """

    fitted: Fit | Regression
    informed: Fit | Regression
    frame: pd.DataFrame
    rows: pd.DataFrame | None
    result: pd.DataFrame


def predicted_by(subject: Subject, given: Path | None, rows: pd.DataFrame | None = None) -> Law:
    """Predict a subject by its fit, after measured rows if there are any.

    Parameters
    ----------
    subject
        What is to be predicted.
    given
        Table of measured rows.
    rows
        What its curvature predicts, setting by setting, for a fit that reads it.
    """
    from qscale.cli.predicted import in_nats  # noqa: PLC0415
    from qscale.predict import predict  # noqa: PLC0415

    if rows is None:
        frame = settings_of(subject.fitted, subject.known, subject.settings)
    else:
        frame = with_facts(subject, rows)
    informed, frame, told = with_measured(subject, frame, given)
    result = in_nats(subject.fitted, predict(informed, frame))
    return Law(subject.fitted, informed, frame, told, result)
