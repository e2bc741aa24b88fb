"""A user's Python function as one factor of a law, with derivatives by complex steps."""

from __future__ import annotations

import inspect
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from qscale.errors import FitError, did_you_mean
from qscale.laws.factors import Factor, Parameter, upright
from qscale.user_code import file_hash, find, load

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from qscale.laws.factors import Array, Columns

Link = Literal["log", "identity"]
Derivative = Literal["complex_step", "central"]
Scale = Literal["linear", "log", "reciprocal"]

WIDEST = 1e30  # bounds of a parameter that is not bounded
_IMAGINARY = 1e-30
_AGREE = 1e-2


def function(
    path: str,
    name: str,
    columns: Sequence[str],
    parameters: Mapping[str, Mapping[str, Any]],
    link: Link = "log",
    derivative: Derivative = "complex_step",
    sha256: str | None = None,
) -> Factor:
    """Load ``name`` from the Python file ``path`` as a factor, see `factor_of`.

    The file is run, so use only files that you trust.

    Parameters
    ----------
    sha256
        Hash of the file when a fit was saved; its parameters mean nothing for another function.

    Raises
    ------
    FitError
        If the file is missing, changed or broken, or has no such function.
    """
    if not path:
        raise FitError(f"function {name!r} was not defined in a file and cannot be loaded again.")
    if sha256 is not None and sha256 != file_hash(path, FitError):
        raise FitError(
            f"{path}: the file has changed since the fit with its function {name!r} was saved. "
            "Restore it, or fit again."
        )
    return factor_of(
        find(load(path, FitError), path, name, FitError),
        columns,
        parameters,
        link,
        derivative,
        source=(path, name),
    )


def factor_of(
    called: Callable[..., Any],
    columns: Sequence[str],
    parameters: Mapping[str, Mapping[str, Any]],
    link: Link = "log",
    derivative: Derivative = "complex_step",
    source: tuple[str, str] | None = None,
) -> Factor:
    """Make a factor of ``called(data, p1, p2, ...)``, the target on the natural scale.

    Parameters
    ----------
    called
        Gets the columns as arrays of shape (n,) by name, and one number for each parameter;
        returns shape (n,).
    columns
        Columns that it reads.
    parameters
        For each parameter ``starts`` and, optionally, ``bounds``, ``scale`` (linear, log or
        reciprocal: what the solver works with) and ``symbol``.
    link
        With ``log`` the factor is the function's logarithm, with ``identity`` the function.
    derivative
        ``complex_step``, exact to rounding (Squire and Trapp 1998, SIAM Review 40), or
        ``central`` differences for functions that cannot be given complex numbers.
    source
        File and name under which the function can be loaded again.

    Raises
    ------
    FitError
        If signature and parameters do not agree, or an option is not known.
    """
    path, name = source or _whereabouts(called)
    where = f"{path or 'function'}:{name}"
    _one_of(where, "link", link, get_args(Link))
    _one_of(where, "derivative", derivative, get_args(Derivative))
    if not columns or not isinstance(columns, (list, tuple)):
        raise FitError(f"{where}: columns must list the columns that are read. Got {columns!r}.")
    columns = tuple(columns)
    if not hasattr(parameters, "keys"):
        raise FitError(f"{where}: parameters must be a table of names. Got {parameters!r}.")
    names = _argument_names(called, where)
    _same_names(names, parameters, where)
    known = tuple(parameter(n, parameters[n], where) for n in names)
    curve = _Curve(called, columns, known, link, derivative, where)
    listed = ", ".join([*map(upright, columns), *(p.symbol.replace("_", r"\_") for p in known)])
    return Factor(
        kind="function",
        options={
            "path": path,
            "name": name,
            "sha256": file_hash(path, FitError) if path else None,
            "columns": list(columns),
            "parameters": {p.name: _parameter_spec(p) for p in known},
            "link": link,
            "derivative": derivative,
        },
        columns=columns,
        parameters=known,
        value=curve.value,
        gradient=curve.gradient,
        latex=f"{upright(name)}({listed})",
        levels_needed={},
        linear=False,
    )


class _Curve:
    """Value and gradient of a user's function for a batch of parameters."""

    def __init__(
        self,
        called: Callable[..., Any],
        columns: tuple[str, ...],
        parameters: tuple[Parameter, ...],
        link: Link,
        derivative: Derivative,
        where: str,
    ) -> None:
        self.called, self.columns, self.parameters = called, columns, parameters
        self.log, self.where = link == "log", where
        self.derive = self._central if derivative == "central" else self._complex_step
        self.unchecked = derivative == "complex_step"

    def value(self, theta: Array, data: Columns) -> Array:
        """Evaluate the function or its logarithm, shape (S, n)."""
        data = self._numbers(data)
        rows = [self._linked(self._call(row, data)) for row in theta]
        return np.reshape(rows, (len(theta), len(data[self.columns[0]])))

    def gradient(self, theta: Array, data: Columns) -> Array:
        """Gradient of `value`, shape (S, n, p)."""
        data = self._numbers(data)
        if self.unchecked and len(theta):
            self._check(theta[0], data)
            self.unchecked = False
        rows = [self.derive(row, data) for row in theta]
        return np.reshape(rows, (len(theta), len(data[self.columns[0]]), theta.shape[1]))

    def _numbers(self, data: Columns) -> dict[str, Array]:
        """Return only the columns that were named, whole numbers as floats."""
        found = {c: np.asarray(data[c]) for c in self.columns}
        return {c: v.astype(float) if v.dtype.kind in "iub" else v for c, v in found.items()}

    def _call(self, theta: Array, data: dict[str, Array]) -> Array:
        """Evaluate the function, shape (n,); where arithmetic fails, as at a wild trial, nan."""
        shape = data[self.columns[0]].shape
        values = [p.natural(theta[i]) for i, p in enumerate(self.parameters)]
        try:
            with np.errstate(all="ignore"):
                found = np.asarray(self.called(dict(data), *values))
            found = np.broadcast_to(found, shape)
        except ArithmeticError:
            return np.full(shape, np.nan)
        except KeyError as error:
            raise FitError(
                f"{self.where}: uses {error}, which is not among its columns "
                f"({', '.join(self.columns)}); add it to columns."
            ) from error
        except Exception as error:  # whatever the user's code raises
            if np.iscomplexobj(theta):
                self._call(theta.real, data)  # raises what has nothing to do with complex numbers
                raise FitError(self._not_complex(f"{error}")) from error
            raise FitError(f"{self.where}: raised {type(error).__name__}: {error}") from error
        if found.dtype.kind not in "iufc":
            raise FitError(f"{self.where}: returns {found.dtype}, not numbers.")
        return found

    def _linked(self, found: Array) -> Array:
        """Map real values to the link's scale."""
        return np.log(np.where(found > 0, found, np.nan)) if self.log else found.astype(float)

    def _complex_step(self, theta: Array, data: dict[str, Array]) -> Array:
        """Gradient from an imaginary step so small that it leaves the real part as it is."""
        parts = []
        for index in range(len(theta)):
            shifted = theta.astype(complex)
            shifted[index] += 1j * _IMAGINARY
            found = self._call(shifted, data)
            slope = found.imag / _IMAGINARY
            parts.append(slope / found.real if self.log else slope)
        return np.stack(parts, axis=-1)

    def _central(self, theta: Array, data: dict[str, Array], relative: float = 6e-6) -> Array:
        """Gradient from central differences, good to about ten digits at best."""
        parts = []
        for index, value in enumerate(theta):
            step = relative * max(abs(value), 1e-4)
            ends = [
                self._linked(self._call(np.where(np.arange(len(theta)) == index, x, theta), data))
                for x in (value + step, value - step)
            ]
            parts.append((ends[0] - ends[1]) / ((value + step) - (value - step)))
        return np.stack(parts, axis=-1)

    def _check(self, theta: Array, data: dict[str, Array]) -> None:
        """Catch functions that drop the imaginary part on the way, as ``abs`` does.

        Differences are trusted only where two step sizes agree.
        """
        exact = self._complex_step(theta, data)
        coarse, fine = self._central(theta, data), self._central(theta, data, 6e-7)
        for index, parameter_ in enumerate(self.parameters):
            a, b, c = exact[:, index], coarse[:, index], fine[:, index]
            size = np.linalg.norm(b)
            sure = np.linalg.norm(b - c) < 0.1 * _AGREE * size
            if sure and not np.linalg.norm(a - b) < _AGREE * size:
                raise FitError(
                    self._not_complex(f"the derivative in {parameter_.name!r} comes out wrong")
                )

    def _not_complex(self, why: str) -> str:
        """Say what to do about a function that needs real numbers."""
        return (
            f"{self.where}: cannot be differentiated by a complex step ({why}). Use numpy "
            "functions and avoid abs, real and float, or give derivative='central' for "
            "finite differences."
        )


def parameter(name: str, options: Mapping[str, Any], where: str) -> Parameter:
    """Build a parameter of a user's law from its options.

    Raises
    ------
    FitError
        If an option is unknown, starts are missing or outside the bounds.
    """
    where = f"{where}: parameter {name!r}"
    if not hasattr(options, "keys"):
        raise FitError(f"{where}: give a table with starts, bounds and scale, not {options!r}.")
    unknown_keys(options, ("bounds", "starts", "scale", "symbol"), where)
    scale: Scale = options.get("scale", "linear")
    _one_of(where, "scale", scale, get_args(Scale))
    lowest = -WIDEST if scale == "linear" else 1 / WIDEST
    try:
        low, high = (float(x) for x in options.get("bounds") or (lowest, WIDEST))
        starts = tuple(float(x) for x in options.get("starts") or ())
    except (TypeError, ValueError) as error:
        raise FitError(f"{where}: bounds are [low, high] and starts a list of numbers.") from error
    low, high = max(low, lowest), min(high, WIDEST)
    if not starts:
        raise FitError(f"{where} has no starts; give values to start the search from.")
    if not low <= high:
        raise FitError(f"{where}: bounds must rise. Got {low:g} and {high:g}.")
    outside = [x for x in starts if not low <= x <= high]
    if outside:
        raise FitError(f"{where}: start {outside[0]:g} is not between {low:g} and {high:g}.")
    return Parameter(name, str(options.get("symbol") or name), low, high, starts, scale)


def unknown_keys(found: Iterable[str], known: Sequence[str], where: str) -> None:
    """Raise a `FitError` for the first key that is not known, with the nearest that is."""
    for key in found:
        if key not in known:
            raise FitError(
                f"{where}: unknown key {key!r}. Keys are: {', '.join(known)}."
                f"{did_you_mean(str(key), known)}"
            )


def _whereabouts(called: Callable[..., Any]) -> tuple[str, str]:
    """File, empty where there is none, and name of a function."""
    path = inspect.getsourcefile(called) if inspect.isfunction(called) else None
    name = getattr(called, "__qualname__", type(called).__name__)
    return (str(path) if path and Path(path).is_file() else ""), name


def _argument_names(called: Callable[..., Any], where: str) -> tuple[str, ...]:
    """Names of the arguments after the first, which is the data."""
    arguments = list(inspect.signature(called).parameters.values())
    usual = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if len(arguments) < 2 or any(a.kind not in usual for a in arguments):
        raise FitError(f"{where}: must be f(data, p1, p2, ...) with one name for each parameter.")
    return tuple(a.name for a in arguments[1:])


def _same_names(names: tuple[str, ...], parameters: Mapping[str, Any], where: str) -> None:
    """Raise unless the function's arguments are the parameters that are described."""
    missing = [n for n in names if n not in parameters]
    if missing:
        raise FitError(
            f"{where}: parameter {missing[0]!r} has no starts; describe it in parameters, such as "
            f'{missing[0]} = {{"starts": [0.1, 1.0]}}.'
        )
    extra = [n for n in parameters if n not in names]
    if extra:
        raise FitError(f"{where}: parameters names {extra[0]!r}, which is not an argument.")


def _one_of(where: str, option: str, value: object, known: tuple[str, ...]) -> None:
    """Raise if an option has a value that is not known."""
    if value not in known:
        raise FitError(f"{where}: {option} must be {' or '.join(known)}. Got {value!r}.")


def _parameter_spec(known: Parameter) -> dict[str, Any]:
    """Return the options from which `parameter` builds the parameter again."""
    return {
        "bounds": [known.low, known.high],
        "starts": [float(x) for x in known.starts if math.isfinite(x)],
        "scale": known.scale,
        "symbol": known.symbol,
    }
