"""Laws from the user: a TOML file that composes factors, or one Python function in a file."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qscale.errors import FitError
from qscale.laws import compose, named
from qscale.laws.function import Link, factor_of, unknown_keys
from qscale.laws.law import Law
from qscale.user_code import NAMED, find, load

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_TOML_KEYS = ("name", "target", "link", "source", "note", "factors")
_LAW_KEYS = ("name", "target", "columns", "parameters", "link", "source", "note", "derivative")


def resolve(text: str, target: str | None = None) -> Law:
    """Return the law that a text names: a named law, ``law.toml`` or ``law.py:function``.

    Parameters
    ----------
    text
        Name or file.
    target
        Column to predict instead of the law's own.

    Raises
    ------
    FitError
        If there is no such law, or its file is missing or wrong.

    Examples
    --------
    >>> resolve("kumar").target
    'delta_loss'
    """
    python = NAMED.fullmatch(text)
    if python:
        law = from_python(python["path"], python["name"] or "")
    elif text.endswith(".toml"):
        law = from_toml(text)
    else:
        return named.get(text, target)
    return law if target is None else replace(law, target=target)


def from_toml(path: str | Path) -> Law:
    """Read a law composed of factors, see `qscale.laws.compose.from_spec`.

    Parameters
    ----------
    path
        File with ``name``, ``target``, optionally ``link``, ``source`` and ``note``, and one
        ``[[factors]]`` table with ``kind`` and options for each factor.

    Notes
    -----
    Factors multiply; with ``link = "identity"`` too, where residuals are taken in the target's
    unit. The path of a ``function`` factor starts from the file's folder.

    Raises
    ------
    FitError
        If the file is missing, no TOML, or names a key, a factor or an option that is not known.
    """
    path = Path(path)
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FitError(f"{path}: cannot be read ({error.strerror}); check the path.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FitError(f"{path}: not a TOML file ({error}).") from error
    unknown_keys(content, _TOML_KEYS, str(path))
    texts = {key: content.get(key, "") for key in _TOML_KEYS[:-1]}
    texts["link"] = texts["link"] or "log"
    for key, value in texts.items():
        if not isinstance(value, str) or (not value and key in ("name", "target")):
            raise FitError(f"{path}: {key} must be a text. Got {value!r}.")
    entries = content.get("factors")
    if (
        not isinstance(entries, list)
        or not entries
        or not all(isinstance(e, dict) for e in entries)
    ):
        raise FitError(f"{path}: give one [[factors]] table with a kind for each factor.")
    if texts["link"] not in ("log", "identity"):
        raise FitError(f"{path}: link must be log or identity. Got {texts['link']!r}.")
    plain = texts["link"] == "identity"
    alone = plain and len(entries) == 1 and entries[0].get("kind") == "function"
    factors = tuple(
        _factor(entry, "identity" if alone else "log", f"{path}: factor {i}", path.parent)
        for i, entry in enumerate(entries, 1)
    )
    if plain and not alone:
        factors = (compose.natural(*factors),)
    _check_starts(factors, str(path))
    return Law(factors=factors, **texts)


def to_toml(law: Law) -> str:
    """Return the text of a file that `from_toml` reads as the law.

    Parameters
    ----------
    law
        A law whose link is the logarithm, without a Python function among its factors. Options
        that a factor would have anyway are left out.

    Examples
    --------
    >>> from qscale.laws import get
    >>> print(to_toml(get("curvature")).partition("[[factors]]")[0].splitlines()[0])
    name = "curvature"
    """
    content = law.spec()
    lines = [f"{key} = {_toml(content[key])}" for key in _TOML_KEYS[:-1] if content.get(key)]
    for entry in content["factors"]:
        lines += ["", "[[factors]]"]
        lines += [f"{key} = {_toml(value)}" for key, value in _unusual(entry).items()]
    return "\n".join([*lines, ""])


def _unusual(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what a factor would have anyway."""
    kept = {key: value for key, value in entry.items() if value is not None}
    for key in list(kept):
        fewer = {k: v for k, v in kept.items() if k != key}
        try:
            if compose.spec(compose.from_spec(fewer)) == entry:
                kept = fewer
        except FitError:  # it is needed
            continue
    return kept


def _toml(value: Any) -> str:
    """Write one value; JSON's texts are TOML's."""
    if isinstance(value, Mapping):
        pairs = (f"{key} = {_toml(inner)}" for key, inner in value.items() if inner is not None)
        return f"{{ {', '.join(pairs)} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


def from_python(path: str | Path, name: str) -> Law:
    """Read a law given as a function of a Python file, which is run.

    Parameters
    ----------
    path
        File that also describes the function: as ``function.law = {...}`` or as a dict ``LAW``
        with the keys of `law_from_function`, or as a law made by that.
    name
        Name of the function.

    Raises
    ------
    FitError
        If the file is missing or cannot be run, or the function or a part of its description is
        missing.
    """
    where = f"{path}:{name}"
    if not name:
        raise FitError(f"{path}: name the function too, as in {path}:function.")
    module = load(path, FitError)
    found = getattr(module, name, None)
    if isinstance(found, Law):
        return found
    found = find(module, path, name, FitError)
    about = getattr(found, "law", None) or getattr(module, "LAW", None)
    if not isinstance(about, dict):
        raise FitError(
            f"{where}: has no description; give the file a dict LAW with "
            f"{', '.join(_LAW_KEYS[1:4])} and optionally link, source, note."
        )
    unknown_keys(about, _LAW_KEYS, where)
    missing = [key for key in ("target", "columns", "parameters") if key not in about]
    if missing:
        raise FitError(f"{where}: LAW has no {missing[0]!r}.")
    for key in set(about) & {"name", "target", "source", "note"}:
        if not isinstance(about[key], str):
            raise FitError(f"{where}: {key} must be a text. Got {about[key]!r}.")
    return law_from_function(found, file=str(path), **about)


def law_from_function(
    function: Callable[..., Any],
    *,
    target: str,
    columns: Sequence[str],
    parameters: Mapping[str, Mapping[str, Any]],
    link: Link = "log",
    name: str | None = None,
    source: str = "",
    note: str = "",
    derivative: str = "complex_step",
    file: str | None = None,
) -> Law:
    """Make a law of ``function(data, p1, p2, ...)``, which returns the target itself.

    Parameters
    ----------
    function
        Gets ``data``, a mapping of column to array of shape (n,), and one number for each
        parameter; returns shape (n,). It must accept complex numbers unless ``derivative`` says
        otherwise.
    target
        Column that it predicts.
    columns
        Columns that it reads.
    parameters
        ``{name: {"starts": [...], "bounds": [low, high], "scale": "linear"}}``; all but starts
        may be left out. The scale, ``linear``, ``log`` or ``reciprocal``, is the one searched on.
    link
        Whether residuals are relative (``log``) or in the target's unit (``identity``).
    name, source, note
        For reports; the name is by default that of the function.
    derivative
        ``complex_step`` or ``central`` differences.
    file
        Where a saved fit finds the function again; by default where it was defined.

    Raises
    ------
    FitError
        If parameters and signature do not agree, or an option is not known.

    Examples
    --------
    >>> law = law_from_function(
    ...     lambda data, a, b: a * data["bits"] ** -b,
    ...     name="fall",
    ...     target="delta_loss",
    ...     columns=["bits"],
    ...     parameters={"a": {"starts": [1.0], "scale": "log"}, "b": {"starts": [1.0]}},
    ... )
    >>> law.names
    ('a', 'b')
    """
    called = getattr(function, "__name__", type(function).__name__)
    given = (file, called) if file is not None else None
    factor = factor_of(function, columns, parameters, link, derivative, source=given)  # type: ignore[arg-type]
    return Law(name or called, target, (factor,), source=source, note=note, link=link)


def _factor(entry: Mapping[str, Any], link: Link, where: str, folder: Path) -> compose.Factor:
    """Build one factor of a TOML file."""
    if entry.get("kind") == "function":
        if "link" in entry:
            raise FitError(f"{where}: link belongs to the law, not to a factor.")
        entry = {**entry, "path": str(folder / str(entry.get("path", ""))), "link": link}
    return compose.from_spec(entry, where)


def _check_starts(factors: Sequence[compose.Factor], where: str) -> None:
    """Raise if a parameter cannot be searched for."""
    for parameter in compose.product(factors).parameters:
        inside = all(parameter.low <= start <= parameter.high for start in parameter.starts)
        if parameter.scale != "linear" and parameter.low <= 0:
            raise FitError(
                f"{where}: parameter {parameter.name!r} is searched for on a {parameter.scale} "
                f"scale; its bounds must be above zero. Got {parameter.low:g}."
            )
        if not parameter.starts or not inside:
            raise FitError(
                f"{where}: parameter {parameter.name!r} needs starts between "
                f"{parameter.low:g} and {parameter.high:g}."
            )
