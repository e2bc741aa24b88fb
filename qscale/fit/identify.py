"""Which parameters of a law the rows determine poorly, and what they trade off with, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from qscale.laws.compose import from_spec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from qscale.laws import Law
    from qscale.laws.factors import Parameter

    Array = np.ndarray

WIDE = 10.0  # ratio of an interval's ends from which a parameter is poorly identified
_INDEX = 30.0  # condition index of a near dependency, Belsley, Kuh and Welsch (1980)
_REACH = 1.6449  # standard errors in half a 90 % interval


def trade_offs(law: Law, theta: Array, information: Array, cov: Array) -> tuple[str, ...]:
    """Say which parameters are poorly identified and which trade off against one another.

    A parameter is poorly identified if its 90 % interval reaches one of its bounds or, for one that
    cannot be negative, spans more than a factor of ten. Parameters trade off if they share a weak
    direction of the information matrix (Belsley, Kuh and Welsch, Regression Diagnostics, 1980).

    Parameters
    ----------
    law
        The law.
    theta
        Internal estimates, shape (p,).
    information
        Their information matrix up to a factor, shape (p, p), with the rows of parameters that are
        on a bound; zero rows for those that are held.
    cov
        Their covariance, shape (p, p); zero for those that are held or on a bound.

    Returns
    -------
    tuple of str
        Sentences, the weakest direction first; none if everything is well identified.
    """
    free = np.flatnonzero(np.diag(information) > 0)
    reasons = {}
    for i in free:
        found = _why(law.parameters[i], float(theta[i]), float(np.sqrt(max(cov[i, i], 0.0))))
        if found:
            reasons[i] = found
    sentences, told = [], set()
    for group in _directions(information[np.ix_(free, free)]):
        members = free[group]
        poor = [i for i in members if i in reasons and i not in told]
        if len(members) > 1 and poor:
            names = _listed([law.names[i] for i in members])
            terms = _terms(law, [law.names[i] for i in members])
            verb = "is" if len(terms) == 1 else "are"
            why = "; ".join(reasons[i] for i in poor)
            sentences.append(
                f"{names} trade off, so {_listed(terms)} {verb} poorly identified: {why}."
            )
            told.update(poor)
    alone = [i for i in reasons if i not in told]
    sentences += [f"{law.names[i]} is poorly identified: {reasons[i]}." for i in alone]
    return tuple(sentences)


def _why(parameter: Parameter, theta: float, se: float) -> str:
    """Say why a parameter is poorly identified; empty if it is not."""
    low, high = parameter.bounds
    estimate = float(parameter.natural(np.asarray(theta)))
    if not low < theta < high:
        return (
            f"{parameter.name} ended on its bound {estimate:.4g}, and the standard errors of the "
            "others take it as known"
        )
    ends = np.array([theta - _REACH * se, theta + _REACH * se])
    reaches = bool(ends[0] <= low or ends[1] >= high)
    first, last = sorted(parameter.natural(np.clip(ends, low, high)))
    if not reaches and (parameter.low < 0 or last <= WIDE * first):
        return ""
    slope = {"linear": 1.0, "log": estimate, "reciprocal": estimate**2}[parameter.scale]
    relative = 100 * se * slope / max(abs(estimate), 1e-300)
    size = f"{relative:.0f}" if relative < 1000 else "over 1000"
    bound = ", which includes its bound" if reaches else ""
    return (
        f"the 90 % interval of {parameter.name} is {first:.3g} to {last:.3g}{bound} "
        f"(relative standard error {size} %)"
    )


def _directions(information: Array) -> list[Array]:
    """Return the parameters of each weak direction, the weakest direction first."""
    if not len(information):
        return []
    size = np.sqrt(np.diag(information))
    values, vectors = np.linalg.eigh(information / np.outer(size, size))
    values = np.maximum(values, 1e-16 * values[-1])
    share = vectors**2 / values
    share /= share.sum(axis=1, keepdims=True)
    weak = np.flatnonzero(np.sqrt(values[-1] / values) > _INDEX)
    return [np.flatnonzero((share[:, k] > 0.5) | (np.abs(vectors[:, k]) > 0.3)) for k in weak]


def _terms(law: Law, names: Sequence[str]) -> list[str]:
    """Name the terms of the law that parameters belong to: by their columns, or by themselves."""
    columns: dict[str, tuple[str, ...]] = {}
    for factor in law.factors:
        terms = [[factor]]
        if factor.kind == "total":
            terms = [[from_spec(entry) for entry in term] for term in factor.options["terms"]]
        for term in terms:
            read = tuple(dict.fromkeys(c for part in term for c in part.columns))
            for part in term:
                for parameter in part.parameters:
                    columns.setdefault(parameter.name, read)
    found = [f"the term in {_listed(columns[name])}" if columns[name] else name for name in names]
    return list(dict.fromkeys(found))


def _listed(words: Sequence[str]) -> str:
    """Join words with commas and a final "and"."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
