"""Bits for each matrix under a size budget: the mix of smallest predicted cost, with a bound."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, milp

from qscale.errors import QscaleError, TableError
from qscale.table import require, require_numbers

if TYPE_CHECKING:
    from scipy.optimize import OptimizeResult

    Array = np.ndarray

NONE, FULL_BITS = "none", 16  # a matrix that is left as it is, in half precision
_SECONDS = 60.0
_LARGEST = 1e6  # costs are scaled to this sum, far above the solver's absolute tolerances


@dataclass(frozen=True, slots=True, eq=False)
class Allocation:
    """A format for each matrix within a budget.

    Parameters
    ----------
    choices
        One row for each matrix: ``matrix``, ``n``, ``spec``, ``bits_per_weight``, ``cost`` and
        ``cost_se`` (nats per token).
    cost, cost_se
        Sum of costs, and of their standard errors: errors of matrices are correlated, and theirs
        is at most the sum.
    bits_per_weight
        Stored bits per weight over the matrices of the table.
    bound
        No allocation within the budget has a smaller sum of costs: that of the linear relaxation,
        in which a matrix may be divided between formats.
    proven
        The same as branch and bound left it; equal to the cost where that is the exact optimum.
    uniform
        One row for each setting that all matrices have: ``spec``, ``bits_per_weight``, ``cost``.
    """

    choices: pd.DataFrame
    cost: float
    cost_se: float
    bits_per_weight: float
    bound: float
    proven: float
    uniform: pd.DataFrame

    @property
    def exact(self) -> bool:
        """Whether no other allocation can be better, to nine digits of the cost."""
        return self.cost - self.proven <= 1e-9 * max(abs(self.cost), abs(self.proven))


def allocate(
    table: pd.DataFrame,
    bits_per_weight: float,
    *,
    cost: str = "gauss_newton_delta",
    or_none: bool = False,
) -> Allocation:
    """Choose a setting for each matrix so that the predicted costs add up to the least.

    A multiple-choice knapsack (Kellerer, Pferschy and Pisinger 2004, Knapsack Problems, chapter
    11), solved to proven optimality by the HiGHS branch and bound of scipy. Adding costs up takes
    the errors of two matrices as uncorrelated under the curvature, as HAWQ-V2 does
    (Dong et al., arXiv:1911.03852, section 3.2).

    Parameters
    ----------
    table
        Rows of `qscale sensitivity` for one checkpoint under several settings: ``matrix``, ``n``,
        ``spec``, ``bits_per_weight`` and the cost.
    bits_per_weight
        Largest stored bits per weight over all matrices of the table.
    cost
        Column to add up, nats per token: ``gauss_newton_delta`` (along the error),
        ``quadratic_delta`` (trace times squared error), or what was measured, ``kl`` or
        ``delta_loss``.
    or_none
        Whether a matrix may also be left as it is, at 16 bits and no cost.

    Raises
    ------
    TableError
        If a column is missing, a cost is not finite, a matrix appears twice under a setting, or
        rows are of several checkpoints or protocols.
    QscaleError
        If no choice fits the budget.
    """
    rows = _candidates(table, cost, or_none)
    if not (rows["n"] > 0).all():
        name = rows["matrix"][~(rows["n"] > 0)].iloc[0]
        raise QscaleError(f"matrix {name} has n at or under zero; it must count its weights.")
    if not (math.isfinite(bits_per_weight) and bits_per_weight > 0):
        raise QscaleError(f"bits_per_weight must be above zero. Got {bits_per_weight:g} instead.")
    sizes = rows.drop_duplicates("matrix")["n"].sum()
    budget = math.floor(bits_per_weight * sizes + 1e-6)
    least = int(rows.groupby("matrix")["stored"].min().sum())
    if least > budget:
        raise QscaleError(
            f"no mix has {bits_per_weight:g} bits per weight: the smallest settings take "
            f"{least / sizes:.4g}. Allow more, or add a table of a smaller setting."
        )
    relaxed = _solve(rows, budget, whole=False)
    taken, proven = _within(rows, budget)
    choices = rows[taken].reset_index(drop=True)
    total = float(choices["cost"].sum())
    return Allocation(
        choices=choices[["matrix", "n", "spec", "bits_per_weight", "cost", "cost_se"]],
        cost=total,
        cost_se=float(choices["cost_se"].sum()),
        bits_per_weight=float(choices["stored"].sum() / sizes),
        bound=min(float(relaxed.fun) / _scale(rows), total),
        proven=min(proven, total),
        uniform=_uniform(rows),
    )


def _candidates(table: pd.DataFrame, cost: str, or_none: bool) -> pd.DataFrame:
    """Check the table and return one row for each matrix and setting, sizes in whole bits."""
    require(table, ["matrix", "spec"], "sensitivity table")
    require_numbers(table, ["n", "bits_per_weight", cost], "sensitivity table")
    for column in ("checkpoint", "protocol"):
        if column in table.columns and len(table[column].unique()) > 1:
            raise TableError(
                f"sensitivity table: column {column!r} has several values "
                f"({', '.join(map(str, table[column].unique()[:3]))}); give tables of one."
            )
    twice = table.duplicated(["matrix", "spec"]).to_numpy()
    if twice.any():
        row = table.iloc[int(twice.argmax())]
        raise TableError(f"sensitivity table: {row['matrix']} has two rows for {row['spec']}.")
    costs = table[cost].to_numpy(dtype=float)
    if not np.isfinite(costs).all():
        row = table.iloc[int(np.argmin(np.isfinite(costs)))]
        raise TableError(f"sensitivity table: {row['matrix']} has no {cost} for {row['spec']}.")
    rows = table[["matrix", "n", "spec", "bits_per_weight"]].assign(cost=costs)
    rows["cost_se"] = table[f"{cost}_se"].fillna(0.0) if f"{cost}_se" in table.columns else 0.0
    if or_none:
        whole = rows.drop_duplicates("matrix").assign(
            spec=NONE, bits_per_weight=float(FULL_BITS), cost=0.0, cost_se=0.0
        )
        rows = pd.concat([rows, whole])
    rows["stored"] = np.rint(rows["bits_per_weight"] * rows["n"]).astype(np.int64)
    order = rows["matrix"].map({name: i for i, name in enumerate(rows["matrix"].unique())})
    return rows.assign(_order=order).sort_values("_order", kind="stable", ignore_index=True)


def _scale(rows: pd.DataFrame) -> float:
    """Factor on costs that takes the solver's absolute tolerances far below all that counts."""
    return _LARGEST / max(float(rows["cost"].abs().sum()), 1e-300)


def _solve(rows: pd.DataFrame, budget: int, *, whole: bool) -> OptimizeResult:
    """Solve the knapsack, or its linear relaxation, in scaled costs."""
    codes, names = pd.factorize(rows["matrix"])
    one = sparse.csr_array((np.ones(len(rows)), (codes, np.arange(len(rows)))))
    size = rows["stored"].to_numpy(dtype=float) / budget
    found = milp(
        rows["cost"].to_numpy() * _scale(rows),
        integrality=np.full(len(rows), int(whole)),
        bounds=Bounds(0, 1),
        constraints=[
            LinearConstraint(one, np.ones(len(names)), np.ones(len(names))),
            LinearConstraint(size[None], -np.inf, 1.0),
        ],
        options={"mip_rel_gap": 0.0, "time_limit": _SECONDS},
    )
    if found.x is None:
        raise QscaleError(f"the solver found no mix within {_SECONDS:g} seconds: {found.message}")
    return found


def _within(rows: pd.DataFrame, budget: int) -> tuple[Array, float]:
    """Solve in whole bits: what the solver's tolerance lets through is taken off the budget.

    Returns the mask of chosen rows and a lower bound of the cost, from the first, loosest solve.
    """
    stored, cut, proven = rows["stored"].to_numpy(), budget, math.nan
    for _ in range(20):
        found = _solve(rows, cut, whole=True)
        taken = found.x > 0.5
        if math.isnan(proven):
            proven = float(found.mip_dual_bound) / _scale(rows)
        excess = int(stored[taken].sum()) - budget
        if excess <= 0:
            return taken, proven
        cut -= excess
    raise QscaleError("the solver does not keep to the budget; change --bits-per-weight a little.")


def _uniform(rows: pd.DataFrame) -> pd.DataFrame:
    """Cost and size of each setting that every matrix has, the smallest first."""
    by = rows.groupby("spec", sort=False)
    found = pd.DataFrame(
        {
            "matrices": by["matrix"].count(),
            "bits_per_weight": by["stored"].sum() / by["n"].sum(),
            "cost": by["cost"].sum(),
        }
    ).reset_index()
    found = found[found["matrices"] == rows["matrix"].nunique()].drop(columns="matrices")
    return found.sort_values("bits_per_weight", ignore_index=True)
