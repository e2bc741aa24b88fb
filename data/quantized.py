"""Tables of what quantization did to a loss: perplexities, figures, GGUF types, trained-in."""

from __future__ import annotations

import numpy as np
import pandas as pd
from joins import (
    COLLAPSE,
    COLLAPSE_REASON,
    REFERENCE_NOTE,
    finish,
    gaps,
    label,
    nats,
    notes,
    raw,
    rounding,
    sizes,
    status_of,
)
from training import cosine_share, recipe_of

from qscale.laws.schedule import decay_share

MODEL_NOTES = {
    "OPT-66B": "OPT-66B has dead units and is an outlier of its line",
    "OPT-350M": "OPT-350M is post-norm, unlike its line",
}
# Models that the collection left without a family; sizes only where the name is a plain total.
NAMED = pd.DataFrame(
    {
        "mistralai/Mistral-7B": ("Mistral", 7e9),
        "mistralai/Mixtral-8x7B-v0.1": ("Mixtral", np.nan),
        "microsoft/phi-2": ("Phi", np.nan),
        "Intel/neural-chat-7b-v3-3": ("neural-chat", 7e9),
    },
    index=["family", "total"],
).T
PYTHIA_160M_MATRICES = 84_934_656  # the shape of Pythia-160M, see training_metadata


def published_ptq() -> pd.DataFrame:
    """Turn the perplexity tables of papers and READMEs into losses."""
    rows = raw("published_ptq", as_text=("value_fp", "value_q"))
    model, fp, q = rows["model"], rows["value_fp"].astype(float), rows["value_q"].astype(float)
    losses = gaps(nats(fp), nats(q))
    total = rows["params_n"].fillna(model.map(NAMED["total"]).astype(float))
    frame = pd.DataFrame(
        {
            "family": rows["family"].fillna(model.map(NAMED["family"])),
            "run": model,
            "checkpoint": model,
            "source": rows["source"],
            "protocol": protocol_of(rows["source"], rows["dataset"]),
            **sizes(model, rows["params_nonemb_est"], total),
            **recipe_of(model),
            **quantizer_of(rows),
            **losses,
            "delta_loss_rounding": rounding(rows["value_fp"]) / fp + rounding(rows["value_q"]) / q,
            **status_of(
                rows.index,
                ("degraded", fp.isna(), "the source prints no full-precision perplexity"),
                ("collapsed", losses["delta_loss"] >= COLLAPSE, COLLAPSE_REASON),
            ),
            "perplexity_fp": fp,
            "perplexity_q": q,
            "reprinted": rows.duplicated(
                ["model", "method", "bits", "group_size", "dataset", "value_q"]
            ),
            "note": notes(rows["note"], model.map(MODEL_NOTES)),
            "source_ref": rows["source_ref"].str.replace(
                "AQLM README.md (see SOURCES.md for commit)", "AQLM@e79a896e README.md", regex=False
            ),
            "raw_row": rows["raw_row"],
        }
    )
    keys = ["source", "family", "n_params_total", "run", "protocol", "method", "bits", "group_size"]
    return finish(frame, keys, "published_ptq")


def quantizer_of(rows: pd.DataFrame) -> dict[str, pd.Series]:
    """Return the quantizer's columns of ``published_ptq``.

    A group is a number of elements that share a scale: codebook formats have none, and the ``g8``
    of an AQLM method is the length of its vectors.
    """
    fmt, group = rows["format"], rows["group_size"]
    gguf, scalar = fmt == "gguf", fmt.isin(["int", "int_asym"])
    return {
        "method": rows["method"].str.lower().mask(gguf, "gguf"),
        "method_kind": rows["kind"],
        "fmt": fmt.replace("int_asym", "int").mask(gguf, rows["method"]),
        "bits": rows["bits"],
        "group_size": group.where(scalar & (group > 0)),
        "group_size_known": scalar & group.notna(),
        "symmetric": label(rows.index, None, (False, fmt == "int_asym")),
        "bits_per_weight": rows["bpw"],
    }


def protocol_of(source: pd.Series, text: pd.Series) -> pd.Series:
    """Name text and context; sources whose full-precision values agree are at context 2048."""
    return (
        (text + "/ctx2048")
        .mask(source == "auto-round docs", text + "/auto-round")
        .mask(text == "wikitext2 (longer context)", "wikitext2/longer-context")
        .mask(text == "wikitext2 (llama.cpp chunks)", "wikitext2/llama.cpp-chunks")
    )


def ptq_vs_learning_rate() -> pd.DataFrame:
    """Tabulate GPTQ gaps along training runs, read off the figures of arXiv:2510.06213."""
    rows = raw("ptq_vs_learning_rate")
    model, index = rows["model"], rows.index
    small = model.str.startswith("Pythia-160M")
    lawa = rows["phase"].str.startswith("LAWA")
    ended = rows["phase"].str.startswith("end of cooldown")
    absolute = rows["metric"] == "absolute_ce_increase"
    recipe = figure_recipe(rows, small)
    run = model.mask(small, "Pythia-160M-arch lr_peak=" + recipe["lr_peak"].map("{:g}".format))
    suffix = label(index, "", (", LAWA", lawa), (", after its own cooldown", ended))
    matrices = pd.Series(PYTHIA_160M_MATRICES, index).where(small)
    frame = pd.DataFrame(
        {
            "family": model.str.extract(r"^(OLMo-2|SmolLM3)", expand=False).mask(
                small, "Pythia-160M-arch"
            ),
            "run": run,
            "checkpoint": run + " @ " + rows["tokens_d"].map("{:.5g}".format) + " tokens" + suffix,
            "source": "arXiv:2510.06213",
            "protocol": "refinedweb/ctx2048",
            **sizes(model, matrices, rows["params_n"]),
            "tokens": rows["tokens_d"],
            **recipe,
            "averaging": label(index, "none", ("lawa", lawa)),
            "method": rows["method"].str.lower(),
            "method_kind": "ptq",
            "fmt": "int",
            "bits": rows["bits"],
            "group_size": rows["group_size"],
            "group_size_known": True,
            "delta_loss": rows["value"].where(absolute),
            "relative_delta": rows["value"].where(~absolute),
            "status": "ok",
            "phase": rows["phase"],
            "figure": rows["figure"],
            "raw_row": rows["raw_row"],
        }
    )
    # Each cooldown to an end of its own is one point, which does not tell where it began.
    frame["decay_share"] = decay_share(frame, ("run", "lr_schedule", "phase"))
    return finish(frame, ["run", "bits", "figure", "tokens"], "ptq_vs_learning_rate")


def figure_recipe(rows: pd.DataFrame, small: pd.Series) -> dict[str, pd.Series]:
    """Return the learning-rate columns: figure label, training metadata, or the paper's setup.

    The paper's own 160M runs (App. C): peak 3e-3 unless the label says otherwise, weight decay 0.1,
    190,000 steps for 100e9 tokens.
    """
    stage = rows["model"].where(~rows["model"].str.startswith("OLMo"), rows["model"] + " (stage 1)")
    known = recipe_of(stage)
    labelled = rows["figure"].str.extract(r"peak_lr=(.*)", expand=False).astype(float)
    peak = labelled.fillna(known["lr_peak"]).mask(small & labelled.isna(), 3e-3)
    schedule = rows["schedule"].str.split().str[0].str.lower()
    linear = (1 - rows["lr_at_checkpoint"] / peak).where(schedule == "wsd")
    return {
        "lr_peak": peak,
        "lr": rows["lr_at_checkpoint"],
        "lr_schedule": schedule,
        "decay_fraction": cosine_share(stage, rows["tokens_d"])
        .fillna(linear)
        .mask(schedule == "constant", 0.0),
        "weight_decay": known["weight_decay"].mask(small, 0.1),
        "batch_tokens": known["batch_tokens"].mask(small, 2.0**19),
    }


def gguf_kld() -> pd.DataFrame:
    """Tabulate KL divergence and perplexity of whole models at one GGUF type."""
    rows = raw("gguf_kld")
    model, fmt, kl, index = rows["model"], rows["qtype"], rows["mean_kld"], rows.index
    reference = fmt == "bf16"
    unmeasured = (kl == 0) & ~reference
    losses = gaps(nats(rows["ppl_bf16"]), nats(rows["ppl"]).mask(reference))
    collapsed = (kl >= COLLAPSE) | (losses["delta_loss"] >= COLLAPSE)
    frame = pd.DataFrame(
        {
            **gguf_model(model),
            "source": "Thireus/GGUF-Tool-Suite",
            "protocol": "ubergarm-imatrix-corpus/ctx512",
            "n_params": rows["params_total"],
            "n_params_basis": label(index, None, ("nominal_total", rows["params_total"].notna())),
            "n_params_total": rows["params_total"],
            "n_params_active": rows["params_active"],
            "method": label(index, "gguf", ("none", reference)),
            "method_kind": label(index, "ptq", (None, reference)),
            "fmt": fmt,
            "bits": pd.Series(16.0, index).where(reference),
            "group_size": np.nan,
            "group_size_known": False,
            "bits_per_weight": rows["bpw"],
            **losses,
            "kl": kl.mask(reference | unmeasured),
            **status_of(
                index,
                ("failed", unmeasured, "the source gives KL 0 for a quantized model: not measured"),
                ("collapsed", collapsed, COLLAPSE_REASON),
                ("degraded", fmt.str.contains("_bn"), "a format for ternary-trained models only"),
            ),
            "interleaved": fmt.str.contains(r"_r[48]$"),
            "note": notes(
                label(index, None, (REFERENCE_NOTE, reference)),
                model.map({"GLM-4.7-Flash": "perplexity falls as KL rises here: use kl"}),
            ),
            "raw_row": rows["raw_row"],
        }
    )
    return finish(frame, ["family", "n_params_total", "run", "fmt"], "gguf_kld")


def gguf_model(model: pd.Series) -> dict[str, pd.Series]:
    """Return family and architecture as far as a model's name states them.

    Qwen names a mixture of experts by its active parameters (``-A3B``) and a dense model without.
    """
    family = model.str.extract(r"^(Qwen[\d.]+(?:-VL)?|GLM-\d|DeepSeek-V\d|Kimi-K2)", expand=False)
    experts = model.str.contains(r"-A\d+B")
    return {
        "family": family,
        "run": model,
        "checkpoint": model,
        "architecture": label(
            model.index, None, ("dense", model.str.startswith("Qwen")), ("moe", experts)
        ),
    }


def quest_qat() -> pd.DataFrame:
    """Tabulate runs trained with quantized weights and activations."""
    rows = raw("quest_qat")
    index, quantizer = rows.index, rows["w_quant"].str.removesuffix("Quantizer")
    reference, fp4 = quantizer == "No", quantizer.str.contains("FP4")
    sparse = quantizer.str.contains("FourEight")
    same = ["non_embedding_params_n", "tokens_d", "peak_lr"]
    full = rows[reference].set_index(same)["val_loss"]
    loss_fp = full.reindex(pd.MultiIndex.from_frame(rows[same])).set_axis(index)
    run = "quest-" + rows["raw_row"].map("{:03d}".format)
    frame = pd.DataFrame(
        {
            "family": "QuEST-Llama",
            "run": run,
            "checkpoint": run,
            "source": "IST-DASLab/QuEST",
            "protocol": "quest-validation/ctx512",
            "n_params": rows["non_embedding_params_n"],
            "n_params_basis": "nonembedding",
            "tokens": rows["tokens_d"],
            "lr_peak": rows["peak_lr"],
            "lr_schedule": rows["lr_schedule"].replace("cos", "cosine"),
            "weight_decay": rows["weight_decay"],
            # 512 sequences of 512: divides every token count, and warm-up is a tenth of the steps.
            "batch_tokens": 512.0 * rows["seq_len"],
            "method": ("quest-" + quantizer.str.lower()).mask(reference, "none"),
            "method_kind": label(index, "qat", (None, reference)),
            "fmt": label(index, "int", ("fp4", fp4), ("int-sparse-4:8", sparse), (None, reference)),
            # The FP4 runs carry 16 in both fields: their width is set by the quantizer.
            "bits": rows["w_bits"].mask(fp4, 4),
            "bits_activation": rows["a_bits"].mask(fp4, 4),
            "group_size": np.nan,
            "group_size_known": False,
            **gaps(loss_fp, rows["val_loss"].mask(reference)),
            "status": "ok",
            "weight_quantizer": rows["w_quant"],
            "activation_quantizer": rows["a_quant"],
            "note": label(index, None, (REFERENCE_NOTE, reference)),
            "raw_row": rows["raw_row"],
        }
    )
    return finish(frame, ["n_params", "tokens", "bits", "bits_activation", "method"], "quest_qat")
