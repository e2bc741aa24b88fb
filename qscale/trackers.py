"""Optional sinks for experiment trackers: rows and fits as parameters and metrics.

A tracker gets copies. The table and the fit's file are what qscale keeps, whatever a tracker does.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pandas as pd

from qscale.atomic import check_place
from qscale.columns import COLUMNS
from qscale.errors import QscaleError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from qscale.fit import Fit

_ORDER = list(COLUMNS)
_RETRIES = "MLFLOW_HTTP_REQUEST_MAX_RETRIES"
# The schema says first who was measured and how, then what came of it.
_RESULTS = frozenset(_ORDER[_ORDER.index("loss_fp") :])
_NOT_IN_A_NAME = re.compile(r"[^\w\-. /]")
_BATCH = 100  # of parameters and of metrics in one of MLflow's batches

Value = str | float | bool


@dataclass(frozen=True, slots=True)
class Record:
    """What a tracker is told of one measured row or one fit.

    Parameters
    ----------
    name
        What a list of runs shows.
    params
        What it was made from and how, by name.
    metrics
        Finite numbers that came of it, by name, in the units of the table.
    """

    name: str
    params: Mapping[str, Value]
    metrics: Mapping[str, float]

    @property
    def digest(self) -> str:
        """Hash of parameters and metrics, by which a tracker knows what it holds already."""
        text = json.dumps([dict(self.params), dict(self.metrics)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


class Tracker(Protocol):
    """Anything that takes records."""

    def log(self, record: Record) -> None:
        """Keep a record; one that is held already is left alone."""


class JsonLines:
    """One JSON object a line: ``name``, ``params`` and ``metrics``.

    Parameters
    ----------
    path
        File that lines are added to.

    Raises
    ------
    QscaleError
        If the file is not of such lines, or cannot be put there.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        check_place(self.path)
        self._held = set()
        lines = self.path.read_bytes().splitlines() if self.path.exists() else []
        for number, line in enumerate(lines, start=1):
            try:
                self._held.add(Record(**json.loads(line)).digest)
            except (ValueError, TypeError) as error:
                raise QscaleError(
                    f"{self.path}: line {number} is not a record of qscale; choose another file "
                    "to track to."
                ) from error

    def log(self, record: Record) -> None:
        """Add a line."""
        if record.digest in self._held:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = {"name": record.name, "params": record.params, "metrics": record.metrics}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(content) + "\n")
        self._held.add(record.digest)


class MLflow:
    """One MLflow run for each record, in the experiment ``MLFLOW_EXPERIMENT_NAME`` or ``qscale``.

    Parameters
    ----------
    uri
        Tracking URI such as ``sqlite:///mlflow.db`` or ``http://host:5000``. None takes
        ``MLFLOW_TRACKING_URI``, or what MLflow takes without one.

    Raises
    ------
    QscaleError
        If MLflow is not installed, or the store cannot be opened.
    """

    def __init__(self, uri: str | None = None) -> None:
        try:
            from mlflow import MlflowClient  # noqa: PLC0415 - never required
        except ImportError as error:
            raise QscaleError(
                f"--track mlflow needs {error.name}. Run: pip install 'qscale[tracking]'"
            ) from error
        shown = uri or os.environ.get("MLFLOW_TRACKING_URI") or "MLflow's default store"
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "qscale"
        try:
            with _few_retries():
                self._client: Any = MlflowClient(tracking_uri=uri)
                found = self._client.get_experiment_by_name(name)
                self._experiment = (
                    found.experiment_id if found else self._client.create_experiment(name)
                )
        except Exception as error:  # stores raise whatever their libraries do
            raise QscaleError(
                f"{shown} cannot be opened as an MLflow store: {_first_line(error)}"
            ) from error

    def log(self, record: Record) -> None:
        """Make a run and end it, failed where not all of the record arrived."""
        from mlflow.entities import Metric, Param  # noqa: PLC0415

        client, experiment = self._client, self._experiment
        same = f"tags.qscale_digest = '{record.digest}' and attributes.status = 'FINISHED'"
        if client.search_runs([experiment], same, max_results=1):
            return
        run = client.create_run(
            experiment, run_name=record.name, tags={"qscale_digest": record.digest}
        ).info
        params = [Param(_plain(key), str(value)) for key, value in record.params.items()]
        metrics = [
            Metric(_plain(key), value, run.start_time, 0) for key, value in record.metrics.items()
        ]
        status = "FAILED"
        try:
            for first in range(0, max(len(params), len(metrics)), _BATCH):
                part = slice(first, first + _BATCH)
                client.log_batch(run.run_id, metrics=metrics[part], params=params[part])
            status = "FINISHED"
        finally:
            client.set_terminated(run.run_id, status)


class Careful:
    """A tracker that stops at its first error with a warning, so that nothing else does.

    Parameters
    ----------
    tracker
        The tracker.
    where
        What the user called it.
    say
        Takes the warning.
    """

    def __init__(self, tracker: Tracker, where: str, say: Callable[[str], None]) -> None:
        self._tracker, self._where, self._say = tracker, where, say
        self._stopped = False

    def log(self, record: Record) -> None:
        """Pass a record on, unless there was an error before."""
        if self._stopped:
            return
        try:
            self._tracker.log(record)
        except Exception as error:  # whatever a tracker does, the work goes on
            self._stopped = True
            self._say(
                f"tracking to {self._where} stopped at {record.name}: {_first_line(error)} "
                "The work goes on and loses nothing. Run the same command again once this is "
                "mended: what is missing there is then logged."
            )


def open_tracker(where: str, say: Callable[[str], None]) -> Tracker:
    """Open what ``--track`` names; once open, its errors are warnings.

    Parameters
    ----------
    where
        ``mlflow``, ``mlflow:URI``, or a path that ends in ``.jsonl``.
    say
        Takes a warning.

    Raises
    ------
    QscaleError
        If it is none of these, its library is not installed, or it cannot be opened.
    """
    kind, _, uri = where.partition(":")
    if kind == "mlflow":
        return Careful(MLflow(uri or None), where, say)
    if where.endswith(".jsonl"):
        return Careful(JsonLines(where), where, say)
    raise QscaleError(
        "--track must be mlflow, mlflow:URI such as mlflow:sqlite:///mlflow.db, or a path that "
        f"ends in .jsonl. Got {where!r} instead."
    )


def of_row(row: Mapping[str, Any]) -> Record:
    """Return a measured row as a record: identity and setting, then losses and features.

    Parameters
    ----------
    row
        Values by column of the measurement table; nulls are left out.
    """
    params: dict[str, Value] = {}
    metrics: dict[str, float] = {}
    for name, column in COLUMNS.items():
        value = row.get(name)
        if value is None or pd.isna(value):
            continue
        if column.kind == "number" and name in _RESULTS:
            metrics[name] = float(value)
        else:
            params[name] = {"number": float, "flag": bool, "text": str}[column.kind](value)
    return Record(f"{str(row.get('checkpoint'))[:12]} {row.get('spec')}", params, metrics)


def of_fit(fit: Fit) -> Record:
    """Return a fit as a record: law, data and options, then estimates with errors and scores."""
    data, search = fit.data, fit.search
    params: dict[str, Value] = {
        "law": fit.law.name,
        "target": fit.target,
        "data": data.name,
        "sha256": data.sha256,
        "cluster": data.cluster,
        "interval": fit.interval,
        "status": search.status,
        **{
            name: value if isinstance(value, str | float | bool) else json.dumps(value)
            for name, value in data.options.items()
            if value not in (None, {}, [])
        },
    }
    found: dict[str, float] = {
        "rows": data.rows,
        "clusters": data.clusters,
        "objective": search.objective,
        "condition_number": search.condition_number,
        **{f"sd/{what}": sd for what, sd in fit.effects.spreads},
    }
    for column, values in fit.parameters().items():
        found |= {f"{column}/{name}": value for name, value in values.items()}
    metrics = {name: float(value) for name, value in found.items() if abs(value) < float("inf")}
    return Record(f"{fit.law.name} on {Path(data.name).name}", params, metrics)


def _plain(name: str) -> str:
    """Replace what MLflow allows in no name, as the brackets of ``source[paper]``."""
    return _NOT_IN_A_NAME.sub("_", name)


@contextmanager
def _few_retries() -> Iterator[None]:
    """Give a server that is down up after seconds: MLflow's seven attempts take minutes."""
    if _RETRIES in os.environ:
        yield
        return
    os.environ[_RETRIES] = "1"
    try:
        yield
    finally:
        del os.environ[_RETRIES]


def _first_line(error: Exception) -> str:
    """Return the first line of an error's message as a sentence."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].strip().rstrip(".") + "."
