"""AWQ against a plain loop over columns and outputs, and against rounding to nearest."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qscale.errors import QscaleError
from qscale.quantize.awq import ALPHAS, awq
from qscale.quantize.format import Format
from qscale.quantize.rtn import rtn

SPECS = [
    "int2 g8 asym",
    "int3 g8",
    "int3 row full",
    "int4 tensor",
    "int4 g16 signed",
    "int3 g8 asym mse",
    "mxint3 g8",
    "mxint4",
    "mxfp4",
    "mxfp4 even",
    "mxfp8",
    "nvfp4",
    "fp8",
    "nf4 g8",
]


def case(seed: int, columns: int = 24, rows: tuple[int, ...] = (6, 3)):
    """Matrices and their inputs: heavy-tailed, correlated, some columns far larger than others."""
    draw = np.random.default_rng(seed)
    weights = [draw.standard_t(5, (r, columns)) for r in rows]
    mixing = np.eye(columns) + 0.3 * draw.normal(size=(columns, columns))
    x = mixing @ draw.standard_t(4, (columns, 100)) * np.exp(1.5 * draw.normal(size=(columns, 1)))
    return weights, x


def tensors(weights, x):
    weights, x = [torch.from_numpy(w) for w in weights], torch.from_numpy(x)
    return weights, x @ x.T, x.abs().mean(1)


def minmax(row: np.ndarray, bits: int, size: int) -> np.ndarray:
    """Asymmetric rounding of one row, group by group, written from the rule."""
    found = []
    for group in np.split(row, range(size, len(row), size)):
        low, high = min(group.min(), 0), max(group.max(), 0)
        step = (high - low) / (2**bits - 1)
        zero = np.round(-low / step)
        found.append((np.clip(np.round(group / step + zero), 0, 2**bits - 1) - zero) * step)
    return np.concatenate(found)


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("seed", range(5))
def test_against_a_loop_over_alphas_rows_and_outputs(bits, seed):
    weights, x = case(seed)
    errors, choices = [], []
    for i in range(20):
        scale = np.array([np.abs(column).mean() for column in x]) ** (i / 20)
        scale /= np.sqrt(scale.max() * scale.min())
        choices.append([np.stack([minmax(r * scale, bits, 8) / scale for r in w]) for w in weights])
        outputs = zip(weights, choices[-1], strict=True)
        errors.append(sum(np.square(w @ x - q @ x).sum() for w, q in outputs))
    best = int(np.argmin(errors))
    found = awq(*tensors(weights, x), [Format.parse(f"int{bits} g8 asym")] * 2)
    assert found.alpha == pytest.approx(best / 20)
    np.testing.assert_allclose(found.errors, errors, rtol=1e-9)
    for own, expected in zip(found.weights, choices[best], strict=True):
        np.testing.assert_allclose(own, expected, rtol=1e-9, atol=1e-12)


@given(
    seed=st.integers(0, 10**6),
    columns=st.integers(1, 40),
    rows=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    words=st.sampled_from(SPECS),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
@settings(max_examples=100, deadline=None)
def test_outputs_are_never_worse_than_by_rounding(seed, columns, rows, words, dtype):
    plain, x = case(seed, columns, tuple(rows))
    weights, gram, mean_abs = tensors(plain, x)
    weights, fmt = [w.to(dtype) for w in weights], Format.parse(words)
    found = awq(weights, gram, mean_abs, [fmt] * len(weights))

    def output_error(quantized):
        off = [(w - q).double().numpy() @ x for w, q in zip(weights, quantized, strict=True)]
        return sum(np.square(o).sum() for o in off)

    rounded = [rtn(w, fmt) for w in weights]
    assert output_error(found.weights) <= output_error(rounded) * (1 + 1e-5)
    assert found.errors[0] == pytest.approx(output_error(rounded), rel=1e-4)
    assert found.errors[ALPHAS.index(found.alpha)] == min(found.errors)
    for weight, own, nearest in zip(weights, found.weights, rounded, strict=True):
        assert own.dtype == dtype
        scaled = rtn(weight * found.scale.to(dtype), fmt) / found.scale.to(dtype)
        assert torch.equal(own, scaled)
        if found.alpha == 0:
            assert torch.equal(own, nearest)


@pytest.mark.parametrize("words", [words for words in SPECS if "fp8" not in words])
def test_columns_that_read_far_more_are_kept_better(words):
    """One column reads a hundred times the others: what AWQ is for.

    It does little for E4M3, whose relative error does not depend on the size of a value.
    """
    plain, _ = case(0, columns=64, rows=(32,))
    x = np.random.default_rng(1).normal(size=(64, 400))
    x[5] *= 100
    weights, gram, mean_abs = tensors(plain, x)
    found = awq(weights, gram, mean_abs, [Format.parse(words)])
    assert found.alpha > 0
    assert min(found.errors) < 0.8 * found.errors[0]
    off = (weights[0] - found.weights[0]).square().mean(0)
    assert off[5] < 0.5 * off.mean()
    assert float(found.scale.amax() * found.scale.amin()) == pytest.approx(1)


def test_matrices_of_different_formats_share_the_scale():
    weights, gram, mean_abs = tensors(*case(3))
    formats = [Format.parse("int2 g8 asym"), Format.parse("mxint4 g8")]
    found = awq(weights, gram, mean_abs, formats)
    alone = [awq([w], gram, mean_abs, [f]) for w, f in zip(weights, formats, strict=True)]
    np.testing.assert_allclose(found.errors, np.sum([one.errors for one in alone], axis=0))
    for weight, fmt, own in zip(weights, formats, found.weights, strict=True):
        assert torch.equal(own, rtn(weight * found.scale, fmt) / found.scale)


def test_size_of_the_inputs_changes_nothing():
    weights, gram, mean_abs = tensors(*case(4))
    formats = [Format.parse("int3 g8 asym")] * 2
    one, other = (awq(weights, gram * c**2, mean_abs * c, formats) for c in (1.0, 1e-6))
    assert one.alpha == other.alpha > 0
    torch.testing.assert_close(one.weights, other.weights, rtol=1e-9, atol=1e-12)


def test_dead_columns_do_no_harm():
    plain, x = case(5)
    x[[2, 9]] = 0
    weights, gram, mean_abs = tensors(plain, x)
    formats = [Format.parse("int3 g8 asym")] * 2
    found = awq(weights, gram, mean_abs, formats)
    assert all(torch.isfinite(w).all() for w in found.weights)
    assert min(found.errors) <= found.errors[0]
    nothing = awq(weights, gram * 0, mean_abs * 0, formats)
    assert nothing.alpha == 0
    assert torch.equal(nothing.weights[0], rtn(weights[0], formats[0]))


def test_nothing_given_is_modified():
    weights, gram, mean_abs = tensors(*case(6))
    before = [value.clone() for value in (*weights, gram, mean_abs)]
    awq(weights, gram, mean_abs, [Format.parse("nvfp4")] * 2)
    after = (*weights, gram, mean_abs)
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_impossible_arguments_are_refused():
    weight, gram, mean = torch.ones(2, 3), torch.eye(3), torch.ones(3)
    fmt = Format.parse("int4 row")
    cases = [
        (([weight], torch.eye(2), mean, [fmt]), "weights must have shape"),
        (([weight], gram, torch.ones(2), [fmt]), "weights must have shape"),
        (([weight, torch.ones(2, 4)], gram, mean, [fmt, fmt]), "weights must have shape"),
        (([weight], gram, mean, [fmt, fmt]), "formats must be one for each of 1 weights"),
        (([], gram, mean, []), "formats must be one for each of 0"),
        (([weight * float("nan")], gram, mean, [fmt]), "must be finite"),
        (([weight], gram * float("inf"), mean, [fmt]), "must be finite"),
        (([weight], gram, -mean, [fmt]), "mean_abs must be at least 0"),
    ]
    for arguments, message in cases:
        with pytest.raises(QscaleError, match=message):
            awq(*arguments)
