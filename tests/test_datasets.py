"""The shipped tables against their raw files, the printed papers and the rules that they state."""

from __future__ import annotations

import csv
import gzip
import math
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from qscale import datasets, table
from qscale.columns import COLUMNS
from qscale.errors import TableError

REPO = Path(__file__).resolve().parent.parent
RAW = REPO / "data" / "raw"
NAMES = (
    "chinchilla_points",
    "controlled_sweep",
    "gguf_kld",
    "lr_schedule_curves",
    "overtrained_runs",
    "ptq_vs_learning_rate",
    "published_ptq",
    "quest_qat",
    "training_metadata",
)
OWN = "controlled_sweep"
"""Made by examples/controlled_sweep, so without a raw file."""
PUBLISHED = tuple(name for name in NAMES if name != OWN)


def raw_rows(name: str) -> list[dict[str, str]]:
    """Read a raw file without pandas, every cell as the text that is there."""
    with (RAW / f"{name}.csv").open(encoding="utf-8", newline="") as handle:
        return list(csv.DictReader(handle))


def with_raw(name: str) -> list[tuple[dict[str, str], dict]]:
    """Pair each row of a shipped table with the raw row that it names."""
    rows = raw_rows(name)
    return [(rows[row["raw_row"] - 1], row) for row in datasets.load(name).to_dict("records")]


def number(cell: str) -> float:
    return float(cell) if cell else math.nan


def only(frame: pd.DataFrame, query: str) -> pd.Series:
    """Return the single row that a query selects."""
    found = frame.query(query)
    assert len(found) == 1
    return found.iloc[0]


def cosine(peak: float, floor: float, share: float) -> float:
    return floor + (peak - floor) * (1 + math.cos(math.pi * share)) / 2


# ------------------------------------------------------------------------ names and documents
def test_the_shipped_names():
    assert datasets.names() == NAMES
    assert {path.stem for path in RAW.iterdir()} == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_raw_row_is_in_the_table_once(name):
    frame = datasets.load(name)
    assert sorted(frame["raw_row"]) == list(range(1, len(raw_rows(name)) + 1))
    assert len(frame) == datasets.describe(name).rows


@pytest.mark.parametrize("name", NAMES)
def test_tables_pass_the_schema_and_keep_its_column_order(name):
    frame = datasets.load(name)
    pd.testing.assert_frame_equal(table.check(frame), frame)
    known = [column for column in COLUMNS if column in frame]
    assert list(frame.columns[: len(known)]) == known


@pytest.mark.parametrize("name", NAMES)
def test_rows_that_are_not_ok_say_why(name):
    frame = datasets.load(name)
    if "status" in frame:
        reason = frame.get("status_reason", pd.Series(None, frame.index, dtype=object))
        assert ((frame["status"] != "ok") == reason.notna()).all()


@pytest.mark.parametrize("name", NAMES)
def test_each_dataset_is_described(name):
    facts = datasets.describe(name)
    sheet = datasets.datasheet(name)
    assert facts.name == name
    assert facts.path.is_file()
    assert facts.kind in ("measured", "transcribed", "digitised")
    assert f"*{facts.kind}*" in sheet.lower()
    for heading in ("**What.**", "**Accuracy.**", "**Licence.**", "## Columns", "## Traps"):
        assert heading in sheet
    extra = set(datasets.load(name).columns) - set(COLUMNS)
    assert [column for column in extra if f"`{column}`" not in sheet] == []


@pytest.mark.parametrize("name", NAMES)
def test_datasheets_do_not_hide_a_missing_licence(name):
    unlicensed = name in ("chinchilla_points", "ptq_vs_learning_rate")
    assert ("no licence file" in datasets.datasheet(name)) == unlicensed
    assert ("no licence file" in datasets.describe(name).licence) == unlicensed


def test_the_controlled_sweep_names_each_checkpoint_and_counts_its_rows():
    frame = datasets.load(OWN)
    assert len(frame) == datasets.describe(OWN).rows
    assert frame.groupby("checkpoint")["name"].nunique().eq(1).all()
    assert not frame.duplicated(["name", "protocol", "spec"]).any()
    assert frame.groupby("name").size().min() >= 36
    assert {"run", "tokens", "lr_peak", "lr", "decay_fraction", "weight_decay"} <= set(frame)
    for kind in ("matrices", "weights", "blocks", "errors"):
        side = pd.read_parquet(table.side_path(datasets.describe(OWN).path, kind))
        assert set(side["name"]) == set(frame["name"])


def test_law_output_is_not_shipped_as_a_measurement():
    fixture = pd.read_csv(REPO / "tests/fixtures/ouyang_table1_predictions.csv")
    predicted = set(fixture["tokens_d_paper"])
    for name in NAMES:
        frame = datasets.load(name)
        assert "2411.17691" not in frame.to_csv()
        assert not predicted & set(frame.get("tokens", pd.Series(dtype=float)))


# ------------------------------------------------------------------------- finding and loading
def test_find_takes_a_name_or_a_file(tmp_path):
    own = tmp_path / "mine.csv"
    own.write_text("n_params,tokens\n1e9,1e11\n")
    assert datasets.find("published_ptq") == REPO / "data/published_ptq/table.csv"
    assert datasets.find(own) == own
    assert datasets.find(str(own)) == own
    assert datasets.find("lr_schedule_curves").name == "table.csv.gz"


@pytest.mark.parametrize("typo", ["publishd_ptq", "published-ptq", "Published_PTQ"])
@pytest.mark.parametrize("look_up", [datasets.find, datasets.load, datasets.datasheet])
def test_a_typo_gets_a_suggestion(look_up, typo):
    with pytest.raises(TableError, match="Did you mean 'published_ptq'") as error:
        look_up(typo)
    assert all(name in str(error.value) for name in NAMES)
    assert "\n" not in str(error.value)


def test_what_is_neither_file_nor_name_is_refused(tmp_path):
    with pytest.raises(TableError, match=r"nowhere\.csv: no such file or dataset\. Datasets are"):
        datasets.find("nowhere.csv")
    with pytest.raises(TableError, match="is a folder"):
        datasets.find(tmp_path)
    with pytest.raises(TableError, match="no such dataset"):
        datasets.describe("raw")


def test_data_is_found_inside_an_installed_package_without_torch(tmp_path):
    package = tmp_path / "qscale"
    package.mkdir()
    for module in ("__init__", "atomic", "errors", "columns", "table", "datasets"):
        shutil.copy(REPO / "qscale" / f"{module}.py", package)
    shutil.copytree(REPO / "data", package / "data", ignore=shutil.ignore_patterns("__pycache__"))
    code = (
        "import sys; from qscale import datasets\n"
        "assert not {'torch', 'pandera', 'scipy'} & set(sys.modules)\n"
        "print(datasets.find('quest_qat'), len(datasets.load('quest_qat')))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == [str(package / "data/quest_qat/table.csv"), "104"]


# ------------------------------------------------------------------------------------ building
def build(data: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", str(data / "build.py"), *options],
        capture_output=True,
        text=True,
        check=False,
    )


def test_shipped_tables_are_what_the_build_makes():
    done = build(REPO / "data", "--check")
    assert (done.returncode, done.stderr) == (0, "")


def test_the_build_is_deterministic_and_its_check_finds_a_changed_cell(tmp_path):
    data = tmp_path / "data"
    shutil.copytree(REPO / "data", data, ignore=shutil.ignore_patterns("table.*", "__pycache__"))
    assert build(data).returncode == 0
    first = {path.parent.name: path.read_bytes() for path in data.glob("*/table.*")}
    assert set(first) == set(PUBLISHED)
    for name in PUBLISHED:
        shipped, rebuilt = datasets.describe(name).path.read_bytes(), first[name]
        if name == "lr_schedule_curves":  # zlib versions may compress to other bytes
            assert rebuilt[3:8] == bytes(5)  # neither a file name nor a time in the header
            shipped, rebuilt = gzip.decompress(shipped), gzip.decompress(rebuilt)
        assert rebuilt == shipped

    source = data / "raw/quest_qat.csv"
    source.write_text(source.read_text().replace("3.0677576065063477", "3.0677576065063478"))
    assert build(data, "--check").returncode == 0  # beyond what the table keeps
    source.write_text(source.read_text().replace("3.0677576065063478", "3.0678"))
    done = build(data, "--check")
    assert done.returncode == 1
    assert "quest_qat" in done.stderr
    assert "gguf_kld" not in done.stderr
    assert {path.parent.name: path.read_bytes() for path in data.glob("*/table.*")} == first


# ----------------------------------------------------------------------------- published_ptq
def test_gaps_are_recomputed_from_the_printed_perplexities_on_every_row():
    for theirs, ours in with_raw("published_ptq"):
        q, fp = math.log(float(theirs["value_q"])), math.log(number(theirs["value_fp"]))
        assert ours["loss_q"] == pytest.approx(q, rel=1e-11)
        assert ours["loss_fp"] == pytest.approx(fp, rel=1e-11, nan_ok=True)
        assert ours["delta_loss"] == pytest.approx(q - fp, rel=1e-9, abs=1e-12, nan_ok=True)
        assert ours["relative_delta"] == pytest.approx((q - fp) / fp, abs=1e-11, nan_ok=True)


@pytest.mark.parametrize(
    ("source", "run", "setting", "fp", "q"),
    [
        ("GPTQ paper", "OPT-125M", "method == 'rtn' and bits == 4", 27.65, 37.28),
        ("GPTQ paper", "OPT-125M", "method == 'gptq' and bits == 4", 27.65, 31.12),
        ("GPTQ README", "LLaMA-7B", "method == 'rtn' and bits == 4", 5.68, 6.29),
        ("AWQ paper", "LLaMA-7B", "method == 'awq' and bits == 3", 5.68, 6.35),
        ("AWQ paper", "Llama-2-70B", "method == 'awq' and bits == 4", 3.32, 3.41),
    ],
)
def test_cells_of_the_papers(source, run, setting, fp, q):
    frame = datasets.load("published_ptq").query("protocol == 'wikitext2/ctx2048'")
    row = only(frame, f"source == '{source}' and run == '{run}' and {setting}")
    assert (row["perplexity_fp"], row["perplexity_q"]) == (fp, q)
    assert row["delta_loss"] == pytest.approx(math.log(q / fp))


def test_one_setting_in_several_papers_stays_apart():
    frame = datasets.load("published_ptq").query(
        "run == 'LLaMA-7B' and method == 'gptq' and bits == 3 and group_size == 128"
        " and protocol == 'wikitext2/ctx2048'"
    )
    printed = frame.set_index("source")["perplexity_q"].to_dict()
    assert printed == {"AWQ paper": 8.81, "GPTQ README": 6.61, "MagR paper": 6.55}


def test_collapsed_means_a_tenth_of_the_probability():
    frame = datasets.load("published_ptq")
    ratio = frame["perplexity_q"] / frame["perplexity_fp"]
    pd.testing.assert_series_equal(
        frame["status"] == "collapsed", ratio >= 10, check_names=False, check_dtype=False
    )
    two_digits = (frame["perplexity_q"] >= 1000) & (frame["perplexity_q"] % 100 == 0)
    assert (frame.loc[two_digits, "status"] == "collapsed").all()
    missing = frame["perplexity_fp"].isna()
    assert ((frame["status"] == "degraded") == missing).all()
    assert (frame.loc[missing, "source"] == "AQLM README").all()
    assert frame["status"].value_counts().to_dict() == {"ok": 623, "collapsed": 33, "degraded": 13}


def test_an_unknown_group_is_not_a_per_row_scale():
    for theirs, ours in with_raw("published_ptq"):
        scalar = theirs["format"] in ("int", "int_asym")
        assert ours["group_size_known"] == (scalar and theirs["group_size"] != "")
        if scalar and float(theirs["group_size"]) > 0:
            assert ours["group_size"] == float(theirs["group_size"])
        else:
            assert math.isnan(ours["group_size"])


def test_baselines_agree_within_the_shared_protocol_only():
    frame = datasets.load("published_ptq")
    shared = frame[frame["protocol"].str.endswith("/ctx2048")]
    spread = shared.groupby(["run", "protocol"])["perplexity_fp"].agg(np.ptp)
    assert spread.max() < 0.02
    own = set(frame["protocol"]) - set(shared["protocol"])
    assert own == {
        "wikitext2/longer-context",
        "wikitext2/llama.cpp-chunks",
        "wikitext2/auto-round",
        "ptb_new/auto-round",
        "c4_new/auto-round",
    }
    assert frame[frame["protocol"].isin(own)]["source"].nunique() == 3


def test_rounding_bounds_the_error_of_a_printed_gap():
    frame = datasets.load("published_ptq")
    row = only(
        frame, "source == 'GPTQ paper' and run == 'OPT-125M' and method == 'rtn' and bits == 4"
    )
    worst = math.log(37.285 / 27.645) - row["delta_loss"]
    assert row["delta_loss_rounding"] == pytest.approx(worst, rel=1e-3)
    collapsed = only(frame, "run == 'OPT-1.3B' and method == 'rtn' and bits == 3")
    assert collapsed["perplexity_q"] == 13_000
    assert collapsed["delta_loss_rounding"] == pytest.approx(50 / 13_000 + 0.005 / 14.63)


def test_reprints_repeat_an_earlier_row():
    frame = datasets.load("published_ptq")
    keys = ["run", "method", "fmt", "bits", "group_size", "protocol", "perplexity_q"]
    repeats = frame.sort_values("raw_row").duplicated(keys)
    assert (
        frame.index[frame["reprinted"]].sort_values().equals(repeats.index[repeats].sort_values())
    )
    assert frame["reprinted"].sum() == 36


def test_notes_name_the_models_that_leave_the_trend():
    frame = datasets.load("published_ptq")
    assert frame.query("run == 'OPT-66B'")["note"].str.contains("dead units").all()
    assert frame.query("run == 'OPT-350M'")["note"].str.contains("post-norm").all()
    assert frame.query("run == 'OPT-175B'")["lr_peak"].isna().all()


# ---------------------------------------------------------------------------------- recipes
def test_recipes_agree_with_what_the_perplexity_tables_said():
    for theirs, ours in with_raw("published_ptq"):
        assert ours["tokens"] == pytest.approx(number(theirs["tokens_d"]), nan_ok=True)
        if ours["run"] != "OPT-175B":
            assert ours["lr_peak"] == pytest.approx(number(theirs["peak_lr"]), nan_ok=True)


def test_decay_is_complete_only_where_the_source_says_so():
    frame = datasets.load("training_metadata").set_index("checkpoint")
    finished = frame[frame["decay_fraction"] == 1]
    families = "LLaMA-1 LLaMA-2 OLMo-1 OLMo-2 Pythia SmolLM SmolLM2 SmolLM3"
    assert sorted(set(finished["family"])) == families.split()
    assert (finished["lr"] == finished["lr_final_planned"]).all()
    partial = frame[frame["decay_fraction"] < 1]
    assert set(partial.index) == {"BLOOM-176B", "OLMo-2-1B (stage 1)"}
    for row in partial.to_dict("records"):
        implied = cosine(row["lr_peak"], row["lr_final_planned"], row["decay_fraction"])
        assert row["lr"] == pytest.approx(implied, rel=0.005)  # stated against the schedule
    unknown = frame.query("family in ['OPT', 'LLaMA-3']")
    assert unknown[["lr", "decay_fraction"]].isna().all(axis=None)
    assert frame.loc["OLMo-2-13B (stage 1)", "lr_peak"] == 9e-4
    assert frame.filter(regex="^loss").empty


def test_nonembedding_counts():
    frame = datasets.load("training_metadata").set_index("checkpoint")
    # OLMo-2-7B and -13B have the matrices of LLaMA, whose counts come from another source
    assert frame.loc["OLMo-2-7B (stage 1)", "n_params"] == frame.loc["LLaMA-7B", "n_params"]
    assert frame.loc["OLMo-2-13B (stage 1)", "n_params"] == frame.loc["LLaMA-13B", "n_params"]
    smol, vocabulary = frame.loc["SmolLM3-3B"], 128_256 * 2048
    assert smol["n_params"] + vocabulary == pytest.approx(3.08e9, rel=0.005)
    nominal = frame[frame["n_params_basis"] == "nominal_total"]
    assert (nominal["n_params"] == nominal["n_params_total"]).all()
    assert nominal["n_params"].min() >= 7e9
    assert (frame["n_params"].isna() == frame["n_params_basis"].isna()).all()


# ------------------------------------------------------------------------ ptq_vs_learning_rate
def test_digitised_gaps_are_either_absolute_or_relative():
    for theirs, ours in with_raw("ptq_vs_learning_rate"):
        absolute = theirs["metric"] == "absolute_ce_increase"
        kept, other = (
            ("delta_loss", "relative_delta") if absolute else ("relative_delta", "delta_loss")
        )
        assert ours[kept] == float(theirs["value"])
        assert math.isnan(ours[other])
        assert ours["lr"] == float(theirs["lr_at_checkpoint"])
    frame = datasets.load("ptq_vs_learning_rate")
    assert frame.loc[frame["delta_loss"].notna(), "figure"].str.startswith("fig6a").all()
    assert "loss_fp" not in frame


def test_learning_rates_follow_from_the_share_of_the_decay():
    frame = datasets.load("ptq_vs_learning_rate")
    olmo = frame[frame["family"] == "OLMo-2"]
    implied = [
        cosine(peak, peak / 10, share)
        for peak, share in zip(olmo["lr_peak"], olmo["decay_fraction"], strict=True)
    ]
    np.testing.assert_allclose(olmo["lr"], implied, atol=1.01e-6)
    assert olmo.groupby("run")["lr_peak"].unique().map(list).to_dict() == {
        "OLMo-2-13B": [9e-4],
        "OLMo-2-1B": [4e-4],
        "OLMo-2-7B": [3e-4],
    }
    wsd = frame[frame["lr_schedule"] == "wsd"]
    np.testing.assert_allclose(wsd["lr"], wsd["lr_peak"] * (1 - wsd["decay_fraction"]), atol=1e-12)
    assert (wsd.loc[wsd["phase"] == "stable", "decay_fraction"] == 0).all()
    assert (wsd.loc[wsd["phase"].str.startswith("end of"), "decay_fraction"] == 1).all()


def test_runs_of_the_small_model_are_one_per_peak_rate():
    frame = datasets.load("ptq_vs_learning_rate").query("family == 'Pythia-160M-arch'")
    assert frame.groupby("run")["lr_peak"].nunique().eq(1).all()
    assert sorted(frame["lr_peak"].unique()) == [3e-4, 1e-3, 3e-3, 1e-2]
    averaged = frame["averaging"] == "lawa"
    assert frame.loc[averaged, "figure"].unique() == ["fig7c"]
    assert averaged.sum() == 37
    assert not set(frame.loc[averaged, "checkpoint"]) & set(frame.loc[~averaged, "checkpoint"])


# -------------------------------------------------------------------------------- gguf_kld
def test_gguf_values_are_recomputed_on_every_row():
    for theirs, ours in with_raw("gguf_kld"):
        kl, ppl, base = (number(theirs[key]) for key in ("mean_kld", "ppl", "ppl_bf16"))
        assert ours["bits_per_weight"] == pytest.approx(number(theirs["bpw"]), nan_ok=True)
        assert ours["loss_fp"] == pytest.approx(math.log(base), nan_ok=True)
        if theirs["qtype"] == "bf16":
            assert (ours["method"], ours["bits"], ours["status"]) == ("none", 16, "ok")
            assert math.isnan(ours["kl"])
            assert math.isnan(ours["delta_loss"])
            continue
        gap = math.log(ppl) - math.log(base)
        assert ours["delta_loss"] == pytest.approx(gap, rel=1e-11, abs=1e-11, nan_ok=True)
        if kl == 0:
            assert ours["status"] == "failed"
            assert math.isnan(ours["kl"])
        else:
            assert ours["kl"] == kl
            collapsed = kl >= math.log(10) or gap >= math.log(10)
            assert (ours["status"] == "collapsed") == collapsed


def test_dense_qwen_line_can_be_selected():
    frame = datasets.load("gguf_kld")
    line = frame.query("family == 'Qwen3.5' and architecture == 'dense'")
    assert line.groupby("run")["n_params"].first().to_dict() == {
        "Qwen3.5-0.8B": 8e8,
        "Qwen3.5-2B": 2e9,
        "Qwen3.5-4B": 4e9,
        "Qwen3.5-9B": 9e9,
    }
    experts = frame[frame["architecture"] == "moe"]
    assert experts["n_params_active"].notna().all()
    assert frame.loc[frame["architecture"].isna(), "n_params"].isna().all()


def test_interleaved_types_duplicate_their_base():
    frame = datasets.load("gguf_kld").query("status == 'ok'")
    base = frame.assign(base=frame["fmt"].str.lower())[~frame["interleaved"]]
    repacked = frame[frame["interleaved"]]
    repacked = repacked.assign(base=repacked["fmt"].str.replace(r"_r[48]$", "", regex=True))
    pairs = repacked.merge(base, on=["run", "base"], suffixes=("", "_base"))
    own = pairs["fmt"].isin(["iq1_s_r4", "iq1_m_r4"])
    same = pairs.loc[~own, "bits_per_weight"] - pairs.loc[~own, "bits_per_weight_base"]
    assert same.abs().max() < 0.005
    ratio = np.log(pairs.loc[~own, "kl"] / pairs.loc[~own, "kl_base"]).abs()
    assert ratio.median() < 1e-3
    assert (ratio < 0.05).mean() > 0.9


def test_decay_shares_tell_where_each_decay_began():
    frame = datasets.load("ptq_vs_learning_rate")
    share, stable = frame["decay_share"], frame["tokens"] * (1 - frame["decay_share"])
    assert (share[frame["phase"].str.startswith(("stable", "LAWA"))] == 0).all()
    assert share.isna().equals(frame["phase"].str.startswith("end of cooldown"))
    decaying = frame["decay_fraction"] > 0
    own = decaying & frame["figure"].str.startswith("fig6a")
    np.testing.assert_allclose(stable[own], 80e9, rtol=1e-3)
    cosine = frame["family"] == "OLMo-2"  # decays from the end of warm-up, 8.39e9 tokens
    np.testing.assert_allclose(stable[cosine], 8.39e9, rtol=2e-3)


# ------------------------------------------------------------------- quest_qat and base losses
def test_quest_gaps_are_to_the_sixteen_bit_run_of_the_same_recipe():
    rows = raw_rows("quest_qat")
    same = ("non_embedding_params_n", "tokens_d", "peak_lr")
    full = {
        tuple(row[key] for key in same): float(row["val_loss"])
        for row in rows
        if row["w_quant"] == "NoQuantizer"
    }
    gaps = 0
    for theirs, ours in with_raw("quest_qat"):
        loss = full.get(tuple(theirs[key] for key in same), math.nan)
        assert ours["loss_fp"] == pytest.approx(loss, nan_ok=True)
        if theirs["w_quant"] == "NoQuantizer":
            assert (ours["method"], ours["bits"]) == ("none", 16)
            assert math.isnan(ours["loss_q"])
            continue
        assert ours["method"].startswith("quest-")
        assert ours["loss_q"] == pytest.approx(float(theirs["val_loss"]), rel=1e-11)
        expected = float(theirs["val_loss"]) - loss
        assert ours["delta_loss"] == pytest.approx(expected, abs=1e-10, nan_ok=True)
        gaps += not math.isnan(expected)
        assert ours["bits"] == (4 if "FP4" in theirs["w_quant"] else float(theirs["w_bits"]))
    assert gaps == 74


def test_quest_batch_follows_from_tokens_and_warmup():
    for theirs, ours in with_raw("quest_qat"):
        steps, rest = divmod(ours["tokens"], ours["batch_tokens"])
        assert rest == 0
        assert int(theirs["warmup_steps"]) == int(steps / 10)


def test_five_highest_chinchilla_losses_are_set_aside():
    frame = datasets.load("chinchilla_points")
    aside = frame["status"] != "ok"
    assert aside.sum() == 5
    assert frame.loc[aside, "loss_fp"].min() > frame.loc[~aside, "loss_fp"].max()
    assert frame.loc[aside, "status_reason"].str.contains("2404.10102").all()
    compute = 6 * frame["n_params"] * frame["tokens"]
    np.testing.assert_allclose(compute, frame["training_flop"], rtol=1e-10)


def test_schedule_shares_reproduce_the_logged_rates():
    frame = datasets.load("lr_schedule_curves")
    share, peak, floor = frame["decay_fraction"], 3e-4, 3e-5
    shape = {
        "constant": lambda s: peak + 0 * s,
        "cosine": lambda s: floor + (peak - floor) * (1 + np.cos(np.pi * s)) / 2,
        "wsd": lambda s: peak * (floor / peak) ** s,
        "wsdld": lambda s: peak + (floor - peak) * s,
        "wsdcon": lambda s: peak + 0 * s,
    }
    kind = frame["schedule_name"].str.split("_").str[0]
    for name, rate in shape.items():
        rows = (kind == name) & share.notna()
        assert rows.sum() > 100
        np.testing.assert_allclose(frame.loc[rows, "lr"], rate(share[rows]), rtol=0.02)
    dropped = share.isna()
    assert (kind[dropped] == "wsdcon").all()
    assert (frame.loc[dropped, "lr"] < peak).all()


def test_overtrained_runs_use_the_c4_loss_and_leave_doubtful_recipes_out():
    for theirs, ours in with_raw("overtrained_runs"):
        c4 = float(theirs["loss[shard-{0000000..0000010}.tar|c4_val]"])
        assert ours["loss_fp"] == pytest.approx(c4, rel=1e-11)
        assert (ours["n_params"], ours["tokens"]) == (
            float(theirs["params_no_embed"]),
            float(theirs["tokens_d"]),
        )
        doubtful = theirs["global_bs"] == "1"
        assert doubtful == ("open_lm_7b" in theirs["name"])
        assert math.isnan(ours["batch_tokens"]) == doubtful
        assert math.isnan(ours["decay_fraction"]) == doubtful
