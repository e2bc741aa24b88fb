"""AWQ: scale columns by what they read before rounding, so that those that matter lose less."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from qscale.errors import QscaleError
from qscale.quantize.rtn import rtn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from qscale.quantize.format import Format

ALPHAS = tuple(i / 20 for i in range(20))
"""Exponents that are tried."""

SMALLEST = 1e-4
"""Least scale before it is normalised, relative to that of the column that reads most."""


@dataclass(frozen=True, slots=True, eq=False)
class Awq:
    """Quantized matrices that read the same input.

    Parameters
    ----------
    weights
        Dequantized values, shape and dtype of each matrix.
    alpha
        Exponent of the scale, of least output error.
    scale
        What columns were multiplied by before rounding and divided by after, shape (columns,).
    errors
        Output error at each of `ALPHAS`, ``tr(E G E^T)`` summed over matrices, in the unit of the
        Gram matrix ``G``.
    """

    weights: list[torch.Tensor]
    alpha: float
    scale: torch.Tensor
    errors: tuple[float, ...]


def awq(
    weights: Sequence[torch.Tensor],
    gram: torch.Tensor,
    mean_abs: torch.Tensor,
    formats: Sequence[Format],
) -> Awq:
    r"""Quantize matrices with their columns scaled by the size of what they read.

    Lin et al. (arXiv:2306.00978, section 3.2). Column :math:`j` is multiplied by
    :math:`s_j = \overline{|x_j|}^{\,\alpha}`, divided by
    :math:`\sqrt{\max s \, \min s}` as in the authors' code, rounded to nearest and divided again:
    :math:`\hat W = Q(W \operatorname{diag}(s)) \operatorname{diag}(s)^{-1}`. Of `ALPHAS` the one is
    taken whose output error :math:`\operatorname{tr}((W - \hat W) X X^\top (W - \hat W)^\top)`,
    summed over the matrices, is least. The first is 0, which is rounding to nearest: the error is
    never above its.

    Parameters
    ----------
    weights
        Matrices of shape (rows, columns) that read the same input, and so share the scale. Not
        modified.
    gram
        :math:`X X^\top` of the input, summed over positions, shape (columns, columns).
    mean_abs
        Mean absolute input, shape (columns,); any multiple of it gives the same result.
    formats
        Format of each matrix.

    Raises
    ------
    QscaleError
        If a value is not finite, or shapes do not fit.

    Notes
    -----
    A deployed model folds :math:`1/s` into what comes before: the gain of a norm, or the rows of
    the matrix before. Here the input's scale is taken to be free, so that every matrix can be
    scaled; where it follows a nonlinearity, as the second matrix of a GPT-2 block does, a deployed
    model must divide its input at run time. The authors' code also clips groups after scaling,
    which is a property of the format here.
    """
    _check(weights, gram, mean_abs, formats)
    full = [w.detach().to(torch.promote_types(w.dtype, torch.float32)) for w in weights]
    errors = []
    least = torch.inf
    for alpha in ALPHAS:
        scale = _scale(mean_abs, alpha)
        tried = [_rounded(w, scale, fmt) for w, fmt in zip(full, formats, strict=True)]
        errors.append(sum(_error(w - q, gram) for w, q in zip(full, tried, strict=True)))
        if errors[-1] < least:
            least, best = errors[-1], (tried, alpha, scale)
    tried, alpha, scale = best
    found = [q.to(w.dtype) for q, w in zip(tried, weights, strict=True)]
    return Awq(found, alpha, scale, tuple(errors))


def _scale(mean_abs: torch.Tensor, alpha: float) -> torch.Tensor:
    """Return the scale of each column, the largest the inverse of the smallest."""
    largest = mean_abs.double().amax()
    relative = mean_abs.double() / torch.where(largest == 0, 1.0, largest)
    scale = relative.pow(alpha).clamp(min=SMALLEST)
    return scale / (scale.amax() * scale.amin()).sqrt()


def _rounded(weight: torch.Tensor, scale: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Round a matrix whose columns are scaled for the while."""
    scale = scale.to(weight)
    return rtn(weight * scale, fmt) / scale


def _error(error: torch.Tensor, gram: torch.Tensor) -> float:
    """Squared output error ``tr(E G E^T)``."""
    return float((error @ gram.to(error)).mul_(error).sum(dtype=torch.float64))


def _check(
    weights: Sequence[torch.Tensor],
    gram: torch.Tensor,
    mean_abs: torch.Tensor,
    formats: Sequence[Format],
) -> None:
    """Refuse what would give NaN or garbage."""
    columns = len(mean_abs)
    shapes = [tuple(w.shape) for w in weights]
    if any(len(s) != 2 or s[1] != columns for s in shapes) or gram.shape != (columns, columns):
        raise QscaleError(
            "weights must have shape (rows, columns), gram (columns, columns) and mean_abs "
            f"(columns,). Got {shapes}, {tuple(gram.shape)} and {tuple(mean_abs.shape)} instead."
        )
    if not shapes or len(formats) != len(shapes):
        raise QscaleError(f"formats must be one for each of {len(shapes)} weights, at least one.")
    for values in (*weights, gram, mean_abs):
        if not torch.isfinite(values).all():
            raise QscaleError("weights, gram and mean_abs must be finite. Got NaN or infinity.")
    if bool((mean_abs < 0).any()):
        raise QscaleError("mean_abs must be at least 0. Got a negative value instead.")
