"""Round-to-nearest against an independent search over the grid, and its properties."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from qscale.errors import QscaleError
from qscale.quantize.format import (
    ABSMAX_FULL,
    ABSMAX_RESTRICTED,
    MINMAX,
    Format,
)
from qscale.quantize.rtn import rtn

SCALE_RULES = (ABSMAX_RESTRICTED, ABSMAX_FULL, MINMAX)
FORMATS = [
    Format("int", bits, group, rule)
    for bits, group, rule in itertools.product(range(2, 9), (None, 3, 4, 100), SCALE_RULES)
]
finite = st.floats(-(2.0**60), 2.0**60, width=32)
matrices = hnp.arrays(
    np.float32, hnp.array_shapes(min_dims=2, max_dims=2, max_side=9), elements=finite
)


def step_of(group: np.ndarray, fmt: Format) -> float:
    """Step between levels, from the formula that names the rule."""
    b = fmt.bits
    absmax, spread = np.abs(group).max(), max(group.max(), 0) - min(group.min(), 0)
    return {
        ABSMAX_RESTRICTED: absmax / (2 ** (b - 1) - 1),
        ABSMAX_FULL: absmax / ((2**b - 1) / 2),
        MINMAX: spread / (2**b - 1),
    }[fmt.scale_rule]


def grid_of(group: np.ndarray, fmt: Format) -> np.ndarray:
    """All levels of a group in float64."""
    b, step = fmt.bits, step_of(group, fmt)
    if fmt.scale_rule == ABSMAX_RESTRICTED:
        return step * np.arange(-(2 ** (b - 1)) + 1, 2 ** (b - 1))
    if fmt.scale_rule == ABSMAX_FULL:
        return step * np.arange(-(2 ** (b - 1)), 2 ** (b - 1))
    zero = np.rint(-min(group.min(), 0) / step) if step else 0
    return step * (np.arange(2**b) - zero)


def groups_of(weight: np.ndarray, fmt: Format):
    size = fmt.group_size or weight.shape[1]
    for row, start in itertools.product(range(len(weight)), range(0, weight.shape[1], size)):
        yield row, slice(start, start + size)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_every_element_goes_to_the_nearest_level_of_its_group(fmt):
    weight = np.random.default_rng(0).standard_t(4, (5, 10)).astype(np.float32)
    rounded = rtn(torch.from_numpy(weight), fmt).numpy()
    assert rounded.dtype == np.float32
    for row, part in groups_of(weight, fmt):
        group = weight[row, part].astype(np.float64)
        levels = grid_of(group, fmt)
        nearest = levels[np.abs(group[:, None] - levels).argmin(axis=1)]
        # Where the largest value lies midway between two levels or beyond them, either may do.
        distance = np.abs(group - rounded[row, part])
        np.testing.assert_allclose(distance, np.abs(group - nearest), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(
            np.abs(levels[:, None] - rounded[row, part]).min(axis=0), 0, atol=1e-5
        )


def test_by_hand():
    weight = torch.tensor([[0.0, 0.4, -1.0, 1.0]])
    for rule, expected in {
        ABSMAX_RESTRICTED: [0.0, 0.0, -1.0, 1.0],  # step 1, levels -1 0 1
        ABSMAX_FULL: [0.0, 2 / 3, -4 / 3, 2 / 3],  # step 2/3, levels -4/3 -2/3 0 2/3; ties to even
        MINMAX: [0.0, 2 / 3, -4 / 3, 2 / 3],  # step 2/3, zero point 2, levels -4/3 -2/3 0 2/3
    }.items():
        torch.testing.assert_close(
            rtn(weight, Format("int", 2, None, rule)), torch.tensor([expected])
        )
    weight = torch.tensor([[0.0, 0.6, 3.0, 1.6]])
    torch.testing.assert_close(
        rtn(weight, Format("int", 2, None, MINMAX)), torch.tensor([[0.0, 1.0, 3.0, 2.0]])
    )


def test_last_group_is_shorter_and_the_others_are_untouched_by_it():
    weight = torch.from_numpy(np.random.default_rng(1).normal(size=(4, 10)).astype(np.float32))
    for rule in SCALE_RULES:
        whole = rtn(weight, Format("int", 3, 4, rule))
        parts = [rtn(weight[:, i : i + 4], Format("int", 3, None, rule)) for i in (0, 4, 8)]
        assert torch.equal(whole, torch.cat(parts, dim=1))


@given(weight=matrices, fmt=st.sampled_from(FORMATS))
@settings(max_examples=300, deadline=None)
def test_error_is_at_most_half_a_step(weight, fmt):
    rounded = rtn(torch.from_numpy(weight), fmt).numpy()
    assert np.isfinite(rounded).all()
    for row, part in groups_of(weight, fmt):
        group = weight[row, part]
        step = step_of(group.astype(np.float64), fmt)
        # An integer zero point shifts the min-max grid by up to half a step, which the ends of the
        # range pay for.
        allowed = step * (1.0 if fmt.scale_rule == MINMAX else 0.5)
        error = np.abs(group.astype(np.float64) - rounded[row, part]).max()
        assert error <= allowed * (1 + 1e-4) + 2.0**-140


@given(weight=matrices, fmt=st.sampled_from(FORMATS), power=st.integers(-20, 20))
@settings(max_examples=200, deadline=None)
def test_scaling_by_a_power_of_two_commutes_to_the_bit(weight, fmt, power):
    weight = np.where(np.abs(weight) < 2.0**-60, 0, weight)  # away from underflow
    scaled = rtn(torch.from_numpy(weight * np.float32(2.0**power)), fmt)
    assert torch.equal(scaled, rtn(torch.from_numpy(weight), fmt) * 2.0**power)


@given(weight=matrices, bits=st.integers(2, 8), size=st.sampled_from([None, 2, 5]))
@settings(max_examples=200, deadline=None)
def test_restricted_rule_is_odd_and_idempotent(weight, bits, size):
    fmt, x = Format("int", bits, size, ABSMAX_RESTRICTED), torch.from_numpy(weight)
    once = rtn(x, fmt)
    assert torch.equal(rtn(-x, fmt), -once)
    torch.testing.assert_close(rtn(once, fmt), once, rtol=1e-6, atol=2.0**-140)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_extreme_values_stay_finite_and_zeros_stay_zero(fmt):
    zero = torch.zeros(2, 5)
    assert torch.equal(rtn(zero, fmt), zero)
    for value in (1e-45, 1e-38, 1e37):
        weight = torch.tensor([[value, -value, 0.0, value / 3, 0.0]])
        rounded = rtn(weight, fmt)
        assert torch.isfinite(rounded).all()
        assert rounded[0, 2] == 0
    constant = torch.full((1, 4), 0.7)
    torch.testing.assert_close(
        rtn(constant, Format("int", fmt.bits, None, ABSMAX_RESTRICTED)), constant
    )
    torch.testing.assert_close(rtn(constant, Format("int", fmt.bits, None, MINMAX)), constant)


def test_a_group_that_is_not_finite_does_not_spoil_its_neighbours():
    weight = torch.tensor([[1.0, 2.0, float("nan"), 1.0]])
    rounded = rtn(weight, Format("int", 4, 2))
    assert torch.equal(torch.isfinite(rounded), torch.tensor([[True, True, False, False]]))


def test_weight_is_not_modified():
    weight = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
    before = weight.clone()
    rtn(weight, Format("int", 2, 4))
    assert torch.equal(weight, before)


def test_noise_of_a_fine_grid_is_that_of_a_uniform_error():
    """Bennett's approximation (Bell Syst. Tech. J. 27, 1948): mean square error step^2 / 12."""
    weight = torch.rand(64, 4096, generator=torch.Generator().manual_seed(0)) * 2 - 1
    for rule in SCALE_RULES:
        fmt = Format("int", 6, None, rule)
        step = np.mean([step_of(row.numpy(), fmt) for row in weight])
        error = float((weight - rtn(weight, fmt)).double().square().mean())
        assert error == pytest.approx(step**2 / 12, rel=0.03)


def test_bits_per_weight_counts_scales_and_zero_points():
    assert Format("int", 4, 128).bits_per_weight([(7, 256)]) == 4 + 16 / 128
    assert Format("int", 4, 128, MINMAX).bits_per_weight([(7, 256)]) == 4 + (16 + 4) / 128
    assert Format("int", 3).bits_per_weight([(5, 100)]) == 3 + 16 / 100
    # 100 = 64 + 36 takes two scales a row
    assert Format("int", 3, 64).bits_per_weight([(5, 100)]) == 3 + 2 * 16 / 100
    assert Format("int", 3, 640).bits_per_weight([(5, 100)]) == Format("int", 3).bits_per_weight(
        [(5, 100)]
    )
    mixed = Format("int", 8, 10).bits_per_weight([(1, 10), (3, 30)])
    assert mixed == pytest.approx((10 * 8 + 16 + 90 * 8 + 9 * 16) / 100)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bits": 9}, r"bits must be an integer from 2 to 8\. Got 9 instead"),
        ({"bits": 3.5}, r"bits must be an integer from 2 to 8\. Got 3\.5 instead"),
        ({"bits": 4, "group_size": 0}, "group_size must be at least 1, or row"),
        (
            {"bits": 4, "scale_rule": "best"},
            "scale_rule of int must be one of .* Got 'best' instead",
        ),
        ({"fmt": "nf5", "bits": 4}, "fmt must be one of int"),
    ],
)
def test_impossible_settings(arguments, message):
    with pytest.raises(QscaleError, match=message):
        Format(**{"fmt": "int"} | arguments)


def test_columns_are_those_of_the_table():
    from qscale.table import COLUMNS  # noqa: PLC0415

    columns = Format("int", 3, 64, MINMAX).columns()
    assert set(columns) <= set(COLUMNS)
    assert columns["symmetric"] is False
    assert Format("int", 3).columns()["group_size"] is None
    assert math.isclose(float(str(columns["bits"])), 3)
