"""Rows to predict, from what flags and a checkpoint's folder say of a checkpoint."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import cyclopts

from qscale.cli.console import how_to_write, pairs
from qscale.columns import COLUMNS
from qscale.errors import QscaleError, did_you_mean
from qscale.provenance import TRAINING_COLUMNS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pandas as pd

    from qscale.checkpoint import Description
    from qscale.fit import Fit, Fitted
    from qscale.regress import Regression

LISTED = ("bits", "group_size", "method", "fmt")
"""Flags that take several values, each of which is predicted."""

FLAGS = ("n_params", "tokens", "lr_peak", "lr", "loss_fp", "family", "source")
"""Flags of one value; every other column is given with ``--set``."""

# What is one for all rows of a checkpoint; a source is that of a measurement.
_OF_THE_SUBJECT = (
    "n_params", "n_params_total", *(c for c in TRAINING_COLUMNS if c != "source"), "loss_fp",
)  # fmt: skip
_ALIKE = 0.1  # relative: sizes are often given rounded, as 7e9 for 6.74e9

# What depends on the quantizer setting, so that one value cannot be of several.
_OF_ONE_SETTING = (
    "bits_per_weight", "quantization_noise", "sqnr_db", "quadratic_delta", "quadratic_delta_se",
)  # fmt: skip


_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@\S+)?")


def _count(_: Any, tokens: Sequence[cyclopts.Token]) -> float:
    """Parse a count; one with a unit, such as 7B, is refused with how to write it."""
    text = tokens[0].value
    try:
        return float(text)
    except ValueError:
        raise QscaleError(
            f"{tokens[0].keyword} must be a number, such as 7e9. "
            f"Got {text!r} instead{how_to_write(text)}."
        ) from None


Count = Annotated[float, cyclopts.Parameter(converter=_count)]
"""A number of parameters or tokens as an option."""


def parted(first: str | None, second: str | None) -> tuple[str | None, str | None]:
    """Tell a fit from a checkpoint where only one of them may be named.

    Parameters
    ----------
    first, second
        What was given; both, one or none. Of one alone, a shipped name or a file is a fit, and a
        folder, a ``.gguf`` file or ``org/name`` of a hub a checkpoint.

    Returns
    -------
    tuple
        The fit and the checkpoint; None for what was not named.

    Examples
    --------
    >>> parted("mine.json", None), parted("EleutherAI/pythia-70m@step1000", None)
    (('mine.json', None), (None, 'EleutherAI/pythia-70m@step1000'))
    """
    from qscale.fit.shipped import names  # noqa: PLC0415

    if first is None or second is not None:
        return first, second
    path = Path(first)
    if first in names() or (path.is_file() and path.suffix != ".gguf"):
        return first, None
    on_hub = path.suffix != ".json" and _HUB_ID.fullmatch(first) is not None
    if path.is_dir() or path.suffix == ".gguf" or on_hub:
        return None, first
    return first, None


def assigned(items: Sequence[str], fitted: Fitted | None) -> dict[str, Any]:
    """Parse ``sqnr_db=21`` items as values of the kind that the column holds.

    Without a fit, the columns of the table alone are known.

    Raises
    ------
    QscaleError
        Naming the item, if it has a flag of its own, is the target, names no column or holds a
        value that the column cannot have.
    """
    import pandas as pd  # noqa: PLC0415

    from qscale import table as tables  # noqa: PLC0415

    values = {}
    own = () if fitted is None else (*fitted.columns, *fitted.categories)
    targets = ("delta_loss", "relative_delta") if fitted is None else (fitted.target,)
    known = (*COLUMNS, *own)
    for name, text in pairs(items, "--set").items():
        if name in LISTED:
            raise QscaleError(f"--set {name}: give --{name.replace('_', '-')} instead.")
        if name in targets:
            raise QscaleError(f"--set {name}: this is what the fit predicts.")
        if name not in known:
            raise QscaleError(
                f"--set {name}: the fit and the table have no such column."
                f"{did_you_mean(name, known)}"
            )
        checked = tables.check(pd.DataFrame({name: [text]}), f"--set {name}={text}")
        values[name] = checked[name].iloc[0]
        if name not in COLUMNS and fitted is not None and name in fitted.columns:
            values[name] = _number(name, text)
    return values


def _number(name: str, text: str) -> float:
    """Parse the value of a number that the table's schema does not know."""
    try:
        return float(text)
    except ValueError:
        raise QscaleError(f"--set {name}: must be a number. Got {text!r} instead.") from None


def described(checkpoint: str | Description | None, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Join what the folder says with the flags, which take precedence.

    Raises
    ------
    QscaleError
        If the loss is not above 0, or the learning rate is above its peak.
    """
    known: dict[str, Any] = {}
    if checkpoint is not None:
        from qscale.checkpoint import describe  # noqa: PLC0415

        description = describe(checkpoint) if isinstance(checkpoint, str) else checkpoint
        known = {
            # A sidecar's source is where the weights come from, not where a measurement does.
            **{k: v for k, v in description.training.items() if k != "source"},
            "n_params": description.n_params,
            "n_params_total": description.n_params_total,
        }
    known |= {name: value for name, value in flags.items() if value is not None}
    _check_known(known)
    return known


def _check_known(known: Mapping[str, Any]) -> None:
    """Raise naming the option whose value no checkpoint can have."""
    loss, lr, lr_peak = (known.get(name) for name in ("loss_fp", "lr", "lr_peak"))
    if loss is not None and not loss > 0:
        raise QscaleError(f"--loss-fp must be above 0. Got {loss:g} instead.")
    if lr is not None and lr_peak is not None and lr > lr_peak:
        raise QscaleError(
            f"--lr must be at most --lr-peak. Got {lr:g} above {lr_peak:g} instead; what is not "
            "given is that of the checkpoint's qscale.toml."
        )


def completed(
    known: Mapping[str, Any], settings: Mapping[str, Sequence[Any]], path: Path
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Add what measured rows say and flags do not: facts of the checkpoint, method and format.

    Parameters
    ----------
    known, settings
        As for `settings_of`.
    path
        Table of the measured rows.

    Returns
    -------
    dict, dict
        Both with what all rows agree on.
    """
    from qscale import table as tables  # noqa: PLC0415

    rows = tables.read(path)
    alike = {}
    for column in (*_OF_THE_SUBJECT, "method", "fmt"):
        values = list(rows[column].dropna().unique()) if column in rows.columns else []
        if len(values) == 1:
            alike[column] = values[0]
    facts = {c: value for c, value in alike.items() if c in _OF_THE_SUBJECT}
    labels = {c: [alike[c]] for c in ("method", "fmt") if c in alike and not settings[c]}
    return facts | dict(known), dict(settings) | labels


def settings_of(
    fitted: Fitted, known: Mapping[str, Any], settings: Mapping[str, Sequence[Any]]
) -> pd.DataFrame:
    """One row for each setting that the fit can tell apart.

    Parameters
    ----------
    fitted
        What predicts.
    known
        Values that all rows share.
    settings
        Values of `LISTED` columns; none where the flag was not given.

    Raises
    ------
    QscaleError
        If a column that the fit needs is not given, or one value is given for several settings.
    """
    import pandas as pd  # noqa: PLC0415

    from qscale import table as tables  # noqa: PLC0415

    _require(fitted, known, settings)
    used = {*fitted.columns, *fitted.categories}
    for name in ("method", "fmt"):
        if len(settings[name]) > 1 and name not in used:
            raise QscaleError(f"--{name}: the fit does not tell its values apart; give one.")
    lists = {name: values if name in used else values[:1] for name, values in settings.items()}
    lists = {name: values for name, values in lists.items() if values}
    rows = [{**known, **dict(zip(lists, row, strict=True))}
            for row in itertools.product(*lists.values())]  # fmt: skip
    single = [name for name in _OF_ONE_SETTING if name in known and name in used]
    if single and len(rows) > 1:
        several = [f"--{n.replace('_', '-')}" for n, values in lists.items() if len(values) > 1]
        raise QscaleError(
            f"--set {single[0]}: it belongs to one quantizer setting; give one value of "
            f"{' and '.join(several)}."
        )
    return tables.check(pd.DataFrame(rows), "prediction")


def _require(
    fitted: Fitted, known: Mapping[str, Any], settings: Mapping[str, Sequence[Any]]
) -> None:
    """Raise naming the first column that the fit needs and nobody gave, and how to give it."""
    for column in fitted.columns:
        if known.get(column) is not None or settings.get(column):
            continue
        meaning = f" ({COLUMNS[column].meaning.lower()})" if column in COLUMNS else ""
        flag = column in LISTED or column in FLAGS
        how = f"--{column.replace('_', '-')}" if flag else f"--set {column}=VALUE"
        folder = ", or add it to the checkpoint's qscale.toml" * (column in TRAINING_COLUMNS)
        raise QscaleError(f"the fit needs {column}{meaning}; give {how}{folder}.")
    if "group_size" in fitted.columns and None in settings["group_size"]:
        raise QscaleError("--group-size row cannot be used: the fit needs a number of elements.")


def measured(
    fitted: Fit | Regression,
    known: Mapping[str, Any],
    settings: Mapping[str, Sequence[Any]],
    frame: pd.DataFrame,
    path: Path,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Read rows that were measured, and say in both tables that it is one checkpoint.

    What the rows lack is taken from the flags, but for bits and group size.

    Raises
    ------
    QscaleError
        If the rows are of several checkpoints, or of another one than the flags describe.
    """
    from qscale import table as tables  # noqa: PLC0415

    rows = tables.read(path)
    _check_measured(fitted, rows, {**known, **settings}, path)
    single = {name: settings[name][0] for name in ("method", "fmt") if len(settings[name]) == 1}
    for column, value in {**known, **single}.items():
        if column not in _OF_ONE_SETTING:
            rows[column] = rows[column].fillna(value) if column in rows.columns else value
    for term in fitted.effects.terms:
        for column in term.columns:
            if column in rows.columns and column not in frame.columns:
                if len(rows[column].drop_duplicates()) > 1:
                    raise QscaleError(
                        f"--given {path}: column {column!r} has several values, but the rows must "
                        "be of one checkpoint."
                    )
                frame = frame.assign(**{column: rows[column].iloc[0]})
    _check_same(rows, known, path)
    return rows, frame


def _check_same(rows: pd.DataFrame, known: Mapping[str, Any], path: Path) -> None:
    """Raise naming the first fact in which the rows contradict the flags or the checkpoint."""
    for column in _OF_THE_SUBJECT:
        expected = known.get(column)
        if expected is None or column not in rows.columns:
            continue
        for i, value in enumerate(rows[column]):
            if not _alike(value, expected):
                flag = f"--{column.replace('_', '-')}" if column in FLAGS else "--set"
                raise QscaleError(
                    f"--given {path}: row {i + 1} has {column} {_said(value)}, but {flag} or the "
                    f"checkpoint says {_said(expected)}. Give rows of the checkpoint that is "
                    f"predicted, or correct {flag}."
                )


def _alike(value: Any, expected: Any) -> bool:
    """Whether two values of a fact may be of one checkpoint."""
    if isinstance(expected, str):
        return bool(value == expected)
    return math.isclose(value, expected, rel_tol=_ALIKE)


def _said(value: Any) -> str:
    """Format a fact."""
    return value if isinstance(value, str) else f"{value:.6g}"


def _check_measured(
    fitted: Fit | Regression, rows: pd.DataFrame, known: Mapping[str, Any], path: Path
) -> None:
    """Raise naming the first column or row that cannot tell what was measured."""
    for column in (*fitted.columns, fitted.target):
        given = column not in LISTED and known.get(column) is not None
        if column not in rows.columns:
            if given:
                continue
            raise QscaleError(f"--given {path}: no column {column!r}; add what was measured.")
        if rows[column].isna().any() and not given:
            row = int(rows[column].isna().to_numpy().argmax()) + 1
            raise QscaleError(f"--given {path}: row {row} has no value in column {column!r}.")
    if "status" in rows.columns:
        unusable = (rows["status"].notna() & (rows["status"] != "ok")).to_numpy()
        if unusable.any():
            row = int(unusable.argmax())
            raise QscaleError(
                f"--given {path}: row {row + 1} has status {rows['status'].iloc[row]}; "
                "leave out rows that are not ok."
            )
