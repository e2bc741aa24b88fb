"""What clusters contribute to the estimating equations, and labels of many groups."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy import sparse

from qscale.fit import mixed
from qscale.fit.grouping import parse, with_levels
from qscale.fit.intervals import pieces
from qscale.fit.likelihood import Rows
from qscale.fit.mixed import Model, estimate

CLUSTERS = np.arange(60) // 5


@pytest.mark.parametrize("terms", [["cluster"], ["half"], ["cluster", "half"], []])
def test_pieces_are_those_of_generalised_least_squares(terms) -> None:
    rng = np.random.default_rng(0)
    x = np.column_stack([np.ones(60), rng.normal(size=60)])
    codes = {"cluster": CLUSTERS, "half": CLUSTERS * 2 + np.arange(60) % 2}
    blocks = [np.eye(codes[t].max() + 1)[codes[t]] * rng.uniform(0.5, 2, (60, 1)) for t in terms]
    z = np.hstack(blocks) if blocks else np.zeros((60, 0))
    y = x @ [1.0, 2.0] + z @ rng.normal(size=z.shape[1]) + 0.3 * rng.normal(size=60)
    model = Model(
        value=lambda theta: x @ theta,
        gradient=lambda _: x,
        low=np.full(2, -99.0),
        high=np.full(2, 99.0),
        effects=sparse.csr_array(z),
        sizes=tuple(block.shape[1] for block in blocks),
        rows=Rows(y, np.zeros(60, dtype=int), np.zeros(60), "gaussian"),
    )
    fitted = estimate(model, np.array([1.0, 2.0]), 0.3)
    found = pieces(model, fitted, CLUSTERS)
    spread = np.repeat(fitted.variances, model.sizes)
    for g in range(12):
        rows = g == CLUSTERS
        v = (z[rows] * spread) @ z[rows].T + fitted.sigma**2 * np.eye(5)
        np.testing.assert_allclose(
            found.information[g], x[rows].T @ np.linalg.solve(v, x[rows]), rtol=1e-8
        )
        residual = y[rows] - x[rows] @ fitted.theta
        score = x[rows].T @ np.linalg.solve(v, residual)
        np.testing.assert_allclose(found.score[g], score, atol=1e-6 * np.abs(found.score).max())


def test_long_identifiers_stay_apart_and_numbers_have_one_label() -> None:
    frame = pd.DataFrame({"run": [1234567, 1234568, 1234568], "bits": [2.0, 2.5, np.nan]})
    assert parse("run").labels(frame).tolist() == ["1234567", "1234568", "1234568"]
    assert parse("bits").labels(frame).tolist() == ["2", "2.5", "unnamed 1"]
    term = with_levels(parse("bits"), frame.assign(bits=[2, 3, 3]))
    np.testing.assert_array_equal(term.design(frame).toarray(), [[1, 0], [0, 0], [0, 0]])


def test_a_wild_trial_of_the_scales_does_not_move_where_the_search_ends(monkeypatch) -> None:
    # Under a variance of a million, the effects explain any parameters of their clusters equally
    # well; Huber rows then hold parameters that have wandered off to a bound.
    rng = np.random.default_rng(0)
    between = np.repeat(rng.normal(size=(12, 2)), 5, axis=0)
    x = np.column_stack([np.ones(60), between, rng.normal(size=60)])
    y = x @ [1.0, 2.0, -1.0, 0.5] + 0.1 * rng.normal(size=12)[CLUSTERS] + rng.normal(0, 0.3, 60)
    model = Model(
        value=lambda theta: x @ theta,
        gradient=lambda _: x,
        low=np.full(4, -30.0),
        high=np.full(4, 30.0),
        effects=sparse.csr_array(np.eye(12)[CLUSTERS]),
        sizes=(12,),
        rows=Rows(y, np.zeros(60, dtype=int), np.zeros(60), "huber"),
    )
    start = np.array([1.0, 2.0, -1.0, 0.5])
    calm = estimate(model, start, 0.3)
    far, starts = np.array([-30.0, 30.0, -30.0, 0.5]), []
    found, real = mixed.find_mode, mixed.minimize

    def lost(*args):
        return replace(found(*args), theta=far, criterion=1e6)

    def watched(model, scales, theta, *rest):
        starts.append(theta)
        return found(model, scales, theta, *rest)

    def wild(criterion, point, **options):
        monkeypatch.setattr(mixed, "find_mode", watched)
        criterion(point)
        monkeypatch.setattr(mixed, "find_mode", lost)
        criterion(np.array([point[0] + 30.0, 1e3 * point[1]]))
        monkeypatch.setattr(mixed, "find_mode", watched)
        return real(criterion, point, **options)

    monkeypatch.setattr(mixed, "minimize", wild)
    again = estimate(model, start, 0.3)
    assert len(starts) > 10
    assert not any(np.array_equal(theta, far) for theta in starts)
    assert again.converged
    np.testing.assert_allclose(again.theta, calm.theta, rtol=1e-5)
    assert again.sigma == pytest.approx(calm.sigma, rel=1e-4)


def test_a_search_that_never_settles_is_no_convergence(monkeypatch) -> None:
    x = np.column_stack([np.ones(60), np.arange(60.0)])
    rows = Rows(x @ [1.0, 2.0] + np.sin(np.arange(60)), np.zeros(60, int), np.zeros(60), "gaussian")
    bounds = np.full(2, -99.0), np.full(2, 99.0)
    effects = sparse.csr_array(np.eye(12)[CLUSTERS])
    model = Model(lambda theta: x @ theta, lambda _: x, *bounds, effects, (12,), rows)
    found = mixed.find_mode
    monkeypatch.setattr(mixed, "find_mode", lambda *a, **k: replace(found(*a, **k), settled=False))
    assert not estimate(model, np.array([1.0, 2.0]), 1.0).converged
