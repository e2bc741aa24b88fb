"""Judge one term of a regression: by its coefficient, and by predicting clusters left out."""

from __future__ import annotations

import numpy as np
from scipy import stats

Array = np.ndarray

_FEW_CLUSTERS = 12  # two signs give too few distinct draws; Webb's six values give enough
_WEBB = np.sqrt([0.5, 1.0, 1.5])
_MANY_CLUSTERS = 200  # beyond, the F distribution is as good as a bootstrap
_DRAWS = 1999
_SINGULAR = 1e-10


def unit(design: Array) -> Array:
    """Scale columns, shape (n, p), to unit norm."""
    return design / np.maximum(np.linalg.norm(design, axis=0), 1e-300)


def _sums(values: Array, clusters: Array) -> Array:
    """Sum rows of each cluster, shape (G, ...) from (n, ...)."""
    total = np.zeros((int(clusters.max()) + 1, *values.shape[1:]))
    np.add.at(total, clusters, values)
    return total


def wald(
    y: Array, rest: Array, added: Array, clusters: Array, *, seed: int = 0
) -> tuple[float, float]:
    """Test whether added columns have zero coefficients in a regression with clustered errors.

    Parameters
    ----------
    y
        Response, shape (n,).
    rest, added
        Columns of the other terms, shape (n, p), and of the tested one, shape (n, q).
    clusters
        Integer cluster of each row, shape (n,), counted from zero.
    seed
        Of the bootstrap.

    Returns
    -------
    tuple of float
        The Wald F statistic with the CR1 covariance, and its p-value from the restricted wild
        cluster bootstrap, or beyond 200 clusters from the F distribution with G - 1 denominator
        degrees of freedom. Null and one if the clusters cannot tell: the added columns are made up
        of the rest, or there are no more clusters than columns.
    """
    groups, (rows, q) = int(clusters.max()) + 1, added.shape
    basis = np.linalg.svd(unit(rest), full_matrices=False)[0] if rest.shape[1] else rest
    own = added - basis @ (basis.T @ added)
    own -= basis @ (basis.T @ own)  # twice is enough for orthogonality to rounding
    kept = np.linalg.norm(own, axis=0) > _SINGULAR * np.linalg.norm(added, axis=0)
    if q == 0 or groups <= q or not kept.all() or np.linalg.matrix_rank(unit(own)) < q:
        return np.nan, 1.0
    own /= np.linalg.norm(own, axis=0)
    residual = y - basis @ (basis.T @ y)  # with the null imposed
    bread = np.linalg.inv(own.T @ own)
    # Everything is linear in one number per cluster, so a draw costs G x G, not n.
    moment = _sums(own * residual[:, None], clusters)
    mixed = _sums(own[:, :, None] * basis[:, None, :], clusters)
    rest_moment = _sums(basis * residual[:, None], clusters)
    square = _sums(own[:, :, None] * own[:, None, :], clusters)
    scores = (
        np.eye(groups)[:, :, None] * moment[:, None, :]
        - np.einsum("gqp,hp->ghq", mixed, rest_moment)
        - np.einsum("gqk,kl,hl->ghq", square, bread, moment)
    )
    correction = groups / (groups - 1) * (rows - 1) / max(rows - rest.shape[1] - q, 1)
    drawn = _multipliers(groups, np.random.default_rng(seed))
    theta = drawn @ moment @ bread
    meat = np.einsum("bh,ghq->bgq", drawn, scores) @ bread
    covariance = correction * np.einsum("bgq,bgk->bqk", meat, meat)
    if np.linalg.cond(covariance[0]) > 1 / _SINGULAR or not covariance[0].any():
        return np.nan, 1.0
    inverse = np.linalg.pinv(covariance, hermitian=True)
    f = np.einsum("bq,bqk,bk->b", theta, inverse, theta) / q
    if groups > _MANY_CLUSTERS:
        return float(f[0]), float(stats.f.sf(f[0], q, groups - 1))
    return float(f[0]), float(np.mean(f >= f[0] * (1 - 1e-9)))


def _multipliers(groups: int, rng: np.random.Generator) -> Array:
    """One multiplier per cluster in each draw, the data themselves first, shape (draws, G)."""
    own = np.ones((1, groups))
    if groups > _MANY_CLUSTERS:
        return own
    drawn = rng.integers(0, 2, size=(_DRAWS, groups)) * 2.0 - 1.0
    if groups <= _FEW_CLUSTERS:
        drawn *= rng.choice(_WEBB, size=drawn.shape)
    return np.concatenate([own, drawn])


def left_out_errors(y: Array, design: Array, clusters: Array, root_weights: Array) -> Array:
    """Predict each cluster by the weighted regression on all others.

    Parameters
    ----------
    y
        Log target, shape (n,).
    design
        Columns, shape (n, p).
    clusters
        Integer cluster of each row, shape (n,), counted from zero.
    root_weights
        Square root of each row's weight, shape (n,).

    Returns
    -------
    numpy.ndarray
        Predicted minus observed, shape (n,); null in clusters without which a coefficient is not
        determined.
    """
    basis, sizes, _ = np.linalg.svd(unit(design), full_matrices=False)
    basis = basis[:, sizes > _SINGULAR * sizes[0]]
    if basis.shape[1] < design.shape[1]:
        return np.full(len(y), np.nan)
    # In an orthonormal basis of the weighted columns the whole normal matrix is the identity.
    whole, upper = np.linalg.qr(basis * root_weights[:, None])
    rotated = np.linalg.solve(upper.T, basis.T).T
    own = _sums(whole[:, :, None] * whole[:, None, :], clusters)
    moment = _sums(whole * (root_weights * y)[:, None], clusters)
    left, eye = moment.sum(axis=0) - moment, np.eye(basis.shape[1])
    determined = np.linalg.eigvalsh(eye - own)[:, 0] > 1e-8
    theta = np.full(moment.shape, np.nan)
    theta[determined] = np.linalg.solve((eye - own)[determined], left[determined][:, :, None])[
        :, :, 0
    ]
    return (rotated * theta[clusters]).sum(axis=1) - y
