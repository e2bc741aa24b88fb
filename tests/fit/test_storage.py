"""Fits are read back as they were, also where a number is not finite, which JSON does not have."""

import numpy as np
import pytest

from qscale.fit import fit, load
from qscale.laws import get
from tests.simulations import simulate


@pytest.mark.parametrize(
    "options",
    [
        {"likelihood": "gaussian", "interval": "model"},
        {"interval": "profile", "fixed": {"gamma": 5.0}},
    ],
    ids=["least squares has no delta", "a fixed parameter has no profile"],
)
def test_numbers_that_are_not_finite_survive(tmp_path, options) -> None:
    made = fit(simulate(), get("ouyang"), **options)
    made.save(tmp_path / "fit.json")
    again = load(tmp_path / "fit.json")
    assert again.search == made.search
    np.testing.assert_array_equal(again.theta, made.theta)
    if made.profiles is not None:
        assert np.isnan(made.profiles).any()
        np.testing.assert_allclose(again.profiles, made.profiles, rtol=1e-9)
