"""Losses, their errors and divergences against transformers, closed forms and resampling."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers as hf
from torch.nn.functional import cross_entropy, kl_div, log_softmax
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from qscale.errors import CheckpointError
from qscale.measure.curvature import head
from qscale.measure.loss import bits_per_byte, compare, mean_and_se, reference
from qscale.measure.subject import open_subject
from qscale.measure.weights import fake_quantized
from qscale.quantize.format import Format
from tests.checkpoints import build_family, save


@pytest.fixture(scope="module")
def subject(trained, text_file):
    """A trained model and its windows, in which every token but a window's first is scored."""
    return open_subject(trained, text_file, context=32, probe_windows=4)


@pytest.fixture(scope="module")
def strided(trained, text_file):
    """The same with overlapping windows, of which later ones score their last 12 tokens."""
    return open_subject(trained, text_file, context=32, stride=12, probe_windows=4)


@pytest.fixture(scope="module", params=[None, 12])
def either(request, trained, text_file):
    """One after the other."""
    return open_subject(trained, text_file, context=32, stride=request.param, probe_windows=4)


def test_mean_loss_is_that_of_transformers(subject):
    model, windows = subject.checkpoint.model, subject.evaluation
    found = reference(model, windows)
    ids = torch.from_numpy(windows.ids)
    with torch.no_grad():
        theirs = [model(input_ids=i[None], labels=i[None]).loss.item() * 31 for i in ids]
    np.testing.assert_allclose(found.nll, theirs, rtol=1e-5)
    assert mean_and_se(found.nll, found.counts)[0] == pytest.approx(
        model(input_ids=ids, labels=ids).loss.item(), abs=1e-5
    )
    assert (found.counts == 31).all()


def test_a_stride_scores_the_last_tokens_of_later_windows_only(strided):
    model, windows = strided.checkpoint.model, strided.evaluation
    found = reference(model, windows)
    assert set(found.counts) <= {12, 31}
    for i, ids in enumerate(torch.from_numpy(windows.ids)):
        count = found.counts[i]
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0]
        expected = cross_entropy(logits[-1 - count : -1], ids[-count:], reduction="sum")
        assert found.nll[i] == pytest.approx(expected.item(), rel=1e-5)


def test_bits_per_byte_are_those_of_the_scored_text(either):
    windows = either.evaluation
    found = reference(either.checkpoint.model, windows)
    value, se = bits_per_byte(found.nll, windows)
    # The tokens are bytes, and the text has no longer characters.
    mean, error = mean_and_se(found.nll, found.counts)
    assert (value, se) == (pytest.approx(mean / np.log(2)), pytest.approx(error / np.log(2)))
    assert bits_per_byte(found.nll, replace(windows, scored_bytes=None)) is None
    fewer = replace(windows, scored_bytes=2 * windows.scored_bytes)
    assert bits_per_byte(found.nll, fewer)[0] == pytest.approx(value / 2)


@pytest.mark.parametrize("family", ["mixtral", "bloom", "gemma3", "opt"])
def test_losses_of_more_families_are_those_of_transformers(tmp_path, text_file, family):
    folder = save(build_family(family), tmp_path)
    subject = open_subject(folder, text_file, context=32, probe_windows=4, max_windows=5)
    model, ids = subject.checkpoint.model, torch.from_numpy(subject.evaluation.ids)
    for size in (1, 2, 5):
        found = reference(model, subject.evaluation, batch_windows=size)
        with torch.no_grad():
            theirs = model(input_ids=ids, labels=ids).loss.item()
        assert mean_and_se(found.nll, found.counts)[0] == pytest.approx(theirs, abs=1e-6)


class Largest(TorchDispatchMode):
    """Notes the most elements that any operation puts out."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def test_no_full_logits_exist_of_a_large_vocabulary(tmp_path, text_file):
    vocabulary, width = 151_936, 8
    sizes = {"vocab_size": vocabulary, "hidden_size": width, "intermediate_size": 8}
    model = build_family("qwen3", **sizes, tie_word_embeddings=True, num_hidden_layers=1)
    subject = open_subject(save(model, tmp_path), text_file, context=32, probe_windows=1)
    windows = subject.evaluation.take(np.arange(4), 1)
    full = reference(subject.checkpoint.model, windows)
    with Largest() as largest:
        compare(subject.checkpoint.model, full)
    embedding = vocabulary * width
    assert embedding < largest.elements <= head.CHUNK_LOGITS < 4 * 31 * vocabulary


@pytest.mark.slow
def test_memory_of_a_large_vocabulary_is_that_of_a_chunk(tmp_path, text_file):
    code = """
import resource, sys
import numpy as np
from qscale.measure.loss import compare, reference
from qscale.measure.subject import open_subject
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
subject = open_subject(sys.argv[1], sys.argv[2], context=128, probe_windows=1)
before = peak()
full = reference(subject.checkpoint.model, subject.evaluation.take(np.arange(16), 1))
compare(subject.checkpoint.model, full, batch_windows=16)
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
    # All logits would take 1,178 MiB; a handful of chunks of 16 MiB are in use.
    assert float(done.stdout) < 200


def test_batches_and_chunks_change_nothing(either, monkeypatch):
    model, windows = either.checkpoint.model, either.evaluation
    base = reference(model, windows, batch_windows=1)
    with fake_quantized(either.weights, Format("int", 3, 8)):
        once = compare(model, base, batch_windows=1)
        monkeypatch.setattr(head, "CHUNK_LOGITS", 256 * 7)
        for size in (3, 8, 1000):
            again = compare(model, base, batch_windows=size)
            for name in ("nll", "kl", "agreements"):
                np.testing.assert_allclose(getattr(again, name), getattr(once, name), atol=1e-4)
            assert mean_and_se(again.nll, base.counts)[0] == pytest.approx(
                mean_and_se(once.nll, base.counts)[0], abs=1e-6
            )
    again = reference(model, windows, batch_windows=5)
    assert torch.allclose(again.hidden, base.hidden, atol=1e-5)
    assert again.nll.sum() / again.counts.sum() == pytest.approx(
        base.nll.sum() / base.counts.sum(), abs=1e-6
    )


def test_divergence_and_agreement_are_those_of_the_full_logits(subject):
    model, windows = subject.checkpoint.model, subject.evaluation
    full = reference(model, windows)
    ids = torch.from_numpy(windows.ids)
    with torch.no_grad():
        p = log_softmax(model(input_ids=ids).logits[:, :-1].double(), dim=-1)
        with fake_quantized(subject.weights, Format("int", 2, 8)):
            q = log_softmax(model(input_ids=ids).logits[:, :-1].double(), dim=-1)
            found = compare(model, full)
    expected = kl_div(q, p, log_target=True, reduction="none").sum((1, 2)).numpy()
    assert expected.min() > 0.1  # the fmt is coarse enough to see something
    np.testing.assert_allclose(found.kl, expected, rtol=1e-4)
    agreements = (p.argmax(-1) == q.argmax(-1)).sum(1).numpy()
    assert (agreements < 31).any()
    np.testing.assert_array_equal(found.agreements, agreements)


def test_a_model_compared_with_itself_differs_in_nothing(subject):
    full = reference(subject.checkpoint.model, subject.evaluation)
    found = compare(subject.checkpoint.model, full)
    np.testing.assert_array_equal(found.nll, full.nll)
    np.testing.assert_array_equal(found.agreements, full.counts)
    np.testing.assert_allclose(found.kl, 0, atol=1e-9)


def test_paired_error_is_that_of_resampling_windows():
    draw = np.random.default_rng(0)
    counts = draw.integers(10, 40, 300)
    level = draw.normal(0, 1, 300)  # windows differ much more than the two models do
    full = counts * (4 + level)
    quantized = counts * (4.1 + level + draw.normal(0, 0.05, 300))
    mean, se = mean_and_se(quantized - full, counts)
    assert mean == pytest.approx((quantized.sum() - full.sum()) / counts.sum())
    picks = draw.integers(0, 300, (4000, 300))
    boots = (quantized - full)[picks].sum(1) / counts[picks].sum(1)
    assert se == pytest.approx(boots.std(), rel=0.05)
    # Unpaired, the error would be that of the losses, many times as large.
    assert mean_and_se(full, counts)[1] > 10 * se


def test_error_with_equal_counts_is_that_of_a_mean():
    values = np.random.default_rng(1).normal(size=50)
    mean, se = mean_and_se(7 * values, np.full(50, 7))
    assert mean == pytest.approx(values.mean())
    assert se == pytest.approx(values.std(ddof=1) / np.sqrt(50))


def test_one_window_has_no_error():
    mean, se = mean_and_se(np.array([6.0]), np.array([3]))
    assert mean == 2
    assert np.isnan(se)


def test_logits_scaled_behind_the_head_are_refused(subject):
    model = hf.CohereForCausalLM(
        hf.CohereConfig(
            vocab_size=256,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
            logit_scale=0.5,
        )
    ).eval()
    with pytest.raises(CheckpointError, match="logits are not the LM head applied to the last hid"):
        reference(model, subject.evaluation)


def test_a_full_precision_loss_that_is_not_finite_is_refused(trained_llama, text_file):
    chosen = open_subject(trained_llama, text_file, context=32, probe_windows=4)
    embedding = chosen.checkpoint.model.get_input_embeddings().weight
    with torch.no_grad():
        embedding[ord("w")] = float("nan")
    with pytest.raises(
        CheckpointError, match=r"full-precision loss of evaluation window \d+ is nan"
    ):
        reference(chosen.checkpoint.model, chosen.evaluation)
