"""Factors: the terms that a law adds up on the log scale, each with its analytic gradient.

A law predicts ``log y = sum of factors``. A factor is evaluated for many parameter vectors at
once: with ``theta`` of shape (S, p) and columns of shape (n,), its value has shape (S, n) and its
gradient (S, n, p). The solver sees each parameter on the scale its `Parameter` names: amplitudes as
logarithms, decay constants as rates, so that products of factors are linear in what it searches.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Array = np.ndarray
    Columns = Mapping[str, Array]


_INTERNAL: dict[str, Callable[[float], float]] = {
    "linear": float,
    "log": np.log,
    "reciprocal": lambda value: 1.0 / value,
}
_NATURAL: dict[str, Callable[[Array], Array]] = {
    "linear": lambda theta: theta,
    "log": np.exp,
    "reciprocal": lambda theta: 1.0 / theta,
}


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a factor.

    Parameters
    ----------
    name
        Name in results, options and files.
    symbol
        LaTeX symbol.
    low, high
        Bounds on the natural scale; an estimate that ends on one is reported as a bound hit.
    starts
        Natural-scale values from which the multi-start search begins.
    scale
        What the solver works with: the value itself, its logarithm or its reciprocal.
    """

    name: str
    symbol: str
    low: float
    high: float
    starts: tuple[float, ...]
    scale: Literal["linear", "log", "reciprocal"] = "linear"

    def internal(self, value: float) -> float:
        """Return the solver's value for a natural-scale ``value``."""
        return float(_INTERNAL[self.scale](value))

    def natural(self, theta: Array) -> Array:
        """Map the solver's values back to the natural scale."""
        with np.errstate(over="ignore"):  # the end of an interval that is not determined
            return _NATURAL[self.scale](theta)

    @property
    def bounds(self) -> tuple[float, float]:
        """Bounds on the solver's scale, the lower first."""
        edges = self.internal(self.low), self.internal(self.high)
        return min(edges), max(edges)


@dataclass(frozen=True, slots=True)
class Factor:
    """One additive term of the log of a law.

    Parameters
    ----------
    kind, options
        Name of the constructor, see `qscale.laws.compose`, and its arguments; together they rebuild
        the factor.
    columns
        Columns of the measurement table it reads.
    parameters
        Its parameters in the order of the last axis of ``theta``.
    value, gradient
        Functions of internal parameters, shape (S, p), and columns, shape (n,) each; they return
        arrays of shape (S, n) and (S, n, p).
    latex
        The factor on the natural scale, as LaTeX.
    levels_needed
        ``{column: distinct values}`` without which the parameters cannot be told apart.
    linear
        Whether the value is linear in ``theta`` with no term free of it, so that the gradient is
        the same everywhere.
    """

    kind: str
    options: dict[str, Any]
    columns: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    value: Callable[[Array, Columns], Array]
    gradient: Callable[[Array, Columns], Array]
    latex: str
    levels_needed: dict[str, int]
    linear: bool = True


SYMBOLS = {
    "n_params": "N",
    "tokens": "D",
    "bits": "P",
    "bits_per_weight": "P",
    "group_size": "G",
    "lr_peak": r"\eta",
    "quadratic_delta": "q",
    "exponent_bits": "E",
    "mantissa_bits": "M",
    "quantized_share": "Q_r",
    "calibration_samples": "C_b",
}


def upright(text: str) -> str:
    """Return words as upright LaTeX in which an underscore is no subscript and a space is seen."""
    return rf"\mathrm{{{text}}}".replace("_", r"\_").replace(" ", r"\ ")


def symbol_of(column: str) -> str:
    """Return the LaTeX symbol of a column, its name if it has none."""
    return SYMBOLS.get(column) or upright(column)


def _linear(
    kind: str,
    options: dict[str, Any],
    columns: tuple[str, ...],
    parameter: Parameter,
    basis: Callable[[Columns], Array],
    latex: str,
) -> Factor:
    """Build a factor ``theta * basis(columns)`` with one parameter."""
    return Factor(
        kind=kind,
        options=options,
        columns=columns,
        parameters=(parameter,),
        value=lambda theta, data: theta * basis(data),
        gradient=lambda theta, data: np.broadcast_to(
            basis(data)[:, None], (len(theta), len(basis(data)), 1)
        ),
        latex=latex,
        levels_needed=dict.fromkeys(columns, 2),
    )


def constant(
    name: str = "k",
    symbol: str | None = None,
    bounds: tuple[float, float] = (1e-30, 1e30),
    starts: tuple[float, ...] = (1.0,),
    sign: int = 1,
) -> Factor:
    """Amplitude ``k`` of a law, positive; with a negative sign what the law is divided by."""
    parameter = Parameter(name, symbol or name, *bounds, tuple(starts), scale="log")
    return Factor(
        kind="constant",
        options={
            "name": name,
            "symbol": symbol,
            "bounds": list(bounds),
            "starts": list(starts),
            "sign": sign,
        },
        columns=(),
        parameters=(parameter,),
        value=lambda theta, _: sign * theta,
        gradient=lambda theta, _: np.full((len(theta), 1, 1), float(sign)),
        latex=parameter.symbol + ("^{-1}" if sign < 0 else ""),
        levels_needed={},
    )


def power(
    column: str,
    name: str,
    symbol: str | None = None,
    sign: int = 1,
    bounds: tuple[float, float] = (-30.0, 30.0),
    starts: tuple[float, ...] = (0.1, 1.0),
) -> Factor:
    """Power law ``column ** (sign * name)``, as in Ouyang et al. (arXiv:2411.17691)."""
    symbol = symbol or f"\\{name}"
    minus = "-" if sign < 0 else ""
    return _linear(
        "power",
        {
            "column": column,
            "name": name,
            "symbol": symbol,
            "sign": sign,
            "bounds": list(bounds),
            "starts": list(starts),
        },
        (column,),
        Parameter(name, symbol, *bounds, tuple(starts)),
        lambda data: sign * np.log(data[column]),
        f"{symbol_of(column)}^{{{minus}{symbol}}}",
    )


def exponential(column: str, name: str, symbol: str | None = None) -> Factor:
    """Exponential fall ``exp(-column / name)``, Kumar et al. (arXiv:2411.04330) for bits."""
    symbol = symbol or f"\\{name}"
    return _linear(
        "exponential",
        {"column": column, "name": name, "symbol": symbol},
        (column,),
        Parameter(name, symbol, 0.02, 200.0, (0.3, 1.0, 3.0), scale="reciprocal"),
        lambda data: -np.asarray(data[column], dtype=float),
        f"e^{{-{symbol_of(column)}/{symbol}}}",
    )


def growth(column: str, name: str, symbol: str | None = None) -> Factor:
    """Exponential growth ``exp(name * column)``, Cao et al. (arXiv:2410.06722) for a share."""
    symbol = symbol or f"\\{name}"
    return _linear(
        "growth",
        {"column": column, "name": name, "symbol": symbol},
        (column,),
        Parameter(name, symbol, -200.0, 200.0, (0.0, 2.0)),
        lambda data: np.asarray(data[column], dtype=float),
        f"e^{{{symbol} {symbol_of(column)}}}",
    )


def log_power(column: str, name: str, symbol: str | None = None) -> Factor:
    """Power of a binary logarithm ``log2(column) ** name``, Chen et al. (arXiv:2505.14302)."""
    symbol = symbol or f"\\{name}"
    return _linear(
        "log_power",
        {"column": column, "name": name, "symbol": symbol},
        (column,),
        Parameter(name, symbol, -30.0, 30.0, (0.1, 1.0)),
        lambda data: np.log(np.log2(data[column])),
        f"(\\log_2 {symbol_of(column)})^{{{symbol}}}",
    )


def anneal(name: str = "c", symbol: str | None = None) -> Factor:
    """Learning-rate decay ``exp(c * (1 - lr / lr_peak))``: one in the stable phase, e^c at its end.

    The form is this project's own; that decay raises quantization error is the finding of
    Catalan-Tatjer, Ajroldi and Geiping (arXiv:2510.06213).
    """
    factor = _linear(
        "anneal",
        {"name": name, "symbol": symbol},
        ("lr", "lr_peak"),
        Parameter(name, symbol or name, -30.0, 30.0, (0.0, 1.0)),
        lambda data: 1.0 - data["lr"] / data["lr_peak"],
        f"e^{{{symbol or name}(1-\\eta_t/\\eta)}}",
    )
    return replace(factor, levels_needed={"lr": 2})


def offset(column: str, levels: tuple[str, ...]) -> Factor:
    """One multiplier for each level of a text column; their geometric mean is one.

    The last level's log multiplier is minus the sum of the others, so the amplitude of the law is
    that of the average level.
    """
    levels = tuple(levels)
    parameters = tuple(
        Parameter(f"{column}[{level}]", f"o_{{{i + 1}}}", -30.0, 30.0, (0.0,))
        for i, level in enumerate(levels[:-1])
    )

    def basis(data: Columns) -> Array:
        hit = np.stack([data[column] == level for level in levels], axis=1).astype(float)
        known = hit.any(axis=1, keepdims=True)  # an unseen level gets the average
        return np.where(known, hit[:, :-1] - hit[:, -1:], 0.0)

    return Factor(
        kind="offset",
        options={"column": column, "levels": list(levels)},
        columns=(column,),
        parameters=parameters,
        value=lambda theta, data: theta @ basis(data).T,
        gradient=lambda theta, data: np.broadcast_to(basis(data), (len(theta), *basis(data).shape)),
        latex=f"o_{{{upright(column)}}}",
        levels_needed={},
    )
