"""GPTQ against an explicit least-squares solver, brute force, identities and its own bound."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qscale.errors import QscaleError
from qscale.quantize.format import (
    ABSMAX_FULL,
    ABSMAX_RESTRICTED,
    ABSMAX_SIGNED,
    MINMAX,
    Format,
)
from qscale.quantize.gptq import gptq
from qscale.quantize.grid import grid
from qscale.quantize.rtn import rtn

SCALE_RULES = (ABSMAX_RESTRICTED, ABSMAX_FULL, ABSMAX_SIGNED, MINMAX)
FORMATS = [
    Format("int", bits, group, rule)
    for bits, group, rule in itertools.product((2, 3, 4, 8), (None, 3, 4, 100), SCALE_RULES)
]
OTHERS = [
    *(f"int{bits} tensor {rule}" for bits in (2, 4) for rule in ("restricted", "full", "asym")),
    *("int2 g16 asym mse", "int3 g128 mse", "int4 row mse", "int4 tensor mse"),
    *(f"mxint{bits} g4" for bits in range(2, 9)),
    *("mxint3", "mxint4 g128", "mxfp4 g4", "mxfp4 even", "mxfp8 g4", "mxfp8 even", "nvfp4"),
    *("fp8", "fp8 tensor", "nf4 g4", "nf4", "nf4 g128"),
]
EVERY = FORMATS + [Format.parse(words) for words in OTHERS]


def inputs(columns: int, seed: int, tokens: int = 300) -> torch.Tensor:
    """Correlated, heavy-tailed inputs of unequal scale, shape (columns, tokens), float64."""
    draw = np.random.default_rng(seed)
    mixing = draw.normal(size=(columns, columns)) + 2 * draw.normal(size=(1, columns))
    return torch.from_numpy(mixing @ draw.standard_t(4, (columns, tokens)))


def matrix(rows: int, columns: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed + 1000).standard_t(5, (rows, columns)))


def by_row(weight: torch.Tensor, quantized: torch.Tensor, gram: torch.Tensor) -> torch.Tensor:
    """Squared output error of each row, the diagonal of (W - Q) H (W - Q)^T."""
    error = (weight - quantized).double()
    return ((error @ gram.double()) * error).sum(1)


def reconstruction(weight: torch.Tensor, quantized: torch.Tensor, gram: torch.Tensor) -> float:
    """Squared output error tr((W - Q) H (W - Q)^T)."""
    return float(by_row(weight, quantized, gram).sum())


def by_least_squares(weight, gram, fmt, act_order=False):
    """Round one column after another and solve anew for all that follow, from the definition.

    Given the rounded columns R, the others F minimise the output error where
    ``(w - w0)_F H_FF = -(q - w0)_R H_RF``.
    """
    columns = weight.shape[1]
    size = fmt.group_size or columns
    order = gram.diagonal().argsort(descending=True).tolist() if act_order else range(columns)
    now, done, grids = weight.clone(), [], {}
    whole = weight.abs().max()
    for j in order:
        first = j // size * size
        if first not in grids:
            source = weight if act_order or fmt.per_tensor else now
            group = source[:, first : first + size]
            grids[first] = grid(group, fmt, (0, 1) if fmt.per_tensor else 1, whole)
        now[:, j : j + 1] = grids[first].round(now[:, j : j + 1])
        done.append(j)
        free = [k for k in order if k not in done]
        if free:
            pull = (now - weight)[:, done] @ gram[done][:, free]
            now[:, free] = weight[:, free] - torch.linalg.solve(gram[free][:, free], pull.T).T
    return now


# The full rule puts the largest weight of a group midway between two levels, where the last bit
# of the arithmetic decides; the others do not.
UNTIED = [fmt for fmt in EVERY if fmt.scale_rule != ABSMAX_FULL]


@pytest.mark.parametrize("fmt", UNTIED, ids=str)
@pytest.mark.parametrize("act_order", [False, True])
def test_columns_are_the_least_squares_answer_to_those_already_rounded(fmt, act_order):
    """Whatever the format, but for rows that rounding to nearest reconstructs better."""
    weight, x = matrix(12, 19, seed=0), inputs(19, seed=0)
    gram = x @ x.T
    found = gptq(weight, gram, fmt, act_order=act_order, damping=0, block_size=4)
    expected, nearest = by_least_squares(weight, gram, fmt, act_order=act_order), rtn(weight, fmt)
    worse = by_row(weight, expected, gram) > by_row(weight, nearest, gram)
    assert torch.equal(found.rounded, worse)
    assert worse.sum() <= 6
    expected[worse] = nearest[worse]
    torch.testing.assert_close(found.weight, expected, rtol=1e-9, atol=1e-9)
    assert found.damping == 0
    assert not found.dead.any()


def test_damping_adds_to_the_diagonal_relative_to_its_mean():
    weight, x = matrix(4, 11, seed=1), inputs(11, seed=1)
    gram, fmt = x @ x.T, Format("int", 3, 4, MINMAX)
    damped = gram + 0.3 * gram.diagonal().mean() * torch.eye(11, dtype=torch.float64)
    found = gptq(weight, gram, fmt, damping=0.3)
    kept = ~found.rounded
    assert kept.sum() >= 3
    torch.testing.assert_close(found.weight[kept], by_least_squares(weight, damped, fmt)[kept])


@pytest.mark.parametrize("fmt", EVERY, ids=str)
def test_uncorrelated_inputs_of_one_size_give_round_to_nearest_to_the_bit(fmt):
    weight = matrix(5, 10, seed=2).float()
    for act_order in (False, True):
        found = gptq(weight, 7 * torch.eye(10), fmt, act_order=act_order, block_size=3)
        assert found.weight.dtype == torch.float32
        assert torch.equal(found.weight, rtn(weight, fmt))


def test_uncorrelated_inputs_of_unequal_size_too():
    weight = matrix(5, 10, seed=2).float()
    gram = torch.diag(torch.linspace(0.1, 9, 10))
    assert torch.equal(
        gptq(weight, gram, Format("int", 2, 4)).weight, rtn(weight, Format("int", 2, 4))
    )


@given(
    seed=st.integers(0, 10**6),
    columns=st.integers(1, 12),
    fmt=st.sampled_from(FORMATS),
    act_order=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_reconstruction_error_is_the_sum_over_columns_and_below_its_bound(
    seed, columns, fmt, act_order
):
    """Nothing rounds by more than half a step unless it is clipped, whatever the inputs."""
    weight, x = matrix(3, columns, seed), inputs(columns, seed)
    gram = x @ x.T
    done = gptq(weight, gram, fmt, act_order=act_order, damping=0)
    found, kept = done.weight, ~done.rounded
    order = gram.diagonal().argsort(descending=True) if act_order else torch.arange(columns)
    # H = R R^T with R upper triangular: the error is |(W - Q) R|^2, and column j of (W - Q) R is
    # what column j was off by when it was rounded, times R_jj.
    root = torch.linalg.cholesky(gram[order][:, order].flip(0, 1)).flip(0, 1)
    off = ((weight - found)[:, order] @ root) / root.diagonal()
    assert reconstruction(weight, found, gram) == pytest.approx(
        float((off * root.diagonal()).square().sum()), rel=1e-6
    )
    if act_order and fmt in UNTIED:
        # Grids are known beforehand: moved values are found on them by rounding.
        size = fmt.group_size or columns
        moved = found.clone()
        moved[:, order] = found[:, order] + off
        for first in range(0, columns, size):
            part = slice(first, first + size)
            expected = grid(weight[:, part], fmt).round(moved[:, part])
            torch.testing.assert_close(found[kept, part], expected[kept], rtol=1e-6, atol=1e-6)


@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(1, 6),
    columns=st.integers(1, 70),
    tokens=st.integers(1, 200),
    fmt=st.sampled_from(EVERY),
    act_order=st.booleans(),
    damping=st.sampled_from([0.0, 0.01, 1.0]),
)
@settings(max_examples=200, deadline=None)
def test_no_row_is_reconstructed_worse_than_by_rounding(
    seed, rows, columns, tokens, fmt, act_order, damping
):
    """Whatever the format, the shape, the rank of the inputs and their damping."""
    weight, x = matrix(rows, columns, seed), inputs(columns, seed, tokens)
    gram = x @ x.T
    for dtype, slack in ((torch.float64, 1e-9), (torch.float32, 1e-3)):
        values = weight.to(dtype)
        found = gptq(values, gram, fmt, act_order=act_order, damping=damping)
        nearest = rtn(values, fmt)
        limit = by_row(values, nearest, gram)
        assert bool((by_row(values, found.weight, gram) <= limit * (1 + slack)).all())
        assert torch.equal(found.weight[found.rounded], nearest[found.rounded])


@pytest.mark.parametrize("fmt", EVERY, ids=str)
def test_a_matrix_is_reconstructed_better_by_far(fmt):
    weight, x = matrix(48, 96, seed=1).float(), inputs(96, seed=1).float()
    gram = x @ x.T
    rounded = reconstruction(weight, rtn(weight, fmt), gram)
    for act_order in (False, True):
        found = gptq(weight, gram, fmt, act_order=act_order)
        assert reconstruction(weight, found.weight, gram) < 0.7 * rounded
        assert found.rounded.sum() < 12


def test_a_row_that_comes_out_worse_is_rounded_instead():
    """The choice is greedy: of such short rows with two bits, about one in six comes out worse."""
    fmt, rounded = Format("int", 2, None, ABSMAX_FULL), 0
    for seed in range(100):
        weight, x = matrix(8, 6, seed), inputs(6, seed)
        gram = x @ x.T
        found = gptq(weight, gram, fmt, damping=0)
        greedy = by_least_squares(weight, gram, fmt)
        worse = by_row(weight, greedy, gram) > by_row(weight, rtn(weight, fmt), gram) * (1 + 1e-9)
        assert bool(found.rounded[worse].all())
        rounded += int(worse.sum())
    assert 80 < rounded < 180


def test_against_every_choice_of_levels_for_three_weights():
    """Never better than the best of all 4^3 choices, often that one."""
    fmt, best = Format("int", 2, None, ABSMAX_FULL), 0
    for seed in range(200):
        weight, x = matrix(1, 3, seed), inputs(3, seed)
        gram = x @ x.T
        levels = grid(weight, fmt)
        choices = torch.cartesian_prod(*[torch.arange(-2.0, 2, dtype=torch.float64)] * 3)
        values = choices * levels.step
        errors = torch.einsum("ci,ij,cj->c", weight - values, gram, weight - values)
        found = reconstruction(weight, gptq(weight, gram, fmt, damping=0).weight, gram)
        assert float(errors.min()) <= found * (1 + 1e-9)
        best += found <= float(errors.min()) * (1 + 1e-9)
    assert best > 80


def test_block_size_and_scale_of_the_gram_matrix_change_nothing():
    weight, x = matrix(6, 40, seed=3), inputs(40, seed=3)
    gram = x @ x.T
    for fmt in (
        Format("int", 3, 16, MINMAX),
        Format("int", 4, None),
        Format("int", 3, 7, ABSMAX_FULL),
        *map(Format.parse, ("int3 tensor", "int3 g16 mse", "mxint3 g16", "mxfp4 g16", "nvfp4")),
        *map(Format.parse, ("mxfp8 g8", "fp8", "nf4 g16")),
    ):
        expected = gptq(weight, gram, fmt).weight
        for block_size in (1, 5, 16, 1000):
            found = gptq(weight, gram * 1e-9, fmt, block_size=block_size)
            torch.testing.assert_close(found.weight, expected, rtol=1e-9, atol=1e-9)


def test_rows_do_not_depend_on_each_other():
    weight, x = matrix(6, 20, seed=4), inputs(20, seed=4)
    gram = x @ x.T
    for words in ("int3 g8 asym", "mxint3 g8", "mxfp4 g8", "fp8", "nf4 g8", "int3 g8 mse"):
        fmt = Format.parse(words)
        assert fmt.rowwise
        whole = gptq(weight, gram, fmt).weight
        alone = [gptq(row[None], gram, fmt).weight for row in weight]
        torch.testing.assert_close(whole, torch.cat(alone), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("words", ["int4 tensor", "nvfp4"])
def test_what_rows_share_is_taken_from_the_whole_matrix_as_it_was(words):
    """So all values lie on the grid of the original weights' largest magnitude."""
    weight, x = matrix(6, 32, seed=4), inputs(32, seed=4)
    found = gptq(weight, x @ x.T, Format.parse(words), act_order=True)
    whole, size = weight.abs().max(), 32 if words == "int4 tensor" else 16
    for first in range(0, 32, size):
        part = slice(first, first + size)
        levels = grid(weight[:, part], Format.parse(words), (0, 1) if size == 32 else 1, whole)
        assert torch.equal(levels.round(found.weight[:, part]), found.weight[:, part])


def test_dead_columns_are_rounded_to_nearest_and_the_others_pay_them_no_heed():
    weight, x = matrix(4, 12, seed=5), inputs(12, seed=5)
    x[[2, 7]] = 0
    live = [j for j in range(12) if j not in {2, 7}]
    gram, fmt = x @ x.T, Format("int", 3, None, ABSMAX_RESTRICTED)
    for act_order in (False, True):
        found = gptq(weight, gram, fmt, act_order=act_order, damping=1e-9)
        assert found.dead.nonzero().flatten().tolist() == [2, 7]
        levels = grid(weight, fmt)
        torch.testing.assert_close(found.weight[:, [2, 7]], levels.round(weight[:, [2, 7]]))
        changed = weight.clone()
        changed[:, [2, 7]] *= 0.5  # the largest of each row is elsewhere
        assert torch.equal(changed.abs().amax(1), weight.abs().amax(1))
        again = gptq(changed, gram, fmt, act_order=act_order, damping=1e-9)
        torch.testing.assert_close(again.weight[:, live], found.weight[:, live])


def test_no_calibration_inputs_at_all_give_round_to_nearest():
    weight = matrix(4, 12, seed=6).float()
    found = gptq(weight, torch.zeros(12, 12), Format("int", 3, 4))
    assert found.dead.all()
    assert torch.equal(found.weight, rtn(weight, Format("int", 3, 4)))


def test_damping_climbs_until_the_gram_matrix_is_positive_definite():
    weight = matrix(4, 12, seed=7)
    few = inputs(12, seed=7, tokens=3)  # rank 3
    gram = few @ few.T
    gram = (gram + gram.T) / 2 - 0.05 * gram.diagonal().mean() * torch.eye(12, dtype=torch.float64)
    found = gptq(weight, gram, Format("int", 4, 4), damping=0.001)
    assert found.damping == pytest.approx(0.1)
    assert torch.isfinite(found.weight).all()
    expected = gptq(weight, gram, Format("int", 4, 4), damping=0.1)
    assert torch.equal(found.weight, expected.weight)
    assert gptq(weight, few @ few.T, Format("int", 4, 4)).damping == 0.01


def test_ill_conditioned_inputs_keep_float32_close_to_float64():
    """Condition number 1e8 before damping, as for inputs that one direction dominates."""
    weight, x = matrix(16, 64, seed=8), inputs(64, seed=8, tokens=500)
    x *= torch.logspace(0, -3, 64, dtype=torch.float64)[:, None]
    gram, fmt = x @ x.T, Format("int", 4, 16, MINMAX)
    exact = gptq(weight, gram, fmt).weight
    single = gptq(weight.float(), gram.float(), fmt).weight
    same = ((single.double() - exact).abs() < 1e-4).double().mean()
    assert same > 0.99
    assert reconstruction(weight, single, gram) == pytest.approx(
        reconstruction(weight, exact, gram), rel=0.01
    )


def test_neither_weight_nor_gram_matrix_is_modified():
    weight, x = matrix(3, 6, seed=9), inputs(6, seed=9)
    gram = x @ x.T
    gram[0], gram[:, 0] = 0, 0
    before = weight.clone(), gram.clone()
    for act_order in (False, True):
        gptq(weight, gram, Format("int", 2, 4), act_order=act_order)
    assert torch.equal(weight, before[0])
    assert torch.equal(gram, before[1])


def test_impossible_arguments_are_refused():
    weight, gram = torch.ones(2, 3), torch.eye(3)
    cases = [
        ((weight, torch.eye(2)), {}, "weight must have shape"),
        ((weight, gram * float("nan")), {}, "gram must be finite"),
        ((weight * float("inf"), gram), {}, "weight must be finite"),
        ((weight, gram), {"damping": -1}, "damping must be at least 0. Got -1"),
        ((weight, gram), {"damping": float("nan")}, "damping must be at least 0"),
        ((weight, gram), {"block_size": 0}, "block_size must be at least 1"),
        ((weight, gram - 1e7 * (1 - gram)), {}, "gram must be positive semidefinite"),
    ]
    for arguments, options, message in cases:
        with pytest.raises(QscaleError, match=message):
            gptq(*arguments, Format("int", 4), **options)
