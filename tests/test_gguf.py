"""GGUF files: the same model as the checkpoint they were written from, within their format."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from qscale.checkpoint import describe
from qscale.errors import CheckpointError, QscaleError
from qscale.measure.loss import bits_per_byte, mean_and_se, reference
from qscale.measure.subject import open_subject
from qscale.model import load, quantizable
from tests.checkpoints import build_family, byte_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate")

SIZES = {"hidden_size": 32, "intermediate_size": 64, "tie_word_embeddings": True, "vocab_size": 257}
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def gguf_name(name: str) -> str:
    """Name of one of Qwen2's parameters in a GGUF file."""
    outer = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
    }
    if name in outer:
        return outer[name]
    _, _, layer, *inner, kind = name.split(".")
    return f"blk.{layer}.{NAMES['.'.join(inner)]}.{kind}"


def write(model, path: Path, matrices: str = "Q8_0") -> dict[str, torch.Tensor]:
    """Write a Qwen2 over bytes and one merge as GGUF; return its weights as they are stored."""
    writer = gguf.GGUFWriter(path, "qwen2")
    config = model.config
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    tokens = [
        token for token, _ in sorted(byte_tokenizer().get_vocab().items(), key=lambda x: x[1])
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*tokens, "th"])
    writer.add_token_types([1] * 257)
    writer.add_token_merges(["t h"])
    stored = {}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        values = weight.numpy()
        kind = gguf.GGMLQuantizationType[matrices if values.ndim == 2 else "F32"]
        block = gguf.quants.quantize(values, kind)
        writer.add_tensor(gguf_name(name), block, raw_dtype=kind)
        stored[name] = torch.from_numpy(gguf.quants.dequantize(block, kind).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


@pytest.fixture(scope="module")
def model():
    return build_family("qwen2", **SIZES).eval()


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_0"])
def test_a_file_opens_as_its_dequantized_weights(tmp_path, model, kind):
    path = tmp_path / "tiny-step20-tokens1.5M.gguf"
    stored = write(model, path, kind)
    found = load(path)
    described = found.description
    assert described.storage.split(", ")[0] == kind
    assert (described.folder, described.gguf) == (tmp_path, path.name)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    assert described.n_params_total == sum(sizes.values())
    assert described.n_params == sum(sizes.values()) - sizes["model.embed_tokens.weight"]
    assert (described.vocab_size, described.max_context) == (257, 32)
    assert described.training == {"step": 20, "tokens": 1.5e6}
    assert len(quantizable(found.model)) == 2 * 7
    for name, p in found.model.named_parameters():
        assert torch.equal(p, stored[name])
    model_of_stored = build_family("qwen2", **SIZES).eval()
    model_of_stored.load_state_dict(stored, strict=False)
    ids = torch.arange(32)[None] * 7
    with torch.no_grad():
        torch.testing.assert_close(
            found.model(input_ids=ids).logits,
            model_of_stored(input_ids=ids).logits,
            rtol=1e-5,
            atol=1e-6,
        )


def test_a_file_can_be_measured_with_the_tokenizer_it_holds(tmp_path, model, text_file):
    write(model, tmp_path / "tiny.gguf")
    subject = open_subject(tmp_path / "tiny.gguf", text_file, context=32, probe_windows=2)
    full = reference(subject.checkpoint.model, subject.evaluation)
    # "th" is one token of two bytes.
    assert subject.evaluation.protocol.scored_bytes > subject.evaluation.protocol.scored_tokens
    share = subject.evaluation.protocol.scored_tokens / subject.evaluation.protocol.scored_bytes
    assert bits_per_byte(full.nll, subject.evaluation)[0] == pytest.approx(
        mean_and_se(full.nll, full.counts)[0] * share / np.log(2)
    )


def test_the_hash_is_of_the_weights(tmp_path, model):
    write(model, tmp_path / "a.gguf", "F32")
    write(model, tmp_path / "b.gguf", "F32")
    write(model, tmp_path / "c.gguf", "F16")
    found = [describe(tmp_path / f"{name}.gguf").checkpoint for name in "abc"]
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda b: b[:-4000], "truncated or not a GGUF file"),
        (lambda b: b[:100], "truncated or not a GGUF file"),
        (lambda _: b"plain text" * 100, "truncated or not a GGUF file"),
        (lambda _: b"", "truncated or not a GGUF file"),
        (lambda b: b.replace(b"token_embd", b"token_xxxx"), "holds no token embedding"),
    ],
)
def test_damaged_files_are_one_line(tmp_path, model, damage, message):
    path = tmp_path / "a.gguf"
    write(model, path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CheckpointError, match=message) as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_extra_is_named(tmp_path, model, monkeypatch):
    write(model, tmp_path / "a.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(QscaleError, match=r"needs gguf. Run: pip install 'qscale\[gguf\]'"):
        describe(tmp_path / "a.gguf")
