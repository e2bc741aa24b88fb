"""Round-to-nearest against an independent search over the grid, and its properties."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from qscale.quantize import rtn as module
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


ABSMAX = ("int2", "int3 g4", "int8 g5", "int4 tensor", "int3 signed g4", "fp8", "fp8 g4", "nf4 g4")
POWERS = (
    "mxint2 g4",
    "mxint3 g5",
    "mxint8 g4",
    "mxfp4 g4",
    "mxfp4 even g4",
    "mxfp8 g4",
    "mxfp8 even g4",
)
OTHERS = ("int2 full", "int4 full g4", "int8 tensor full", "int2 asym", "int4 asym g4", "nvfp4")
CLIPPED = ("int3 mse", "int2 asym g4 mse", "mxfp4 g4 mse", "nvfp4 mse", "fp8 tensor mse", "nf4 mse")
SPECS = (*ABSMAX, *POWERS, *OTHERS)
ODD = ("int2", "int3 g4", "int8 g5", "int4 tensor", "fp8", "fp8 g4", *POWERS, "nvfp4")
WIDE = st.floats(-(2.0**127), 2.0**127, width=32)


def groups_apart(weight: np.ndarray, fmt: Format) -> np.ndarray:
    """For every element the largest magnitude of its group."""
    out = np.full_like(weight, np.abs(weight).max())
    if not fmt.per_tensor:
        for row, part in groups_of(weight, fmt):
            out[row, part] = np.abs(weight[row, part]).max()
    return out.astype(np.float64)


def largest_error(weight: np.ndarray, fmt: Format) -> np.ndarray:
    """Half a step at each element, or what is cut off where the rule does that."""
    absmax, b = groups_apart(weight, fmt), fmt.bits
    binade = np.exp2(np.floor(np.log2(np.where(absmax == 0, 1, absmax))))
    size = np.abs(weight.astype(np.float64))
    if fmt.fmt == "int":
        return {
            "absmax/(2^(b-1)-1)": absmax / (2 ** (b - 1) - 1) / 2,
            "absmax/((2^b-1)/2)": absmax / (2**b - 1),
            # The positive end of a group whose largest value is negative is a step short.
            "signed absmax/-2^(b-1)": absmax / 2 ** (b - 1),
            # An integer zero point shifts the levels by up to half a step; the ends pay for it.
            "(max-min)/(2^b-1)": 2 * absmax / (2**b - 1),
        }[fmt.scale_rule]
    if fmt.fmt == "mxint":  # the last half step below the next power of two is cut off
        return binade / 2 ** (b - 2)
    if fmt.fmt == "nf4":
        return absmax * (1 - 0.6961928) / 2  # the widest gap
    # Relative half steps of 1 and of 3 bits of mantissa, and halves of the smallest level. E4M3
    # ends at 7/4, so that a power of two as scale cuts off up to an eighth.
    return {
        "mxfp4": np.maximum(size / 4, binade / 4 / 4 * 2),
        "nvfp4": np.maximum(size / 4, absmax / 6 / 4 * (1 + 1 / 16)),
        "mxfp8": np.maximum(size / 8, binade / 2**8 / 2**10 * 2),
        "fp8_e4m3": np.maximum(size / 16, absmax / 448 / 2**10),
    }[fmt.fmt]


def away_from_underflow(weight: np.ndarray, least: float = 2.0**-40) -> torch.Tensor:
    return torch.from_numpy(np.where(np.abs(weight) < least, 0, weight).astype(np.float32))


@given(weight=matrices, spec=st.sampled_from(SPECS))
@settings(max_examples=200, deadline=None)
def test_error_is_at_most_half_a_step_and_what_is_cut_off(weight, spec):
    fmt = Format.parse(spec)
    if spec == "nvfp4":  # within the range of normal E4M3 scales
        weight = np.where(np.abs(weight) < np.abs(weight).max() * 2.0**-12, 0, weight)
    weight = away_from_underflow(weight)
    rounded = rtn(weight, fmt).numpy().astype(np.float64)
    allowed = largest_error(weight.numpy(), fmt) * (1 + 5e-5)
    assert (np.abs(weight.numpy() - rounded) <= allowed).all()


@given(weight=matrices, spec=st.sampled_from((*SPECS, *CLIPPED)), power=st.integers(-20, 20))
@settings(max_examples=200, deadline=None)
def test_scaling_by_a_power_of_two_commutes_to_the_bit(weight, spec, power):
    weight, fmt = away_from_underflow(np.clip(weight, -(2.0**30), 2.0**30)), Format.parse(spec)
    assert torch.equal(rtn(weight * 2.0**power, fmt), rtn(weight, fmt) * 2.0**power)


@given(weight=matrices, spec=st.sampled_from(ODD))
@settings(max_examples=200, deadline=None)
def test_formats_whose_levels_are_symmetric_are_odd(weight, spec):
    weight, fmt = torch.from_numpy(weight), Format.parse(spec)
    assert torch.equal(rtn(-weight, fmt), -rtn(weight, fmt))


def test_signed_levels_turn_with_the_weights_but_for_ties():
    weight = torch.from_numpy(np.random.default_rng(3).normal(size=(40, 30)).astype(np.float32))
    fmt = Format.parse("int3 signed")
    assert torch.equal(rtn(-weight, fmt), -rtn(weight, fmt))
    tie = torch.tensor([[1.0, -1.0]])
    assert rtn(tie, fmt).tolist() == rtn(-tie, fmt).flip(1).tolist() == [[1.0, -0.75]]
    skew = torch.tensor([[1.0, -1.0, 0.5]])
    assert not torch.equal(
        rtn(-skew, Format.parse("int2 full")), -rtn(skew, Format.parse("int2 full"))
    )


@given(weight=matrices, spec=st.sampled_from((*ABSMAX, *POWERS)))
@settings(max_examples=200, deadline=None)
def test_rounding_twice_is_rounding_once_to_the_bit(weight, spec):
    """The largest value becomes a level that gives the same step again.

    For a step ``s = fl(m / n)`` that holds to the bit: ``fl(n s)`` is no farther from ``n s`` than
    ``m`` is, and all that near to it gives ``s``.
    """
    fmt = Format.parse(spec)
    once = rtn(away_from_underflow(weight), fmt)
    assert torch.equal(rtn(once, fmt), once)


@pytest.mark.parametrize("spec", ["int2 asym", "int4 asym g16", "int8 asym tensor", "nvfp4"])
def test_rounding_twice_is_rounding_once_to_the_last_place_where_two_numbers_make_the_step(spec):
    fmt = Format.parse(spec)
    for seed in range(10):
        weight = np.random.default_rng(seed).normal(size=(16, 64)).astype(np.float32)
        once = rtn(torch.from_numpy(weight), fmt)
        torch.testing.assert_close(rtn(once, fmt), once, rtol=1e-6, atol=0)


def test_where_rounding_twice_goes_on():
    """The largest value is no level: the full rule shrinks, and a tied zero point loses an end."""
    weight = torch.tensor([[1.0, 0.0, -0.5]])
    once = rtn(weight, Format.parse("int2 full"))
    torch.testing.assert_close(once, torch.tensor([[2 / 3, 0.0, -2 / 3]]))
    torch.testing.assert_close(rtn(once, Format.parse("int2 full"))[0, 0], torch.tensor(4 / 9))
    ends = torch.tensor([[-8.5, 6.5]])
    assert rtn(ends, Format.parse("int4 asym")).tolist() == [[-8.0, 6.0]]
    # An E4M3 scale of 0.55 times its smallest becomes that, next time 0.5 times, and then none.
    tiny = torch.zeros(1, 32)
    tiny[0, 0], tiny[0, 16] = 2688.0, 6 * 0.55 * 2.0**-9
    once = rtn(tiny, Format.parse("nvfp4"))
    assert once[0, 16] == 3 * 2.0**-9
    assert rtn(once, Format.parse("nvfp4"))[0, 16] == 0


def mean_square(spec: str, columns: int = 256) -> float:
    fmt, total = Format.parse(spec), 0.0
    for seed in range(8):
        weight = np.random.default_rng(seed).normal(size=(32, columns)).astype(np.float32)
        error = rtn(torch.from_numpy(weight), fmt) - torch.from_numpy(weight)
        total += float(error.double().square().mean()) / 8
    return total


@pytest.mark.parametrize(
    "spec",
    ["int{} g32", "int{} g32 full", "int{} g32 signed", "int{} asym", "mxint{}", "int{} mse"],
)
def test_mean_error_falls_with_bits(spec):
    errors = [mean_square(spec.format(bits)) for bits in range(2, 9)]
    assert all(fine < coarse / 2.5 for coarse, fine in itertools.pairwise(errors))


@pytest.mark.parametrize(
    "spec",
    [
        "int4 {}",
        "int3 {} full",
        "int2 {} signed",
        "int4 {} asym",
        "mxint4 {}",
        "mxfp4 {} even",
        "fp8 {}",
        "nf4 {}",
        "int3 {} mse",
    ],
)
def test_mean_error_rises_with_group_size(spec):
    whole = ["row", "tensor"] if spec.startswith("int") else []
    words = [f"g{size}" for size in (8, 16, 32, 64, 128)] + whole
    errors = [mean_square(spec.format(word), 512) for word in words]
    assert all(small < large for small, large in itertools.pairwise(errors))


@pytest.mark.parametrize("spec", ["mxfp4 {}", "mxfp8 {}"])
def test_floats_of_the_floor_rule_lose_less_in_larger_blocks(spec):
    """What it cuts off the largest value weighs more the fewer values there are."""
    errors = [mean_square(spec.format(f"g{size}"), 512) for size in (4, 8, 16, 32, 64, 128)]
    assert all(small > large for small, large in itertools.pairwise(errors))


@given(
    weight=hnp.arrays(np.float32, (2, 9), elements=WIDE), spec=st.sampled_from((*SPECS, *CLIPPED))
)
@settings(max_examples=200, deadline=None)
def test_any_finite_values_stay_finite_and_no_error_exceeds_the_largest(weight, spec):
    fmt = Format.parse(spec)
    rounded = rtn(torch.from_numpy(weight), fmt).numpy().astype(np.float64)
    assert np.isfinite(rounded).all()
    assert (np.abs(rounded - weight) <= groups_apart(weight, fmt) * (1 + 1e-5) + 2.0**-140).all()


@pytest.mark.parametrize("spec", [*SPECS, *CLIPPED])
def test_extreme_values_stay_finite_and_zeros_stay_zero(spec):
    fmt = Format.parse(spec)
    zero = torch.zeros(2, 5)
    assert torch.equal(rtn(zero, fmt), zero)
    top = torch.finfo(torch.float32).max
    for value in (1e-45, 1e-40, 1e-38, 1e-30, 1e37, 3e38, top):
        weight = torch.tensor([[value, -value, 0.0, value / 3, 0.0], [0, 0, 0, 0, value]])
        rounded = rtn(weight, fmt)
        assert torch.isfinite(rounded).all()
        assert rounded[0, 2] == 0
        if 1e-38 < value < 1e38:
            assert 0.5 * value < rounded[1, 4] < 1.5 * value


@pytest.mark.parametrize("spec", [*SPECS, *CLIPPED])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_never_passes_for_finite(spec, bad):
    weight = torch.tensor([[1.0, -2.0, bad, 1.0, 0.0]])
    rounded = rtn(weight, Format.parse(spec))
    assert not torch.isfinite(rounded[0, 2])


@pytest.mark.parametrize("spec", [*SPECS, *CLIPPED])
def test_half_precision_weights_are_rounded_in_single(spec):
    weight = torch.from_numpy(np.random.default_rng(5).normal(size=(6, 40)).astype(np.float32))
    for dtype in (torch.float16, torch.bfloat16):
        half = weight.to(dtype)
        rounded = rtn(half, Format.parse(spec))
        assert rounded.dtype == dtype
        assert torch.equal(rounded, rtn(half.float(), Format.parse(spec)).to(dtype))
        whole = half.abs().amax(1)[:, None, None]
        rounded = rtn(half, Format.parse(spec), whole)
        assert torch.equal(rounded, rtn(half.float(), Format.parse(spec), whole.float()).to(dtype))


@pytest.mark.parametrize("spec", [*SPECS, *CLIPPED])
def test_pieces_change_nothing(spec, monkeypatch):
    fmt = Format.parse(spec)
    weight = torch.from_numpy(np.random.default_rng(6).normal(size=(11, 33)).astype(np.float32))
    whole = weight.abs().amax(1)[:, None, None]
    expected, apart = rtn(weight, fmt), rtn(weight, fmt, whole)
    for piece in (1, 70, 33 * 11):
        monkeypatch.setattr(module, "PIECE", piece)
        assert torch.equal(rtn(weight, fmt), expected)
        assert torch.equal(rtn(weight, fmt, whole), apart)
    assert torch.equal(rtn(weight.T.contiguous().T, fmt), expected)


def test_constant_rows_are_levels():
    constant = torch.full((1, 4), 0.7)
    for spec in ("int2", "int8", "int3 asym", "fp8", "nf4"):
        torch.testing.assert_close(rtn(constant, Format.parse(spec)), constant)


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
