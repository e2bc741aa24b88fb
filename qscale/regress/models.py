"""The models behind the regressions: linear ones of statsmodels, learned ones of scikit-learn."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import statsmodels.api as sm
from sklearn.ensemble import HistGradientBoostingRegressor, RandomForestRegressor
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import StandardScaler

from qscale.errors import FitError
from qscale.laws import Law, columns_of

if TYPE_CHECKING:
    import pandas as pd

    from qscale.regress.inputs import Inputs

    Array = np.ndarray

LINEAR = ("ols", "rlm", "mixedlm", "quantreg")
LEARNED: dict[str, type] = {
    "forest": RandomForestRegressor,
    "boosting": HistGradientBoostingRegressor,
    "gp": Pipeline,
}
_GP_ROWS = 3000


@dataclass(frozen=True, slots=True)
class Linear:
    """Coefficients on the design and their covariance, shapes (p,) and (p, p)."""

    beta: Array
    cov: Array

    def location(self, x: Array) -> Array:
        """Log target, shape (n,)."""
        return x @ self.beta

    def variance(self, x: Array) -> Array:
        """Variance of the log target's mean, shape (n,)."""
        return np.einsum("ni,ij,nj->n", x, self.cov, x)


@dataclass(frozen=True, slots=True)
class Learned:
    """A scikit-learn estimator on the design without its intercept."""

    estimator: Any

    def location(self, x: Array) -> Array:
        """Log target, shape (n,)."""
        return np.asarray(self.estimator.predict(x[:, 1:]), dtype=float)


@dataclass(frozen=True, slots=True)
class Base:
    """A fitted law whose residuals a process learns; ``theta`` is internal, shape (p,)."""

    law: Law
    theta: Array

    def location(self, frame: pd.DataFrame) -> Array:
        """Log target, shape (n,)."""
        found = self.law.location(self.theta[None], columns_of(self.law, frame))[0]
        return np.broadcast_to(found, len(frame))


@dataclass(frozen=True, slots=True)
class Predictor:
    """A model with its inputs, and the law under it if there is one."""

    inputs: Inputs
    model: Linear | Learned
    base: Base | None = None

    def locate(self, frame: pd.DataFrame, name: str = "prediction") -> tuple[Array, Array]:
        """Log target and the variance that an unknown category adds to it, shape (n,) each.

        A row of an unknown level is predicted by the average of the known levels, and has their
        variance, as a further one of them.
        """
        x, owner = self.inputs.design(frame, name)
        every = self.model.location(x)
        lines = np.bincount(owner, minlength=len(frame))
        location = np.bincount(owner, every, len(frame)) / lines
        squares = np.bincount(owner, (every - location[owner]) ** 2, len(frame))
        between = squares / np.maximum(lines - 1, 1) * (1 + 1 / lines)
        return location + (self.base.location(frame) if self.base else 0.0), between

    def averaged_design(self, frame: pd.DataFrame) -> Array:
        """Design with the average of the known levels where a level is unknown, shape (n, p)."""
        x, owner = self.inputs.design(frame)
        lines = np.bincount(owner, minlength=len(frame))
        return np.stack([np.bincount(owner, column, len(frame)) / lines for column in x.T], axis=1)


def fit_linear(kind: str, x: Array, y: Array, clusters: Array) -> tuple[Linear, tuple[str, ...]]:
    """Fit one of `LINEAR` to log targets.

    Parameters
    ----------
    kind
        ``ols``; ``rlm``, Huber's M-estimator; ``mixedlm``, a random intercept for each cluster by
        restricted maximum likelihood; or ``quantreg``, the conditional median.
    x, y
        Design, shape (n, p), and log target, shape (n,).
    clusters
        Cluster number of each row, shape (n,).

    Returns
    -------
    Linear, tuple of str
        Coefficients with a covariance that is robust to shared noise in clusters (for ``mixedlm``,
        that of its model), and sentences about the fit.

    Raises
    ------
    FitError
        If it cannot be fitted.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            model = _LINEAR_FITS[kind](x, y, clusters)
        except (np.linalg.LinAlgError, ValueError, ZeroDivisionError) as error:
            raise FitError(f"{kind} could not be fitted: {error}.") from error
    if not (np.isfinite(model.beta).all() and np.isfinite(model.cov).all()):
        raise FitError(f"{kind} could not be fitted: its coefficients are not finite.")
    said = dict.fromkeys(str(warning.message).strip().rstrip(".") for warning in caught)
    return model, tuple(f"{kind}: {sentence}." for sentence in said)


def _ols(x: Array, y: Array, clusters: Array) -> Linear:
    options = {"groups": clusters}
    found = sm.OLS(y, x).fit(cov_type="cluster", cov_kwds=options)
    return Linear(found.params, found.cov_params())


def _rlm(x: Array, y: Array, clusters: Array) -> Linear:
    norm = sm.robust.norms.HuberT()
    found = sm.RLM(y, x, M=norm).fit()
    standardised = found.resid / found.scale
    bread = (x * norm.psi_deriv(standardised)[:, None]).T @ x
    return Linear(
        found.params, sandwich(bread, x * (found.scale * norm.psi(standardised))[:, None], clusters)
    )


def _mixedlm(x: Array, y: Array, clusters: Array) -> Linear:
    found = sm.MixedLM(y, x, groups=clusters).fit(reml=True)
    p = x.shape[1]
    return Linear(np.asarray(found.fe_params), np.asarray(found.cov_params())[:p, :p])


def _quantreg(x: Array, y: Array, clusters: Array) -> Linear:
    found = sm.QuantReg(y, x).fit(q=0.5, max_iter=5000)
    # The median's score and bread; clusters as in Parente and Santos Silva (2016).
    scores = x * (0.5 - (found.resid < 0))[:, None]
    return Linear(found.params, sandwich(x.T @ x / found.sparsity, scores, clusters))


_LINEAR_FITS = {"ols": _ols, "rlm": _rlm, "mixedlm": _mixedlm, "quantreg": _quantreg}


def sandwich(bread: Array, scores: Array, clusters: Array) -> Array:
    """Cluster-robust covariance of an M-estimator (CR1, as statsmodels computes it), shape (p, p).

    Parameters
    ----------
    bread
        Expected derivative of the summed scores, shape (p, p).
    scores
        Score of each row at the estimate, shape (n, p).
    clusters
        Cluster number of each row, shape (n,).
    """
    n, p = scores.shape
    groups = int(clusters.max()) + 1
    summed = np.zeros((groups, p))
    np.add.at(summed, clusters, scores)
    inverse = np.linalg.inv(bread)
    factor = groups / (groups - 1) * (n - 1) / (n - p)
    return factor * inverse @ (summed.T @ summed) @ inverse


def fit_learned(kind: str, x: Array, y: Array, seed: int) -> Learned:
    """Fit one of `LEARNED` to log targets (or, for ``gp``, to a law's residuals in them).

    Parameters
    ----------
    kind
        ``forest``: 100 trees with at least 2 rows in each leaf and half of the inputs at each
        split. ``boosting``: histogram gradient boosting, 200 rounds at rate 0.05 with at least 5
        rows in each leaf. ``gp``: a Gaussian process with one length for all standardised inputs
        and white noise, both by maximum marginal likelihood.
    x, y
        Design with intercept, shape (n, p), and log target, shape (n,).
    seed
        Of forests, boosting and restarts.

    Raises
    ------
    FitError
        If there are too many rows for a Gaussian process.
    """
    estimator: Any
    if kind == "forest":
        estimator = RandomForestRegressor(
            n_estimators=100, min_samples_leaf=2, max_features=0.5, random_state=seed
        )
    elif kind == "boosting":
        estimator = HistGradientBoostingRegressor(
            max_iter=200, learning_rate=0.05, min_samples_leaf=5, early_stopping=False,
            random_state=seed,
        )  # fmt: skip
    else:
        if len(y) > _GP_ROWS:
            raise FitError(
                f"gp takes at most {_GP_ROWS} rows and there are {len(y)}; use boosting, or choose "
                "rows with where."
            )
        spread = max(float(y.var()), 1e-6)
        kernel = ConstantKernel(spread, (1e-3 * spread, 1e3 * spread)) * RBF(1.0, (0.1, 1e2))
        kernel += WhiteKernel(0.1 * spread, (1e-4 * spread, 1e1 * spread))
        process = GaussianProcessRegressor(kernel, n_restarts_optimizer=2, random_state=seed)
        estimator = Pipeline([("scale", StandardScaler()), ("process", process)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a length at its limit means that an input says nothing
        return Learned(estimator.fit(x[:, 1:], y))
