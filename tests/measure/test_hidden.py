"""The growth of hidden-state errors against transformers' own states, closed forms and planted cases."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qscale.errors import CheckpointError, QscaleError
from qscale.measure.hidden import block_terms, error_growth
from qscale.measure.residual import decoder_blocks, run_blocks, swapped
from qscale.measure.weights import fake_quantized
from qscale.model import load, quantizable
from qscale.quantize.format import Format
from qscale.quantize.rtn import rtn
from tests.checkpoints import build_family, build_model, save

FAMILIES = ("llama", "gpt2", "neox", "opt", "olmo2", "qwen3", "gemma3", "bloom", "olmoe")
FORMAT = Format("int", 3, 8)
IDS = torch.randint(256, (5, 12), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """Open a family's model, its matrices enlarged so that blocks have much to say."""
    models = {}

    def get(family):
        if family not in models:
            build = build_model if family in ("llama", "gpt2", "neox") else build_family
            folder = save(build(family), tmp_path_factory.mktemp(family))
            models[family] = load(folder).model
            for weight in quantizable(models[family]).values():
                weight.data.mul_(8)
        return models[family]

    return get


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, opened):
    """One family after the other."""
    return opened(request.param)


@pytest.fixture(scope="module")
def llama(opened):
    return opened("llama")


def quantized(model, fmt=FORMAT, only=""):
    return {n: rtn(w.detach(), fmt) for n, w in quantizable(model).items() if only in n}


def theirs(model):
    """States that transformers reports; its last one is behind the final norm and is left out."""
    with torch.no_grad():
        found = model(input_ids=IDS, output_hidden_states=True, use_cache=False).hidden_states
    return [state.double().numpy() for state in found[:-1]]


def test_states_are_those_of_transformers(model):
    blocks = decoder_blocks(model)
    assert len(blocks) == 2
    with torch.inference_mode():
        states, _ = run_blocks(model, blocks, IDS)
    for ours, expected in zip(states[:-1], theirs(model), strict=True):
        np.testing.assert_array_equal(ours.numpy(), expected)
    assert states[2].shape == states[1].shape
    assert not torch.equal(states[2], states[1])


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_terms_add_up_to_the_growth_of_the_error_at_every_position(model, dtype, atol):
    model = model.to(dtype)
    try:
        replacements = quantized(model)
        with torch.inference_mode():
            states, _ = run_blocks(model, decoder_blocks(model), IDS)
        with swapped(model, replacements), torch.inference_mode():
            moved, _ = run_blocks(model, decoder_blocks(model), IDS)
    finally:
        model.to(torch.float32)
    relative, absolute = [torch.zeros(IDS.shape, dtype=dtype)] * 2
    for block in (0, 1):
        terms = block_terms(*states[block : block + 2], *moved[block : block + 2])
        error = (moved[block + 1] - states[block + 1]).norm(dim=-1)
        ratio = error / states[block + 1].norm(dim=-1)
        assert 0.01 < ratio.mean() < 2
        growth = terms["t_add"] + terms["t_inter"] + terms["t_align"]
        torch.testing.assert_close(ratio**2 - relative, growth, rtol=0, atol=atol)
        growth = (terms["abs_add"] + terms["abs_inter"]) / error.max() ** 2
        torch.testing.assert_close(
            (error**2 - absolute) / error.max() ** 2, growth, rtol=0, atol=atol
        )
        torch.testing.assert_close(terms["relative_error"], ratio, rtol=1e-4, atol=0)
        relative, absolute = ratio**2, error**2
    assert terms["t_inter"].abs().max() > 1e-4
    assert terms["t_align"].abs().max() > 1e-6


def test_means_are_those_of_the_states_of_transformers(model):
    found = error_growth(model, IDS, quantized(model), max_norm_change=None, batch_windows=2)
    before, after = theirs(model)
    with fake_quantized(quantizable(model), FORMAT):
        q_before, q_after = theirs(model)
    np.testing.assert_array_equal(before, q_before)  # the embedding keeps its weights
    u, du = after - before, q_after - after

    def norm(x):
        return np.linalg.norm(x, axis=-1)[:, 1:]

    expected = {
        "relative_error": norm(du) / norm(after),
        "t_add": (norm(u) / norm(after)) ** 2 * (norm(du) / norm(u)) ** 2,
        "t_inter": np.zeros((5, 11)),
        "abs_add": norm(du) ** 2,
        "update_size": norm(u) / norm(after),
        "update_error": norm(du) / norm(u),
    }
    first = found.blocks.iloc[0]
    for name, values in expected.items():
        by_window = values.mean(axis=1)
        assert first[name] == pytest.approx(by_window.mean(), rel=1e-5, abs=1e-12), name
        se = by_window.std(ddof=1) / np.sqrt(5)
        assert first[f"{name}_se"] == pytest.approx(se, rel=1e-4, abs=1e-12), name
    assert np.isnan(first["error_cosine"])  # nothing came in
    assert (found.windows, found.positions, found.kept) == (5, 55, 1.0)


def test_terms_of_a_later_block_are_those_of_the_paper(llama):
    """Three blocks, so that transformers reports the states around the second."""
    deep = build_model("llama", num_hidden_layers=3).eval()
    for weight in quantizable(deep).values():
        weight.data.mul_(8)
    found = error_growth(deep, IDS, quantized(deep), max_norm_change=None)
    _, h1, h2 = theirs(deep)
    with fake_quantized(quantizable(deep), FORMAT):
        _, q1, q2 = theirs(deep)
    h1, h2, q1, q2 = (x[:, 1:] for x in (h1, h2, q1, q2))
    u, dh = h2 - h1, q1 - h1
    du = (q2 - q1) - u

    def dot(x, y):
        return (x * y).sum(-1)

    relative_in = dot(dh, dh) / dot(h1, h1)
    expected = {
        "error_cosine": dot(dh, du) / np.sqrt(dot(dh, dh) * dot(du, du)),
        "t_add": dot(u, u) / dot(h2, h2) * (dot(du, du) / dot(u, u) - relative_in),
        "t_inter": 2 * dot(dh, du) / dot(h2, h2),
        "t_align": -2 * dot(h1, u) / dot(h2, h2) * relative_in,
        "abs_inter": 2 * dot(dh, du),
    }
    for name, values in expected.items():
        assert found.blocks[name][1] == pytest.approx(values.mean(), rel=1e-4), name
    together = found.blocks[["t_add", "t_inter", "t_align"]].sum(axis=1).cumsum()
    np.testing.assert_allclose(found.blocks["relative_error_sq"], together, rtol=1e-9)
    sums = found.blocks.cumsum()
    np.testing.assert_allclose(found.blocks["cancelled_inter"], -sums["t_inter"] / sums["t_add"])
    taken = -(sums["t_inter"] + sums["t_align"])
    np.testing.assert_allclose(found.blocks["cancelled"], taken / sums["t_add"])
    np.testing.assert_allclose(found.blocks["cancelled_abs"], -sums["abs_inter"] / sums["abs_add"])
    mean = found.blocks["error_cosine"][1:].mean()
    assert found.mean_cosine == pytest.approx(mean)
    last = found.blocks.iloc[-1]
    assert found.columns() == {
        "hidden_relative_error": last["relative_error"],
        "hidden_relative_error_se": last["relative_error_se"],
        "hidden_cancelled_inter": last["cancelled_inter"],
        "hidden_cancelled_inter_se": last["cancelled_inter_se"],
        "hidden_cancelled": last["cancelled"],
        "hidden_cancelled_se": last["cancelled_se"],
        "hidden_cancelled_abs": last["cancelled_abs"],
        "hidden_cancelled_abs_se": last["cancelled_abs_se"],
        "hidden_error_cosine": found.mean_cosine,
        "hidden_error_cosine_se": found.mean_cosine_se,
        "hidden_kept": 1.0,
    }


def test_a_block_that_undoes_incoming_error_cancels_it():
    draw = torch.Generator().manual_seed(0)
    before, update, came_in = torch.randn((3, 4, 16), generator=draw, dtype=torch.float64)
    after = before + update
    terms = block_terms(before, after, before + came_in, after + 0.25 * came_in)
    norm = after.square().sum(-1)
    torch.testing.assert_close(terms["error_cosine"], -torch.ones(4, dtype=torch.float64))
    torch.testing.assert_close(terms["t_inter"], -1.5 * came_in.square().sum(-1) / norm)
    torch.testing.assert_close(terms["abs_add"], 0.75**2 * came_in.square().sum(-1))


def test_batches_change_nothing(llama):
    replacements = quantized(llama)
    seen = []
    once = error_growth(llama, IDS, replacements, split=True, on_windows=seen.append)
    again = error_growth(llama, IDS, replacements, split=True, batch_windows=3)
    np.testing.assert_allclose(again.blocks, once.blocks, rtol=1e-4, atol=1e-7)
    assert seen == [1] * 5


def test_equal_weights_have_no_error_and_nothing_cancelled(model):
    same = {name: w.detach().clone() for name, w in quantizable(model).items()}
    found = error_growth(model, IDS, same, split=True)
    undefined = {"error_cosine", "weight_cosine", "response_cosine"}
    undefined |= {"cancelled", "cancelled_inter", "cancelled_abs"}
    undefined |= {f"{name}_se" for name in undefined}
    plain = {"block", "update_size", "update_size_se"}
    for name, values in found.blocks.items():
        if name in undefined:
            assert values.isna().all(), name
        elif name not in plain:
            assert (values == 0).all(), name
    assert found.kept == 1
    columns = found.columns()
    assert columns.pop("hidden_relative_error") == columns.pop("hidden_relative_error_se") == 0
    assert columns.pop("hidden_kept") == 1
    assert set(columns.values()) == {None}


def test_new_error_splits_into_the_effect_of_weights_and_the_response(model):
    found = error_growth(model, IDS, quantized(model), split=True).blocks
    np.testing.assert_allclose(
        found["weight_inter"] + found["response_inter"], found["t_inter"], rtol=1e-6, atol=1e-9
    )
    assert found["weight_error"][0] == pytest.approx(found["update_error"][0])
    assert found["response_error"][0] == pytest.approx(0, abs=1e-12)
    assert found["weight_error"][1] > 0.01
    assert found["response_error"][1] > 0.01


def test_either_source_of_error_can_be_alone(llama):
    first = error_growth(llama, IDS, quantized(llama, only="layers.0"), split=True).blocks
    assert first["weight_error"][1] == 0
    assert first["response_error"][1] == first["update_error"][1] > 0.01
    assert first["response_inter"][1] == first["t_inter"][1]
    second = error_growth(llama, IDS, quantized(llama, only="layers.1"), split=True).blocks
    assert second["relative_error"][0] == second["response_error"][1] == 0
    assert second["weight_error"][1] == second["update_error"][1] > 0.01


def test_positions_whose_norm_changes_much_can_be_left_out(llama):
    replacements = quantized(llama, Format("int", 2, 8))
    with torch.inference_mode():
        states, _ = run_blocks(llama, decoder_blocks(llama), IDS)
    with swapped(llama, replacements), torch.inference_mode():
        moved, _ = run_blocks(llama, decoder_blocks(llama), IDS)
    norms = torch.stack([x.norm(dim=-1) for x in states[1:]])[:, :, 1:]
    changes = (torch.stack([x.norm(dim=-1) for x in moved[1:]])[:, :, 1:] - norms).abs() / norms
    worst = changes.amax(0)
    limit = float(worst.quantile(0.8))
    inside = worst <= limit
    found = error_growth(llama, IDS, replacements, max_norm_change=limit)
    assert found.kept == pytest.approx(inside.double().mean().item())
    assert found.positions == inside.sum()
    error = ((moved[2] - states[2]).norm(dim=-1) / states[2].norm(dim=-1))[:, 1:]
    expected = torch.stack([e[i].mean() for e, i in zip(error, inside, strict=True)]).mean()
    assert found.blocks["relative_error"][1] == pytest.approx(expected.item(), rel=1e-5)
    everything = error_growth(llama, IDS, replacements, max_norm_change=None)
    assert everything.kept == 1
    assert everything.blocks["relative_error"][1] == pytest.approx(error.mean().item(), rel=1e-5)
    # A limit that some window does not meet anywhere leaves that window out, not the others.
    few = error_growth(llama, IDS, replacements, max_norm_change=float(worst.amin(1).median()))
    assert 0 < few.kept < 0.5
    assert np.isfinite(few.blocks["relative_error"]).all()
    with pytest.raises(QscaleError, match="must leave a position to measure. Got 1e-09 instead"):
        error_growth(llama, IDS, replacements, max_norm_change=1e-9)


def test_weights_and_hooks_are_what_they_were(model):
    def hooks():
        return [len(b._forward_hooks) + len(b._forward_pre_hooks) for b in decoder_blocks(model)]

    weights = quantizable(model)
    before = {name: (w.data_ptr(), w.detach().clone()) for name, w in weights.items()}
    replacements, hooked = quantized(model), hooks()
    error_growth(model, IDS, replacements)
    assert hooks() == hooked

    def stop_inside():
        with swapped(model, replacements):
            assert not any(torch.equal(w, before[n][1]) for n, w in weights.items())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stop_inside()
    for name, (address, values) in before.items():
        assert weights[name].data_ptr() == address
        assert torch.equal(weights[name], values)


def test_one_window_has_no_standard_error(llama):
    found = error_growth(llama, IDS[:1], quantized(llama))
    assert found.blocks["relative_error"].notna().all()
    assert found.blocks["relative_error_se"].isna().all()
    assert found.columns()["hidden_cancelled_se"] is None


def test_mistakes_are_named(llama):
    replacements = quantized(llama)
    name = "model.layers.1.mlp.down_proj.weight"
    with pytest.raises(QscaleError, match="LlamaForCausalLM has no parameter 'up' to replace"):
        error_growth(llama, IDS, {"up": replacements[name]})
    wrong = {name: replacements[name].T}
    with pytest.raises(QscaleError, match=r"must have shape.* \(16, 24\).*Got \(24, 16\)"):
        error_growth(llama, IDS, wrong)
    with pytest.raises(QscaleError, match="float32.*Got .*float64.* instead"):
        error_growth(llama, IDS, {name: replacements[name].double()})
    with pytest.raises(QscaleError, match=r"at least one window of 2 tokens. Got shape \(5, 1\)"):
        error_growth(llama, IDS[:, :1], replacements)
    with pytest.raises(QscaleError, match="max_norm_change must be above 0. Got 0 instead"):
        error_growth(llama, IDS, replacements, max_norm_change=0)
    with pytest.raises(CheckpointError, match="of the quantized model after block 2 is not finite"):
        error_growth(llama, IDS, {name: torch.full((16, 24), torch.inf)})
    with (
        swapped(llama, {name: torch.full((16, 24), torch.nan)}),
        pytest.raises(CheckpointError, match="state after block 2 is not finite in window 0"),
    ):
        error_growth(llama, IDS, replacements)
    llama.train()
    with pytest.raises(CheckpointError, match="must be in evaluation mode"):
        error_growth(llama, IDS, replacements)
    llama.eval()


def test_a_model_that_changes_states_between_blocks_is_refused(llama):
    handle = decoder_blocks(llama)[1].register_forward_pre_hook(lambda _, args: (2 * args[0],))
    try:
        with pytest.raises(CheckpointError, match="do not pass one hidden state on to the next"):
            error_growth(llama, IDS, quantized(llama))
    finally:
        handle.remove()
