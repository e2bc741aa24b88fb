"""Laws over a whole learning-rate schedule: the multi-power law and its sum over rate drops.

Both read the learning rate at every step, not columns of a table, so they are not a `Law`. A run's
rates come from `cosine` or `stable_decay` where its shape is known, from `interpolate` where only
logged rates are. What the laws need of them is gathered once, in `Exposure`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from qscale.errors import FitError
from qscale.laws.factors import Parameter
from qscale.laws.law import Published
from qscale.table import require

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

    Array = np.ndarray

_LAG_GROWTH = 1.15  # bins of drops widen with age; the error is tested against the sum over steps


@dataclass(frozen=True, slots=True)
class Exposure:
    """What the schedule did up to each of n steps, with the drops in m bins of their age.

    Parameters
    ----------
    lr_sum
        Sum of the learning rate from the first step, warm-up included, shape (n,).
    drop
        Fall of the rate in the bin, negative where it rises, shape (n, m).
    since
        Sum of the rate from the drop to the step, averaged over the bin's drops, shape (n, m).
    log_lr
        Logarithm of the rate after the drop, averaged likewise, shape (n, m).
    """

    lr_sum: Array
    drop: Array
    since: Array
    log_lr: Array


def cosine(steps: int, peak: float, end: float, warmup: int = 0) -> Array:
    """Learning rate at steps 0 to ``steps``: linear warm-up, then half a cosine down to ``end``."""
    share = (np.arange(steps + 1 - warmup)) / (steps - warmup)
    decay = end + (peak - end) * 0.5 * (1.0 + np.cos(np.pi * share))
    return np.concatenate([_warm(peak, warmup), decay])


def stable_decay(
    steps: int,
    peak: float,
    end: float,
    start: int,
    warmup: int = 0,
    shape: Literal["linear", "exponential", "drop"] = "linear",
) -> Array:
    """Learning rate at steps 0 to ``steps``: warm-up, constant to ``start``, then down to ``end``.

    A ``drop`` goes to ``end`` at once and stays there. With ``end`` equal to ``peak`` the schedule
    is constant.
    """
    share = np.clip((np.arange(warmup, steps + 1) - start) / max(steps - start, 1), 0.0, 1.0)
    if shape == "linear":
        later = peak + (end - peak) * share
    elif shape == "exponential":
        later = peak * (end / peak) ** share
    else:
        later = np.where(share > 0, end, peak)
    return np.concatenate([_warm(peak, warmup), later])


def interpolate(step: Array, lr: Array, warmup: int = 0) -> Array:
    """Learning rate at steps 0 to the last logged one, linear between logged steps.

    Before the first logged step it is that step's rate, rising linearly over ``warmup`` steps. A
    sudden drop is smeared over its logging interval.

    Raises
    ------
    FitError
        If the steps do not increase.
    """
    step = np.asarray(step, dtype=float)
    if len(step) < 1 or np.any(np.diff(step) <= 0):
        raise FitError("column 'step' must increase along a run. Sort the rows of the run by step.")
    every = np.interp(np.arange(int(step[-1]) + 1), step, lr)
    every[:warmup] = _warm(every[min(warmup, len(every) - 1)], warmup)[: len(every)]
    return every


def _warm(peak: float, warmup: int) -> Array:
    """Linear warm-up from zero: the rates of steps 0 to ``warmup`` - 1."""
    return peak * np.arange(warmup) / max(warmup, 1)


def exposure(lr: Array, step: Array, warmup: int = 0, growth: float = _LAG_GROWTH) -> Exposure:
    """Gather what the laws need of one run.

    Parameters
    ----------
    lr
        Learning rate of every step from 0, shape (T + 1,).
    step
        Steps at which the law is evaluated, shape (n,).
    warmup
        Steps whose rises do not count. The multi-power law's published constants count the rises of
        warm-up as negative drops, so it wants 0; with the length of warm-up given, `drop_sum`
        vanishes in a constant-rate run.
    growth
        Ratio of the ages at which one bin of drops ends and starts; at 1 every step is a bin.

    Raises
    ------
    FitError
        If a step lies outside the schedule or a rate is negative.
    """
    lr, step = np.asarray(lr, dtype=float), np.asarray(step, dtype=int)
    if not len(step) or step.min() < max(warmup, 1) or step.max() >= len(lr):
        raise FitError(
            f"column 'step' must lie between {max(warmup, 1)}, after warm-up, and the schedule's "
            f"last step, {len(lr) - 1}."
        )
    if not np.all(lr >= 0) or lr.max() == 0:
        raise FitError("column 'lr' must not be negative or zero throughout.")
    total = np.cumsum(lr)
    drops = -np.diff(lr, prepend=lr[0])
    drops[: warmup + 1] = 0.0
    size = np.abs(drops)
    before = total - lr
    log_lr = np.log(np.maximum(lr, 1e-12 * lr.max()))
    young, old = _ages(int(step.max()), growth)
    newest, oldest = (np.maximum(step[:, None] - age, 0) for age in (young, old))

    def within(values: Array) -> Array:
        sums = np.cumsum(values)
        return sums[newest] - sums[oldest]

    weight = within(size)
    # Where nothing drops the average is of no consequence, but it must be a number.
    empty = weight <= 1e-12 * lr.max()
    weight = np.where(empty, 1.0, weight)
    since = total[step][:, None] - within(size * before) / weight
    return Exposure(
        lr_sum=total[step],
        drop=np.where(empty, 0.0, within(drops)),
        since=np.where(empty, 0.0, np.maximum(since, 0.0)),
        log_lr=np.where(empty, 0.0, within(size * log_lr) / weight),
    )


def _ages(longest: int, growth: float) -> tuple[Array, Array]:
    """Edges of the bins of drops in steps before now, the younger and the older."""
    edges = [0]
    while edges[-1] < longest:
        edges.append(max(edges[-1] + 1, int(edges[-1] * growth)))
    return np.array(edges[:-1]), np.array(edges[1:])


def stack(parts: Sequence[Exposure]) -> Exposure:
    """Put the steps of several runs below one another."""
    bins = max(part.drop.shape[1] for part in parts)

    def wide(name: str) -> Array:
        arrays = [getattr(part, name) for part in parts]
        return np.concatenate([np.pad(a, ((0, 0), (0, bins - a.shape[1]))) for a in arrays])

    return Exposure(
        np.concatenate([part.lr_sum for part in parts]), wide("drop"), wide("since"), wide("log_lr")
    )


def drop_sum(exposure: Exposure, C: float, beta: float, gamma: float) -> Array:  # noqa: N803
    """Sum over the drops of the learning rate, each weighted by how far its effect has developed.

    ``sum_k (lr[k-1] - lr[k]) G(lr[k]**-gamma S_k)`` with ``G(x) = 1 - (C x + 1)**-beta`` and
    ``S_k`` the sum of the rate since the drop: zero in a constant-rate run, and at most the whole
    fall of the rate. From Luo et al. (arXiv:2503.12811), who subtract it from the full-precision
    loss. That it could stand for the growth of quantization error is this project's conjecture.

    Parameters
    ----------
    exposure
        Of n steps.
    C, beta, gamma
        Constants of the law; ``C`` is per unit of ``lr**(1 - gamma)`` times steps.

    Returns
    -------
    numpy.ndarray
        Shape (n,), in units of the learning rate.
    """
    arrived = np.log1p(C * np.exp(-gamma * exposure.log_lr) * exposure.since)
    return (exposure.drop * -np.expm1(-beta * arrived)).sum(axis=1)


def cooldown_drop_sum(
    lr_peak: Array,
    lr: Array,
    decay_steps: Array,
    C: float,  # noqa: N803
    beta: float,
    gamma: float,
    shape: Literal["linear", "cosine"] = "linear",
) -> Array:
    """`drop_sum` part-way through one decay, from summary columns alone.

    Parameters
    ----------
    lr_peak, lr
        Rate before the decay and now, shape (n,).
    decay_steps
        Steps since the decay began, shape (n,).
    C, beta, gamma
        As in `drop_sum`.
    shape
        ``linear``, or ``cosine`` for a half cosine to zero, on which ``lr`` is the present point.

    Returns
    -------
    numpy.ndarray
        Shape (n,). The sum over steps is replaced by an integral over the rate, taken by
        Gauss-Legendre quadrature; the two agree when the decay takes many steps.
    """
    nodes, weights = np.polynomial.legendre.leggauss(64)
    # Squaring the nodes puts more of them at the end, where the last drops have not yet acted.
    place, weights = ((1.0 + nodes) / 2.0) ** 2, weights * (1.0 + nodes) / 2.0
    now = np.asarray(lr / lr_peak, dtype=float)[:, None]
    rate = now + (1.0 - now) * place
    steps = np.asarray(decay_steps, dtype=float)[:, None]
    if shape == "linear":
        since = steps * (rate + now) / 2.0 * place
    else:
        angle, end = (np.arccos(np.clip(2.0 * r - 1.0, -1.0, 1.0)) for r in (rate, now))
        with np.errstate(invalid="ignore"):
            since = steps / end * (end - angle + np.sin(end) - np.sin(angle)) / 2.0
    peak = np.asarray(lr_peak, dtype=float)[:, None]
    with np.errstate(divide="ignore"):
        arrived = np.log1p(C * peak ** (1.0 - gamma) * rate**-gamma * since)
    inside = -np.expm1(-beta * arrived) * weights
    return np.where(now < 1, peak * (1.0 - now) * inside, 0.0).sum(axis=1)


def decay_share(frame: pd.DataFrame, by: Sequence[str] = ("run",)) -> Array:
    """Share of each checkpoint's tokens that was seen while the learning rate decayed.

    ``decay_fraction`` grows linearly with ``tokens`` during a decay, so two checkpoints in it tell
    where it began.

    Parameters
    ----------
    frame
        A measurement table with ``tokens``, ``decay_fraction`` and the columns of ``by``.
    by
        Columns whose rows belong to one decay.

    Returns
    -------
    numpy.ndarray
        Shape (n,), in the order of the rows: zero before the decay, null where it is not known.
    """
    require(frame, ("tokens", "decay_fraction", *by), "table")
    tokens = frame["tokens"].to_numpy(dtype=float)
    fraction = frame["decay_fraction"].to_numpy(dtype=float)
    share = np.where(fraction == 0, 0.0, np.nan)
    for rows in frame.groupby(list(by)).indices.values():
        inside = np.asarray(rows)[fraction[rows] > 0]
        if len(inside) > 1 and np.ptp(fraction[inside]) > 0:
            _, begin = np.polyfit(fraction[inside], tokens[inside], 1)
            share[inside] = np.clip(1.0 - begin / tokens[inside], 0.0, 1.0)
    return share


@dataclass(frozen=True, slots=True)
class MultiPower:
    """Multi-power law of Luo et al. (arXiv:2503.12811): loss at a step of any schedule.

    ``L = L0 + A * lr_sum**-alpha - B * drop_sum(C, beta, gamma)`` in nats per token.

    Parameters
    ----------
    values
        ``L0, A, alpha, B, C, beta, gamma``; ``A`` and ``C`` are in units of summed learning rate.
    """

    values: dict[str, float]

    def loss(self, exposure: Exposure) -> Array:
        """Loss at each step, shape (n,)."""
        v = self.values
        falls = drop_sum(exposure, v["C"], v["beta"], v["gamma"])
        return v["L0"] + v["A"] * exposure.lr_sum ** -v["alpha"] - v["B"] * falls


PARAMETERS = (
    Parameter("L0", "L_0", 1e-3, 50.0, (2.5,), scale="log"),
    Parameter("A", "A", 1e-6, 1e3, (0.5,), scale="log"),
    Parameter("alpha", r"\alpha", 0.0, 5.0, (0.3, 0.8)),
    Parameter("B", "B", 1e-3, 1e6, (100.0, 1000.0), scale="log"),
    Parameter("C", "C", 1e-4, 1e4, (0.05, 1.0), scale="log"),
    Parameter("beta", r"\beta", 1e-3, 10.0, (0.3, 1.0), scale="log"),
    Parameter("gamma", r"\gamma", -2.0, 3.0, (0.5,)),
)
NAMES = tuple(p.name for p in PARAMETERS)

PUBLISHED = tuple(
    Published(
        size,
        dict(zip(NAMES, numbers, strict=True)),
        "arXiv:2503.12811, constants in the authors' code",
        f"gives R2 {r2} on the six schedules it was not fitted on",
    )
    for size, r2, numbers in (
        ("25M", 0.9988, (3.0405, 0.5247, 0.5079, 363.79, 2.0656, 0.5828, 0.6414)),
        ("100M", 0.9983, (2.6514, 0.6012, 0.4530, 437.95, 2.1325, 0.5979, 0.6552)),
        ("400M", 0.9978, (2.3747, 0.6542, 0.4288, 523.42, 2.0246, 0.5935, 0.6347)),
    )
)


def log_loss(theta: Array, exposure: Exposure) -> tuple[Array, Array]:
    """Log of the law and its gradient for many parameter vectors.

    Parameters
    ----------
    theta
        Internal parameters in the order of `PARAMETERS`, shape (S, 7).
    exposure
        Of n steps.

    Returns
    -------
    tuple of numpy.ndarray
        Shapes (S, n) and (S, n, 7); nan where the law is not positive.
    """
    found = [_log_loss(row, exposure) for row in np.atleast_2d(theta)]
    return np.stack([value for value, _ in found]), np.stack([slope for _, slope in found])


def _log_loss(theta: Array, exposure: Exposure) -> tuple[Array, Array]:
    """Log of the law, shape (n,), and its gradient, shape (n, 7), for one parameter vector."""
    level, size, alpha, scale, C, beta, gamma = theta  # noqa: N806 - the paper's symbol
    floor, early, scale, beta = np.exp(level), np.exp(size), np.exp(scale), np.exp(beta)
    x = np.exp(C - gamma * exposure.log_lr) * exposure.since
    arrived = np.log1p(x)
    left = np.exp(-beta * arrived)
    log_sum = np.log(exposure.lr_sum)
    early = early * np.exp(-alpha * log_sum)
    drop = scale * exposure.drop
    falls = (drop * (1.0 - left)).sum(axis=1)
    by_c = drop * beta * left * x / (1.0 + x)
    slope = [
        np.full_like(early, floor),
        early,
        -early * log_sum,
        -falls,
        -by_c.sum(axis=1),
        -(drop * beta * left * arrived).sum(axis=1),
        (by_c * exposure.log_lr).sum(axis=1),
    ]
    loss = floor + early - falls
    loss = np.where(loss > 0, loss, np.nan)
    return np.log(loss), np.stack(slope, axis=-1) / loss[:, None]


def starts() -> Array:
    """Return internal starting values of the search, shape (S, 7)."""
    values = [[p.internal(start) for start in p.starts] for p in PARAMETERS]
    return np.array(list(itertools.product(*values)))


def from_internal(theta: Array) -> MultiPower:
    """Return the law of internal parameters, shape (7,)."""
    return MultiPower({p.name: float(p.natural(theta[i])) for i, p in enumerate(PARAMETERS)})
