"""Tables of full-precision losses, for the laws that quantization laws sit on."""

from __future__ import annotations

import pandas as pd
from joins import finish, label, raw, status_of

OVERTRAINED_LOSSES = {
    "loss_fp": "loss[shard-{0000000..0000010}.tar|c4_val]",
    "loss_openlm": "loss[shard_00000000.tar|openlm]",
    "loss_paloma_c4_en": "loss[00000001.tar|paloma_c4_en]",
    "loss_paloma_programming": "loss[00000001.tar|paloma_dolma_100_programing_la]",
    "loss_paloma_refinedweb": "loss[00000001.tar|paloma_falcon-refinedweb]",
    "loss_paloma_ptb": "loss[00000001.tar|paloma_ptb]",
    "loss_paloma_redpajama": "loss[00000001.tar|paloma_redpajama]",
    "loss_de_en": "loss[val_de-en_100.tar|de-en]",
}


def lr_schedule_curves() -> pd.DataFrame:
    """Tabulate loss curves of three sizes under nine learning-rate schedules."""
    rows = raw("lr_schedule_curves")
    name, step = rows["schedule"], rows["step"].astype(float)
    kind = name.str.split("_").str[0]
    last = name.str.extract(r"(\d+)$", expand=False).astype(float)
    cosine = ((step - 2160) / (last - 2160)).where(kind == "cosine")  # warm-up ends at step 2160
    decay = ((step - 20_000) / 4_000).clip(lower=0).where(kind.isin(["wsd", "wsdld"]))
    # wsdcon drops once, at step 8000, to a lower constant rate: no share of a decay after that.
    flat = (kind == "constant") | ((kind == "wsdcon") & (step < 8_000))
    run = rows["model_m"].map("{}M ".format) + name
    frame = pd.DataFrame(
        {
            "family": "MultiPowerLaw-Llama",
            "run": run,
            "checkpoint": run + " @ step " + rows["step"].map(str),
            "source": "MultiPowerLaw",
            "protocol": "multipowerlaw-logged-loss",
            "n_params": rows["model_m"] * 1e6,
            "n_params_basis": "nominal_total",
            "step": step,
            "lr_peak": rows["lr"].groupby(run).transform("max"),
            "lr": rows["lr"],
            "lr_schedule": kind.replace({"wsdld": "wsd", "wsdcon": "wsd"}),
            "decay_fraction": cosine.fillna(decay).mask(flat, 0.0),
            "loss_fp": rows["loss"],
            "status": "ok",
            "schedule_name": name,
            "raw_row": rows["raw_row"],
        }
    )
    return finish(frame, ["n_params", "schedule_name", "step"], "lr_schedule_curves")


def chinchilla_points() -> pd.DataFrame:
    """Tabulate the points of Hoffmann et al.'s Figure 4 that Besiroglu et al. extracted."""
    rows = raw("chinchilla_points")
    highest = rows["loss"].rank(ascending=False) <= 5
    run = "chinchilla-" + rows["raw_row"].map("{:03d}".format)
    reason = "set aside by Besiroglu et al. (arXiv:2404.10102): five highest losses"
    frame = pd.DataFrame(
        {
            "family": "Chinchilla",
            "run": run,
            "checkpoint": run,
            "source": "arXiv:2203.15556 Figure 4",
            "protocol": "hoffmann-2022",
            "n_params": rows["params_n"],
            "tokens": rows["tokens_d"],
            "training_flop": rows["training_flop"],
            "loss_fp": rows["loss"],
            **status_of(rows.index, ("degraded", highest, reason)),
            "raw_row": rows["raw_row"],
        }
    )
    return finish(frame, ["n_params", "tokens"], "chinchilla_points")


def overtrained_runs() -> pd.DataFrame:
    """Tabulate full-precision runs from 1/4 of to 32 times the Chinchilla-optimal tokens."""
    rows = raw("overtrained_runs")
    # The source records a global batch of one sequence for its 7B runs, which cannot be.
    doubtful = rows["global_bs"] == 1
    frame = pd.DataFrame(
        {
            "family": "open_lm/" + rows["dataset"],
            "run": rows["name"],
            "checkpoint": rows["name"],
            "source": "mlfoundations/scaling",
            "protocol": "c4-validation/ctx2048",
            "n_params": rows["params_no_embed"],
            "n_params_basis": "nonembedding",
            "n_params_total": rows["params"],
            "tokens": rows["tokens_d"],
            "lr_peak": rows["peak_lr"],
            "lr": rows["cooldown_lr"].mask(doubtful),
            "lr_schedule": label(rows.index, "cosine", (None, doubtful)),
            "decay_fraction": pd.Series(1.0, rows.index).mask(doubtful),
            "weight_decay": rows["wd"],
            "batch_tokens": (rows["global_bs"] * 2048.0).mask(doubtful),
            **{name: rows[theirs] for name, theirs in OVERTRAINED_LOSSES.items()},
            "status": "ok",
            "warmup_steps": rows["warmup"],
            "chinchilla_multiple": rows["chinchilla_multiplier"],
            "note": label(rows.index, None, ("batch and schedule unclear in the source", doubtful)),
            "raw_row": rows["raw_row"],
        }
    )
    return finish(frame, ["family", "n_params", "tokens"], "overtrained_runs")
