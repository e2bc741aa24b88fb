"""A law: a target column and the factors whose product predicts it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from qscale.errors import FitError
from qscale.laws import compose
from qscale.laws.factors import upright

if TYPE_CHECKING:
    import pandas as pd

    from qscale.laws.factors import Array, Factor, Parameter


@dataclass(frozen=True, slots=True)
class Published:
    """Constants of a law as a paper gives them.

    Parameters
    ----------
    setting
        What was quantized and how, for example ``W4A4``.
    values
        Natural-scale values by parameter name; a partial set is allowed.
    source
        Paper and table.
    verified
        How far the values were checked.
    """

    setting: str
    values: dict[str, float]
    source: str
    verified: str


@dataclass(frozen=True, slots=True)
class Law:
    """A product of factors that predicts one column of the measurement table.

    Parameters
    ----------
    name
        Name on the command line.
    target
        Column it predicts, a positive quantity such as ``delta_loss``.
    factors
        Terms added up on the log scale.
    source
        Paper and equation.
    note
        What a user should know before trusting it.
    published
        Constants from the literature.
    link
        Scale on which the factors add up and residuals are taken: ``log``, or ``identity`` for a
        law whose errors are additive.
    """

    name: str
    target: str
    factors: tuple[Factor, ...]
    source: str = ""
    note: str = ""
    published: tuple[Published, ...] = ()
    link: Literal["log", "identity"] = "log"

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Distinct parameters of all factors, in the order of the last axis of ``theta``."""
        return compose.product(self.factors).parameters

    @property
    def linear(self) -> bool:
        """Whether the law is linear in the solver's parameters, so that its fit is convex."""
        return all(factor.linear for factor in self.factors)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters."""
        return tuple(p.name for p in self.parameters)

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns the law reads, the target not included."""
        return tuple(dict.fromkeys(c for factor in self.factors for c in factor.columns))

    @property
    def latex(self) -> str:
        """The law as a LaTeX equation."""
        target = {"delta_loss": r"\Delta L", "loss_fp": "L", "kl": r"\mathrm{KL}"}
        left = target.get(self.target, upright(self.target))
        return f"{left} = " + r"\,".join(factor.latex for factor in self.factors)

    @property
    def formula(self) -> str:
        """The law in plain text."""
        text = self.latex.replace(r"\,", "*").replace(r"\mathrm", "").replace(r"\Delta L", "ΔL")
        greek = {"alpha": "α", "beta": "β", "gamma": "γ", "delta": "δ", "eta": "η", "log": "log"}
        greek |= {"nu": "ν", "epsilon": "ε", "lambda": "λ", "rho": "ρ", "theta": "θ"}
        for name, letter in greek.items():
            text = text.replace(f"\\{name}", letter)
        return text.replace("{", "").replace("}", "").replace("\\", "").replace("*", " · ")

    def location(self, theta: Array, data: Mapping[str, Array]) -> Array:
        """Prediction on the link's scale, shape (S, n), for internal parameters, shape (S, p)."""
        return compose.product(self.factors).value(theta, data)

    def gradient(self, theta: Array, data: Mapping[str, Array]) -> Array:
        """Gradient of `location` in the internal parameters, shape (S, n, p)."""
        return compose.product(self.factors).gradient(theta, data)

    def linked(self, target: Array) -> Array:
        """Map values of the target to the link's scale; a value without a logarithm gives nan."""
        if self.link == "identity":
            return target
        return np.log(np.where(target > 0, target, np.nan))

    def unlinked(self, location: Array) -> Array:
        """Map the link's scale back to the target's unit."""
        if self.link == "identity":
            return location
        with np.errstate(over="ignore"):
            return np.exp(location)

    def to_internal(self, values: Mapping[str, float]) -> Array:
        """Return the internal parameter vector, shape (p,), of natural-scale values by name.

        Raises
        ------
        FitError
            If a parameter has no value.
        """
        missing = [name for name in self.names if name not in values]
        if missing:
            raise FitError(f"law {self.name!r}: no value for {', '.join(missing)}.")
        return np.array([p.internal(values[p.name]) for p in self.parameters])

    def to_natural(self, theta: Array) -> Array:
        """Map internal parameters, shape (..., p), to the natural scale."""
        columns = [p.natural(theta[..., i]) for i, p in enumerate(self.parameters)]
        return np.stack(columns, axis=-1)

    def evaluate(self, values: Mapping[str, float], frame: pd.DataFrame) -> Array:
        """Predict the target, shape (n,), from natural-scale parameters and a table."""
        location = self.location(self.to_internal(values)[None], columns_of(self, frame))[0]
        return self.unlinked(np.broadcast_to(location, len(frame)))

    def with_factors(self, *extra: Factor) -> Law:
        """Return the law multiplied by further factors."""
        return replace(self, factors=self.factors + extra)

    def without_offsets(self) -> Law:
        """Return the law without the offsets that a fit added."""
        return replace(self, factors=tuple(f for f in self.factors if f.kind != "offset"))

    def fit(self, frame: pd.DataFrame, **options: Any) -> Any:
        """Fit the law to a measurement table: `qscale.fit.fit`, its options and its `Fit`.

        Examples
        --------
        >>> from qscale import datasets
        >>> from qscale.laws import get
        >>> rtn = get("kumar").fit(datasets.load("published_ptq"), where="method == 'rtn'")
        >>> rtn.search.status, rtn.data.rows
        ('converged', 77)
        """
        # The one step up from laws to fits, for convenience; nothing here depends on it.
        return importlib.import_module("qscale.fit").fit(frame, self, **options)

    def spec(self) -> dict[str, Any]:
        """Return a JSON-able description from which `from_spec` rebuilds the law."""
        return {
            "name": self.name,
            "target": self.target,
            "link": self.link,
            "factors": [compose.spec(factor) for factor in self.factors],
            "source": self.source,
            "note": self.note,
        }


def columns_of(law: Law, frame: pd.DataFrame) -> dict[str, Array]:
    """Return the law's columns as arrays of shape (n,).

    Raises
    ------
    FitError
        If a column is missing.
    """
    if missing := [name for name in law.columns if name not in frame]:
        raise FitError(f"law {law.name!r} needs column {missing[0]!r}, which is not there.")
    return {name: frame[name].to_numpy() for name in law.columns}


def from_spec(spec: Mapping[str, Any]) -> Law:
    """Rebuild a law from `Law.spec`.

    Raises
    ------
    FitError
        If it is no such mapping, or a factor's kind is not known.
    """
    wanted = ("name", "target", "factors")
    if not isinstance(spec, Mapping):
        raise FitError(f"a law's spec must be a dict. Got {type(spec).__name__} instead.")
    if missing := [key for key in wanted if key not in spec]:
        raise FitError(
            f"a law's spec must be a dict with {', '.join(wanted)}; {missing[0]} is not in."
        )
    factors = [compose.from_spec(entry, f"law {spec['name']!r}") for entry in spec["factors"]]
    return Law(
        spec["name"],
        spec["target"],
        tuple(factors),
        source=spec.get("source", ""),
        note=spec.get("note", ""),
        link=spec.get("link", "log"),
    )
