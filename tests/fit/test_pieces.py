"""What clusters contribute to the estimating equations, and labels of many groups."""

import numpy as np
import pandas as pd
import pytest
from scipy import sparse

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
