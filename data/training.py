"""How each published model was trained: the table itself and the columns others look up in it."""

from __future__ import annotations

import functools

import pandas as pd
from joins import finish, raw, sizes

RECIPE = (
    "tokens",
    "lr_peak",
    "lr",
    "lr_schedule",
    "decay_fraction",
    "weight_decay",
    "batch_tokens",
)
# Decay spans that the metadata says are the whole run or its end.
FINISHED = (
    "143000 steps (whole run)",
    "whole run to 10% of peak",
    "739328 steps",
    "50e9 tokens to zero",
    "100e9 (or 300e9) tokens to zero",
)
# Cosine decays that the run did not finish: warm-up and decay span in tokens. BLOOM: 183,105 and
# 200e6 sequences of 2,048; OLMo-2: t_warmup and t_max of the stage-1 configs.
COSINE_SPANS = {
    "BLOOM-176B": (183_105 * 2048, 200e6 * 2048),
    "OLMo-2-1B (stage 1)": (8_388_608_000, 5e12),
    "OLMo-2-7B (stage 1)": (8_388_608_000, 5e12),
    "OLMo-2-13B (stage 1)": (8_388_608_000, 5e12),
}
# Learning rates stated at a checkpoint that is not the end of the decay: BLOOM's log at 364.39e9
# tokens; the rate at which OLMo-2-1B stage 2 takes over.
LR_STATED = {"BLOOM-176B": 7.6e-6, "OLMo-2-1B (stage 1)": 7.4487e-5}
OLMO2_WEIGHT_DECAY = 0.1  # optimizer.weight_decay of the three stage-1 configs


@functools.cache
def training_metadata() -> pd.DataFrame:
    """Tabulate how each published model was trained: a row a model or stage, no losses."""
    rows = raw("training_metadata")
    model, span = rows["model"], rows["decay_span"].fillna("")
    bare = model.str.replace(r" \(stage \d\)", "", regex=True)
    later_stage = model.str.endswith("(stage 2)")
    finished = span.isin(FINISHED) | span.str.startswith("last ")
    frame = pd.DataFrame(
        {
            "family": rows["family"],
            "run": bare,
            "checkpoint": model,
            "source": rows["source_ref"],
            **sizes(bare, rows["params_nonemb_est"], rows["params_n"]),
            "tokens": rows["tokens_d"].mask(later_stage),
            "stage_tokens": rows["tokens_d"].where(later_stage),
            "lr_peak": rows["peak_lr"].mask(model == "OPT-175B"),  # see its note
            "lr": rows["final_lr"].where(finished).fillna(model.map(LR_STATED)),
            "lr_final_planned": rows["final_lr"],
            "lr_schedule": rows["lr_schedule"].str.split().str[0].str.lower(),
            "decay_shape": rows["lr_schedule"].str.extract(r"\((.*)\)", expand=False),
            "decay_span": rows["decay_span"],
            "decay_fraction": cosine_share(model, rows["tokens_d"]).mask(finished, 1.0),
            "warmup": rows["warmup"],
            "weight_decay": rows["weight_decay"].mask(
                model.str.contains(r"OLMo-2.*stage 1"), OLMO2_WEIGHT_DECAY
            ),
            "batch_tokens": rows["batch_tokens"],
            "note": rows["note"].str.replace(
                "so treat peak_lr as a default only", "so the default of 3e-5 is left out"
            ),
            "raw_row": rows["raw_row"],
        }
    )
    return finish(frame, ["family", "n_params_total", "checkpoint"], "training_metadata")


def cosine_share(model: pd.Series, tokens: pd.Series) -> pd.Series:
    """Return the share of the decay done after ``tokens``, for the runs of COSINE_SPANS."""
    spans = pd.DataFrame(COSINE_SPANS, index=["warmup", "span"]).T.reindex(model)
    spans = spans.set_index(model.index)
    return ((tokens - spans["warmup"]) / (spans["span"] - spans["warmup"])).clip(0, 1)


def recipe_of(model: pd.Series) -> pd.DataFrame:
    """Look up how each model was trained; null where it is not known."""
    found = training_metadata().set_index("checkpoint")[list(RECIPE)].reindex(model)
    return found.set_index(model.index)
