"""Mixes under a budget: exact against enumeration, bounds, and what the table must be."""

import itertools
import time

import numpy as np
import pandas as pd
import pytest

from qscale.errors import QscaleError, TableError
from qscale.plan.mix import FULL_BITS, allocate


def simulated(matrices: int, bits=(2, 3, 4), seed: int = 0) -> pd.DataFrame:
    """Costs that fall fourfold with each bit, matrices of different size and sensitivity."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(matrices):
        n, scale = 64 * int(rng.integers(4, 64)), 10 ** rng.uniform(-4, -1)
        for b in bits:
            cost = scale * 4.0**-b * np.exp(rng.normal(0, 0.2))
            rows.append((f"m{i}", n, f"rtn int{b} g64", b + 16 / 64, cost, 0.1 * cost))
    names = ("matrix", "n", "spec", "bits_per_weight", "gauss_newton_delta",
             "gauss_newton_delta_se")  # fmt: skip
    return pd.DataFrame(rows, columns=names)


def best(table: pd.DataFrame, budget: float) -> float:
    """Try every mix."""
    groups = [rows for _, rows in table.groupby("matrix")]
    total = sum(rows["n"].iloc[0] for rows in groups)
    costs = []
    for places in itertools.product(*(range(len(rows)) for rows in groups)):
        chosen = [rows.iloc[i] for rows, i in zip(groups, places, strict=True)]
        if sum(r["n"] * r["bits_per_weight"] for r in chosen) <= budget * total + 1e-6:
            costs.append(sum(r["gauss_newton_delta"] for r in chosen))
    return min(costs)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("budget", [2.3, 2.9, 3.4, 4.25])
def test_the_mix_is_the_best_of_all(seed, budget) -> None:
    table = simulated(6, seed=seed)
    found = allocate(table, budget)
    assert found.cost == pytest.approx(best(table, budget), rel=1e-12)
    assert found.bits_per_weight <= budget + 1e-12
    assert found.exact
    assert found.bound <= found.proven <= found.cost
    assert found.choices["matrix"].tolist() == [f"m{i}" for i in range(6)]
    assert found.cost_se == pytest.approx(0.1 * found.cost)


def test_a_large_table_is_solved_in_seconds_and_beats_uniform_bits() -> None:
    table = simulated(300, (2, 3, 4, 5, 6, 8), seed=5)
    since = time.perf_counter()
    found = allocate(table, 4.25)
    assert time.perf_counter() - since < 30
    assert found.exact
    assert found.cost - found.bound < 0.01 * found.cost
    uniform = found.uniform.set_index("spec")["cost"]["rtn int4 g64"]
    assert found.cost < 0.8 * uniform
    sizes = found.choices["n"] * found.choices["bits_per_weight"]
    assert sizes.sum() <= 4.25 * found.choices["n"].sum() + 1e-6


def test_a_matrix_may_be_left_as_it_is() -> None:
    table = simulated(5, seed=1)
    table.loc[table["matrix"] == "m0", "gauss_newton_delta"] += 10.0
    budget = (FULL_BITS * table["n"][0] + 2.25 * table.drop_duplicates("matrix")["n"][1:].sum()) / (
        table.drop_duplicates("matrix")["n"].sum()
    )
    found = allocate(table, budget, or_none=True)
    assert found.choices["spec"][0] == "none"
    assert found.cost < 10 < allocate(table, budget).cost


def test_other_costs_and_missing_candidates() -> None:
    table = simulated(4).assign(kl=lambda t: -t["bits_per_weight"])
    table = table[~((table["matrix"] == "m1") & (table["spec"] == "rtn int4 g64"))]
    found = allocate(table, 4.25, cost="kl")
    assert found.choices["spec"].tolist() == [
        "rtn int4 g64",
        "rtn int3 g64",
        "rtn int4 g64",
        "rtn int4 g64",
    ]
    assert found.cost_se == 0.0
    assert "rtn int4 g64" not in found.uniform["spec"].tolist()


@pytest.mark.parametrize(
    ("change", "budget", "error", "message"),
    [
        (lambda t: t, 2.0, QscaleError, "the smallest settings take 2.25"),
        (lambda t: t, np.nan, QscaleError, "must be above zero"),
        (lambda t: pd.concat([t, t[:1]]), 3.0, TableError, "m0 has two rows for rtn int2 g64"),
        (lambda t: t.assign(gauss_newton_delta=np.inf), 3.0, TableError, "no gauss_newton_delta"),
        (lambda t: t.drop(columns="n"), 3.0, TableError, "no column 'n'"),
        (lambda t: t.assign(protocol=np.arange(len(t))), 3.0, TableError, "'protocol' has several"),
    ],
)
def test_tables_that_cannot_be_used(change, budget, error, message) -> None:
    with pytest.raises(error, match=message):
        allocate(change(simulated(3)), budget)


@pytest.mark.slow
def test_predicted_costs_of_mixes_are_those_measured() -> None:
    from tests.test_examples import load  # noqa: PLC0415

    load("error_growth")
    for one in load("plan_mix").study(max_windows=32):
        assert one.found.exact
        kl, uniform = one.measured["kl"], one.of_uniform["kl"]
        assert kl < 1.1 * uniform, one.budget
        if one.budget > 3:  # below, the loss is far from quadratic
            assert abs(np.log(one.found.cost / kl)) < 0.35, one.budget
        if one.budget > 4:
            assert kl < uniform
