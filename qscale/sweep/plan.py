"""Read the plan of a sweep and expand it into tasks; no torch needed."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qscale.errors import SweepError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_ARM_KEYS = ("name", "fixed", "grid", "exclude", "cost")
_PLAN_KEYS = ("task", *_ARM_KEYS[1:], "arms")
_COSTS = ("seconds", "gigabytes")
_HASH_DIGITS = 16


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """One call of the plan's function.

    Parameters
    ----------
    hash
        First hexadecimal digits of the SHA-256 of the function's name and the parameters.
    arm
        Arm of the plan, for counts.
    params
        What the function is called with.
    seconds, gigabytes
        Cost of a task as the plan states it.
    """

    hash: str
    arm: str
    params: dict[str, Any]
    seconds: float | None
    gigabytes: float | None


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """A function and the tasks to call it for.

    Parameters
    ----------
    path
        The plan's file.
    function
        ``measure``, ``file.py:function`` without folders, or ``module:function``.
    source
        The Python file, where the plan names one.
    tasks
        In the plan's order, each hash once.
    repeated
        How many further tasks had the parameters of an earlier one.
    """

    path: Path
    function: str
    source: Path | None
    tasks: tuple[Task, ...]
    repeated: int


@dataclass(frozen=True, slots=True, eq=False)
class _Arm:
    """Values of each parameter, and where to find them in the file for messages."""

    name: str
    where: str
    values: dict[str, list[Any]]
    excludes: tuple[tuple[str, dict[str, list[Any]]], ...]
    cost: dict[str, float]


def read(path: str | Path) -> Plan:
    """Read a plan and expand its grid.

    Parameters
    ----------
    path
        TOML file with ``task``, and optionally ``[fixed]`` parameters, a ``[grid]`` of lists,
        ``[[exclude]]`` tables, ``[cost]`` and ``[[arms]]``, each with tables of the same names that
        go before those of the plan.

    Raises
    ------
    SweepError
        Naming the file and the key that is wrong.
    """
    path = Path(path)
    content = _load(path)
    _known(content, _PLAN_KEYS, str(path))
    function, source = _function(content.get("task"), path)
    shared = _arm({k: v for k, v in content.items() if k in _ARM_KEYS}, f"{path}:", "plan")
    arms = content.get("arms", [])
    if not isinstance(arms, list) or not all(isinstance(arm, dict) for arm in arms):
        raise SweepError(f"{path}: arms must be [[arms]] tables. Got {arms!r} instead.")
    own = [_own_arm(arm, path, i) for i, arm in enumerate(arms, start=1)]
    names = [arm.name for arm in own]
    for name in names:
        if names.count(name) > 1:
            raise SweepError(f"{path}: [[arms]] name {name!r} is given twice; give each its own.")
    found = list(_expand(shared, own, function))
    if not found:
        raise SweepError(f"{path}: no tasks are left once [[exclude]] is applied.")
    tasks = {task.hash: task for task in reversed(found)}
    order = dict.fromkeys(task.hash for task in found)
    unique = tuple(tasks[key] for key in order)
    return Plan(path, function, source, unique, len(found) - len(unique))


def task_hash(function: str, params: Mapping[str, Any]) -> str:
    """Hash a function's name and its parameters; the order of keys and ``1`` or ``1.0`` are alike.

    Examples
    --------
    >>> task_hash("a.py:f", {"x": 1, "y": 2e-3}) == task_hash("a.py:f", {"y": 0.002, "x": 1.0})
    True
    """
    plain = canonical({"function": function, "params": dict(params)}, "params")
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:_HASH_DIGITS]


def canonical(value: Any, where: str) -> Any:
    """Return a parameter's value so that equal values are alike: whole numbers as ``int``.

    Raises
    ------
    SweepError
        If it is not made of texts, finite numbers, true and false, lists and tables.
    """
    if isinstance(value, float) and math.isfinite(value):
        return int(value) if value.is_integer() and abs(value) < 2**53 else value
    if isinstance(value, (str, int)):
        return value
    if isinstance(value, list):
        return [canonical(item, where) for item in value]
    if isinstance(value, dict):
        return {str(key): canonical(item, f"{where}.{key}") for key, item in value.items()}
    raise SweepError(
        f"{where} must be text, a finite number, true or false, a list or a table. "
        f"Got {value!s} instead."
    )


def _load(path: Path) -> dict[str, Any]:
    """Read a TOML file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SweepError(f"{path}: cannot be read ({error.strerror}); check the path.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SweepError(f"{path}: not a TOML file ({error}).") from error


def _known(content: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    """Raise for the first key that is not known."""
    for key in content:
        if key not in known:
            raise SweepError(
                f"{where}: unknown key {key!r}. Keys are: {', '.join(known)}."
                f"{did_you_mean(key, known)}"
            )


def _function(text: Any, path: Path) -> tuple[str, Path | None]:
    """Return the name that goes into hashes, and the file that it is read from."""
    if text == "measure":
        return text, None
    file, colon, name = text.rpartition(":") if isinstance(text, str) else ("", "", "")
    if not (file and colon and name.isidentifier()):
        raise SweepError(
            f"{path}: task must be measure, file.py:function or module:function. "
            f"Got {text!r} instead."
        )
    if not file.endswith(".py"):
        return text, None
    source = path.parent / file
    if not source.is_file():
        raise SweepError(f"{path}: task: {source} is no file; paths start from the plan's folder.")
    return f"{source.name}:{name}", source.absolute()


def _own_arm(content: dict[str, Any], path: Path, number: int) -> _Arm:
    """Read one of the ``[[arms]]``."""
    where = f"{path}: [[arms]] {number}:"
    _known(content, _ARM_KEYS, where.removesuffix(":"))
    name = content.get("name", f"arm {number}")
    if not isinstance(name, str) or not name:
        raise SweepError(f"{where} name must be text. Got {name!r} instead.")
    return _arm(content, where, name)


def _arm(content: Mapping[str, Any], where: str, name: str) -> _Arm:
    """Read the tables of the plan or of an arm."""
    fixed, grid, cost = (_table(content, key, where) for key in ("fixed", "grid", "cost"))
    for key in fixed.keys() & grid.keys():
        raise SweepError(f"{where} {key} is in [fixed] and in [grid]; leave one out.")
    values = {key: [canonical(v, f"{where} [fixed] {key}")] for key, v in fixed.items()}
    values |= {key: _levels(v, f"{where} [grid] {key}") for key, v in grid.items()}
    _known(cost, _COSTS, f"{where} [cost]")
    for key, value in cost.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e15:
            raise SweepError(f"{where} [cost] {key} must be above 0. Got {value!r} instead.")
    excludes = content.get("exclude", [])
    if not isinstance(excludes, list) or not all(isinstance(e, dict) and e for e in excludes):
        raise SweepError(f"{where} exclude must be [[exclude]] tables that hold parameters.")
    return _Arm(
        name=name,
        where=where,
        values=values,
        excludes=tuple(_exclude(e, f"{where} [[exclude]] {i}") for i, e in enumerate(excludes, 1)),
        cost=cost,
    )


def _table(content: Mapping[str, Any], key: str, where: str) -> dict[str, Any]:
    """Return a table of a TOML file; empty if it is not there."""
    found = content.get(key, {})
    if not isinstance(found, dict):
        raise SweepError(f"{where} {key} must be a table, [{key}]. Got {found!r} instead.")
    return found


def _levels(values: Any, where: str) -> list[Any]:
    """Return the values that a parameter of the grid takes."""
    if not isinstance(values, list) or not values:
        raise SweepError(f"{where} must be a list of values. Got {values!r} instead.")
    levels = [canonical(value, where) for value in values]
    for i, level in enumerate(levels):
        if any(_same(level, earlier) for earlier in levels[:i]):
            raise SweepError(f"{where} has {values[i]!r} twice; leave one out.")
    return levels


def _exclude(content: dict[str, Any], where: str) -> tuple[str, dict[str, list[Any]]]:
    """Read one ``[[exclude]]``: a value or a list of values for each parameter."""
    lists = {key: v if isinstance(v, list) else [v] for key, v in content.items()}
    return where, {k: [canonical(v, f"{where} {k}") for v in found] for k, found in lists.items()}


def _expand(shared: _Arm, own: Sequence[_Arm], function: str) -> Iterator[Task]:
    """Yield the tasks of every arm, and check that each exclude leaves something out."""
    arms = own or [_Arm(shared.name, shared.where, {}, (), {})]
    idle = {where: rule for arm in (shared, *own) for where, rule in arm.excludes}
    parameters: set[str] = set()
    for arm in arms:
        values = shared.values | arm.values
        if not values:
            raise SweepError(f"{arm.where} give parameters in [fixed] or [grid].")
        parameters |= values.keys()
        cost = shared.cost | arm.cost
        for levels in itertools.product(*values.values()):
            params = dict(zip(values, levels, strict=True))
            matched = {w for w, rule in (*shared.excludes, *arm.excludes) if _matches(params, rule)}
            idle = {where: rule for where, rule in idle.items() if where not in matched}
            if not matched:
                yield Task(
                    hash=task_hash(function, params),
                    arm=arm.name,
                    params=params,
                    seconds=cost.get("seconds"),
                    gigabytes=cost.get("gigabytes"),
                )
    for where, rule in idle.items():
        for key in rule.keys() - parameters:
            raise SweepError(f"{where}: no parameter {key!r}.{did_you_mean(key, parameters)}")
        raise SweepError(f"{where} leaves out nothing; check its values.")


def _matches(params: Mapping[str, Any], rule: Mapping[str, list[Any]]) -> bool:
    """Whether every parameter that a rule names has one of its values."""
    return all(
        key in params and any(_same(params[key], value) for value in values)
        for key, values in rule.items()
    )


def _same(one: Any, other: Any) -> bool:
    """Whether two canonical values are equal; ``true`` is not 1."""
    return isinstance(one, bool) == isinstance(other, bool) and one == other
