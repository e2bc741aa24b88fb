"""Functions that a plan can name: measure, which is built in, and a user's own."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import random
import re
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from qscale import table
from qscale.errors import QscaleError, SweepError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path
    from types import ModuleType

    from qscale.sweep.plan import Plan

    Function = Callable[[dict[str, Any], Path], Any]

ROWS = "rows"
TASK = "task"
MEASURE_KEYS = (
    "checkpoint", "text", "specs", "features", "revision", "calibration", "calibration_samples",
    "context", "stride", "bos", "probe_windows", "num_probes", "hessian_rtol",
    "max_hessian_probes", "max_windows", "batch_windows", "seed", "device", "metadata",
)  # fmt: skip
"""Parameters of the built-in task: those of `qscale.measure.run.measure`, its settings as specs."""

_KIND = re.compile(r"[a-z][a-z0-9_]*")


def check(plan: Plan) -> None:
    """Refuse, before any work, parameters that the built-in task does not have.

    Raises
    ------
    SweepError
        Naming the plan and the parameter.
    """
    if plan.function != "measure":
        return
    for task in plan.tasks:
        for key in task.params:
            if key not in MEASURE_KEYS:
                raise SweepError(
                    f"{plan.path}: measure has no parameter {key!r}. Parameters are: "
                    f"{', '.join(MEASURE_KEYS)}.{did_you_mean(key, MEASURE_KEYS)}"
                )
        for key in ("checkpoint", "text", "specs"):
            if key not in task.params:
                raise SweepError(f"{plan.path}: measure needs {key}; give it in [fixed] or [grid].")
        try:
            _settings(task.params["specs"], plan.path.parent)
        except QscaleError as error:
            raise SweepError(f"{plan.path}: specs: {error}") from error


def load(function: str, source: Path | None, folder: Path) -> Function:
    """Return the function that a plan names.

    Parameters
    ----------
    function, source
        As of `qscale.sweep.plan.Plan`.
    folder
        Where the plan lies; files that it names start from there.

    Raises
    ------
    SweepError
        If the file or module cannot be run or has no such function.
    """
    if function == "measure":
        return functools.partial(measure, folder=folder)
    name = function.rpartition(":")[2]
    where = str(source) if source else function.rpartition(":")[0]
    try:
        module = _run(source) if source else importlib.import_module(where)
    except (Exception, SystemExit) as error:  # whatever the user's file raises
        raise SweepError(f"{where}: raised {type(error).__name__}: {error}") from error
    found = getattr(module, name, None)
    if not callable(found):
        own = [n for n, f in vars(module).items() if inspect.isfunction(f) and n[0] != "_"]
        raise SweepError(f"{where}: no function {name!r}. Functions are: {', '.join(own)}.")
    return found


def call(
    function: Function, params: Mapping[str, Any], key: str, scratch: Path
) -> dict[str, pd.DataFrame]:
    """Call a task's function with a seed and return the frames that are to be kept.

    The seed is the parameter of that name or follows from the task's hash, never from the order in
    which tasks run. The generators of random and numpy start from it, and that of torch where the
    function's file imports torch at its top.

    Raises
    ------
    SweepError, TableError
        If what it returns is no frame, or its rows are no measurement table.
    """
    given = {"seed": int(key, 16) % 2**31, **params}
    if isinstance(given["seed"], int):
        _seed(given["seed"] % 2**32)
    found = function(given, scratch)
    frames = found if isinstance(found, dict) else {ROWS: found}
    for kind, frame in frames.items():
        if not isinstance(kind, str) or not _KIND.fullmatch(kind):
            raise SweepError(
                f"kinds of frames must be like rows or per_layer. Got {kind!r} instead."
            )
        if not isinstance(frame, pd.DataFrame):
            raise SweepError(
                f"a task must return a DataFrame or a dict of them. Got {type(frame).__name__} "
                f"as {kind} instead."
            )
        if TASK in frame:
            raise SweepError(f"{kind}: column {TASK!r} is the sweep's own; name it otherwise.")
    return frames | ({ROWS: table.check(frames[ROWS], ROWS)} if ROWS in frames else {})


def measure(params: dict[str, Any], scratch: Path, *, folder: Path) -> dict[str, pd.DataFrame]:
    """Measure a checkpoint: rows, and the side tables of its features.

    Parameters
    ----------
    params
        See `MEASURE_KEYS`. Files start from the plan's folder; ``features`` is a list or a text
        with commas, ``specs`` a list or one spec.
    scratch
        Where the tables grow.
    folder
        Where the plan lies.
    """
    from qscale.measure.run import measure as run  # noqa: PLC0415 - torch loads here

    given = dict(params)
    out = scratch / "rows.parquet"
    for key in ("checkpoint", "text", "calibration"):
        if key in given and (folder / str(given[key])).exists():
            given[key] = folder / str(given[key])
    features = given.pop("features", None)
    if features is not None:
        given["features"] = features.split(",") if isinstance(features, str) else features
    settings = _settings(given.pop("specs"), folder)
    rows = run(given.pop("checkpoint"), given.pop("text"), out, settings=settings, **given)
    prefix = len(out.stem) + 1
    sides = {path.stem[prefix:]: path for path in scratch.glob(f"{out.stem}.*.parquet")}
    return {ROWS: rows} | {kind: pd.read_parquet(path) for kind, path in sides.items()}


def _settings(specs: Any, folder: Path) -> list[Any]:
    """Parse specs; those that are files start from the plan's folder."""
    from qscale.quantize.mix import parse_setting  # noqa: PLC0415 - only measure needs it

    found = [specs] if isinstance(specs, str) else specs
    if not isinstance(found, list) or not found or not all(isinstance(s, str) for s in found):
        raise SweepError(f"specs must be a list of texts, such as ['rtn int4']. Got {specs!r}.")
    return [parse_setting(str(folder / s) if s.strip().endswith(".toml") else s) for s in found]


def _run(source: Path) -> ModuleType:
    """Run a Python file as a module that may import its neighbours, as a script may."""
    name = f"qscale_task_{source.stem}"
    wanted = importlib.util.spec_from_file_location(name, source)
    if wanted is None or wanted.loader is None:
        raise SweepError(f"{source}: not a Python file.")
    if str(source.parent) not in sys.path:
        sys.path.insert(0, str(source.parent))
    module = importlib.util.module_from_spec(wanted)
    sys.modules[name] = module  # dataclasses and pickle look it up
    wanted.loader.exec_module(module)
    return module


def _seed(seed: int) -> None:
    """Start the global generators from a seed."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - a user's function may draw from it
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)
