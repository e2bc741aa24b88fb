"""A league table: several models on the same held-out rows, and tests of the best against each."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from qscale.atomic import write_text
from qscale.errors import FitError, QscaleError
from qscale.fit import fit
from qscale.laws import Law
from qscale.laws.factors import constant
from qscale.table import require_numbers
from qscale.validate.paired import holm, paired
from qscale.validate.scores import SCORES, held_out, scorable, summarize

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from qscale.fit import Fit
    from qscale.validate.scores import Refit
    from qscale.validate.splits import Split

BASELINE = "mean_by_setting"
FEW_CLUSTERS = 10
_SUFFIXES = (".json", ".md", ".csv")
_SETTING = "_setting"
_SHOWN = (
    "model", "rows", "clusters", "mean_abs_log_error", "mean_abs_log_error_low",
    "mean_abs_log_error_high", "median_abs_log_error", "bias", "coverage_50", "coverage_90",
    "width_90", "pinball",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class League:
    """Models ordered by their mean absolute log error on the same held-out rows.

    Parameters
    ----------
    target, cluster
        Column predicted, and the one whose values mark held-out rows with shared errors.
    table
        One row per model, the best first: ``model`` and the columns of
        `qscale.validate.summarize`, pooled over splits.
    by_split
        The same for each model and split.
    tests
        The best against each other model: ``model``, ``difference`` (its mean absolute log error
        minus the best's), its ``low`` and ``high`` (90 %, resampling clusters), ``p_value`` (sign
        flips of clusters) and ``p_holm``, adjusted for all pairs of models, so that it holds
        whichever of them turned out best.
    errors
        Held-out rows of every model as `qscale.validate.held_out` gives them, with ``model``.
    notes
        Sentences on rows and models that could not be scored, and on what the intervals are worth.
    """

    target: str
    cluster: str
    table: pd.DataFrame
    by_split: pd.DataFrame
    tests: pd.DataFrame
    errors: pd.DataFrame
    notes: tuple[str, ...]

    def to_markdown(self) -> str:
        """Return the tables and notes as Markdown."""
        parts = [
            f"# Held-out predictions of {self.target}",
            _markdown(self.table[list(_SHOWN)]),
            f"## {self.table['model'].iloc[0]} against each other model",
            _markdown(self.tests),
            "## By split",
            _markdown(self.by_split[["split", *_SHOWN]]),
            *(f"- {note}" for note in self.notes),
            "## Columns",
            *(f"- `{name}`: {meaning}." for name, meaning in SCORES.items()),
        ]
        return "\n\n".join(parts).replace("\n\n- ", "\n- ") + "\n"

    def to_json(self) -> str:
        """Return everything, held-out rows included, as JSON text."""
        frames = {
            name: json.loads(getattr(self, name).to_json(orient="records", double_precision=10))
            for name in ("table", "tests", "by_split", "errors")
        }
        head = {"target": self.target, "cluster": self.cluster, "notes": list(self.notes)}
        return json.dumps({**head, **frames, "versions": {"qscale": version("qscale")}})

    def save(self, path: str | Path) -> None:
        """Write the league as ``.json``, ``.md`` or ``.csv`` (its table), all or nothing.

        Raises
        ------
        FitError
            If the suffix is none of them.
        """
        path = check_suffix(path)
        writers: dict[str, Callable[[], str]] = {
            ".json": self.to_json,
            ".md": self.to_markdown,
            ".csv": lambda: self.table.to_csv(index=False),
        }
        write_text(path, writers[path.suffix]())


def check_suffix(path: str | Path) -> Path:
    """Return a path whose suffix a league can be written to.

    Raises
    ------
    FitError
        If the suffix is not one of ``.json``, ``.md`` and ``.csv``.
    """
    path = Path(path)
    if path.suffix not in _SUFFIXES:
        raise FitError(f"{path}: a league table must end in one of {', '.join(_SUFFIXES)}.")
    return path


def compare(
    frame: pd.DataFrame,
    models: Mapping[str, Refit],
    splits: Sequence[Split],
    *,
    target: str = "delta_loss",
    cluster: str = "run",
    given_rows: int = 0,
    given_by: str = "run",
    seed: int = 0,
    progress: Callable[[str], None] = lambda _: None,
) -> League:
    """Refit several models on every split and compare them on the rows that all can predict.

    Parameters
    ----------
    frame
        A measurement table.
    models
        ``{name: refit}``: functions that fit a model to training rows and return what
        `qscale.predict.predict` takes. Each trains on those rows that it can use. The mean log
        target of each ``method`` and ``bits`` in the training rows is added as
        ``mean_by_setting``: what a model must beat.
    splits
        Splits of ``frame``.
    target
        Column that all the models predict.
    cluster
        Column whose values mark held-out rows with shared errors. For splits that leave one value
        of a column out, that column: its rows share one training set.
    given_rows, given_by
        Measured rows that each model is told of every held-out ``given_by`` before it predicts the
        others, see `held_out`.
    seed
        Of intervals and tests.
    progress
        Called with a sentence before each refit.

    Returns
    -------
    League
        A model that fails in every split is left out, with a note.

    Raises
    ------
    FitError
        If there are no models or splits, or no row that all the models can predict.
    """
    if not models or not splits:
        raise FitError("a comparison needs at least one model and one split.")
    frame = with_setting(frame)
    baseline = mean_by_setting(target, given_by if given_rows else cluster, random=given_rows > 0)
    every = {**models, BASELINE: baseline}
    splits, notes = _scorable_splits(frame, splits, target)
    if given_rows:
        notes.append(
            f"Every model was told {given_rows} measured row{'s' * (given_rows > 1)} of each "
            f"held-out {given_by}: the nearest to plain rounding to 4 bits, else to the median "
            "bits."
        )
    parts: list[pd.DataFrame] = []
    failed: dict[tuple[str, str], list[str]] = {}
    for (name, refit), split in itertools.product(every.items(), splits):
        progress(f"{name}: refitting without {split.name}")
        try:
            part = held_out(
                frame,
                refit,
                split,
                target=target,
                cluster=cluster,
                given_rows=given_rows,
                given_by=given_by,
            )
        except QscaleError as error:
            failed.setdefault((name, str(error)), []).append(split.name)
        else:
            parts.append(part.assign(model=name))
    notes += [
        f"{name} has no score for {_listed(splits)}: {reason}"
        for (name, reason), splits in failed.items()
    ]
    if not parts:
        raise FitError(f"no model could be scored. {notes[-1]}")
    errors, incomplete = _common(pd.concat(parts, ignore_index=True), len(every))
    table = summarize(errors, ("model",), seed=seed).sort_values(
        "mean_abs_log_error", kind="stable", ignore_index=True
    )
    groups = int(table["clusters"].iloc[0])
    if groups < FEW_CLUSTERS:
        notes.append(
            f"Only {groups} held-out value{'s' * (groups > 1)} of {cluster}: intervals are too "
            f"narrow with so few, and no p-value can be below {2 / 2**groups:.2g}."
        )
    return League(
        target=target,
        cluster=cluster,
        table=table,
        by_split=summarize(errors, ("split", "model"), seed=seed),
        tests=_tests(errors, list(table["model"]), seed),
        errors=errors,
        notes=(*incomplete, *notes),
    )


def mean_by_setting(target: str, cluster: str = "run", *, random: bool = False) -> Refit:
    """Return the baseline: the mean log target of the training rows of one method and bit width.

    Rows of a setting that no training row has are predicted by the mean over settings. With
    ``random``, clusters deviate from the means, so that it can be told measured rows.
    """
    law = Law(BASELINE, target, (constant("k"),), source="Mean log target of each setting")

    def refit(train: pd.DataFrame) -> Fit:
        return fit(train, law, offset=(_SETTING,), random=(cluster,) if random else (),
                   cluster=cluster, likelihood="gaussian", interval="model",
                   name="training rows")  # fmt: skip

    return refit


def _listed(names: list[str], most: int = 4) -> str:
    """Join names, of many only the first."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def with_setting(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a table with the text column that the baseline reads: method and bits, where known."""
    known = [column for column in ("method", "bits") if column in frame.columns]
    # Text first: an unknown value is a setting too.
    joined = frame[known].map(str).agg(" ".join, axis=1) if known else "all"
    return frame.assign(**{_SETTING: joined})


def _scorable_splits(
    frame: pd.DataFrame, splits: Sequence[Split], target: str
) -> tuple[list[Split], list[str]]:
    """Keep the splits with a held-out row that has a log target; say which rows have none."""
    if target not in frame.columns:
        raise FitError(f"the table has no column {target!r} to predict.")
    require_numbers(frame, [target], "--target")
    usable = scorable(frame, target)
    reason = f"{target} is unknown or not above zero, or their status is not ok"
    kept = [split for split in splits if (split.test & usable).any()]
    if not kept:
        raise FitError(f"no held-out row can be scored: {reason}.")
    out = int((np.any([split.test for split in splits], axis=0) & ~usable).sum())
    notes = [f"{out} held-out rows are not scored because their {reason}."] if out else []
    if empty := [split.name for split in splits if not (split.test & usable).any()]:
        notes.append(f"No row can be scored of {_listed(empty)}.")
    return kept, notes


def _common(errors: pd.DataFrame, n_models: int) -> tuple[pd.DataFrame, list[str]]:
    """Keep the rows that all models with any prediction have predicted; say what was lost."""
    predicted = errors[errors["log_error"].notna()]
    counts = predicted["model"].value_counts(sort=False)
    key = ["split", "row"]
    total = len(errors.drop_duplicates(key))
    common = predicted[predicted.groupby(key)["model"].transform("size") == len(counts)]
    if common.empty:
        each = ", ".join(f"{model} {count}" for model, count in counts.items())
        raise FitError(
            f"no held-out row can be predicted by all models (of {total}: {each}); compare fewer "
            "models or choose rows with --where."
        )
    notes = []
    if len(counts) < n_models:
        notes.append(f"{n_models - len(counts)} of {n_models} models could not be scored at all.")
    shared = len(common.drop_duplicates(key))
    if shared < total:
        short = ", ".join(f"{m} {c}" for m, c in counts.items() if c < total)
        notes.append(
            f"Scores are of the {shared} held-out rows that every model predicts; of {total} in "
            f"all, these models predict fewer: {short}."
        )
    return common.reset_index(drop=True), notes


def _tests(errors: pd.DataFrame, ranked: list[str], seed: int) -> pd.DataFrame:
    """Test the best model against each other one, adjusted for all pairs."""
    wide = errors.assign(size=errors["log_error"].abs()).pivot_table(
        index=["split", "row", "cluster"], columns="model", values="size"
    )
    clusters = wide.index.get_level_values("cluster").to_numpy()
    pairs = list(itertools.combinations(ranked, 2))
    results = [
        paired((wide[other] - wide[better]).to_numpy(), clusters, seed=seed)
        for better, other in pairs
    ]
    adjusted = holm([result.p_value for result in results])
    rows: list[dict[str, Any]] = [
        {"model": other, **asdict(result), "p_holm": p}
        for (better, other), result, p in zip(pairs, results, adjusted, strict=True)
        if better == ranked[0]
    ]
    columns = ["model", "difference", "low", "high", "p_value", "p_holm", "rows", "clusters"]
    return pd.DataFrame(rows, columns=columns)


def _markdown(frame: pd.DataFrame) -> str:
    """Format a frame as a Markdown table with four significant digits."""

    def cell(value: object) -> str:
        if isinstance(value, float):
            return "–" if np.isnan(value) else f"{value:.4g}"
        return str(value).replace("|", r"\|")

    lines = [
        "| " + " | ".join(frame.columns) + " |",
        "|---" * len(frame.columns) + "|",
        *("| " + " | ".join(map(cell, row)) + " |" for row in frame.itertuples(index=False)),
    ]
    return "\n".join(lines)
