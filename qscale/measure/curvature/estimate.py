"""What a trace estimator returns, and the loss increase it predicts; numpy only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, eq=False)
class TraceEstimate:
    """Stochastic estimate of the trace of a curvature matrix, one diagonal block per weight matrix.

    Samples are kept one by one. Blocks share them, so their errors are correlated, and only the
    samples give the right standard error of a sum over blocks.

    Parameters
    ----------
    names
        Parameter names of the blocks.
    values
        Samples, shape ``(num_probes * microbatches, len(names))``: probe by probe, and in each the
        microbatches in order. A microbatch's estimate of its part of each block's trace is
        multiplied by the number of microbatches, so that the mean of all samples is the trace.
    tokens
        Number of scored tokens the loss is a mean over.
    backward_passes
        Backward passes over all of those tokens that were spent.
    microbatches
        Number of parts of the tokens that have probes of their own. The standard error is that of a
        stratified sample (Cochran, Sampling Techniques, 1977, section 5.4): a part's samples are
        compared with each other only. With one part it is that of whole probes.
    """

    names: tuple[str, ...]
    values: np.ndarray
    tokens: int
    backward_passes: int
    microbatches: int = 1

    @property
    def num_probes(self) -> int:
        """Number of independent probes of every microbatch."""
        return len(self.values) // self.microbatches

    @property
    def degrees_of_freedom(self) -> int:
        """Most degrees of freedom of the standard errors, reached if all parts are alike."""
        return len(self.values) - self.microbatches

    @property
    def total(self) -> float:
        """Trace over all blocks."""
        return self.combine(np.ones(len(self.names)))[0]

    @property
    def se(self) -> float:
        """Standard error of ``total`` over the probes; the tokens are taken as given."""
        return self.combine(np.ones(len(self.names)))[1]

    @property
    def per_matrix(self) -> dict[str, float]:
        """Trace of each block."""
        return dict(zip(self.names, self.values.mean(axis=0).tolist(), strict=True))

    @property
    def per_matrix_se(self) -> dict[str, float]:
        """Standard error of each block's trace over the probes."""
        return dict(zip(self.names, self._error(self.values).tolist(), strict=True))

    def combine(self, weights: np.ndarray) -> tuple[float, float]:
        """Estimate a linear combination of the blocks' traces.

        Parameters
        ----------
        weights
            Weight of each block, in the order of ``names``.

        Returns
        -------
        tuple of float
            The value and its standard error over the probes.
        """
        sums = self.values @ weights
        return float(sums.mean()), float(self._error(sums))

    def _error(self, samples: np.ndarray) -> np.ndarray:
        """Return the standard error of the mean of samples along the first axis."""
        parts = samples.reshape(self.num_probes, self.microbatches, *samples.shape[1:])
        variance = parts.var(axis=0, ddof=1).mean(axis=0)
        return np.sqrt(variance / len(samples))


def quadratic_delta(
    ggn: TraceEstimate, squared_error: Mapping[str, float], sizes: Mapping[str, int]
) -> tuple[float, float]:
    r"""Predict the loss increase from curvature and weight noise, with nothing fitted.

    The increase is taken to be second order, the curvature to be that of the Gauss-Newton matrix
    :math:`G`, and the noise :math:`\epsilon_l = Q(W_l) - W_l` to be without preferred direction
    inside a matrix and uncorrelated between matrices. Then the expected increase is

    .. math:: \tfrac12 \sum_l \frac{\operatorname{tr} G_l}{n_l} \lVert Q(W_l) - W_l \rVert_F^2 .

    Parameters
    ----------
    ggn
        Gauss-Newton trace of each quantized matrix, from :func:`ggn_trace`.
    squared_error
        Squared Frobenius norm of the quantization error of each matrix, by parameter name.
    sizes
        Number of weights of each matrix, by parameter name.

    Returns
    -------
    tuple of float
        Predicted increase of the loss in nats per token, and its standard error over the probes.

    Raises
    ------
    ValueError
        If the three arguments are not about the same matrices.

    Notes
    -----
    Average Hessian trace times squared error is the metric by which HAWQ-V2 (Dong et al.,
    arXiv:1911.03852) ranks layers for mixed precision. Here its sum, with the factor one half of
    the Taylor expansion and the Gauss-Newton trace, is read as the increase itself.

    Examples
    --------
    >>> trace = TraceEstimate(("a", "b"), np.array([[8.0, 2.0], [12.0, 2.0]]), 100, 2)
    >>> value, se = quadratic_delta(trace, {"a": 0.1, "b": 0.2}, {"a": 10, "b": 4})
    >>> round(value, 3), round(se, 3)
    (0.1, 0.01)
    """
    if not set(ggn.names) == set(squared_error) == set(sizes):
        odd = sorted(
            (set(ggn.names) | set(squared_error) | set(sizes))
            - (set(ggn.names) & set(squared_error) & set(sizes))
        )
        raise ValueError(
            f"ggn, squared_error and sizes must name the same matrices. Not in all: {odd}."
        )
    return ggn.combine(np.array([squared_error[name] / (2 * sizes[name]) for name in ggn.names]))
