"""Features of streamed weights against direct computations on the whole tensors."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from scipy.stats import kurtosis

from qscale.errors import CheckpointError, QscaleError
from qscale.matrices import BLOCK, matrices, quantizable_names
from qscale.measure.stream import (
    Grid,
    find_grid,
    mean_distance,
    weight_distance,
    weight_features,
)
from qscale.measure.stream.spectral import spectral_norm
from qscale.measure.weights import squared_errors, squared_norms
from qscale.model import load, quantizable
from qscale.quantize.format import ABSMAX_FULL, MINMAX, Format
from qscale.quantize.rtn import rtn
from qscale.shards import locate
from tests.checkpoints import SIZES, build_family, build_model, save, train

if TYPE_CHECKING:
    from pathlib import Path

FORMATS = (Format("int", 4, 8), Format("int", 3, 7, MINMAX), Format("int", 2, None, ABSMAX_FULL))
DENSE = ("llama", "gpt2", "neox", "opt", "qwen2", "qwen3", "olmo2", "gemma", "bloom", "mistral")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, tuple[Path, dict[str, torch.Tensor]]]:
    """Briefly trained models, stored in three formats, and their matrices as float64."""
    found = {}
    formats = {"llama": torch.bfloat16, "gpt2": torch.float16, "neox": torch.float32}
    for name, dtype in formats.items():
        model = build_model(name)
        train(model, steps=20)
        folder = tmp_path_factory.mktemp(name)
        model.to(dtype).save_pretrained(folder)
        stored = load_file(folder / "model.safetensors")
        flip = {m.name: m.transposed for m in matrices(locate(folder), model.config.model_type)}
        found[name] = (
            folder,
            {n: (stored[n].T if t else stored[n]).double() for n, t in flip.items()},
        )
    return found


def write(folder: Path, weights: dict[str, torch.Tensor], model_type: str = "llama") -> Path:
    """Write a checkpoint of just these tensors."""
    folder.mkdir(exist_ok=True)
    save_file({n: w.contiguous() for n, w in weights.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


def one(folder: Path, weight: torch.Tensor) -> Any:
    """Write one matrix and return it as the stored matrix of a block."""
    name = "model.layers.0.mlp.up_proj.weight"
    return matrices(locate(write(folder, {name: weight})), "llama")[0]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", ["llama", "gpt2", "neox"])
def test_features_are_those_of_the_whole_matrices(checkpoints, name):
    folder, weights = checkpoints[name]
    frame = weight_features(folder).matrices.set_index("matrix")
    assert list(frame.index) == list(weights)
    for matrix, row in frame.iterrows():
        w = weights[matrix].numpy()
        sigma = w.std()
        assert (row["rows"], row["columns"], row["n"]) == (*w.shape, w.size)
        expected = {
            "frobenius_norm": np.linalg.norm(w),
            "rms": np.sqrt((w**2).mean()),
            "absmax": abs(w).max(),
            "kurtosis": kurtosis(w, axis=None, fisher=False),
            "outliers_3": (abs(w) > 3 * sigma).mean(),
            "outliers_6": (abs(w) > 6 * sigma).mean(),
            "group_absmax_mean": abs(w).max(1).mean(),  # rows are shorter than a group
            "group_absmax_cv": abs(w).max(1).std() / abs(w).max(1).mean(),
            "group_kurtosis_median": np.median((w**4).mean(1) / (w**2).mean(1) ** 2),
            "group_kurtosis_p95": np.quantile((w**4).mean(1) / (w**2).mean(1) ** 2, 0.95),
        }
        assert dict(row[list(expected)]) == pytest.approx(expected, rel=1e-5)
        assert row["mean"] == pytest.approx(w.mean(), abs=1e-6 * sigma)
        values = np.linalg.svd(w, compute_uv=False)
        assert row["spectral_norm"] == pytest.approx(values[0], rel=1e-3)
        assert row["stable_rank"] == pytest.approx((values**2).sum() / values[0] ** 2, rel=2e-3)


@pytest.mark.parametrize("name", ["llama", "gpt2", "neox"])
def test_rounding_errors_are_those_of_the_quantizer(checkpoints, name):
    folder, weights = checkpoints[name]
    features = weight_features(folder, FORMATS, spectral=False)
    blocks = list(features.matrices.query("kind == 'block'")["matrix"])
    assert list(features.formats["matrix"]) == [m for m in blocks for _ in FORMATS]
    errors, signal = [], 0.0
    for index, row in features.formats.iterrows():
        w, fmt = weights[row["matrix"]], FORMATS[index % len(FORMATS)]
        error = float((rtn(w.float(), fmt).double() - w).square().sum())
        assert row["squared_error"] == pytest.approx(error, rel=1e-5)
        assert row["sqnr_db"] == pytest.approx(10 * math.log10(w.square().sum() / error), rel=1e-5)
        assert row["bits_per_weight"] == fmt.bits_per_weight([w.shape])
        errors.append(error)
        signal += float(w.square().sum()) / len(FORMATS)
    total = features.by_format()
    assert list(total["bits"]) == [s.bits for s in FORMATS]
    for index, row in total.iterrows():
        error = sum(errors[index :: len(FORMATS)])
        assert row["sqnr_db"] == pytest.approx(10 * math.log10(signal / error), rel=1e-5)
        shapes = [weights[m].shape for m in blocks]
        assert row["bits_per_weight"] == pytest.approx(FORMATS[index].bits_per_weight(shapes))


def test_groups_of_a_row_and_its_shorter_last_group(tmp_path):
    w = normal(5, 300, seed=1)
    frame = weight_features(write(tmp_path, {"model.layers.0.a.weight": w}), spectral=False)
    groups = [part.numpy() for row in w for part in row.split(128)]
    row = frame.matrices.iloc[0]
    peaks = [abs(g).max() for g in groups]
    about_zero = [(g**4).mean() / (g**2).mean() ** 2 for g in groups]
    assert row["group_absmax_mean"] == pytest.approx(np.mean(peaks), rel=1e-5)
    assert row["group_absmax_cv"] == pytest.approx(np.std(peaks) / np.mean(peaks), rel=1e-5)
    assert row["group_kurtosis_median"] == pytest.approx(np.median(about_zero), rel=1e-5)
    assert row["kurtosis"] == pytest.approx(kurtosis(w, axis=None, fisher=False), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_outliers_are_counted_on_the_very_threshold(tmp_path, dtype):
    """Of 40 elements, 36 of one size and four larger, so that an element is exactly 3 sigma."""
    w = torch.ones(1, 36 * 4)
    w[0, ::2] = -1
    large = torch.zeros(1, 56 * 4)
    large[0, :2] = torch.tensor([30.0, -30.0])
    w = torch.cat([w, large], 1).to(dtype)
    exact = w.double()
    sigma = float(exact.std(correction=0))
    w[0, -1], w[0, -2] = 3 * sigma, -3 * sigma
    frame = weight_features(write(tmp_path, {"model.layers.0.a.weight": w}), spectral=False)
    exact = w.double()
    sigma = float(exact.std(correction=0))
    expected = [float((exact.abs() > k * sigma).double().mean()) for k in (3, 6)]
    assert frame.matrices[["outliers_3", "outliers_6"]].iloc[0].tolist() == expected
    assert expected[1] > 0


def test_a_constant_matrix_and_one_of_zeros_have_no_kurtosis(tmp_path):
    weights = {f"model.layers.{i}.a.weight": torch.full((3, 20), i / 2) for i in range(2)}
    frame = weight_features(write(tmp_path, weights), FORMATS[:1]).matrices
    assert frame["kurtosis"].isna().all()
    assert frame["frobenius_norm"].tolist() == pytest.approx([0, math.sqrt(15)])
    assert frame["spectral_norm"].tolist() == pytest.approx([0, math.sqrt(15)])
    assert frame["stable_rank"].isna().tolist() == [True, False]


def test_shards_and_block_sizes_change_nothing(checkpoints, tmp_path):
    folder, _ = checkpoints["llama"]
    model = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size=2000)
    assert len(list(tmp_path.glob("*.safetensors"))) >= 5
    whole = weight_features(folder, FORMATS)
    for other in (
        weight_features(tmp_path, FORMATS),
        weight_features(folder, FORMATS, block_elements=100),
    ):
        for name in ("matrices", "formats", "totals"):
            one = getattr(whole, name)
            key = one.columns[0]
            two = getattr(other, name).set_index(key).loc[one[key].unique()].reset_index()
            numbers = list(one.select_dtypes("number").columns)
            np.testing.assert_allclose(
                one[numbers].to_numpy(float), two[numbers].to_numpy(float), rtol=1e-5, atol=1e-8
            )


def test_totals_count_a_tied_head_once(tmp_path):
    for tied in (True, False):
        model = build_model("llama", tie_word_embeddings=tied)
        model.save_pretrained(tmp_path / str(tied))
        totals = weight_features(tmp_path / str(tied), spectral=False).totals.set_index("kind")
        assert totals.loc["all", "n"] == model.num_parameters()
        squares = sum(float(p.detach().double().square().sum()) for p in model.parameters())
        assert totals.loc["all", "squared_norm"] == pytest.approx(squares, rel=1e-6)
        assert totals.loc["vector", "n"] == sum(p.numel() for p in model.parameters() if p.ndim < 2)
        assert totals.loc["block", "n"] == sum(w.numel() for w in quantizable(model).values())
    weights = load_file(tmp_path / "True" / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    stored_twice = weight_features(write(tmp_path / "twice", weights), spectral=False).totals
    assert stored_twice.set_index("kind").loc["all", "n"] == sum(
        w.numel() for n, w in weights.items() if n != "lm_head.weight"
    )


def test_progress_ends_at_the_total(checkpoints):
    calls: list[tuple[int, int]] = []
    folder, _ = checkpoints["neox"]
    weight_features(folder, spectral=False, on_progress=lambda *call: calls.append(call))
    done = [call[0] for call in calls]
    assert done == sorted(done)
    stored = sum(t.stop - t.start for t in locate(folder).values())
    assert calls[-1] == (stored, stored)


def build(architecture: str) -> Any:
    return (build_model if architecture in SIZES else build_family)(architecture)


@pytest.mark.parametrize("architecture", DENSE)
def test_names_to_quantize_are_those_of_the_model(architecture, tmp_path):
    save(build(architecture), tmp_path)
    weights = quantizable(load(tmp_path).model)
    found = {m.name: m.shape for m in matrices(locate(tmp_path), architecture) if m.kind == BLOCK}
    assert found == {name: tuple(w.shape) for name, w in weights.items()}
    assert quantizable_names(locate(tmp_path), architecture) == list(found)


@pytest.mark.parametrize("architecture", ["mixtral", "olmoe", "qwen3-moe"])
def test_experts_are_matrices_of_their_own(architecture, tmp_path):
    """Files hold gate and up of each expert; the model has them stacked, with the same rows."""
    save(build(architecture), tmp_path)
    fmt = Format("int", 3, 8)
    features = weight_features(tmp_path, [fmt], spectral=False)
    frame = features.matrices
    blocks = frame[frame["kind"] == BLOCK]
    weights = quantizable(load(tmp_path).model)
    experts = sum("gate_up_proj" in name for name in weights)
    assert experts == 2 * 4
    assert len(blocks) == len(weights) + experts
    assert blocks["n"].sum() == sum(w.numel() for w in weights.values())
    total = features.by_format().iloc[0]
    assert total["squared_norm"] == pytest.approx(sum(squared_norms(weights).values()), rel=1e-6)
    errors = sum(squared_errors(weights, fmt).values())
    assert total["squared_error"] == pytest.approx(errors, rel=1e-5)
    routers = frame[frame["matrix"].str.endswith("gate.weight")]
    assert len(routers) == 2
    assert set(routers["kind"]) == {"other"}


def test_fused_experts_are_split_and_turned(tmp_path):
    """Rows are outputs: gpt-oss stores fused experts as (experts, in, out)."""
    w = normal(3, 16, 40)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    frame = weight_features(write(tmp_path, {name: w}, "gpt_oss"), FORMATS[:1])
    assert list(frame.matrices["matrix"]) == [f"{name}[{e}]" for e in range(3)]
    assert frame.matrices[["rows", "columns"]].to_numpy().tolist() == [[40, 16]] * 3
    for e, error in enumerate(frame.formats["squared_error"]):
        turned = w[e].T.contiguous()
        assert error == pytest.approx(float((rtn(turned, FORMATS[0]) - turned).square().sum()))


def test_spectral_norm_states_its_residual(tmp_path):
    w = normal(60, 90)
    u, s, v = torch.linalg.svd(w.double(), full_matrices=False)
    matrix = one(tmp_path, w)
    for limit in (3, 6, 12):
        found = spectral_norm(matrix, max_products=limit, rtol=0)
        assert found.products == limit
        assert found.value <= float(s[0]) * (1 + 1e-6)
        # Some eigenvalue of W'W is within the residual.
        gap = (s**2 / found.value**2 - 1).abs().min()
        assert float(gap) <= found.residual + 1e-6
    fine = spectral_norm(matrix, rtol=1e-5)
    assert fine.value == pytest.approx(float(s[0]), rel=1e-6)
    assert fine.residual <= 1e-5
    low_rank = one(tmp_path, (u[:, :1] @ v[:1]).float())
    assert spectral_norm(low_rank).value == pytest.approx(1, rel=1e-6)


def quantized(w: torch.Tensor, bits: int, size: int | None, rule: str = MINMAX) -> torch.Tensor:
    return rtn(w, Format("int", bits, size, rule))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("bits", "size"), [(2, 16), (3, 32), (4, 32), (4, 128), (4, None), (8, None), (8, 32)]
)
def test_a_grid_is_found_where_there_is_one(tmp_path, dtype, bits, size):
    w = normal(70, 512) * 0.02
    found = find_grid(one(tmp_path, quantized(w, bits, size).to(dtype)))
    if bits == 8 and dtype == torch.bfloat16:  # every group of bfloat16 numbers is near a fine grid
        assert found is None
    else:
        assert found == Grid(bits, size)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_no_grid_is_found_where_there_is_none(tmp_path, dtype):
    assert find_grid(one(tmp_path, normal(64, 512).to(dtype))) is None
    assert find_grid(one(tmp_path, normal(64, 16).to(dtype))) is None
    almost = quantized(normal(3, 128), 4, 32)
    almost[1] = normal(128)
    assert find_grid(one(tmp_path, almost.to(dtype))) is None
    assert find_grid(one(tmp_path, torch.zeros(4, 64, dtype=dtype))) is None


def test_weights_that_were_quantized_before_are_told(checkpoints, tmp_path):
    folder, weights = checkpoints["llama"]
    assert weight_features(folder, spectral=False).grid_note() is None
    rounded = {n: quantized(w.float(), 4, None) for n, w in weights.items() if "layers.0" in n}
    features = weight_features(write(tmp_path, rounded), spectral=False)
    assert (features.matrices["grid_bits"] == 4).all()
    assert features.matrices["grid_group_size"].isna().all()
    assert "7 of 7 matrices sit on a quantization grid already" in features.grid_note()
    assert "4 bits per row" in features.grid_note()


@pytest.mark.parametrize("block", [1 << 17, 100])
def test_distance_from_another_checkpoint(checkpoints, tmp_path, block):
    folder, weights = checkpoints["gpt2"]
    build_model("gpt2").save_pretrained(tmp_path)  # the initialisation, in float32
    frame = weight_distance(folder, tmp_path, block_elements=block).set_index("matrix")
    stored = load_file(tmp_path / "model.safetensors")
    parts = []
    for name, w in weights.items():
        w0 = stored[name].double()
        w0 = w0 if "wte" in name or "wpe" in name else w0.T
        row = frame.loc[name]
        assert row["distance"] == pytest.approx(float((w - w0).norm()), rel=1e-5)
        assert row["relative_distance"] == pytest.approx(
            float((w - w0).norm() / w0.norm()), rel=1e-5
        )
        cosine = float((w * w0).sum() / (w.norm() * w0.norm()))
        assert row["cosine"] == pytest.approx(cosine, rel=1e-5)
        if row["kind"] == BLOCK:
            parts.append(float((w - w0).square().sum()))
    assert frame.loc["all blocks", "distance"] == pytest.approx(math.sqrt(sum(parts)), rel=1e-5)


def test_distance_to_itself_is_zero(checkpoints):
    folder, _ = checkpoints["llama"]
    frame = weight_distance(folder, folder)
    assert (frame["distance"] == 0).all()
    assert frame["cosine"].tolist() == pytest.approx([1.0] * len(frame))


def test_distance_from_the_mean(tmp_path):
    name = "model.layers.0.mlp.up_proj.weight"
    all_w = [normal(9, 70, seed=s) for s in range(3)]
    folders = [write(tmp_path / str(i), {name: w}) for i, w in enumerate(all_w)]
    frame = mean_distance(folders, block_elements=150)
    mean = torch.stack(all_w).mean(0)
    for index, folder in enumerate(folders):
        rows = frame[frame["checkpoint"] == str(folder)]
        assert rows["matrix"].tolist() == [name, "all blocks"]
        expected = float((all_w[index] - mean).norm())
        assert rows["distance"].tolist() == pytest.approx([expected] * 2, rel=1e-5)
        assert rows["relative_distance"].tolist() == pytest.approx(
            [expected / float(mean.norm())] * 2, rel=1e-5
        )
    with pytest.raises(QscaleError, match="at least 2 different ones"):
        mean_distance(folders[:1])
    with pytest.raises(QscaleError, match="at least 2 different ones"):
        mean_distance([folders[0], folders[0]])


def test_other_models_are_no_neighbours(tmp_path):
    name = "model.layers.0.mlp.up_proj.weight"
    base = write(tmp_path / "base", {name: normal(4, 8)})
    shape = write(tmp_path / "shape", {name: normal(8, 4)})
    more = write(tmp_path / "more", {name: normal(4, 8), name.replace("0", "1"): normal(4, 8)})
    with pytest.raises(CheckpointError, match=r"up_proj.weight' has shape \(8, 4\).*\(4, 8\)"):
        weight_distance(base, shape)
    for pair in ((base, more), (more, base)):
        with pytest.raises(CheckpointError, match=r"base: lacks matrix 'model.layers.1.mlp"):
            mean_distance(pair)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_a_weight_that_is_not_finite_is_named(tmp_path, value, model_type):
    name = "model.layers.0.mlp.up_proj.weight"
    w = normal(200, 150).bfloat16()
    w[70, 140] = value
    where = "row 140, column 70" if model_type == "gpt2" else "row 70, column 140"
    bad = write(tmp_path / "bad", {name: w}, model_type)
    good = write(tmp_path / "good", {name: normal(200, 150)}, model_type)
    message = rf"up_proj.weight' holds {value} at {where}"
    for job in (
        lambda: weight_features(bad),
        lambda: weight_distance(bad, good),
        lambda: weight_distance(good, bad, block_elements=1000),
        lambda: mean_distance([good, bad]),
    ):
        with pytest.raises(CheckpointError, match=message):
            job()


def test_broken_folders(checkpoints, tmp_path):
    folder, _ = checkpoints["llama"]
    with pytest.raises(CheckpointError, match="no config.json"):
        weight_features(tmp_path)
    with pytest.raises(CheckpointError, match="not a folder"):
        weight_features(tmp_path / "absent" / "x" / "y")
    (tmp_path / "model.gguf").touch()
    with pytest.raises(CheckpointError, match="streamed from safetensors files only"):
        weight_features(tmp_path / "model.gguf")
    model = hf.AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path, max_shard_size=6000)
    shard = sorted(tmp_path.glob("*.safetensors"))[2]
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"{shard.name} is missing"):
        weight_features(tmp_path)
    eight = {"model.layers.0.a.weight": normal(4, 4).to(torch.float8_e4m3fn)}
    with pytest.raises(CheckpointError, match="stored as BF16, F16, F32, F64. Got F8_E4M3 instead"):
        weight_features(write(tmp_path / "eight", eight))
