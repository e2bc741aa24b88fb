"""Every supported family: counts by hand, the same logits as transformers', no matrix skipped."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from qscale.checkpoint import describe
from qscale.errors import CheckpointError
from qscale.matrices import BLOCK, matrices
from qscale.model import load, quantizable
from qscale.shards import locate
from tests.checkpoints import HEADS, SPECIAL, build_family, build_model, save

# Two layers of width 16 over 256 tokens; four heads, two of them for keys and values.
TOKENS = 256 * 16
ATTENTION = 2 * 16 * 16 + 2 * 8 * 16
MLP = 3 * 16 * 24
ROUTER = 4 * 16
OPT_POSITIONS = (32 + 2) * 16
OPT_LAYER = 4 * (16 * 16 + 16) + 2 * 16 * 24 + 24 + 16 + 2 * 2 * 16

# Parameters without embeddings and head, all parameters, matrices to quantize in one layer.
COUNTS = {
    "llama": (2 * (ATTENTION + MLP + 2 * 16) + 16, 2 * TOKENS, 7),
    "mistral": (2 * (ATTENTION + MLP + 2 * 16) + 16, 2 * TOKENS, 7),
    "qwen2": (2 * (ATTENTION + 16 + 8 + 8 + MLP + 2 * 16) + 16, 2 * TOKENS, 7),
    "qwen3": (2 * (ATTENTION + 2 * 4 + MLP + 2 * 16) + 16, 2 * TOKENS, 7),
    "olmo2": (2 * (ATTENTION + 16 + 8 + MLP + 2 * 16) + 16, 2 * TOKENS, 7),
    "gemma": (2 * (ATTENTION + MLP + 2 * 16) + 16, TOKENS, 7),
    "gemma3": (2 * (ATTENTION + 2 * 4 + MLP + 4 * 16) + 16, TOKENS, 7),
    "opt": (2 * OPT_LAYER + 32, TOKENS + OPT_POSITIONS, 6),
    "bloom": (
        2 * (48 * 16 + 48 + 16 * 16 + 16 + 2 * 64 * 16 + 64 + 16 + 2 * 2 * 16) + 2 * 32,
        TOKENS,
        4,
    ),
    "mixtral": (2 * (ATTENTION + ROUTER + 4 * MLP + 2 * 16) + 16, 2 * TOKENS, 4 + 2 * 4),
    "olmoe": (2 * (ATTENTION + 16 + 8 + ROUTER + 4 * MLP + 2 * 16) + 16, 2 * TOKENS, 4 + 2 * 4),
    "qwen3-moe": (
        2 * (ATTENTION + 2 * 4 + ROUTER + 4 * MLP // 3 + 2 * 16) + 16,
        2 * TOKENS,
        4 + 2 * 4,
    ),
    "qwen2-moe": (
        2 * (ATTENTION + 16 + 8 + 8 + ROUTER + 4 * MLP // 3 + MLP + 16 + 2 * 16) + 16,
        2 * TOKENS,
        4 + 2 * 4 + 3,
    ),
}
IDS = torch.arange(2 * 32).view(2, 32) * 3 % 256


@pytest.mark.parametrize("family", COUNTS)
def test_a_family_opens_with_the_counts_the_logits_and_all_matrices(tmp_path, family):
    model = build_family(family).eval()
    with torch.no_grad():
        expected = model(input_ids=IDS).logits
    folder = save(model, tmp_path)
    body, outside, per_layer = COUNTS[family]
    described = describe(folder)
    assert (described.n_params, described.n_params_total) == (body, body + outside)
    assert described.storage == "F32"

    found = load(folder).model
    with torch.no_grad():
        torch.testing.assert_close(found(input_ids=IDS).logits, expected, rtol=1e-5, atol=1e-6)
    weights = quantizable(found)
    assert len(weights) == 2 * per_layer
    by_name = dict(found.named_parameters())
    assert all(by_name[name] is weight for name, weight in weights.items())
    # Read off the files, which hold an expert's gate and up apart, they are as many numbers.
    stored = [m for m in matrices(locate(folder), described.architecture) if m.kind == BLOCK]
    assert sum(w.numel() for w in weights.values()) == sum(m.stored.size for m in stored)
    # What is left is embeddings, head, biases, gains and routers: no matrix is skipped.
    left = {n: p for n, p in by_name.items() if n not in weights and p.ndim > 1}
    kinds = {
        "embed_tokens",
        "lm_head",
        "embed_positions",
        "word_embeddings",
        "gate",
        "shared_expert_gate",
    }
    assert {name.split(".")[-2] for name in left} <= kinds
    assert all(p.ndim == 2 for p in by_name.values() if p.ndim > 1)


def test_the_matrices_of_experts_are_those_that_transformers_fuses(tmp_path):
    model = build_family("mixtral")
    weights = quantizable(load(save(model, tmp_path)).model)
    fused = model.model.layers[1].mlp.experts
    for expert in range(4):
        name = f"model.layers.1.mlp.experts.down_proj.{expert}"
        assert torch.equal(weights[name], fused.down_proj[expert])
        name = f"model.layers.1.mlp.experts.gate_up_proj.{expert}"
        assert torch.equal(weights[name], fused.gate_up_proj[expert])


@pytest.mark.parametrize("tokens", [1, 64])
def test_the_gradients_of_experts_are_those_of_the_fused_tensors(tmp_path, tokens):
    model = build_family("olmoe").eval()
    found = load(save(model, tmp_path)).model
    for each in (model, found):
        each(input_ids=IDS.view(1, -1)[:, :tokens]).logits.square().sum().backward()
    weights, unused = quantizable(found), 0
    for layer in range(2):
        fused = model.model.layers[layer].mlp.experts
        for kind in ("gate_up_proj", "down_proj"):
            for expert in range(4):
                grad = weights[f"model.layers.{layer}.mlp.experts.{kind}.{expert}"].grad
                torch.testing.assert_close(grad, getattr(fused, kind).grad[expert])
                unused += not grad.any()
    assert unused == (8 if tokens == 1 else 0)  # one token goes to two of four experts


def test_projections_around_narrow_embeddings_are_counted_and_left_alone(tmp_path):
    found = load(save(build_family("opt", word_embed_proj_dim=8), tmp_path))
    assert found.description.n_params == 2 * OPT_LAYER + 32 + 2 * 16 * 8
    assert not any("project" in name for name in quantizable(found.model))


def test_capped_logits_are_refused(tmp_path):
    folder = save(build_family("gemma2"), tmp_path)
    with pytest.raises(CheckpointError, match=r"caps its logits \(final_logit_softcapping is 30\)"):
        load(folder)


def test_a_model_that_looks_ahead_is_refused(tmp_path):
    folder = save(build_family("gemma3", use_bidirectional_attention=True), tmp_path)
    with pytest.raises(CheckpointError, match="predictions change with later tokens, so this is n"):
        load(folder)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("architecture", ["gpt2", "neox", "mixtral"])
def test_half_precision_shards_open_as_float32(tmp_path, architecture, dtype):
    build = build_family if architecture == "mixtral" else build_model
    model = build(architecture).to(dtype).eval()
    folder = save(model, tmp_path, max_shard_size="8KB")
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 1
    found = load(folder)
    assert found.description.storage == {torch.float16: "F16", torch.bfloat16: "BF16"}[dtype]
    assert {p.dtype for p in found.model.parameters()} == {torch.float32}
    with torch.no_grad():
        expected = model.float()(input_ids=IDS).logits
        torch.testing.assert_close(
            found.model(input_ids=IDS).logits, expected, rtol=1e-5, atol=1e-6
        )


def published(tensors: dict, prefix: str) -> dict:
    """Names without the prefix of the causal model, as the first checkpoints of some families."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("family", ["gpt2", "bloom"])
def test_names_without_a_prefix_are_those_with_one(tmp_path, family):
    model = (build_model if family == "gpt2" else build_family)(family).eval()
    folder = save(model, tmp_path)
    expected = describe(folder)
    path = folder / "model.safetensors"
    masks = {"h.0.attn.bias": torch.ones(1, 1, 32, 32)} if family == "gpt2" else {}
    save_file(published(load_file(path), "transformer.") | masks, path, metadata={"format": "pt"})
    found = load(folder)
    assert found.description.n_params == expected.n_params
    assert found.description.n_params_total == expected.n_params_total
    with torch.no_grad():
        torch.testing.assert_close(
            found.model(input_ids=IDS).logits, model(input_ids=IDS).logits, rtol=1e-5, atol=1e-6
        )


def test_masks_and_frequencies_in_another_format_are_not_weights(tmp_path):
    folder = save(build_model("neox"), tmp_path)
    expected = describe(folder)
    path = folder / "model.safetensors"
    prefix = "gpt_neox.layers.0.attention"
    extra = {
        f"{prefix}.bias": torch.ones(1, 1, 32, 32, dtype=torch.uint8),
        f"{prefix}.masked_bias": torch.tensor(-1e4),
        f"{prefix}.rotary_emb.inv_freq": torch.ones(2),
    }
    save_file(load_file(path) | extra, path, metadata={"format": "pt"})
    found = load(folder).description
    assert (found.n_params, found.n_params_total) == (expected.n_params, expected.n_params_total)
    assert found.storage == "F32"


def test_a_model_that_cannot_be_run_is_one_line(tmp_path):
    # StableLM rotates a quarter of a head: one of four numbers, which cannot be paired.
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, **SPECIAL, **HEADS}
    model = hf.StableLmForCausalLM(hf.StableLmConfig(vocab_size=256, **sizes))
    with pytest.raises(
        CheckpointError, match="the model cannot be run .* Give the config"
    ) as caught:
        load(save(model, tmp_path))
    assert "\n" not in str(caught.value)
