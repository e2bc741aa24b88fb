"""Diagnostics appear when their condition holds and say what to do."""

import numpy as np
import pandas as pd
import pytest

from qscale.fit import fit
from qscale.laws import get
from qscale.report.cautions import cautions
from qscale.report.diagnostics import influence, influence_in_words, uneven_scatter
from qscale.report.evidence import gather, refitter
from tests.simulations import simulate


def evidence(frame: pd.DataFrame):
    return gather("x", fit(frame, get("ouyang"), n_boot=0), frame)


def spread(frame: pd.DataFrame, power: float) -> pd.DataFrame:
    """Rows with further noise that grows with a power of the size."""
    size = (frame["n_params"] / frame["n_params"].min()) ** power
    noise = np.random.default_rng(4).normal(0, 0.02, len(frame)) * size
    return frame.assign(delta_loss=frame["delta_loss"] * np.exp(noise))


@pytest.mark.parametrize(("power", "uneven"), [(0.7, True), (0.0, False)])
def test_scatter_that_grows_with_a_column(power, uneven) -> None:
    each = evidence(spread(simulate(runs=40, between=0.0, within=0.01), power))
    said = uneven_scatter(each)
    assert (said is not None) is uneven
    if uneven:
        assert "more at high n_params" in said
        assert "too narrow at high n_params" in said
        assert "--interval conformal" in said
        assert cautions(each, {})["uneven_scatter"] == said


def test_influence_is_what_leaving_a_run_out_does() -> None:
    frame = simulate(runs=12, between=0.05, within=0.02)
    # The largest run loses far more than the law says: it pulls the exponent of size.
    largest = frame["run"][frame["n_params"].idxmax()]
    frame.loc[frame["run"] == largest, "delta_loss"] *= 3
    each = evidence(frame)
    refit = refitter(each)
    table = influence(each, refit)
    rows = each.rows[each.rows["run"] != largest]
    assert refit(rows) is refit(rows.copy())  # what was left out once is not fitted again
    assert set(table.index) == set(frame["run"])
    assert table.index[0] == largest
    again = fit(frame[frame["run"] != largest], get("ouyang"), n_boot=0)
    se = np.sqrt(np.diag(each.fit.cov))
    expected = dict(zip(again.law.names, (again.theta - each.fit.theta) / se, strict=True))
    for name, move in table.iloc[0].items():
        assert move == pytest.approx(expected[name], rel=1e-4, abs=1e-6)


def test_influence_in_words_says_whether_one_run_decides() -> None:
    table = pd.DataFrame({"k": [0.1, 0.0], "alpha": [-2.5, 0.3]}, index=["a", "b"])
    table = table.rename_axis("run")
    said = influence_in_words(table)
    assert "Left out, a moves the estimates most: alpha by 2.5 standard errors down." in said
    assert "with and without it" in said
    assert "No single run decides" in influence_in_words(table / 2)


@pytest.mark.parametrize("runs", [3, 40])
def test_too_few_or_too_many_clusters_have_no_table(runs) -> None:
    each = evidence(simulate(runs=runs))
    assert influence(each, refitter(each)) is None
