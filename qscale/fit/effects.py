"""How rows scatter around a law: random effects known and unknown, and what new rows say of them.

Everything here is on the link's scale. Parameters and the effects of known levels have one joint
Gaussian distribution; a level that was not fitted has its term's variance. Measured rows of a new
checkpoint update all of it by exact Gaussian conditioning.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from scipy.linalg import block_diag

from qscale.fit.grouping import Term, design
from qscale.fit.mixed import satterthwaite

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pandas as pd

    Array = np.ndarray

_CHUNK_ELEMENTS = 10_000_000  # of the rows' joint design, dense at 80 MB a time
Kind = Literal["mean", "new_checkpoint"]
UNSEEN = ""
"""Level of an offset in rows whose own was not fitted: they share what is not known of it."""


@dataclass(frozen=True, slots=True)
class Effects:
    """Random effects of a fit and the scatter of rows.

    Parameters
    ----------
    terms
        Random terms with their known levels.
    values
        Effects of the known levels, term after term, shape (q,).
    variances
        Variance of each term, shape (K,).
    residual
        Variance of a single row around its effects, squared log units (or the target's unit
        squared if the law's link is the identity).
    cov
        Joint covariance of errors in the p parameters and the q effects, shape (p + q, p + q).
    scales_cov
        Covariance of the logs of (residual, *variances), shape (K + 1, K + 1).
    cov_slopes
        Derivatives of the parameters' covariance in those logs, shape (K + 1, p, p).
    """

    terms: tuple[Term, ...]
    values: Array
    variances: Array
    residual: float
    cov: Array
    scales_cov: Array
    cov_slopes: Array

    @property
    def spreads(self) -> tuple[tuple[str, float], ...]:
        """Standard deviation between what, such as ``values of run``; rows come last."""
        terms = [
            (f"values of {term.text}", float(variance) ** 0.5)
            for term, variance in zip(self.terms, self.variances, strict=True)
        ]
        return (*terms, ("rows", self.residual**0.5))

    def known(self, frame: pd.DataFrame) -> Array:
        """Design of the known levels, shape (n, q)."""
        return design(self.terms, frame).toarray()

    def unknown(self, frame: pd.DataFrame) -> Array:
        """Squared multiplier of each term in rows whose level is not known, shape (n, K)."""
        columns = []
        for term in self.terms:
            new = ~np.isin(term.labels(frame).astype(str), np.array(term.levels, dtype=str))
            columns.append(new * term.weights(frame) ** 2)
        return np.stack(columns, axis=1) if columns else np.zeros((len(frame), 0))

    def to_json(self) -> dict[str, Any]:
        """Return JSON-able values, arrays rounded to ten digits."""
        arrays = ("values", "variances", "cov", "scales_cov", "cov_slopes")
        return {
            "terms": [asdict(term) for term in self.terms],
            "residual": self.residual,
            **{name: shortened(getattr(self, name)) for name in arrays},
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Effects:
        """Rebuild from `to_json`."""
        terms = tuple(
            Term(**{**term, "columns": tuple(term["columns"]), "levels": tuple(term["levels"])})
            for term in content["terms"]
        )
        rest = {
            key: np.array(value, dtype=float)
            for key, value in content.items()
            if key not in ("terms", "residual")
        }
        return cls(terms=terms, residual=content["residual"], **rest)


def shortened(values: Array) -> Any:
    """Nested lists with ten significant digits, far below any uncertainty, to keep files small.

    A value that is not finite, which JSON does not have, is null.
    """
    if values.ndim == 0:
        return float(f"{values:.10g}") if np.isfinite(values) else None
    return [shortened(value) for value in values]


@dataclass(frozen=True, slots=True)
class Predictive:
    """Distribution of predicted rows on the link's scale: location plus scale times Student's t.

    Parameters
    ----------
    mean, sd, dof
        Shape (n,) each.
    """

    mean: Array
    sd: Array
    dof: Array


def predictive(
    effects: Effects, location: Array, x: Array, frame: pd.DataFrame, kind: Kind
) -> Predictive:
    """Distribution of the law's mean or of a newly measured row.

    Parameters
    ----------
    effects
        Of the fit.
    location, x
        The law and its gradient at the rows, shapes (n,) and (n, p).
    frame
        The rows; their grouping columns say which levels they belong to.
    kind
        ``mean`` is the law plus known effects; ``new_checkpoint`` adds the variance of unknown
        levels and of the row itself.
    """
    z = design(effects.terms, frame)
    chunk = max(1, _CHUNK_ELEMENTS // len(effects.cov))
    variance = np.empty(len(x))
    for part in (slice(i, i + chunk) for i in range(0, len(x), chunk)):
        both = np.concatenate([x[part], z[part].toarray()], axis=1)
        variance[part] = ((both @ effects.cov) * both).sum(axis=1)
    slopes = np.einsum("ni,kij,nj->nk", x, effects.cov_slopes, x)
    if kind == "new_checkpoint":
        new = effects.unknown(frame) * effects.variances
        variance = variance + new.sum(axis=1) + effects.residual
        slopes = slopes + np.concatenate([np.full((len(new), 1), effects.residual), new], axis=1)
    dof = satterthwaite(variance, slopes, effects.scales_cov)
    return Predictive(location + z @ effects.values, np.sqrt(np.maximum(variance, 0.0)), dof)


def mean_variance(effects: Effects, x: Array, frame: pd.DataFrame) -> Predictive:
    """Distribution of the mean error of newly measured rows together, on the link's scale.

    Rows that share an unknown level share its deviation, so that many rows of one new run are not
    surer than the spread of runs.

    Parameters
    ----------
    effects
        Of a fit that has not seen the rows' levels.
    x
        Gradient of the law at the rows, shape (n, p).
    frame
        The rows.
    """
    wider = with_new_levels(effects, frame, x.shape[1])
    both = np.concatenate([x, wider.known(frame)], axis=1).mean(axis=0)
    variance = np.array([both @ wider.cov @ both + effects.residual / len(frame)])
    shared = both[x.shape[1] :] ** 2 * np.diag(wider.cov)[x.shape[1] :]
    owner = np.repeat(np.arange(len(wider.terms)), [len(term.levels) for term in wider.terms])
    parts = np.bincount(owner, weights=shared, minlength=len(wider.terms))
    own = np.concatenate([[effects.residual / len(frame)], parts])
    mean = both[: x.shape[1]]
    slopes = np.einsum("i,kij,j->k", mean, effects.cov_slopes, mean) + own
    dof = satterthwaite(variance, slopes[None], effects.scales_cov)
    return Predictive(np.zeros(1), np.sqrt(variance), dof)


def condition(
    effects: Effects,
    theta: Array,
    x: Array,
    frame: pd.DataFrame,
    surprise: Array,
    noise: Array,
) -> tuple[Array, Effects]:
    """Update parameters and effects by measured rows, exactly for a law linear in its parameters.

    Parameters
    ----------
    effects, theta
        Of the fit.
    x
        Gradient of the law at the measured rows, shape (m, p).
    frame
        The measured rows.
    surprise
        Measured minus the law's value, without effects, shape (m,).
    noise
        Variance of the measurement itself, on the link's scale, shape (m,).

    Returns
    -------
    numpy.ndarray, Effects
        Updated parameters, and effects whose terms now know the rows' levels.
    """
    p = len(theta)
    wider = with_new_levels(effects, frame, p)
    both = np.concatenate([x, wider.known(frame)], axis=1)
    gain_to = wider.cov @ both.T
    observed = both @ gain_to + np.diag(wider.residual + noise)
    gain = np.linalg.solve(observed, gain_to.T).T
    innovation = surprise - both[:, p:] @ wider.values
    move = gain @ innovation
    updated = replace(wider, values=wider.values + move[p:], cov=wider.cov - gain @ gain_to.T)
    return theta + move[:p], updated


@dataclass(frozen=True, slots=True)
class Offset:
    """What is known of the levels of an offset that were not fitted.

    Parameters
    ----------
    column
        Column of the levels.
    levels
        Those whose effects the law holds.
    variance
        Of an unseen level, on the link's scale: that between the fitted ones, and of their mean.
    dof
        Degrees of freedom of that variance, one less than the levels it was estimated from.
    slope
        Column whose log multiplies the deviation; None for one.
    """

    column: str
    levels: tuple[str, ...]
    variance: float
    dof: float
    slope: str | None = None

    @property
    def text(self) -> str:
        """Name of its term."""
        return f"offset {self.column}"


def offset_of(column: str, levels: tuple[str, ...], values: Mapping[str, float]) -> Offset:
    """Return what the fitted levels of an offset say of others.

    Parameters
    ----------
    column, levels
        Of the offset, two levels or more; the last one's log multiplier balances the others.
    values
        The law's parameters by name.
    """
    logs = [values[f"{column}[{level}]"] for level in levels[:-1]]
    spread, count = float(np.var([*logs, -sum(logs)], ddof=1)), len(levels)
    return Offset(column, levels, spread * (1 + 1 / count), count - 1)


def with_offsets(effects: Effects, offsets: Sequence[Offset]) -> Effects:
    """Return the effects with a term for each offset, so that an unseen level is a new one.

    The law holds the fitted levels, so that their effects here are zero and sure. The variance of
    an unseen one rests on few of them: its own is that of a sample variance of normal values.

    Parameters
    ----------
    effects
        Of a fit.
    offsets
        Those of its law; terms that are there already are not added again.
    """
    present = {term.text for term in effects.terms}
    new = [offset for offset in offsets if offset.text not in present]
    if not new:
        return effects
    count = sum(len(offset.levels) for offset in new)
    zeros = np.zeros((len(new), *effects.cov_slopes.shape[1:]))
    return replace(
        effects,
        terms=(
            *effects.terms,
            *(Term(each.text, (each.column,), each.slope, levels=each.levels) for each in new),
        ),
        values=np.concatenate([effects.values, np.zeros(count)]),
        variances=np.concatenate([effects.variances, [offset.variance for offset in new]]),
        cov=block_diag(effects.cov, np.zeros((count, count))),
        scales_cov=block_diag(effects.scales_cov, np.diag([2 / offset.dof for offset in new])),
        cov_slopes=np.concatenate([effects.cov_slopes, zeros]),
    )


def with_new_levels(effects: Effects, frame: pd.DataFrame, p: int) -> Effects:
    """Return the effects with the frame's unknown levels added at their prior variance.

    Parameters
    ----------
    effects
        Of a fit.
    frame
        Rows whose levels are to be known.
    p
        Number of the law's parameters, which come first in the joint covariance.
    """
    terms, order = [], list(range(p))
    fresh: list[float] = []
    position = p
    total = len(effects.cov)
    for term, variance in zip(effects.terms, effects.variances, strict=True):
        new = [label for label in dict.fromkeys(term.labels(frame)) if label not in term.levels]
        terms.append(replace(term, levels=(*term.levels, *new)))
        order += [*range(position, position + len(term.levels))]
        order += [*range(total + len(fresh), total + len(fresh) + len(new))]
        position += len(term.levels)
        fresh += [variance] * len(new)
    cov = np.zeros((total + len(fresh),) * 2)
    cov[:total, :total] = effects.cov
    cov[range(total, len(cov)), range(total, len(cov))] = fresh
    values = np.concatenate([np.zeros(p), effects.values, np.zeros(len(fresh))])
    return replace(
        effects, terms=tuple(terms), values=values[order][p:], cov=cov[np.ix_(order, order)]
    )
