"""The geometry of the LM head against full float64 logits, closed forms and random rotations."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers as hf
from torch.nn.functional import log_softmax, normalize

from qscale.errors import CheckpointError, QscaleError
from qscale.measure.curvature import head
from qscale.measure.head_geometry import (
    expected_score_change,
    head_geometry,
    length_and_angle,
    mean_projection,
)
from qscale.measure.loss import compare, mean_and_se, reference
from qscale.measure.subject import open_subject
from qscale.measure.weights import fake_quantized
from qscale.quantize.format import Format
from tests.checkpoints import SPECIAL, build_family, build_model, save
from tests.measure.test_loss import Largest

COARSE = Format("int", 3, 8)


@pytest.fixture(scope="module", params=[None, 12])
def subject(request, trained, text_file):
    """A trained model with plain and with overlapping windows, of which not all is scored."""
    stride = request.param
    return open_subject(trained, text_file, context=32, stride=stride, probe_windows=4)


@pytest.fixture(scope="module")
def llama(trained_llama, text_file):
    return open_subject(trained_llama, text_file, context=32, probe_windows=4)


def dense(hidden, other, lm_head, targets):
    """All measures of each position from full logits, in float64 and with other formulas."""
    h, g, w = hidden.double(), other.double(), lm_head.weight.double()
    bias = 0 if lm_head.bias is None else lm_head.bias.double()
    z, y = h @ w.T + bias, g @ w.T + bias
    p, q = log_softmax(z, -1), log_softmax(y, -1)
    angles = [torch.acos(normalize(x) @ normalize(w).T) for x in (h, g)]
    top, other_top = z.argsort(-1, descending=True), y.argsort(-1, descending=True)
    rho = g.norm(dim=1) / h.norm(dim=1)
    found = {
        "rotation": torch.acos((normalize(h) * normalize(g)).sum(-1).clamp(-1, 1)).rad2deg(),
        "norm_change": (rho - 1).abs(),
        "relative_error_sq": ((g - h) ** 2).sum(-1) / (h**2).sum(-1),
        "angle_change": (angles[1] - angles[0]).abs().mean(-1).rad2deg(),
        "flip_1": (top[:, 0] != other_top[:, 0]).double(),
        "kl": (p.exp() * (p - q)).sum(-1),
        "delta_loss": (p - q).gather(-1, targets[:, None])[:, 0],
    }
    for k in (5, 10, 20):
        both = [
            len({*a[:k].tolist()} & {*b[:k].tolist()}) for a, b in zip(top, other_top, strict=True)
        ]
        found[f"retained_{k}"] = torch.tensor(both) / k
    change = ((y - z) / z).abs().gather(-1, top)
    return found, {"score_change": change, "log_p_change": (q - p).abs().gather(-1, top)}


def positions(model, windows):
    """LM-head inputs and targets at scored positions, and the window of each."""
    ids = torch.from_numpy(windows.ids)
    scored = torch.from_numpy(windows.scored)
    with torch.no_grad():
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    return hidden[:, :-1][scored], ids[:, 1:][scored], scored.nonzero()[:, 0]


def assert_dense(model, windows, weights, rtol=1e-4):
    full = reference(model, windows)
    with fake_quantized(weights, COARSE):
        found = head_geometry(model, full, ranks=25)
        other, targets, owner = positions(model, windows)
    with torch.no_grad():
        means, ranks = dense(full.hidden, other, model.get_output_embeddings(), targets)
    for name, values in means.items():
        sums = np.bincount(owner, weights=values.double(), minlength=len(windows))
        mean, se = mean_and_se(sums, full.counts)
        assert mean != 0 or name == "flip_1"
        assert found.means.loc[name, "value"] == pytest.approx(mean, rel=rtol, abs=1e-7), name
        assert found.means.loc[name, "se"] == pytest.approx(se, rel=100 * rtol), name
    for name, values in ranks.items():
        typical = values[:, :25].mean(0)
        np.testing.assert_allclose(found.ranks[name][:5], typical[:5], rtol=100 * rtol)
    assert found.ranks["rank"].tolist() == list(range(1, 26))
    return found


def test_measures_are_those_of_full_logits(subject):
    found = assert_dense(subject.checkpoint.model, subject.evaluation, subject.weights)
    assert found.means.loc["rotation", "value"] > 1
    assert found.means.loc["retained_5", "value"] < 1


@pytest.mark.parametrize("family", ["neox", "opt", "olmo2", "qwen3"])
def test_measures_of_more_families_are_those_of_full_logits(tmp_path, text_file, family):
    model = build_model(family) if family == "neox" else build_family(family)
    folder = save(model, tmp_path)
    subject = open_subject(folder, text_file, context=32, probe_windows=4, max_windows=5)
    for weight in subject.weights.values():
        weight.data.mul_(8)
    assert_dense(subject.checkpoint.model, subject.evaluation, subject.weights)


def test_a_bias_of_the_head_moves_logits_but_no_angles(llama):
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = hf.PhiConfig(vocab_size=256, num_attention_heads=4, **sizes, **SPECIAL)
        model = hf.PhiForCausalLM(config).eval()
        model.lm_head.bias.data.normal_()
    weights = {n: p for n, p in model.named_parameters() if "layers" in n and p.ndim == 2}
    for weight in weights.values():
        weight.data.mul_(8)
    windows = llama.evaluation.take(np.arange(8), 1)
    assert_dense(model, windows, weights)


def test_log_probabilities_change_as_the_chain_identity_says(llama):
    """Theorem 3 at every position and token, with the change and divergence that are measured."""
    model = llama.checkpoint.model
    windows = llama.evaluation.take(np.arange(1), 1)
    windows = replace(windows, scored=windows.scored & (np.arange(31) == 20))  # one position
    model.double()
    try:
        full = reference(model, windows)
        with fake_quantized(llama.weights, COARSE):
            found = head_geometry(model, full, ranks=256)
            other, _, _ = positions(model, windows)
        with torch.no_grad():
            z, y = (model.lm_head(x)[0] for x in (full.hidden, other))
    finally:
        model.float()
    assert full.hidden.dtype == torch.float64
    order = z.argsort(descending=True)
    p = z.softmax(-1)
    kl = found.means.loc["kl", "value"]
    chain = (y - z) - p @ (y - z) - kl
    assert kl > 1e-4
    np.testing.assert_allclose(y.log_softmax(-1) - z.log_softmax(-1), chain, rtol=0, atol=1e-12)
    np.testing.assert_allclose(found.ranks["log_p_change"], chain[order].abs(), rtol=0, atol=1e-12)


def test_the_squared_error_is_that_of_length_and_angle():
    draw = torch.Generator().manual_seed(0)
    h = torch.randn((50, 24), generator=draw, dtype=torch.float64)
    for size in (1e-9, 1e-4, 0.3, 3.0, 100.0):
        g = h + size * torch.randn(h.shape, generator=draw, dtype=torch.float64)
        rho, alpha = length_and_angle(h, g)
        error = ((g - h) ** 2).sum(-1) / (h**2).sum(-1)
        angular = 4 * rho * torch.sin(alpha / 2) ** 2
        torch.testing.assert_close((rho - 1) ** 2 + angular, error, rtol=1e-6, atol=0)
    rho, alpha = length_and_angle(h, -2 * h)
    torch.testing.assert_close(rho, torch.full((50,), 2.0, dtype=torch.float64))
    torch.testing.assert_close(alpha, torch.full((50,), np.pi, dtype=torch.float64))


def directions(like, seed):
    """Unit vectors in uniformly random directions orthogonal to given ones."""
    draw = torch.Generator().manual_seed(seed)
    v = torch.randn(like.shape, generator=draw, dtype=torch.float64)
    unit = normalize(like.double(), dim=-1)
    return normalize(v - (v * unit).sum(-1, keepdim=True) * unit, dim=-1)


@pytest.mark.parametrize("width", [3, 8, 128])
def test_mean_projection_is_that_of_random_directions(width):
    h = torch.zeros(50_000, width)
    h[:, 0] = 1
    sizes = directions(h, 0)[:, -1].abs()
    se = sizes.std() / len(sizes) ** 0.5
    assert abs(sizes.mean() - mean_projection(width)) < 3 * se
    if width == 128:
        assert mean_projection(width) == pytest.approx((2 / np.pi / 127) ** 0.5, rel=0.01)


@pytest.mark.parametrize(("rho", "degrees"), [(1, 5), (1.03, 5), (0.9, 40), (1.2, 0), (1, 0)])
def test_expected_score_change_is_that_of_random_rotations(rho, degrees):
    width, alpha = 12, np.radians(degrees)
    h, w = torch.randn((2, width), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    r = directions(h.expand(100_000, -1), 2)
    moved = rho * (np.cos(alpha) * h + np.sin(alpha) * h.norm() * r)
    changes = ((moved - h) @ w / (h @ w)).abs()
    theta = float(torch.acos(normalize(h, dim=0) @ normalize(w, dim=0)))
    expected = float(expected_score_change(*map(np.float64, (rho, alpha, theta)), width))
    se = float(changes.std()) / len(changes) ** 0.5
    assert expected == pytest.approx(float(changes.mean()), abs=3 * se + 1e-12)
    if rho == 1 and degrees:  # the first-order form of the paper
        first_order = alpha * abs(np.tan(theta)) * mean_projection(width)
        assert expected == pytest.approx(first_order, rel=0.02)


@pytest.mark.parametrize(("degrees", "rho"), [(1.0, 1.0), (8.0, 1.0), (8.0, 1.04)])
def test_a_random_rotation_is_attenuated_and_changes_scores_as_predicted(llama, degrees, rho):
    model = build_model("llama", hidden_size=96).eval()
    full, alpha = reference(model, llama.evaluation), np.radians(degrees)

    def turn(module, args, output):
        h = output.double()
        sideways = h.norm(dim=-1, keepdim=True) * directions(h, 5)
        return (rho * (np.cos(alpha) * h + np.sin(alpha) * sideways)).to(output)

    model.model.norm.register_forward_hook(turn)
    result = head_geometry(model, full, batch_windows=len(llama.evaluation))
    means = result.means["value"]
    assert means["rotation"] == pytest.approx(degrees, rel=1e-4)
    assert means["norm_change"] == pytest.approx(rho - 1, abs=1e-6)
    assert result.attenuation_predicted == pytest.approx((np.pi * 95 / 2) ** 0.5, rel=0.01)
    assert means["attenuation"] == pytest.approx(result.attenuation_predicted, rel=0.01)
    ranks = result.ranks
    ratio = ranks["score_shift"] / ranks["score_shift_predicted"]
    np.testing.assert_allclose(ratio, 1, atol=0.05)


def test_divergence_and_loss_are_those_of_a_comparison(subject):
    model = subject.checkpoint.model
    full = reference(model, subject.evaluation)
    with fake_quantized(subject.weights, COARSE):
        found, theirs = head_geometry(model, full), compare(model, full)
    expected = mean_and_se(theirs.kl, full.counts)
    assert tuple(found.means.loc["kl"]) == pytest.approx(expected, rel=1e-3)
    expected = mean_and_se(theirs.nll - full.nll, full.counts)
    assert tuple(found.means.loc["delta_loss"]) == pytest.approx(expected, rel=1e-3)
    flips = 1 - theirs.agreements.sum() / full.counts.sum()
    assert found.means.loc["flip_1", "value"] == pytest.approx(flips)


def test_batches_and_chunks_change_nothing(llama, monkeypatch):
    model = llama.checkpoint.model
    full = reference(model, llama.evaluation)
    with fake_quantized(llama.weights, COARSE):
        once = head_geometry(model, full)
        monkeypatch.setattr(head, "CHUNK_LOGITS", 256 * 7)
        again = head_geometry(model, full, batch_windows=3)
    np.testing.assert_allclose(again.means, once.means, rtol=1e-3)
    np.testing.assert_allclose(again.ranks["log_p_change"], once.ranks["log_p_change"], rtol=1e-3)


def test_an_equal_model_turns_nothing_and_no_attenuation_is_defined(subject):
    model = subject.checkpoint.model
    found = head_geometry(model, reference(model, subject.evaluation))
    kept = found.means.index.str.startswith("retained")
    assert (found.means["value"][kept] == 1).all()
    undefined = found.means.index.isin(["attenuation", "angular_share"])
    assert found.means[undefined].isna().all(axis=None)
    np.testing.assert_allclose(found.means[~kept & ~undefined], 0, atol=1e-12)
    np.testing.assert_allclose(found.ranks.drop(columns="rank"), 0, atol=1e-12)
    columns = found.columns()
    assert {n for n, v in columns.items() if v is None} == {
        "head_attenuation",
        "head_attenuation_se",
        "head_angular_share",
        "head_angular_share_se",
    }
    assert columns["head_attenuation_predicted"] == pytest.approx(1 / mean_projection(16))
    assert columns["head_rotation"] == columns["head_flip_1"] == 0
    assert "head_kl" not in columns


def test_rows_of_zeros_have_no_angle(llama):
    model = build_model("llama").eval()
    full = reference(model, llama.evaluation)
    other = full.hidden.flip(0)
    whole = head_geometry(model, replace(full, hidden=other)).means["value"]
    model.lm_head.weight.data[200:] = 0  # as where a vocabulary is padded; the text is below
    part = head_geometry(model, replace(full, hidden=other)).means["value"]
    w = normalize(model.lm_head.weight[:200].detach().double())
    angles = [torch.acos(normalize(x.double()) @ w.T) for x in (full.hidden, other)]
    expected = (angles[0] - angles[1]).abs().rad2deg().mean().item()
    assert part["angle_change"] == pytest.approx(expected, rel=1e-5)
    assert part["angle_change"] != pytest.approx(whole["angle_change"], rel=1e-5)


def test_no_full_logits_exist_of_a_large_vocabulary(tmp_path, text_file):
    vocabulary, width = 151_936, 8
    sizes = {"vocab_size": vocabulary, "hidden_size": width, "intermediate_size": 8}
    model = build_family("qwen3", **sizes, tie_word_embeddings=True, num_hidden_layers=1)
    subject = open_subject(save(model, tmp_path), text_file, context=32, probe_windows=1)
    windows = subject.evaluation.take(np.arange(2), 1)
    full = reference(subject.checkpoint.model, windows)
    with fake_quantized(subject.weights, COARSE), Largest() as largest:
        head_geometry(subject.checkpoint.model, full)
    assert vocabulary * width < largest.elements <= head.CHUNK_LOGITS / 2 < 2 * 31 * vocabulary


@pytest.mark.slow
def test_memory_of_a_large_vocabulary_is_that_of_chunks(tmp_path, text_file):
    code = """
import resource, sys
import numpy as np
from qscale.measure.head_geometry import head_geometry
from qscale.measure.loss import reference
from qscale.measure.subject import open_subject
from qscale.measure.weights import fake_quantized
from qscale.quantize.format import Format
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
subject = open_subject(sys.argv[1], sys.argv[2], context=128, probe_windows=1)
before = peak()
full = reference(subject.checkpoint.model, subject.evaluation.take(np.arange(16), 1))
with fake_quantized(subject.weights, Format("int", 3, 8)):
    head_geometry(subject.checkpoint.model, full, batch_windows=16)
print(peak() - before)
"""
    model = build_family(
        "qwen3",
        vocab_size=151_936,
        hidden_size=8,
        num_hidden_layers=1,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(save(model, tmp_path)), str(text_file)],
        capture_output=True,
        text=True,
        check=True,
    )
    # The logits of one model alone would take 1,178 MiB.
    assert float(done.stdout) < 250


def test_mistakes_are_named(llama):
    model = llama.checkpoint.model
    full = reference(model, llama.evaluation)
    with pytest.raises(QscaleError, match="ranks must be at least 1. Got 0 instead"):
        head_geometry(model, full, ranks=0)
    with pytest.raises(QscaleError, match="must hold at least 300 tokens to rank. Got 256 instead"):
        head_geometry(model, full, ranks=300)
    norm = model.model.norm.weight
    kept = norm.detach().clone()
    norm.data[0] = torch.inf
    with pytest.raises(CheckpointError, match="LM-head input is not finite in window 0"):
        head_geometry(model, full)
    norm.data.copy_(kept)
