"""Losses against lm-eval's rolling log likelihood, where that library is installed."""

from __future__ import annotations

import math

import pytest
import torch

from qscale.measure.loss import bits_per_byte, mean_and_se, reference
from qscale.measure.subject import open_subject
from qscale.text import windows
from tests.checkpoints import babble, build_model, byte_tokenizer, train

pytestmark = pytest.mark.slow
LENGTH = 31  # tokens that lm-eval predicts in one window


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "neox"])
def test_rolling_log_likelihood(tmp_path, architecture):
    """One BOS before the text and one token of context: lm-eval's windows with a stride.

    It feeds BOS and all tokens but the last, ``LENGTH`` at a time, each time with the token before
    as context; a window of ours holds what it feeds and the last token it predicts.
    """
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    instance = pytest.importorskip("lm_eval.api.instance")
    model = build_model(architecture, vocab_size=257, bos_token_id=256)
    train(model)
    model.save_pretrained(tmp_path)
    byte_tokenizer(bos="<s>").save_pretrained(tmp_path)
    text = babble(600, seed=5)[: LENGTH * 60]
    path = tmp_path / "text.txt"
    path.write_text(text)
    subject = open_subject(
        tmp_path, path, context=LENGTH + 1, stride=LENGTH, bos="once", probe_windows=1
    )
    checkpoint = subject.checkpoint
    whole = windows(
        path,
        checkpoint.tokenizer,
        context=LENGTH + 1,
        stride=LENGTH,
        bos="once",
        vocab_size=257,
    )
    assert whole.protocol.scored_tokens == whole.protocol.scored_bytes == len(text)
    ours = reference(checkpoint.model, whole)

    theirs = huggingface.HFLM(
        pretrained=checkpoint.model,
        tokenizer=checkpoint.tokenizer,
        max_length=LENGTH,
        device="cpu",
        batch_size=4,
    )
    with torch.no_grad():
        (total,) = theirs.loglikelihood_rolling(
            [instance.Instance("loglikelihood_rolling", {}, (text,), 0)], disable_tqdm=True
        )
    nats = mean_and_se(ours.nll, ours.counts)[0]
    assert nats == pytest.approx(-total / len(text), abs=1e-5)
    assert bits_per_byte(ours.nll, whole)[0] == pytest.approx(
        -total / len(text) / math.log(2), abs=1e-5
    )
