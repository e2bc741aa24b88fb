"""Windows and protocols: what is scored, in what context, and that probes and evaluation differ."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from qscale.errors import CheckpointError, TextError
from qscale.text import (
    BOS_POLICIES,
    Protocol,
    Windows,
    adds_bos,
    split,
    spread,
    tokenizer_hash,
    windows,
)
from tests.checkpoints import byte_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

BOS = 7


@dataclass
class Letters:
    """Tokenizer that gives the n-th character of a text the id n + 100, so ids are positions."""

    bos_token_id: int | None = BOS

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": list(range(100, 100 + len(text)))}

    def get_vocab(self) -> dict[str, int]:
        return {"a": 0}


def cut(path: Path, length: int, context: int, **options: object) -> Windows:
    path.write_text("x" * length)
    return windows(path, Letters(), context=context, vocab_size=10**6, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("text") / "text.txt"


@given(
    length=st.integers(20, 200),
    context=st.integers(3, 20),
    share=st.floats(0, 1),
    bos=st.sampled_from(BOS_POLICIES),
)
@settings(max_examples=200, deadline=None)
def test_every_window_is_consecutive_text_and_every_token_scored_at_most_once(
    scratch, length, context, share, bos
):
    body = context - (bos == "each_window")
    stride = max(1, round(share * body))
    found = cut(scratch, length, context, stride=stride, bos=bos)
    scored = []
    for ids, mask in zip(found.ids, found.scored, strict=True):
        assert len(ids) == context
        text = ids[ids != BOS]
        assert (np.diff(text) == 1).all()
        assert (ids == BOS).sum() <= 1
        scored += ids[1:][mask].tolist()
    assert len(scored) == len(set(scored)) == found.protocol.scored_tokens
    if stride < body or bos == "each_window":
        # No gaps: all tokens the windows reach, but the very first where nothing precedes it.
        first = 100 if bos != "none" else 101
        assert sorted(scored) == list(range(first, max(scored) + 1))
    # A rest too short for another step is all that is left out.
    assert length + (bos == "once") - body - found.starts[-1] < stride


def test_overlapping_windows_give_scored_tokens_enough_context(scratch):
    found = cut(scratch, 64, 16, stride=4)
    for mask in found.scored[1:]:
        assert np.flatnonzero(mask).min() + 1 >= 16 - 4
    assert found.scored[0].all()


def test_bos_policies(scratch):
    assert not (cut(scratch, 60, 12).ids == BOS).any()
    once = cut(scratch, 60, 12, bos="once").ids == BOS
    assert once[0].tolist() == [True] + 11 * [False]
    assert not once[1:].any()
    each = cut(scratch, 60, 12, bos="each_window")
    assert (each.ids == BOS)[:, 0].all()
    assert (each.ids == BOS).sum() == len(each)
    assert each.protocol.stride == 11


@given(
    length=st.integers(200, 900),
    context=st.integers(4, 20),
    share=st.floats(0.2, 1),
    probes=st.integers(1, 6),
    most=st.none() | st.integers(1, 10),
    bos=st.sampled_from(BOS_POLICIES),
)
@settings(max_examples=200, deadline=None)
def test_no_token_is_in_a_probe_and_in_an_evaluation_window(
    scratch, length, context, share, probes, most, bos
):
    body = context - (bos == "each_window")
    found = cut(scratch, length, context, stride=max(1, round(share * body)), bos=bos)
    try:
        probe, rest = split(found, probes, max_windows=most)
    except TextError:
        assert length < 4 * (probes + 1) * body  # text that is plainly long enough is accepted
        return
    assert not (set(probe.ids.ravel()) & set(rest.ids.ravel())) - {BOS}
    assert len(probe) == probes
    assert len(set(probe.ids.ravel()) - {BOS}) >= probes * body - (bos == "once")
    assert len(rest) == (min(most, len(rest)) if most else len(rest)) > 0
    assert rest.protocol.scored_tokens == rest.scored.sum()
    assert rest.protocol.probe_windows == probes
    # A limit on evaluation leaves the probes alone, so predictions do not depend on it.
    assert np.array_equal(split(found, probes)[0].ids, probe.ids)


def test_spread_covers_the_range_evenly():
    for n in range(1, 40):
        for k in range(1, n + 1):
            picks = spread(n, k)
            assert len(set(picks)) == k
            assert 0 <= picks.min() <= picks.max() < n
            assert np.ptp(np.diff(picks)) <= 1 if k > 1 else True
    assert spread(3, 5).tolist() == [0, 1, 2]


def test_protocols_differ_when_anything_does(scratch):
    base = Protocol("books", "0a", "0b", 8, 8, "none", 1, 70)
    others = [
        replace(base, **{name: value})
        for name, value in {
            "text": "news",
            "text_hash": "0c",
            "tokenizer_hash": "0c",
            "context": 9,
            "stride": 7,
            "bos": "once",
            "probe_windows": 2,
            "scored_tokens": 71,
            "dtype": "bfloat16",
            "kernel": "sdpa",
        }.items()
    ]
    assert len({p.id for p in [base, *others]}) == 11
    found = cut(scratch, 50, 10).protocol
    scratch.write_text("y" * 50)
    other = windows(scratch, Letters(), context=10, vocab_size=10**6).protocol
    assert found.text_hash != other.text_hash
    assert replace(found, text_hash="") == replace(other, text_hash="")


def test_tokenizer_hash_follows_the_ids_it_gives():
    plain = byte_tokenizer()
    plain.padding_side, plain.model_max_length = "left", 77  # do not change ids
    assert tokenizer_hash(plain) == tokenizer_hash(byte_tokenizer())
    assert tokenizer_hash(byte_tokenizer(bos="<s>")) != tokenizer_hash(plain)


def test_a_real_tokenizer_adds_no_special_tokens(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("Größe\r\nnext line, café".encode())
    found = windows(path, byte_tokenizer(bos="<s>"), context=4, vocab_size=257)
    assert bytes(found.ids.ravel().tolist()) == path.read_bytes()[: 4 * len(found)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": 2, "bos": "each_window"}, "context must leave room for 2 text tokens. Got 2"),
        ({"context": 1}, "context must leave room for 2 text tokens. Got 1"),
        ({"context": 8, "stride": 9}, "stride must be between 1 and 8. Got 9 instead"),
        ({"context": 8, "stride": 8, "bos": "each_window"}, "stride must be between 1 and 7"),
        ({"context": 8, "stride": 0}, "stride must be between 1 and 8. Got 0 instead"),
        ({"context": 8, "bos": "twice"}, "bos must be one of none, once, each_window. Got twice"),
        ({"context": 500}, r"text.txt: 60 tokens are shorter than one window of 500"),
    ],
)
def test_impossible_options(scratch, options, message):
    with pytest.raises(TextError, match=message):
        cut(scratch, 60, **options)


def test_impossible_shares(scratch):
    found = cut(scratch, 60, 10)
    with pytest.raises(TextError, match=r"text.txt: 60 tokens are too few for 6 .* 70 are needed"):
        split(found, 6)
    assert len(split(found, 5)[1]) == 1
    with pytest.raises(TextError, match=r"probe_windows must be at least 1. Got 0"):
        split(found, 0)
    with pytest.raises(TextError, match=r"max_windows must be at least 1. Got 0"):
        split(found, 2, max_windows=0)


def test_unusable_texts(tmp_path):
    path = tmp_path / "a.txt"
    with pytest.raises(TextError, match=r"a.txt: no such text file"):
        windows(path, Letters(), context=8, vocab_size=500)
    path.write_bytes(b"fine so far\xff and then not")
    with pytest.raises(TextError, match=r"a.txt: not UTF-8 text, byte 0xff at offset 11"):
        windows(path, Letters(), context=8, vocab_size=500)
    path.write_text("x" * 50)
    with pytest.raises(
        TextError, match=r"bos must be none: the tokenizer has no BOS token. Got on"
    ):
        windows(path, Letters(bos_token_id=None), context=8, vocab_size=500, bos="once")
    with pytest.raises(
        CheckpointError, match=r"BOS token is 900, the model's .* 499. Set bos to n"
    ):
        windows(path, Letters(bos_token_id=900), context=8, vocab_size=500, bos="once")
    with pytest.raises(CheckpointError, match=r"token 149, the model's vocabulary ends at 120"):
        windows(path, Letters(), context=8, vocab_size=121)


PROSE = "A naïve reader — “quoted” — pays 3,50 €.\r\n\tTwo  spaces, 𝄞 and 日本語. The end?  \n"


def byte_bpe() -> Any:
    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.post_processor = processors.ByteLevel(trim_offsets=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    found.train_from_iterator([PROSE * 3], trainer)
    return found


def sentencepiece() -> Any:
    found = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    found.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    found.pre_tokenizer = pre_tokenizers.Metaspace()
    found.train_from_iterator(
        ["a reader pays two spaces the end"],
        trainers.BpeTrainer(vocab_size=60, special_tokens=["<unk>"], show_progress=False),
    )
    return found


def words() -> Any:
    found = Tokenizer(models.WordPiece(vocab={"[UNK]": 0, "the": 1, "end": 2}, unk_token="[UNK]"))
    found.normalizer = normalizers.BertNormalizer()
    found.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return found


@pytest.mark.parametrize("build", [byte_bpe, sentencepiece, words])
@pytest.mark.parametrize("bos", BOS_POLICIES)
def test_every_byte_of_the_text_belongs_to_one_token(tmp_path, build, bos):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=build(), bos_token="<s>")
    path = tmp_path / "a.txt"
    path.write_bytes((PROSE * 4).encode())
    n = len(tokenizer(PROSE * 4, add_special_tokens=False)["input_ids"])
    lead = bos != "none"
    whole = windows(path, tokenizer, context=n + lead, vocab_size=10**6, bos=bos)
    assert whole.n_tokens == n + (bos == "once")
    first = 0
    if bos == "none":  # the first token is not scored
        end = tokenizer(PROSE * 4, add_special_tokens=False, return_offsets_mapping=True)
        first = len((PROSE * 4)[: end["offset_mapping"][0][1]].encode())
    assert whole.scored_bytes.tolist() == [len((PROSE * 4).encode()) - first]
    assert whole.protocol.scored_bytes == whole.scored_bytes.sum()
    # However the text is cut, bytes add up to those of the tokens that are scored.
    cut_up = windows(path, tokenizer, context=7, stride=3, vocab_size=10**6, bos=bos)
    reach = cut_up.starts[-1] + 7 - (bos == "each_window") - (bos == "once")
    offsets = tokenizer(PROSE * 4, add_special_tokens=False, return_offsets_mapping=True)
    behind = max(e for _, e in offsets["offset_mapping"][:reach])
    if reach < n:
        assert cut_up.protocol.scored_bytes == len((PROSE * 4)[:behind].encode()) - first
    probe, rest = split(cut_up, 2)
    assert rest.protocol.scored_bytes == rest.scored_bytes.sum() > 0
    assert len(rest.scored_bytes) == len(rest)
    assert (rest.scored_bytes <= cut_up.scored_bytes.max()).all()
    assert probe.scored_bytes.tolist() == [
        cut_up.scored_bytes[cut_up.starts == start].item() for start in probe.starts
    ]


def test_bytes_of_byte_tokens_are_one_each_but_for_shared_characters(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("abcdefgé" * 4, encoding="utf-8")
    found = windows(path, byte_tokenizer(), context=8, vocab_size=256)
    # The first byte token of é stands for both its bytes, the second for none.
    assert found.scored_bytes.tolist() == [8, 7, 6, 7]


def test_a_tokenizer_that_puts_bos_first_is_known():
    assert not adds_bos(byte_tokenizer())
    assert not adds_bos(byte_tokenizer(bos="<s>"))
    found = byte_bpe()
    found.add_special_tokens(["<s>"])
    start = ("<s>", found.token_to_id("<s>"))
    found.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[start])
    assert adds_bos(PreTrainedTokenizerFast(tokenizer_object=found, bos_token="<s>"))


def test_a_tokenizer_without_offsets_gives_no_bytes(scratch):
    found = cut(scratch, 60, 10)
    assert found.scored_bytes is None
    assert found.protocol.scored_bytes is None
    assert split(found, 2)[1].scored_bytes is None


def test_punctuation_split_off_is_noted(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("It was late , he said , and dark . " * 9)
    assert not windows(path, byte_tokenizer(), context=8, vocab_size=256).protocol.detokenised
    path.write_text("It was late, he said, and dark. A .txt file. " * 9)
    assert windows(path, byte_tokenizer(), context=8, vocab_size=256).protocol.detokenised
