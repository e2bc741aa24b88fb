"""How a checkpoint was trained, and which file, name or flag says so; read without torch."""

from __future__ import annotations

import json
import math
import re
import tomllib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from qscale.columns import COLUMNS
from qscale.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

TRAINING_COLUMNS = (
    "family",
    "run",
    "tokens",
    "step",
    "lr_peak",
    "lr",
    "lr_schedule",
    "decay_fraction",
    "decay_share",
    "lr_sum",
    "weight_decay",
    "batch_tokens",
    "optimizer",
    "averaging",
    "source",
)
"""Columns of the measurement table that a sidecar or a user states about the training."""

SIDECAR = "qscale.toml"
TRAINER_STATE = "trainer_state.json"

# As OLMo (step1000-tokens4B), Pythia (step143000) and transformers' Trainer (checkpoint-500) write.
_STEP = re.compile(r"(?:^|[-_.])(?:step|checkpoint)[-_]?(\d+)(?=$|[-_.])", re.IGNORECASE)
_TOKENS = re.compile(r"(?:^|[-_.])tokens[-_]?(\d+(?:\.\d+)?)([KMBT])(?=$|[-_.])", re.IGNORECASE)
_LATER_STAGE = re.compile(r"(?:^|[-_.])stage([2-9])(?=$|[-_.])", re.IGNORECASE)
_UNITS = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


@dataclass(frozen=True, slots=True)
class Statement:
    """What one source says about the training.

    Parameters
    ----------
    origin
        The source, as shown to the user: ``qscale.toml``, ``flags``, ...
    values
        Values by column name, checked by :func:`training_metadata`.
    slack
        By how much a value may be off, in its unit; a name says ``tokens4B`` for 4.19e9.
    remark
        What the user should know of this source; empty for nothing.
    """

    origin: str
    values: Mapping[str, float | str]
    slack: Mapping[str, float] = field(default_factory=dict)
    remark: str = ""


@dataclass(frozen=True, slots=True)
class Training:
    """Training metadata joined from all sources.

    Parameters
    ----------
    values
        Values by column name; only what is known.
    origins
        The source of each value.
    remarks
        Sentences on sources that disagree or say less than they seem to.
    """

    values: dict[str, float | str]
    origins: dict[str, str]
    remarks: tuple[str, ...]


def combine(statements: Iterable[Statement]) -> Training:
    """Join what several sources say; of two that differ the earlier one counts, and it is said.

    Tokens that nobody states are steps times tokens per step, where both are known.

    Parameters
    ----------
    statements
        Sources, the most trusted first: flags, sidecar, trainer state, name.

    Examples
    --------
    >>> found = combine([Statement("flags", {"lr": 1e-3}), Statement("qscale.toml", {"lr": 2e-3})])
    >>> found.values, found.origins
    ({'lr': 0.001}, {'lr': 'flags'})
    >>> found.remarks
    ('lr is 0.001 by flags, 0.002 by qscale.toml; the first is used.',)
    """
    chosen: dict[str, Statement] = {}
    remarks = []
    for statement in statements:
        if statement.remark:
            remarks.append(statement.remark)
        for name, value in statement.values.items():
            first = chosen.setdefault(name, statement)
            if not _agree(name, first, statement):
                remarks.append(
                    f"{name} is {_shown(first.values[name])} by {first.origin}, "
                    f"{_shown(value)} by {statement.origin}; the first is used."
                )
    values = {name: chosen[name].values[name] for name in TRAINING_COLUMNS if name in chosen}
    origins = {name: chosen[name].origin for name in values}
    step, batch = values.get("step"), values.get("batch_tokens")
    if "tokens" not in values and isinstance(step, float) and isinstance(batch, float) and step:
        values["tokens"] = step * batch
        origins["tokens"] = (
            f"step ({origins['step']}) times batch_tokens ({origins['batch_tokens']})"
        )
    return Training(values, origins, tuple(remarks))


def _agree(name: str, first: Statement, second: Statement) -> bool:
    """Whether two sources say the same of a column, within what they round away."""
    a, b = first.values[name], second.values[name]
    if isinstance(a, str) or isinstance(b, str):
        return a == b
    slack = first.slack.get(name, 0.0) + second.slack.get(name, 0.0)
    return math.isclose(a, b, rel_tol=1e-6, abs_tol=slack)


def _shown(value: float | str) -> str:
    """Write a value for a message."""
    return value if isinstance(value, str) else f"{value:.6g}"


def statements(folder: Path, named: Statement) -> tuple[Statement, ...]:
    """Read all that is known of the training: sidecar, trainer state and name, in this order.

    Parameters
    ----------
    folder
        Checkpoint folder.
    named
        What the name of the folder, file or revision says; see :func:`from_name`.

    Raises
    ------
    CheckpointError
        If the sidecar or the trainer state cannot be read or holds an impossible value.
    """
    found = (_sidecar(folder / SIDECAR), _trainer_state(folder / TRAINER_STATE), named)
    return tuple(s for s in found if s.values or s.remark)


def from_name(name: str, origin: str) -> Statement:
    """Read step and tokens from the name of a folder or revision.

    Examples
    --------
    >>> from_name("stage1-step140000-tokens294B", "revision").values
    {'step': 140000.0, 'tokens': 294000000000.0}
    """
    step, tokens, stage = _STEP.search(name), _TOKENS.search(name), _LATER_STAGE.search(name)
    if stage and (step or tokens):
        # OLMo counts both from the start of the stage, not of the training.
        remark = (
            f"Step and tokens in {name!r} count stage {stage[1]} alone and are not used; "
            "give those of the whole training."
        )
        return Statement(origin, {}, remark=remark)
    values: dict[str, float | str] = {}
    slack = {}
    if step:
        values["step"] = float(step[1])
    if tokens and (count := float(tokens[1])) > 0:
        unit = _UNITS[tokens[2].upper()]
        values["tokens"], slack["tokens"] = count * unit, unit
    return Statement(origin, training_metadata(values, name), slack)


def _trainer_state(path: Path) -> Statement:
    """Read what transformers' Trainer wrote: steps, tokens and the logged learning rate."""
    if not path.is_file():
        return Statement(TRAINER_STATE, {})
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        step = found.get("global_step")
        seen = found.get("num_input_tokens_seen")
        rates = [
            float(entry["learning_rate"])
            for entry in found.get("log_history", ())
            if "learning_rate" in entry and (step is None or entry.get("step", 0) <= step)
        ]
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: not the state of a transformers Trainer ({error}). Remove or repair it."
        ) from error
    values: dict[str, Any] = {"step": step}
    if seen:  # zero where the Trainer was not asked to count
        values["tokens"] = seen
    if rates:
        values["lr"] = rates[-1]
        if len(rates) > 1 and not rates[-1] == max(rates) > rates[-2]:  # else still warming up
            values["lr_peak"] = max(rates)
    return Statement(TRAINER_STATE, training_metadata(values, str(path)))


def _sidecar(path: Path) -> Statement:
    """Read the training metadata beside a checkpoint; an absent file says nothing."""
    if not path.is_file():
        return Statement(SIDECAR, {})
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # malformed TOML or bytes that are not UTF-8
        raise CheckpointError(f"{path}: not valid TOML ({error}).") from error
    unknown = [key for key in found if key != "training"]
    if unknown or not isinstance(found.get("training", {}), dict):
        raise CheckpointError(
            f"{path}: unknown key {(unknown or ['training'])[0]!r}. "
            "The file holds one table, [training]."
        )
    return Statement(SIDECAR, training_metadata(found.get("training", {}), str(path)))


def training_metadata(values: Mapping[str, Any], where: str) -> dict[str, float | str]:
    """Check training metadata against the measurement table's columns; nulls are left out.

    Parameters
    ----------
    values
        Values by column name, one of `TRAINING_COLUMNS`.
    where
        File or option group for messages.

    Returns
    -------
    dict
        Numbers as floats, text as strings.

    Raises
    ------
    CheckpointError
        If a name is unknown, or a value is of the wrong kind or out of its column's range.
    """
    unknown = [name for name in values if name not in TRAINING_COLUMNS]
    if unknown:
        raise CheckpointError(
            f"{where}: unknown key {unknown[0]!r}. Known are: {', '.join(TRAINING_COLUMNS)}."
        )
    return {name: _value(name, v, where) for name, v in values.items() if v is not None}


def _value(name: str, value: object, where: str) -> float | str:
    """Check one value of training metadata."""
    column = COLUMNS[name]
    if column.kind == "text":
        if not isinstance(value, str):
            raise CheckpointError(f"{where}: {name!r} must be text. Got {value!r} instead.")
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise CheckpointError(f"{where}: {name!r} must be a number. Got {value!r} instead.")
    low = -math.inf if column.low is None else column.low
    high = math.inf if column.high is None else column.high
    if not low <= value <= high:
        raise CheckpointError(
            f"{where}: {name!r} must be between {low:g} and {high:g}. Got {value:g} instead. "
            f"{column.hint}".rstrip()
        )
    return float(value)
