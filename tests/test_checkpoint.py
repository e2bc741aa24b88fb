"""Checkpoint folders: counts by hand, hashes, sidecars, loading, and every way to be broken."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.utils import logging

from qscale.checkpoint import describe
from qscale.errors import CheckpointError, QscaleError
from qscale.model import load, quantizable, require_torch
from tests.checkpoints import build_model, byte_tokenizer, save

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WIDTH, INNER, VOCAB, POSITIONS, LAYERS = 16, 24, 256, 32, 2
# Llama: q and o are 16x16, k and v 8x16 (two of four heads), gate, up and down 16x24, two gains.
LLAMA_BODY = LAYERS * (2 * 16 * 16 + 2 * 8 * 16 + 3 * 16 * 24 + 2 * 16) + 16
# GPT-2 and NeoX: fused qkv, projection, two MLP matrices, all with biases, two LayerNorms.
GPT_BODY = LAYERS * (16 * 48 + 48 + 16 * 16 + 16 + 16 * 24 + 24 + 24 * 16 + 16 + 2 * 2 * 16) + 32
TOKENS = VOCAB * WIDTH


@pytest.mark.parametrize(
    ("architecture", "changes", "body", "total"),
    [
        ("llama", {"tie_word_embeddings": False}, LLAMA_BODY, LLAMA_BODY + 2 * TOKENS),
        ("llama", {"tie_word_embeddings": True}, LLAMA_BODY, LLAMA_BODY + TOKENS),
        ("gpt2", {}, GPT_BODY, GPT_BODY + TOKENS + POSITIONS * WIDTH),
        ("neox", {}, GPT_BODY, GPT_BODY + 2 * TOKENS),
    ],
)
def test_parameters_counted_by_hand(tmp_path, architecture, changes, body, total):
    found = describe(save(build_model(architecture, **changes), tmp_path))
    assert (found.n_params, found.n_params_total) == (body, total)
    assert (found.vocab_size, found.max_context) == (VOCAB, POSITIONS)
    assert found.training == {}


def test_masks_and_a_tied_copy_of_the_head_are_not_counted(tmp_path):
    folder = save(build_model("gpt2"), tmp_path)
    counts = (describe(folder).n_params, describe(folder).n_params_total)
    edit(
        folder,
        lambda t: (
            t
            | {
                "transformer.h.0.attn.bias": torch.ones(1, 1, 32, 32),
                "transformer.h.0.attn.masked_bias": torch.tensor(-1e4),
                "lm_head.weight": t["transformer.wte.weight"].clone(),
            }
        ),
    )
    assert (describe(folder).n_params, describe(folder).n_params_total) == counts
    (folder / "config.json").write_text(
        json.dumps({k: v for k, v in config(folder).items() if k != "tie_word_embeddings"})
    )  # now the bytes settle it
    assert (describe(folder).n_params, describe(folder).n_params_total) == counts
    load(folder)


def test_hash_is_of_the_weights_not_of_their_files(tmp_path):
    model = build_model("llama")
    whole = describe(save(model, tmp_path / "whole"))
    parts = describe(save(model, tmp_path / "parts", max_shard_size="8KB"))
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 1
    assert whole.checkpoint == parts.checkpoint
    assert whole.n_params_total == parts.n_params_total
    with torch.no_grad():
        model.model.norm.weight[3] = torch.nextafter(model.model.norm.weight[3], torch.tensor(2.0))
    assert describe(save(model, tmp_path / "other")).checkpoint != whole.checkpoint


def test_a_whole_file_counts_before_shards_as_it_does_for_transformers(tmp_path):
    other = build_model("llama", initializer_range=0.5)
    folder = save(other, tmp_path / "both", max_shard_size="8KB")
    (folder / "model.safetensors.index.json").rename(tmp_path / "index")
    for shard in folder.glob("model-*"):
        shard.rename(tmp_path / shard.name)
    model = build_model("llama")
    expected = describe(save(model, folder)).checkpoint
    (tmp_path / "index").rename(folder / "model.safetensors.index.json")
    for shard in tmp_path.glob("model-*"):
        shard.rename(folder / shard.name)
    found = load(folder)
    assert found.description.checkpoint == expected
    assert torch.equal(found.model.lm_head.weight, model.lm_head.weight)


def test_describing_needs_no_torch(trained_llama):
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from qscale.checkpoint import describe\n"
        "print(describe(sys.argv[1]).n_params)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(trained_llama)], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) == LLAMA_BODY


def test_missing_torch_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(QscaleError, match=r"pip install 'qscale\[measure\]'"):
        require_torch()


def test_sidecar_numbers_become_floats(trained_llama):
    assert describe(trained_llama).training == {"run": "one", "tokens": 4e5, "lr": 0.01}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "[training]\nlearning_rate = 1",
            r"qscale.toml: unknown key 'learning_rate'\. Known are: ",
        ),
        ("tokens = 1e9", r"qscale.toml: unknown key 'tokens'\. The file holds one table"),
        ("training = 3", r"qscale.toml: unknown key 'training'"),
        ("[training]\ntokens = 'many'", r"'tokens' must be a number. Got 'many' instead"),
        ("[training]\ntokens = true", r"'tokens' must be a number. Got True instead"),
        ("[training]\nlr = nan", r"'lr' must be a number. Got nan instead"),
        ("[training]\nrun = 7", r"'run' must be text. Got 7 instead"),
        ("[training]\ntokens = 300", r"'tokens' must be between .* write 125e6 for 125 million"),
        ("[training", r"qscale.toml: not valid TOML"),
    ],
)
def test_sidecar_mistakes(tmp_path, content, message):
    folder = save(build_model("llama"), tmp_path)
    (folder / "qscale.toml").write_text(content)
    with pytest.raises(CheckpointError, match=message):
        describe(folder)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "neox"])
def test_loading_keeps_the_function_and_lists_block_matrices(tmp_path, architecture):
    model = build_model(architecture).eval()
    found = load(save(model, tmp_path))
    ids = torch.arange(2 * 32).view(2, 32)
    with torch.no_grad():
        torch.testing.assert_close(
            found.model(input_ids=ids).logits, model(input_ids=ids).logits, rtol=1e-6, atol=1e-6
        )
    weights = quantizable(found.model)
    assert len(weights) == LAYERS * {"llama": 7, "gpt2": 4, "neox": 4}[architecture]
    by_name = dict(found.model.named_parameters())
    assert all(by_name[name] is weight for name, weight in weights.items())
    # All weights but gains and biases: those have one dimension.
    inner = [p for n, p in by_name.items() if p.ndim == 2 and p.shape[0] not in (VOCAB, POSITIONS)]
    if architecture != "gpt2":
        inner = [p for p in inner if VOCAB not in p.shape]
    assert {id(p) for p in inner} == {id(p) for p in weights.values()}
    assert not found.model.training


def test_conv1d_becomes_its_transpose(tmp_path):
    model = build_model("gpt2")
    found = load(save(model, tmp_path)).model
    mine, theirs = found.transformer.h[1].mlp.c_fc, model.transformer.h[1].mlp.c_fc
    assert isinstance(mine, torch.nn.Linear)
    assert torch.equal(mine.weight, theirs.weight.T)
    assert torch.equal(mine.bias, theirs.bias)
    assert found.lm_head.weight is found.transformer.wte.weight


def test_half_precision_loads_as_float32(tmp_path):
    model = build_model("llama").to(torch.bfloat16)
    found = load(save(model, tmp_path)).model
    assert {p.dtype for p in found.parameters()} == {torch.float32}
    assert torch.equal(found.model.norm.weight, model.model.norm.weight.float())


def test_loading_is_silent_and_restores_the_settings(trained_llama, capfd):
    logging.set_verbosity_info()
    logging.enable_progress_bar()
    try:
        load(trained_llama)
        assert logging.get_verbosity() == logging.INFO
        assert logging.is_progress_bar_enabled()
    finally:
        logging.set_verbosity_warning()
    assert capfd.readouterr() == ("", "")


def config(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def set_config(folder: Path, **values: object) -> None:
    (folder / "config.json").write_text(json.dumps(config(folder) | values))


def edit(folder: Path, change: Callable[[dict], dict]) -> None:
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


def poison(value: float) -> Callable[[Path], None]:
    def change(tensors: dict) -> dict:
        tensors["model.layers.1.mlp.up_proj.weight"][2, 3] = value
        return tensors

    return lambda folder: edit(folder, change)


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def replace_shard(folder: Path) -> None:
    save(build_model("llama"), folder, max_shard_size="8KB")
    next(folder.glob("model-00002-of-*.safetensors")).unlink()
    (folder / "model.safetensors").unlink(missing_ok=True)


def half_written(folder: Path) -> None:
    save(build_model("llama"), folder, max_shard_size="8KB")
    (folder / "model.safetensors").unlink(missing_ok=True)
    path = next(folder.glob("model-00002-of-*.safetensors"))
    path.write_bytes(path.read_bytes()[:-40])


def bad_index(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": 3}')


def promise_more(folder: Path) -> None:
    save(build_model("llama"), folder, max_shard_size="8KB")
    (folder / "model.safetensors").unlink(missing_ok=True)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.layers.9.up"] = min(index["weight_map"].values())
    path.write_text(json.dumps(index))


def only_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


NAME = "model.layers.1.mlp.up_proj.weight"
BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "no config.json"),
    "only an adapter": (
        lambda f: (f / "config.json").rename(f / "adapter_config.json"),
        "no config.json. It holds an adapter: merge it into its base model",
    ),
    "only a GGUF file": (
        lambda f: (f / "config.json").rename(f / "tiny.gguf"),
        "no config.json. Give the file tiny.gguf itself",
    ),
    "config not JSON": (lambda f: (f / "config.json").write_text("{"), "not valid JSON"),
    "config not an object": (lambda f: (f / "config.json").write_text("[1]"), "JSON object"),
    "no model type": (lambda f: set_config(f, model_type=None), "'model_type' must be"),
    "unknown model type": (lambda f: set_config(f, model_type="foo"), "transformers cannot load"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "no model.safetensors. Convert"),
    "pickled weights": (only_pickle, "no model.safetensors, only pytorch_model.bin. Convert"),
    "missing shard": (replace_shard, r"model-00002-of-\d+.safetensors is missing"),
    "bad index": (bad_index, "'weight_map' must name"),
    "truncated": (truncate, r"truncated. The file has \d+ bytes, its header promises \d+"),
    "empty file": (lambda f: (f / "model.safetensors").write_bytes(b""), "truncated or not a saf"),
    "not safetensors": (
        lambda f: (f / "model.safetensors").write_bytes(b"plain text, and long enough"),
        "truncated or not a safetensors file",
    ),
    "damaged header": (
        lambda f: (f / "model.safetensors").write_bytes(b"\x04" + bytes(7) + b"{{{{"),
        "header is damaged",
    ),
    "NaN": (poison(float("nan")), f"'{NAME}' holds NaN or infinite"),
    "infinity": (poison(float("-inf")), f"'{NAME}' holds NaN or infinite"),
    "missing weight": (
        lambda f: edit(f, lambda t: {k: v for k, v in t.items() if k != NAME}),
        f"the weights lack '{NAME}'",
    ),
    "left-over weight": (
        lambda f: set_config(f, num_hidden_layers=1),
        "the configuration has no place for weight 'model.layers.1",
    ),
    "wrong shape": (
        lambda f: set_config(f, intermediate_size=32),
        r"has shape \(.*24.*\), the configuration asks for \(.*32.*\)",
    ),
    "index promises more": (
        promise_more,
        r"model-00001-of-\d+.safetensors: lacks 'model.layers.9.up', which model.safetens",
    ),
    "8-bit floats": (
        lambda f: edit(f, lambda t: t | {NAME: t[NAME].to(torch.float8_e4m3fn)}),
        rf"model.safetensors: '{NAME}' must be stored as .* Got F8_E4M3 instead. Give the checkp",
    ),
    "packed integers": (
        lambda f: edit(f, lambda t: t | {NAME: t[NAME].to(torch.int32)}),
        rf"'{NAME}' must be stored as one of BF16, F16, F32, F64. Got I32 instead",
    ),
    "half written": (
        half_written,
        r"model-00002-of-\d+.safetensors: truncated. The file has \d+ bytes, its header pro",
    ),
    "sequence to sequence": (
        lambda f: set_config(f, architectures=None, model_type="t5"),
        "transformers cannot load this as a causal language model",
    ),
    "tokenizer damaged": (
        lambda f: (f / "tokenizer.json").write_text("{"),
        "no usable tokenizer .* Copy tokenizer.json",
    ),
    "vocabulary of another model": (
        lambda f: set_config(f, vocab_size=300),
        r"'lm_head.weight' has shape \(256, 16\), the configuration asks for \(300, 16\)",
    ),
    "no tokenizer": (
        lambda f: [p.unlink() for p in f.glob("tokenizer*")],
        "no usable tokenizer",
    ),
    "encoder": (
        lambda f: set_config(f, architectures=["BertForMaskedLM"]),
        "not a causal language model. Got BertForMaskedLM instead",
    ),
    "quantized already": (
        lambda f: set_config(f, quantization_config={"bits": 4}),
        "quantized already",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_folder_is_one_line_naming_it(tmp_path, case):
    folder = save(build_model("llama"), tmp_path / "ckpt")
    change, message = BROKEN[case]
    change(folder)
    with pytest.raises(CheckpointError, match=message) as caught:
        load(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_not_a_folder(tmp_path):
    with pytest.raises(CheckpointError, match="not a folder"):
        describe(tmp_path / "absent")


def test_impossible_device(trained_llama):
    with pytest.raises(QscaleError, match=r"device must be one torch can use, .* Got 'abacus'"):
        load(trained_llama, device="abacus")


def test_blocks_without_linear_layers_are_refused():
    model = build_model("llama")
    for layer in model.model.layers:
        layer.mlp = torch.nn.ParameterList([torch.zeros(4, 16, 24)])
    with pytest.raises(CheckpointError, match="weights of Linear layers"):
        quantizable(model)


def test_tokenizer_of_the_folder_is_used(trained_llama):
    found = load(trained_llama).tokenizer
    assert (
        found("héllo")["input_ids"] == list("héllo".encode()) == byte_tokenizer()("héllo").input_ids
    )
