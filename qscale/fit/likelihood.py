"""Likelihood of each row given the law: how residuals are distributed, noise floor and collapse.

With ``eta`` the law's prediction on the link's scale plus the row's random effects, every function
returns the log likelihood, its derivative in ``eta`` and a positive weight, shape (n,) each. The
weight is the secant one of iteratively reweighted least squares, score over residual, where the
curvature itself can be negative.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from scipy.optimize import brentq
from scipy.special import gammaln, log_ndtr, ndtr
from scipy.stats import norm

if TYPE_CHECKING:
    from collections.abc import Callable

Array = np.ndarray
Family = Literal["gaussian", "student_t", "huber"]

STUDENT_DOF = 4.0
HUBER_EFFICIENT = 1.345  # times sigma: 95 % efficient for Gaussian errors (Huber 1981, section 4.5)
_FAINT = 1e-6
_NODES, _NODE_WEIGHTS = np.polynomial.hermite_e.hermegauss(21)
_LOG_NODE_WEIGHTS = np.log(_NODE_WEIGHTS) - 0.5 * np.log(2 * np.pi)


@dataclass(frozen=True, slots=True)
class Rows:
    """What was observed in each row and how it is distributed around the law.

    Parameters
    ----------
    observed
        Target on the link's scale, shape (n,); the bound itself in censored rows.
    censored
        -1 where the target is only known to be below ``observed``, +1 where only above, else 0.
    noise
        Standard error of the target in its own unit, shape (n,), 0 where not known; log link only.
    family
        Distribution of residuals around the law.
    huber_delta
        Residual at which the Huber loss turns linear; None is 1.345 sigma.
    """

    observed: Array
    censored: Array
    noise: Array
    family: Family = "huber"
    huber_delta: float | None = None

    @property
    def plain(self) -> bool:
        """Whether all rows are measured, with Gaussian residuals of one unknown scale."""
        return self.family == "gaussian" and not self.censored.any() and not self.noise.any()

    def evaluate(self, eta: Array, sigma: float) -> tuple[Array, Array, Array]:
        """Log likelihood, score and weight of every row, shape (n,) each."""
        log_p, score, weight = _FAMILIES[self.family](self.observed - eta, sigma, self.huber_delta)
        below, above = self.censored < 0, self.censored > 0
        noisy = self.noise > 0
        for mask, parts in (
            (noisy & (self.censored == 0), _noisy),
            (below & noisy, _below_noisy),
            (below & ~noisy, _below),
            (above, _above),
        ):
            if mask.any():
                log_p[mask], score[mask], weight[mask] = parts(
                    self.observed[mask], eta[mask], sigma, self.noise[mask]
                )
        return log_p, score, weight

    def curvature(self, weight: Array, sigma: float) -> Array:
        """Return weights for Newton's steps, shape (n,), from the secant ones of `evaluate`.

        Beyond delta Huber's loss has no curvature; a faint one keeps the equations solvable.
        """
        if self.family != "huber":
            return weight
        beyond = (weight < (1 - 1e-9) / sigma**2) & (self.censored == 0) & (self.noise <= 0)
        return np.where(beyond, _FAINT * weight, weight)

    def information(self, weight: Array, sigma: float) -> Array:
        """Return each row's information on the law, shape (n,).

        For a robust density this is its expectation, which does not jump as rows pass delta; rows
        that are censored or noisy keep the ``weight`` of `evaluate`.
        """
        if self.family == "gaussian":
            return weight
        plain = (self.censored == 0) & (self.noise <= 0)
        if self.family == "student_t":
            share = (STUDENT_DOF + 1) / (STUDENT_DOF + 3)
        else:
            k = HUBER_EFFICIENT if self.huber_delta is None else self.huber_delta / sigma
            share = np.sqrt(2 * np.pi) * (2 * ndtr(k) - 1) / _huber_mass(k)
        return np.where(plain, share / sigma**2, weight)

    def spread(self, sigma: float) -> float:
        """Return the standard deviation of Gaussian residuals that would be estimated as ``sigma``.

        The maximum likelihood scale of a robust density is not the standard deviation; this is the
        usual consistency factor, found from the expected estimating equation. Rows that are
        censored or have a known error are Gaussian, so that the factor is as far from one as the
        others weigh.
        """
        robust = float(((self.censored == 0) & (self.noise <= 0)).mean())
        if self.family == "gaussian" or robust == 0:
            return sigma
        z = np.linspace(-10, 10, 4001)
        density = norm.pdf(z) * (z[1] - z[0])

        def expected_slope(ratio: float) -> float:
            """Return d E[log density] / d log sigma for residuals N(0, ratio sigma)."""
            up, down = (
                _FAMILIES[self.family](z * ratio * sigma, scale, self.huber_delta)[0]
                for scale in (sigma * np.exp(1e-5), sigma * np.exp(-1e-5))
            )
            gaussian = 2e-5 * (ratio**2 - 1)
            return robust * float(((up - down) * density).sum()) + (1 - robust) * gaussian

        return sigma * float(brentq(expected_slope, 0.02, 50.0))


def _gaussian(r: Array, sigma: float, _: float | None) -> tuple[Array, Array, Array]:
    """Gaussian residuals."""
    weight = np.full(len(r), sigma**-2.0)
    return -0.5 * r**2 * weight - np.log(sigma) - 0.5 * np.log(2 * np.pi), r * weight, weight


def _student_t(r: Array, sigma: float, _: float | None) -> tuple[Array, Array, Array]:
    """Student residuals with few degrees of freedom (Lange, Little and Taylor 1989)."""
    dof = STUDENT_DOF
    weight = (dof + 1) / (dof * sigma**2 + r**2)
    constant = gammaln((dof + 1) / 2) - gammaln(dof / 2) - 0.5 * np.log(dof * np.pi) - np.log(sigma)
    return constant - (dof + 1) / 2 * np.log1p((r / sigma) ** 2 / dof), r * weight, weight


def _huber(r: Array, sigma: float, delta: float | None) -> tuple[Array, Array, Array]:
    """Huber's least favourable density: Gaussian inside, exponential tails (Huber 1964)."""
    k = HUBER_EFFICIENT if delta is None else delta / sigma
    size = np.abs(r) / sigma
    inner = np.minimum(size, k)
    loss = inner * (size - 0.5 * inner)
    weight = np.minimum(1.0, k / np.maximum(size, 1e-300)) / sigma**2
    return -loss - np.log(sigma * _huber_mass(k)), r * weight, weight


def _huber_mass(k: float) -> float:
    """Integral of exp(-huber(z, k)) over z."""
    return float(np.sqrt(2 * np.pi) * (2 * ndtr(k) - 1) + 2 / k * np.exp(-0.5 * k * k))


_FAMILIES = {"gaussian": _gaussian, "student_t": _student_t, "huber": _huber}


def _below(bound: Array, eta: Array, sigma: float, _: Array) -> tuple[Array, Array, Array]:
    """Probability that the target lies under the bound (Tobin 1958)."""
    z = (bound - eta) / sigma
    log_p = log_ndtr(z)
    ratio = np.exp(-0.5 * z**2 - 0.5 * np.log(2 * np.pi) - log_p)  # inverse Mills ratio
    curvature = ratio * (ratio + z)
    return log_p, -ratio / sigma, np.maximum(curvature, 1e-9) / sigma**2


def _above(bound: Array, eta: Array, sigma: float, noise: Array) -> tuple[Array, Array, Array]:
    """Probability that the target lies over the bound."""
    log_p, score, weight = _below(-bound, -eta, sigma, noise)
    return log_p, -score, weight


def _noisy(observed: Array, eta: Array, sigma: float, noise: Array) -> tuple[Array, Array, Array]:
    """Target measured with Gaussian error in its own unit, scattered log-normally around the law.

    The density of the measured value is the integral of ``N(y; e^t, noise^2) N(t; eta, sigma^2)``
    over the true log target ``t``, by Gauss-Hermite quadrature centred on the integrand's mode.
    """
    value = np.exp(observed)

    def log_measured(t: Array) -> Array:
        z = (value[:, None] - np.exp(t)) / noise[:, None]
        return -0.5 * z**2 - np.log(noise[:, None]) - 0.5 * np.log(2 * np.pi) + observed[:, None]

    def slopes(t: Array) -> tuple[Array, Array]:
        e = np.exp(t)
        return (value - e) * e / noise**2, e * e / noise**2

    return _integrate(log_measured, slopes, np.minimum(observed, eta + 3 * sigma), eta, sigma)


def _below_noisy(
    bound: Array, eta: Array, sigma: float, noise: Array
) -> tuple[Array, Array, Array]:
    """Probability that the measured target, error included, lies under the bound."""
    value = np.exp(bound)

    def log_measured(t: Array) -> Array:
        return log_ndtr((value[:, None] - np.exp(t)) / noise[:, None])

    def slopes(t: Array) -> tuple[Array, Array]:
        e = np.exp(t)
        z = (value - e) / noise
        ratio = np.exp(-0.5 * z**2 - 0.5 * np.log(2 * np.pi) - log_ndtr(z)) * e / noise
        return -ratio, ratio**2

    return _integrate(log_measured, slopes, np.minimum(bound, eta), eta, sigma)


def _integrate(
    log_measured: Callable[[Array], Array],
    slopes: Callable[[Array], tuple[Array, Array]],
    start: Array,
    eta: Array,
    sigma: float,
) -> tuple[Array, Array, Array]:
    """Log of the integral over the true log target and its first two derivatives in ``eta``.

    The derivatives are posterior moments of the true log target (Fisher's identity).
    """
    t = start.copy()
    for _ in range(30):  # Fisher scoring to the mode of the integrand
        slope, information = slopes(t)
        step = (slope + (eta - t) / sigma**2) / (information + sigma**-2.0)
        t += np.clip(step, -0.5, 0.5)
    width = (slopes(t)[1] + sigma**-2.0) ** -0.5
    points = t[:, None] + width[:, None] * _NODES
    log_prior = -0.5 * ((points - eta[:, None]) / sigma) ** 2 - np.log(sigma)
    log_terms = log_measured(points) + log_prior + _LOG_NODE_WEIGHTS + 0.5 * _NODES**2
    log_terms += np.log(width)[:, None]
    top = log_terms.max(axis=1, keepdims=True)
    share = np.exp(log_terms - top)
    mass = share.sum(axis=1)
    share /= mass[:, None]
    mean = (share * points).sum(axis=1)
    variance = (share * (points - mean[:, None]) ** 2).sum(axis=1)
    score = (mean - eta) / sigma**2
    weight = (1.0 - variance / sigma**2) / sigma**2
    return np.log(mass) + top[:, 0], score, np.maximum(weight, 1e-6 / sigma**2)
