"""Normal equations of a mixed model: parameters and random effects of a step at once.

The levels of one random term share no row, so that their block is diagonal and the largest term is
eliminated without filling anything in; what is left has the size of the parameters and the other
terms (as in section 3.2 of Bates et al. 2015, J. Stat. Softw. 67).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import sparse
from scipy.linalg import cho_factor, cho_solve
from scipy.sparse.linalg import splu

if TYPE_CHECKING:
    from collections.abc import Sequence

    Array = np.ndarray

DENSE_EFFECTS = 800  # levels up to which a dense matrix of them is made
_DENSE_ELEMENTS = 300_000  # of a design, up to which it is faster dense
_RIDGE, _WIDE_RIDGE = 1e-15, 1e-12  # keep exactly collinear parameters solvable


class Scaled:
    """Design of all random effects in units of their standard deviations.

    Parameters
    ----------
    design
        Sparse design of all terms side by side, shape (n, q).
    sizes
        Levels of each term.
    deviations
        Standard deviation of each term.
    """

    def __init__(self, design: sparse.csr_array, sizes: Sequence[int], deviations: Array) -> None:
        self.count = design.shape[1]
        scale = np.repeat(deviations, sizes)
        self.small = design.shape[0] * self.count <= _DENSE_ELEMENTS
        self.z: Any = design.toarray() * scale if self.small else design @ sparse.diags_array(scale)
        largest = int(np.argmax(sizes)) if len(sizes) else 0
        first = int(sum(sizes[:largest]))
        self.largest = np.zeros(self.count, dtype=bool)
        self.largest[first : first + (sizes[largest] if len(sizes) else 0)] = True
        self.eliminates = not self.small and (~self.largest).sum() <= DENSE_EFFECTS
        if self.eliminates:
            columns = self.z.tocsc()
            self.main, self.rest = columns[:, self.largest], columns[:, ~self.largest]
            self.squares = self.main.power(2).T


class Normal:
    """Factored normal equations, with the prior precision of one for every scaled effect.

    Parameters
    ----------
    x
        Gradient of the law in its free parameters, shape (n, p).
    effects
        Design of the effects.
    weight
        Information of each row, shape (n,).
    """

    def __init__(self, x: Array, effects: Scaled, weight: Array) -> None:
        self.p, self.effects = x.shape[1], effects
        weighted = x * weight[:, None]
        fixed = x.T @ weighted
        self.unit = 1.0 / np.sqrt(np.maximum(np.diag(fixed), 1e-300))
        fixed = fixed * np.outer(self.unit, self.unit)
        fixed[range(self.p), range(self.p)] += _RIDGE
        weighted *= self.unit
        if effects.eliminates:
            self._eliminate(fixed, weighted, weight)
        elif effects.small or effects.count <= DENSE_EFFECTS:
            z = effects.z if effects.small else effects.z.toarray()
            inner = (z * weight[:, None]).T @ z + np.eye(effects.count)
            cross = z.T @ weighted
            self.factor: Any = self._factored(np.block([[fixed, cross.T], [cross, inner]]))
        else:
            z = effects.z
            inner = z.multiply(weight[:, None]).tocsr().T @ z + sparse.eye_array(effects.count)
            cross = sparse.csc_array(z.T @ weighted)
            blocks = sparse.block_array([[inner, cross], [cross.T, fixed]])
            self.factor = splu(sparse.csc_array(blocks))

    def _factored(self, matrix: Array) -> Any:
        """Cholesky factor, with a wider ridge on parameters that are exactly collinear."""
        try:
            return cho_factor(matrix, lower=True)
        except np.linalg.LinAlgError:
            matrix[range(self.p), range(self.p)] += _WIDE_RIDGE
            return cho_factor(matrix, lower=True)

    def _eliminate(self, fixed: Array, weighted: Array, weight: Array) -> None:
        """Factor what is left of parameters and smaller terms without the largest term."""
        main, rest = self.effects.main, self.effects.rest
        heavy = rest.multiply(weight[:, None]).tocsc()
        self.diagonal = 1.0 + self.effects.squares @ weight
        self.cross = sparse.csr_array(
            sparse.hstack([sparse.csr_array(main.T @ weighted), main.T @ heavy])
        )
        corner = rest.T @ weighted
        inner = (rest.T @ heavy).toarray() + np.eye(rest.shape[1])
        whole = np.block([[fixed, corner.T], [corner, inner]])
        whole -= (self.cross.T @ (self.cross / self.diagonal[:, None])).toarray()
        self.factor = self._factored(whole)

    def solve(self, right: Array) -> Array:
        """Solve for parameters, then effects; ``right`` has shape (p + q,) or (p + q, m)."""
        unit = np.concatenate([self.unit, np.ones(len(right) - self.p)])
        scaled = (right.T * unit).T
        if self.effects.eliminates:
            solution = np.empty_like(scaled)
            main = np.concatenate([np.zeros(self.p, dtype=bool), self.effects.largest])
            outer = (scaled[main].T / self.diagonal).T
            inner = cho_solve(self.factor, scaled[~main] - self.cross.T @ outer)
            solution[~main] = inner
            solution[main] = outer - ((self.cross @ inner).T / self.diagonal).T
        elif isinstance(self.factor, tuple):
            solution = cho_solve(self.factor, scaled)
        else:
            rolled = self.factor.solve(np.roll(scaled, -self.p, axis=0))
            solution = np.roll(rolled, self.p, axis=0)
        with np.errstate(over="ignore"):  # of a parameter that no row informs
            return (solution.T * unit).T

    def log_determinant(self) -> float:
        """Log determinant of the normal matrix in the parameters' own units."""
        if isinstance(self.factor, tuple):
            found = 2.0 * np.log(np.diag(self.factor[0])).sum()
        else:
            found = np.log(np.abs(self.factor.U.diagonal())).sum()
        if self.effects.eliminates:
            found += np.log(self.diagonal).sum()
        return float(found - 2.0 * np.log(self.unit).sum())
