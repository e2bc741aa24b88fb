"""``qscale plan tokens``: from where on more training makes the quantized model worse."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
from cyclopts import Parameter

from qscale.cli.console import Seed, console, number, refuse_existing, table
from qscale.cli.facts import COMMON, NOTHING, Facts, Settings
from qscale.cli.plan_bits import with_stored_bits
from qscale.cli.subject import subject_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

    from qscale.fit import Fit

LOSS = "chinchilla_points_chinchilla"
_SOME = 1e11  # tokens, where none are said
SETTING = ("bits", "group_size", "method", "fmt")


def tokens(
    fit: str | None = None,
    checkpoint: str | None = None,
    /,
    *,
    loss: str = LOSS,
    facts: Facts = NOTHING,
    settings: Settings = COMMON,
    draws: int = 1000,
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
    force: bool = False,
    seed: Seed = 0,
) -> None:
    r"""Find the training tokens beyond which the quantized model gets worse, if there are any.

    The loss before quantization falls with tokens, its increase may grow. The interval comes from
    joint draws of both fits, with the deviation of a new checkpoint.

    ```sh
    qscale plan tokens published_gptq_ouyang --n-params 1e9 --tokens 1e12 \
        --bits 2,3,4 --method gptq
    qscale plan tokens published_gptq_kumar --n-params 7e9 --bits 3 \
        --method gptq -o critical.csv
    ```

    Next: qscale plan pareto asks for the best size within a memory, qscale plan schedule what the
    learning rate would do.

    Parameters
    ----------
    fit
        A fit of delta_loss or relative_delta, written by qscale fit, or the name of a shipped one.
        Left out, the shipped one that reads tokens and covers the checkpoint best is taken.
    checkpoint
        Hugging Face folder or hub id: parameters are counted, its qscale.toml is read.
    loss
        A fit of loss_fp that reads tokens.
    draws
        Joint draws of both fits.
    output
        Write the table to this .csv or .parquet file.
    force
        Replace the output if it exists.
    seed
        Seed of the draws.
    """
    from qscale import table as tables  # noqa: PLC0415
    from qscale.load import load_fitted  # noqa: PLC0415
    from qscale.plan.joint import require_law  # noqa: PLC0415
    from qscale.plan.tokens import critical_tokens  # noqa: PLC0415

    refuse_existing(output, force)
    base = require_law(load_fitted(loss), "--loss")
    subject = subject_of(
        fit, checkpoint, facts, settings, reading=("tokens",), solved={"tokens": _SOME}
    )
    delta = require_law(subject.fitted, "the fit of the increase")
    now = subject.known.get("tokens")
    frame = with_stored_bits(delta, subject.known | {"tokens": now or _SOME}, subject.settings)
    found = critical_tokens(base, delta, frame, count=draws, seed=seed)
    _show(base, delta, found, now, subject.chosen)
    if output is not None:
        written = found.replace({np.inf: np.nan})  # a table holds no infinities
        tables.write(written, output)
        console.print(f"Written to {output}; a cell is empty where there are none.", markup=False)


def _show(
    loss: Fit, delta: Fit, found: pd.DataFrame, now: float | None, chosen: Sequence[str]
) -> None:
    """Print the critical tokens of each setting and what they rest on."""
    from qscale.predict import outside  # noqa: PLC0415

    console.print(
        f"\nloss_fp: {loss.name} fitted on {loss.data.rows} rows of {loss.data.name}. "
        f"{delta.target}: {delta.name} fitted on {delta.data.rows} rows of {delta.data.name}.",
        markup=False,
    )
    for sentence in chosen:
        console.print(f"Chosen: {sentence}", markup=False)
    shown = [c for c in SETTING if c in found.columns]
    rows = [
        (
            *(row[c] if isinstance(row[c], str) else number(row[c], 6) for c in shown),
            _tokens(row["critical_tokens"]),
            f"{_tokens(row['low'])} to {_tokens(row['high'])}",
            f"{row['share_without']:.0%}",
            number(row["lowest_loss"]),
            *(() if now is None else ("yes" if now > row["critical_tokens"] else "no",)),
        )
        for _, row in found.iterrows()
    ]
    past = () if now is None else (f"{number(now, 3)} is past it",)
    heading = (*shown, "critical tokens", "90 % interval", "draws without", "loss there", *past)
    console.print(table("", heading, rows))
    # Beyond the fitted tokens is said of the critical ones, not of those so far.
    unseen = outside(delta, found.drop(columns="tokens", errors="ignore"))
    for sentence in (*remarks(loss, delta, found), *unseen):
        console.print(f"Note: {sentence}", markup=False)


def remarks(loss: Fit, delta: Fit, found: pd.DataFrame) -> list[str]:
    """Say plainly when there are no critical tokens, and when they lie beyond the data."""
    said = []
    at = found["critical_tokens"]
    if "tokens" not in delta.columns:
        said.append(
            f"{delta.name} does not read tokens, so that the increase is the same however long the "
            "training: there are no critical tokens."
        )
    elif np.isinf(at).all():
        said.append("the loss still falls at 1e18 tokens: there are no critical tokens.")
    edges = [fit.data.ranges["tokens"] for fit in (loss, delta) if "tokens" in fit.data.ranges]
    beyond = at[np.isfinite(at)]
    if edges and len(beyond):
        low, high = max(e[0] for e in edges), min(e[1] for e in edges)
        outside = int((~beyond.between(low, high)).sum())
        if outside:
            said.append(
                f"{outside} of {len(beyond)} critical tokens lie outside what both laws were "
                f"fitted on, {number(low, 3)} to {number(high, 3)}: an extrapolation."
            )
    if loss.data.name != delta.data.name:
        said.append(
            "the two laws were fitted on different models and texts; their losses are added as if "
            "they were of one."
        )
    if {"lr", "lr_peak"} & set(delta.columns):
        said.append("learning rates are held at what was given, whatever the tokens.")
    return [*said, *delta.notes]


def _tokens(value: float) -> str:
    """Print a number of tokens; infinity is none."""
    return "none" if np.isinf(value) else number(value, 3)
