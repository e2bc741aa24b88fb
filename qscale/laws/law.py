"""A law: a target column and the factors whose product predicts it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from qscale.errors import FitError
from qscale.laws.factors import FACTORS, Factor, Parameter

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd

    from qscale.laws.factors import Array


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
    """

    name: str
    target: str
    factors: tuple[Factor, ...]
    source: str = ""
    note: str = ""
    published: tuple[Published, ...] = ()

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Parameters of all factors, in the order of the last axis of ``theta``."""
        return tuple(p for factor in self.factors for p in factor.parameters)

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
        left = target.get(self.target, rf"\mathrm{{{self.target.replace('_', ' ')}}}")
        return f"{left} = " + r"\,".join(factor.latex for factor in self.factors)

    @property
    def formula(self) -> str:
        """The law in plain text."""
        text = self.latex.replace(r"\,", "*").replace(r"\mathrm", "").replace(r"\Delta L", "ΔL")
        greek = {"alpha": "α", "beta": "β", "gamma": "γ", "eta": "η", "log": "log"}
        for name, letter in greek.items():
            text = text.replace(f"\\{name}", letter)
        return text.replace("{", "").replace("}", "").replace("\\", "").replace("*", " · ")

    def log_value(self, theta: Array, data: Mapping[str, Array]) -> Array:
        """Log of the prediction, shape (S, n), for internal parameters of shape (S, p)."""
        parts = [f.value(t, data) for f, t in self._split(theta)]
        return np.sum(np.broadcast_arrays(*parts), axis=0)

    def gradient(self, theta: Array, data: Mapping[str, Array]) -> Array:
        """Gradient of `log_value` in the internal parameters, shape (S, n, p)."""
        parts = [f.gradient(t, data) for f, t in self._split(theta)]
        n = max(part.shape[1] for part in parts)
        return np.concatenate(
            [np.broadcast_to(part, (len(theta), n, part.shape[2])) for part in parts], axis=2
        )

    def _split(self, theta: Array) -> list[tuple[Factor, Array]]:
        """Pair each factor with its slice of the parameter vectors."""
        edges = np.cumsum([len(factor.parameters) for factor in self.factors])[:-1]
        return list(zip(self.factors, np.split(theta, edges, axis=1), strict=True))

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
        positive = np.array([p.positive for p in self.parameters])
        return np.where(positive, np.exp(np.where(positive, theta, 0.0)), theta)

    def evaluate(self, values: Mapping[str, float], frame: pd.DataFrame) -> Array:
        """Predict the target, shape (n,), from natural-scale parameters and a table."""
        return np.exp(self.log_value(self.to_internal(values)[None], columns_of(self, frame))[0])

    def with_factors(self, *extra: Factor) -> Law:
        """Return the law multiplied by further factors."""
        return replace(self, factors=self.factors + extra)

    def spec(self) -> dict[str, Any]:
        """Return a JSON-able description from which `from_spec` rebuilds the law."""
        factors = [{"kind": factor.kind, **factor.options} for factor in self.factors]
        return {
            "name": self.name,
            "target": self.target,
            "factors": factors,
            "source": self.source,
            "note": self.note,
        }


def columns_of(law: Law, frame: pd.DataFrame) -> dict[str, Array]:
    """Return the law's columns as arrays of shape (n,)."""
    return {name: frame[name].to_numpy() for name in law.columns}


def from_spec(spec: Mapping[str, Any]) -> Law:
    """Rebuild a law from `Law.spec`.

    Raises
    ------
    FitError
        If a factor's kind is not known.
    """
    factors = []
    for entry in spec["factors"]:
        options = {key: value for key, value in entry.items() if key != "kind"}
        if entry["kind"] not in FACTORS:
            raise FitError(f"law {spec['name']!r}: unknown factor {entry['kind']!r}.")
        factors.append(FACTORS[entry["kind"]](**options))
    return Law(
        spec["name"],
        spec["target"],
        tuple(factors),
        source=spec.get("source", ""),
        note=spec.get("note", ""),
    )
