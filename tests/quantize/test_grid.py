"""Number formats against compressed-tensors, ml_dtypes and references written from definitions."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from qscale.errors import QscaleError
from qscale.quantize.format import Format
from qscale.quantize.grid import NF4_LEVELS, grid, to_e2m1, to_e4m3, to_nf4
from qscale.quantize.rtn import rtn

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E4M3 = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)  # 0 .. 448
ENTRIES = {"tensor": "tensor", "channel": "row", "group": "g32"}


def matrix(seed: int, rows: int = 24, columns: int = 128) -> torch.Tensor:
    """Heavy-tailed weights in groups of unequal size, of which one is zero and one constant."""
    draw = np.random.default_rng(seed)
    values = draw.standard_t(4, (rows, columns)) * np.exp2(draw.integers(-9, 9, (rows, 1)))
    values[0, :32], values[1, 32:64] = 0, 0.3
    return torch.from_numpy(values.astype(np.float32))


def outside(weight: torch.Tensor, **arguments) -> torch.Tensor:
    """Round by compressed-tensors, with the ranges that its users' observers find."""
    args = QuantizationArgs(**arguments)
    groups = weight
    if args.group_size:
        groups = weight.reshape(len(weight), -1, args.group_size)
    if args.strategy == "tensor":
        low, high = weight.min(), weight.max()
    else:
        keep = args.strategy == "channel"
        low, high = groups.amin(-1, keepdim=keep), groups.amax(-1, keepdim=keep)
    shared = {}
    if args.strategy == "tensor_group":
        shared["global_scale"] = generate_gparam(weight.min(), weight.max())
    scale, zero = calculate_qparams(low, high, args, **shared)
    return fake_quantize(weight, scale, zero, args, **shared)


@pytest.mark.parametrize(("strategy", "word"), ENTRIES.items())
@pytest.mark.parametrize("rule", ["full", "asym"])
@pytest.mark.parametrize("bits", range(2, 9))
def test_integers_are_those_of_compressed_tensors_to_the_bit(bits, rule, strategy, word):
    size = 32 if strategy == "group" else None
    weight = matrix(bits)
    theirs = outside(
        weight, num_bits=bits, symmetric=rule == "full", strategy=strategy, group_size=size
    )
    assert torch.equal(rtn(weight, Format.parse(f"int{bits} {word} {rule}")), theirs)


@pytest.mark.parametrize(("strategy", "word"), ENTRIES.items())
def test_fp8_is_that_of_compressed_tensors_to_the_bit(strategy, word):
    size = 32 if strategy == "group" else None
    weight = matrix(10)
    theirs = outside(weight, num_bits=8, type="float", strategy=strategy, group_size=size)
    assert torch.equal(rtn(weight, Format.parse(f"fp8 {word}")), theirs)


def mx(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """Round to MXFP4 or MXFP8 by compressed-tensors."""
    scale = {"scale_dtype": torch.uint8, "zp_dtype": torch.uint8}
    return outside(weight, num_bits=bits, type="float", strategy="group", group_size=32, **scale)


def test_mxfp4_even_is_that_of_compressed_tensors_to_the_bit():
    weight = matrix(11)
    assert torch.equal(rtn(weight, Format.parse("mxfp4 even")), mx(weight, 4))


def test_mxfp8_even_is_that_of_compressed_tensors_but_where_that_rounds_to_one_mantissa_bit():
    """Its scale is the next power of two from 1.75 on, that of the element's three bits 1.9375."""
    weight = matrix(12, rows=200)
    weight[0, :32] = 1.0  # a scale of a zero group is 2^-127 there
    ours, theirs = rtn(weight, Format.parse("mxfp8 even")), mx(weight, 8)
    part = 2 * np.frexp(weight.reshape(200, -1, 32).abs().amax(-1).numpy())[0]
    apart = torch.from_numpy((part >= 1.75) & (part < 1.9375)).repeat_interleave(32, 1)
    assert 0 < apart.double().mean() < 0.3
    assert torch.equal(ours[~apart], theirs[~apart])
    assert not torch.equal(ours[apart], theirs[apart])


def test_nvfp4_is_that_of_compressed_tensors_to_the_bit():
    weight = matrix(13)  # some scales are subnormal, or underflow
    theirs = outside(
        weight,
        num_bits=4,
        type="float",
        strategy="tensor_group",
        group_size=16,
        scale_dtype=torch.float8_e4m3fn,
    )
    assert torch.equal(rtn(weight, Format("nvfp4", 4, 16)), theirs)


def near(levels: np.ndarray) -> np.ndarray:
    """Levels, the points midway between them, what lies next to those, and far values."""
    points = np.concatenate([levels, (levels[1:] + levels[:-1]) / 2]).astype(np.float32)
    far = np.float32([1e-45, 1e-39, 1e-20, 2.0**-10, 2.0**-9, 2 * levels[-1]])
    sides = [np.nextafter(points, np.float32(sign * np.inf)) for sign in (-1, 1)]
    values = np.concatenate([points, *sides, far])
    return np.concatenate([values, -values])


def test_casts_are_those_of_ml_dtypes_and_torch():
    values = near(E2M1)
    expected = values.astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    found = to_e2m1(torch.from_numpy(values)).numpy()
    assert np.array_equal(found, expected)
    assert np.array_equal(np.signbit(found), np.signbit(values))

    values = near(E4M3)
    clamped = values.clip(-448, 448)
    found = to_e4m3(torch.from_numpy(values)).numpy()
    assert np.array_equal(found, clamped.astype(ml_dtypes.float8_e4m3fn).astype(np.float32))
    assert torch.equal(
        torch.from_numpy(found), torch.from_numpy(clamped).to(torch.float8_e4m3fn).float()
    )
    assert to_e4m3(torch.tensor([1e30, -1e30])).tolist() == [448, -448]
    for cast in (to_e2m1, to_e4m3):
        assert cast(torch.tensor([float("nan")])).isnan().all()


def test_nf4_levels_are_quantiles_of_a_gaussian():
    """Appendix E of arXiv:2305.14314: eight quantiles above zero, seven below, scaled to 1."""
    offset = (1 - 1 / 32 + 1 - 1 / 30) / 2
    above = stats.norm.ppf(np.linspace(offset, 0.5, 9)[:-1])
    below = -stats.norm.ppf(np.linspace(offset, 0.5, 8)[:-1])
    levels = np.sort(np.concatenate([above, [0], below])) / above.max()
    np.testing.assert_allclose(NF4_LEVELS, levels, atol=2e-6)
    values = torch.linspace(-1.1, 1.1, 997)
    table = torch.tensor(NF4_LEVELS)
    nearest = table[(values[:, None] - table).abs().argmin(1)]
    assert torch.equal(to_nf4(values), nearest)


def nearest(values: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """Nearest level in float64; of two equally near ones, that of even index from zero."""
    distance = np.abs(np.abs(values)[..., None] - levels)
    tied = distance == distance.min(-1, keepdims=True)
    index = np.where(tied, np.arange(len(levels)) % 2, 2).argmin(-1)
    return np.copysign(levels[index], values)


def by_definition(weight: np.ndarray, spec: str) -> np.ndarray:
    """Round by the text of OCP microscaling v1.0 (sections 5.3 and 6.3), in float64."""
    fmt = Format.parse(spec)
    size = fmt.group_size or weight.shape[1]
    groups = weight.astype(np.float64).reshape(len(weight), -1, size)
    levels = {"mxfp4": E2M1, "mxfp8": E4M3}.get(fmt.fmt)
    if levels is None:  # a sign and k - 1 bits, of which k - 2 behind the point
        levels = np.arange(2 ** (fmt.bits - 1)) / 2 ** (fmt.bits - 2)
    largest = np.abs(groups).max(-1, keepdims=True)
    if "even" in spec:  # add half of the last place kept to the bits, and cut off
        kept = {"mxfp4": 1, "mxfp8": 3}[fmt.fmt]
        bits = largest.astype(np.float32).view(np.uint32) + (1 << (22 - kept))
        largest = (bits & 0x7F800000).astype(np.uint32).view(np.float32).astype(np.float64)
    with np.errstate(divide="ignore"):
        shared = np.floor(np.log2(largest)) - np.floor(np.log2(levels[-1]))
    scale = np.exp2(np.clip(shared, -127, 127))
    return (nearest(groups / scale, levels) * scale).reshape(weight.shape)


@pytest.mark.parametrize(
    "spec",
    [
        *(f"mxint{bits} g{size}" for bits, size in itertools.product(range(2, 9), (16, 32, 128))),
        "mxfp4",
        "mxfp4 even",
        "mxfp8",
        "mxfp8 even g16",
    ],
)
def test_microscaling_formats_by_definition(spec):
    weight = matrix(14).numpy()
    weight[0, :32] = 2.0 ** -np.arange(32)  # ties
    weight[1, :4] = 7, 3.5, 1.75, 0.4375
    weight[2] *= np.float32(2.0**-130)  # scales at their lowest
    assert np.array_equal(
        rtn(torch.from_numpy(weight), Format.parse(spec)).numpy(), by_definition(weight, spec)
    )


def test_microscaling_by_hand():
    weight = torch.tensor([[7.0, -3.6, 1.0, 0.3]])
    for spec, expected in {
        "mxint4 g4": [7.0, -4.0, 1.0, 0.0],  # 2^(2 - 2): levels -7 .. 7
        "mxint3 g4": [6.0, -4.0, 0.0, 0.0],  # 2^(2 - 1): levels -6 -4 .. 6, ties to even
        "mxfp4 g4": [6.0, -4.0, 1.0, 0.5],  # 2^(2 - 2): levels 0 0.5 1 1.5 2 3 4 6
        "mxfp4 even g4": [8.0, -4.0, 1.0, 0.0],  # 7 counts as 8: 2^(3 - 2), levels 0 1 2 3 4 6 8 12
    }.items():
        assert rtn(weight, Format.parse(spec)).tolist() == [expected], spec


@pytest.mark.parametrize("bits", range(2, 9))
def test_signed_rule_by_definition(bits):
    weight = np.random.default_rng(bits).normal(size=(50, 40)).astype(np.float32)
    for row, found in zip(
        weight, rtn(torch.from_numpy(weight), Format.parse(f"int{bits} signed row")), strict=True
    ):
        step = row[np.abs(row).argmax()] / np.float32(-(2 ** (bits - 1)))
        levels = np.rint(row / step).clip(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        assert np.array_equal(found.numpy(), levels * step)


def test_signed_rule_by_hand():
    for weight, expected in (
        ([-4.0, 3.0, 1.4, -0.6], [-4.0, 2.0, 2.0, 0.0]),  # step 2: -4 -2 0 2, ties to even
        ([4.0, 3.0, 1.4, -0.6], [4.0, 4.0, 2.0, 0.0]),  # step -2: 4 2 0 -2
        ([4.0, -4.0, 0.0, 0.0], [4.0, -2.0, 0.0, 0.0]),  # of equals, the positive one counts
    ):
        assert rtn(torch.tensor([weight]), Format.parse("int2 signed")).tolist() == [expected]


def nvfp4(weight: np.ndarray) -> np.ndarray:
    """Round by NVIDIA's description in float64: E4M3 scales of 16 values under one of all."""
    groups = weight.astype(np.float64).reshape(len(weight), -1, 16)
    second = np.abs(groups).max() / (448 * 6)
    first = np.abs(groups).max(-1, keepdims=True) / 6 / second
    scale = nearest(first, E4M3) * second
    return (nearest(groups / scale, E2M1) * scale).reshape(weight.shape)


def test_nvfp4_by_definition():
    weight = np.random.default_rng(15).normal(size=(64, 96)).astype(np.float32)
    found = rtn(torch.from_numpy(weight), Format("nvfp4", 4, 16)).numpy()
    np.testing.assert_allclose(found, nvfp4(weight), rtol=1e-6)


def test_nvfp4_can_share_its_second_scale_with_what_is_named():
    weight = matrix(16)
    fmt, both = Format("nvfp4", 4, 16), torch.cat([weight, 3 * weight])
    whole = both.abs().max()
    assert torch.equal(rtn(both, fmt)[:24], rtn(weight, fmt, whole=whole))
    each = weight.abs().amax(1)[:, None, None]
    rows = torch.cat([rtn(row[None], fmt) for row in weight])
    assert torch.equal(rtn(weight, fmt, whole=each), rows)


def test_groups_may_lie_along_any_axis():
    weight = matrix(17)
    for spec in ("int3 row asym", "int3 row mse", "mxfp4 g24", "fp8", "nvfp4"):
        fmt = Format.parse(spec)
        across = grid(weight, fmt, 0).round(weight)
        down = grid(weight.T.contiguous(), fmt, 1).round(weight.T.contiguous())
        assert torch.equal(across, down.T), spec
    fmt = Format.parse("int4 tensor")
    assert torch.equal(grid(weight, fmt, (0, 1)).round(weight), rtn(weight, fmt))


CLIPPED = ("int3", "int2 asym", "int4 signed", "int4 full", "fp8", "nf4 g48", "mxfp4", "mxint3 g16")


@given(seed=st.integers(0, 10**6), spec=st.sampled_from((*CLIPPED, "nvfp4", "int3 tensor")))
@settings(max_examples=60, deadline=None)
def test_clipping_never_adds_squared_error(seed, spec):
    weight = torch.from_numpy(np.random.default_rng(seed).standard_t(3, (6, 96)).astype(np.float32))

    def errors(fmt: Format) -> torch.Tensor:
        squares = (rtn(weight, fmt) - weight).double().square()
        size = weight.numel() if fmt.per_tensor else fmt.group_size or 96
        return squares.view(-1, size).sum(1)

    plain, clipped = errors(Format.parse(spec)), errors(Format.parse(f"{spec} mse"))
    assert (clipped <= plain * (1 + 1e-5)).all()


def test_clipping_of_few_bits_gains_by_hand():
    """Of 0.4 (31 times) and 1, two restricted bits keep 1 alone; clipped, they keep the others."""
    weight = torch.tensor([[1.0] + 31 * [0.4]])
    assert rtn(weight, Format.parse("int2")).tolist() == [[1.0] + 31 * [0.0]]
    clipped = rtn(weight, Format.parse("int2 mse"))
    assert clipped[0].unique().tolist() == pytest.approx([0.42])  # shares are 1, 0.98 .. 0.42 ..


def test_what_only_a_library_rounds_to_is_refused():
    with pytest.raises(QscaleError, match="fp4 is rounded to by its library alone: add library="):
        rtn(torch.ones(1, 64), Format.parse("fp4"))
