"""Put factors together: products that tie parameters by name, sums of products, and their specs."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from qscale.errors import FitError, did_you_mean
from qscale.laws import factors as elementary
from qscale.laws import shapes
from qscale.laws.factors import Factor, Parameter
from qscale.laws.function import function

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from qscale.laws.factors import Array, Columns


@dataclass(frozen=True, slots=True)
class Product:
    """Factors added up on the log scale; parameters of one name are one parameter.

    Parameters
    ----------
    factors
        The terms.
    parameters
        The distinct parameters, in order of first appearance.
    slots
        For each factor the positions of its parameters among them.
    """

    factors: tuple[Factor, ...]
    parameters: tuple[Parameter, ...]
    slots: tuple[tuple[int, ...], ...]

    def value(self, theta: Array, data: Columns) -> Array:
        """Sum of the factors, shape (S, n) or (S, 1) if no factor reads a column."""
        parts = [f.value(theta[:, s], data) for f, s in zip(self.factors, self.slots, strict=True)]
        return sum(parts[1:], parts[0]) if parts else np.zeros((len(theta), 1))

    def gradient(self, theta: Array, data: Columns) -> Array:
        """Gradient of `value` in the distinct parameters, shape (S, n, p)."""
        parts = [
            f.gradient(theta[:, s], data) for f, s in zip(self.factors, self.slots, strict=True)
        ]
        if len(parts) == 1:
            return parts[0]
        rows = max((part.shape[1] for part in parts), default=1)
        total = np.zeros((len(theta), rows, theta.shape[1]))
        for part, slot in zip(parts, self.slots, strict=True):
            total[:, :, slot] += part
        return total


def product(factors: Sequence[Factor]) -> Product:
    """Tie the parameters of several factors by name."""
    parameters: dict[str, Parameter] = {}
    for factor in factors:
        for parameter in factor.parameters:
            known = parameters.setdefault(parameter.name, parameter)
            if known.scale != parameter.scale:
                raise FitError(
                    f"parameter {known.name!r} is an amplitude or a decay in one factor and "
                    "something else in another; give them different names."
                )
    position = {name: i for i, name in enumerate(parameters)}
    slots = tuple(tuple(position[p.name] for p in factor.parameters) for factor in factors)
    return Product(tuple(factors), tuple(parameters.values()), slots)


def total(*terms: Sequence[Factor], levels_needed: Mapping[str, int] | None = None) -> Factor:
    """Sum of products, such as ``E + A / N**alpha + B / D**beta``, as one factor of a law.

    Parameters
    ----------
    terms
        Each a sequence of factors that are multiplied. Parameters of one name are one parameter,
        across terms too.
    levels_needed
        Distinct values a column must have; by default three for each column that is read.

    Notes
    -----
    The logarithm of the sum is taken stably from the logarithms of its terms, as in Hoffmann et
    al. (arXiv:2203.15556, equation 10).
    """
    products = [product(tuple(term)) for term in terms]
    whole = product([factor for term in products for factor in term.factors])
    position = {p.name: i for i, p in enumerate(whole.parameters)}
    slots = [[position[p.name] for p in term.parameters] for term in products]
    columns = tuple(dict.fromkeys(c for factor in whole.factors for c in factor.columns))

    def log_terms(theta: Array, data: Columns) -> Array:
        values = [t.value(theta[:, s], data) for t, s in zip(products, slots, strict=True)]
        return np.stack(np.broadcast_arrays(*values))

    def value(theta: Array, data: Columns) -> Array:
        logs = log_terms(theta, data)
        top = logs.max(axis=0)
        return top + np.log(np.exp(logs - top).sum(axis=0))

    def gradient(theta: Array, data: Columns) -> Array:
        logs = log_terms(theta, data)
        share = np.exp(logs - logs.max(axis=0))
        share /= share.sum(axis=0)
        result = np.zeros((*share.shape[1:], theta.shape[1]))
        for part, term, slot in zip(share, products, slots, strict=True):
            # Where a term is linear its gradient is the same for every parameter vector.
            rows = theta[:1] if all(factor.linear for factor in term.factors) else theta
            slopes = term.gradient(rows[:, slot], data)
            for i, place in enumerate(slot):
                result[:, :, place] += part * slopes[:, :, i]
        return result

    return Factor(
        kind="total",
        options={
            "terms": [[spec(factor) for factor in term.factors] for term in products],
            "levels_needed": dict(levels_needed) if levels_needed is not None else None,
        },
        columns=columns,
        parameters=whole.parameters,
        value=value,
        gradient=gradient,
        latex="(" + " + ".join(r"\,".join(f.latex for f in t.factors) for t in products) + ")",
        levels_needed=dict(
            levels_needed if levels_needed is not None else dict.fromkeys(columns, 3)
        ),
        linear=False,
    )


def natural(*factors: Factor) -> Factor:
    """Product of factors itself rather than its logarithm, for a law with the identity link."""
    whole = product(factors)

    def value(theta: Array, data: Columns) -> Array:
        with np.errstate(over="ignore"):  # a wild trial of the search
            return np.exp(whole.value(theta, data))

    return Factor(
        kind="natural",
        options={"factors": [spec(factor) for factor in factors]},
        columns=tuple(dict.fromkeys(c for factor in factors for c in factor.columns)),
        parameters=whole.parameters,
        value=value,
        gradient=lambda theta, data: value(theta, data)[:, :, None] * whole.gradient(theta, data),
        latex=r"\,".join(factor.latex for factor in factors),
        levels_needed={c: n for factor in factors for c, n in factor.levels_needed.items()},
        linear=False,
    )


def spec(factor: Factor) -> dict[str, Any]:
    """Return a JSON-able description from which `from_spec` rebuilds the factor."""
    return {"kind": factor.kind, **factor.options}


def _check_arguments(made_by: Callable[..., Factor], options: Iterable[str], where: str) -> None:
    """Raise naming the options that a factor lacks or does not have."""
    arguments = inspect.signature(made_by).parameters.values()
    several = any(a.kind is a.VAR_KEYWORD for a in arguments)
    known = [a.name for a in arguments if a.kind not in (a.VAR_KEYWORD, a.VAR_POSITIONAL)]
    lacking = [a.name for a in arguments if a.name in known and a.default is a.empty]
    for name in options:
        if name not in known and not several:
            raise FitError(
                f"{where} has no option {name!r}. Options are: {', '.join(known)}."
                f"{did_you_mean(name, known)}"
            )
    if missing := [name for name in lacking if name not in options]:
        raise FitError(f"{where} needs {' and '.join(missing)}.")


def from_spec(entry: Mapping[str, Any], where: str = "factor") -> Factor:
    """Rebuild a factor from `spec`.

    Raises
    ------
    FitError
        If the kind or one of the options is not known.
    """
    options = {key: value for key, value in entry.items() if key != "kind"}
    kind = entry.get("kind")
    if kind not in (*FACTORS, "total", "natural"):
        raise FitError(
            f"{where}: unknown factor {kind!r}. Factors are: {', '.join(FACTORS)}, total."
        )
    _check_options(options, f"{where}: factor {kind!r}")
    try:
        if kind == "total":
            terms = [[from_spec(factor, where) for factor in term] for term in options.pop("terms")]
            return total(*terms, **options)
        if kind == "natural":
            return natural(*(from_spec(factor, where) for factor in options["factors"]))
        _check_arguments(FACTORS[kind], options, f"{where}: factor {kind!r}")
        return FACTORS[kind](**options)
    except KeyError as error:
        raise FitError(f"{where}: factor {kind!r} needs {error}.") from error
    except (TypeError, AttributeError, ValueError) as error:
        raise FitError(
            f"{where}: factor {kind!r} does not take these options ({error})."
        ) from error


def _check_options(options: Mapping[str, Any], where: str) -> None:
    """Raise unless names are texts, bounds two numbers, starts numbers and the sign 1 or -1."""
    for key, value in options.items():
        listed = value if isinstance(value, list | tuple) else [None]
        numbers = all(isinstance(x, int | float) for x in listed)
        texts = all(isinstance(x, str) for x in listed)
        wanted, right = {
            "column": ("the name of a column", isinstance(value, str) and value != ""),
            "name": ("a text", isinstance(value, str) and value != ""),
            "bounds": ("two numbers, [low, high]", numbers and len(listed) == 2),
            "starts": ("a list of numbers", numbers),
            "sign": ("1 or -1", value in (1, -1)),
            "levels": ("two or more texts or numbers", len(listed) > 1 and (numbers or texts)),
        }.get(key, ("", True))
        if not right:
            raise FitError(f"{where}: {key} must be {wanted}. Got {value!r}.")


FACTORS: dict[str, Callable[..., Factor]] = {
    function.__name__: function
    for function in (
        elementary.constant,
        elementary.power,
        elementary.exponential,
        elementary.growth,
        elementary.log_power,
        elementary.anneal,
        elementary.offset,
        shapes.binary_log,
        shapes.drop,
        shapes.shifted_power,
        shapes.saturating,
        shapes.effective,
        shapes.stable_power,
        shapes.kaplan,
        function,
    )
}
