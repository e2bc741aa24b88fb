"""Further fits of a report: other losses, runs left out, and exponents within runs."""

import numpy as np
import pytest

from qscale.fit import fit
from qscale.laws import get
from qscale.report.checks import sensitivity, surprising
from qscale.report.evidence import gather, refitter
from qscale.select import exponents_within
from tests.simulations import TRUE, simulate


def test_sensitivity_lists_the_fits_under_other_losses() -> None:
    frame = simulate()
    frame.loc[0, "delta_loss"] *= 20.0  # one wild row pulls the Gaussian fit most
    each = gather("x", fit(frame, get("ouyang")), frame)
    table = sensitivity(each)
    for label, options in (
        ("Gaussian", {"likelihood": "gaussian"}),
        ("Huber, δ × 0.5", {"huber_delta": 0.5 * each.fit.search.huber_delta}),
    ):
        expected = fit(frame, get("ouyang"), interval="model", **options).values
        assert table[label].to_dict() == pytest.approx(expected)
    off = (table.loc["gamma"] - TRUE["gamma"]).abs()
    assert off["Gaussian"] > 2 * off["Student's t"]


def found(frame):
    each = gather("x", fit(frame, get("ouyang")), frame)
    return surprising(each, refitter(each))


def test_a_run_with_a_mistaken_record_comes_first() -> None:
    frame = simulate(runs=12, between=0.05)
    frame.loc[frame["run"] == "run3", "delta_loss"] *= 3.0
    table = found(frame)
    assert table["cluster"][0] == "run3"
    assert table["log_ratio"][0] == pytest.approx(np.log(3.0), abs=0.2)
    assert table["p_holm"][0] < 0.01
    assert (table["p_holm"][1:] > 0.1).all()


def test_too_many_runs_are_not_left_out_one_by_one() -> None:
    frame = simulate(runs=31)
    assert found(frame) is None


def test_exponents_within_runs_are_those_of_their_part_of_the_schedule() -> None:
    tokens = np.geomspace(1e10, 1e12, 12)
    frame = simulate(runs=2).iloc[:0].reindex(range(24))
    frame["run"], frame["bits"] = "a", 4.0
    frame["tokens"] = np.tile(tokens, 2)
    frame["lr_peak"] = 1e-3
    frame["lr"] = np.repeat([1e-3, 0.0], 12)
    frame["delta_loss"] = frame["tokens"] ** np.repeat([0.1, 0.04], 12)
    table = exponents_within(frame, "delta_loss").set_index("part")["exponent"]
    assert table.to_dict() == pytest.approx({"after decay": 0.04, "constant rate": 0.1})
