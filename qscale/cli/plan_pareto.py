"""``qscale plan pareto``: the frontier of size and precision, and the best within a memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from cyclopts import Parameter

from qscale.cli.console import Seed, console, number, numbers, refuse_existing, table
from qscale.cli.facts import COMMON, NOTHING, Facts, Settings
from qscale.cli.plan_bits import with_stored_bits
from qscale.cli.plan_tokens import LOSS, SETTING
from qscale.cli.predicted import origin
from qscale.cli.subject import subject_of
from qscale.errors import QscaleError

if TYPE_CHECKING:
    import pandas as pd

    from qscale.cli.subject import Subject
    from qscale.fit import Fit


def pareto(
    fit: str | None = None,
    /,
    *,
    loss: str = LOSS,
    memory: str | None = None,
    sizes: str | None = None,
    tokens_per_param: float | None = None,
    measured: str | None = None,
    where: str | None = None,
    facts: Facts = NOTHING,
    settings: Settings = COMMON,
    draws: int = 1000,
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
    force: bool = False,
    seed: Seed = 0,
) -> None:
    r"""Find which model sizes and bit widths give the lowest loss for their bytes.

    From two laws: a family of --sizes, or without it, for each setting the size that fills
    --memory. Or from the rows of a --measured family. Bytes are those of the non-embedding
    parameters.

    ```sh
    # Which of five sizes at how many bits, within 4 or 8 GB?
    qscale plan pareto published_gptq_kumar --sizes 1e9,3e9,7e9,13e9,30e9 \
        --memory 4e9,8e9 --tokens 2e12 --method gptq
    # The size and width that fill 8 GB best, at 20 tokens for each parameter
    qscale plan pareto published_gptq_kumar --memory 8e9 --tokens-per-param 20 \
        --method gptq
    # The frontier of rows of your own, such as those that qscale sweep collected
    qscale plan pareto --measured rows.parquet
    ```

    Next: qscale plan tokens, for how long to train the size that was chosen.

    Parameters
    ----------
    fit
        A fit of delta_loss or relative_delta, written by qscale fit, or the name of a shipped one.
        Left out, the shipped one that covers the family best is taken.
    loss
        A fit of loss_fp.
    memory
        Bytes for the weights, such as 8e9, several separated by commas.
    sizes
        Non-embedding parameters of the models to choose from, such as 1e9,3e9,8e9.
    tokens_per_param
        Training tokens for each parameter, in place of --tokens.
    measured
        A .csv or .parquet table of measured rows, or the name of a shipped dataset.
    where
        Rows of the measured table to use, as a pandas query.
    draws
        Joint draws of both fits.
    output
        Write the rows to this .csv or .parquet file.
    force
        Replace the output if it exists.
    seed
        Seed of the draws.
    """
    from qscale import table as tables  # noqa: PLC0415

    refuse_existing(output, force)
    budgets = [] if memory is None else numbers(memory, "--memory")
    if any(budget <= 0 for budget in budgets):
        raise QscaleError("--memory must be above zero.")
    if fit is not None and measured is not None:
        raise QscaleError("give either a fit or --measured with a table, not both.")
    if measured is not None:
        found = _of_table(measured, where)
        _show(found, budgets)
    else:
        from qscale.load import load_fitted  # noqa: PLC0415
        from qscale.plan.joint import require_law  # noqa: PLC0415
        from qscale.plan.pareto import predicted  # noqa: PLC0415

        base = require_law(load_fitted(loss), "--loss")
        sized = _sized(facts, sizes, budgets, tokens_per_param)
        subject = subject_of(fit, None, sized, settings, reading=("n_params", "bits"))
        delta = require_law(subject.fitted, "the fit of the increase")
        frame = _points(delta, subject, sizes, budgets, tokens_per_param)
        found = predicted(base, delta, frame, count=draws, seed=seed)
        origin(delta, subject.chosen)
        _show(found, budgets)
        _notes(base, delta, found)
    if output is not None:
        tables.write(found, output)
        console.print(f"Written to {output}.", markup=False)


def _of_table(name: str, where: str | None) -> pd.DataFrame:
    """Read measured rows and find their frontier."""
    from qscale import datasets  # noqa: PLC0415
    from qscale import table as tables  # noqa: PLC0415
    from qscale.fit.rows import matches  # noqa: PLC0415
    from qscale.plan.pareto import measured  # noqa: PLC0415

    frame = tables.read(datasets.find(name))
    if where is not None:
        frame = frame[matches(frame, where, name)]
        if frame.empty:
            raise QscaleError(f"no row of {name} is {where}.")
    return measured(frame)


def _sized(
    facts: Facts, sizes: str | None, budgets: list[float], tokens_per_param: float | None
) -> Facts:
    """Check what says how large and how long, and stand in for what varies."""
    if facts.n_params is not None:
        raise QscaleError("--n-params is one size; give --sizes, or --memory alone.")
    if not sizes and not budgets:
        raise QscaleError(
            "give --sizes to choose from, or --memory to fill, or --measured with a table."
        )
    if tokens_per_param is not None and not tokens_per_param > 0:
        raise QscaleError(f"--tokens-per-param must be above zero. Got {tokens_per_param:g}.")
    if (tokens_per_param is None) == (facts.tokens is None):
        raise QscaleError("give the training tokens: either --tokens or --tokens-per-param.")
    return replace(facts, n_params=1e9, tokens=facts.tokens or 1e9)


def _points(
    delta: Fit,
    subject: Subject,
    sizes: str | None,
    budgets: list[float],
    tokens_per_param: float | None,
) -> pd.DataFrame:
    """Cross settings with sizes, or with the sizes that fill the budgets."""
    import pandas as pd  # noqa: PLC0415

    from qscale import table as tables  # noqa: PLC0415
    from qscale.plan.pareto import largest_models  # noqa: PLC0415

    frame = with_stored_bits(delta, subject.known, subject.settings)
    if sizes:
        parts = [frame.assign(n_params=size) for size in numbers(sizes, "--sizes")]
        frame = pd.concat(parts, ignore_index=True)
        if (frame["n_params"] <= 0).any():
            raise QscaleError("--sizes must be above zero.")
        frame = tables.check(frame, "--sizes")
    else:
        frame = largest_models(frame, budgets)
    return frame if tokens_per_param is None else frame.assign(
        tokens=tokens_per_param * frame["n_params"]
    )  # fmt: skip


def _show(found: pd.DataFrame, budgets: list[float]) -> None:
    """Print the frontier, or all settings of each budget, and the best within each budget."""
    from qscale.plan.pareto import best_within  # noqa: PLC0415

    by_budget = "memory" in found.columns
    uncertain = "low" in found.columns
    rows = found if by_budget else found[found["on_frontier"]]
    shown = [c for c in ("family", "run", *SETTING) if c in found.columns]
    drawn = [
        (
            number(row["bytes"], 3), number(row["n_params"], 3), *(_word(row[c]) for c in shown),
            f"{row['bits_per_weight']:.3f}", f"{row['loss_q']:.4f}",
            *((f"{row['low']:.4f} to {row['high']:.4f}", f"{row['share_on_frontier']:.0%}")
              if uncertain else ()),
        )
        for _, row in rows.iterrows()
    ]  # fmt: skip
    share = "lowest in draws" if by_budget else "on it in draws"
    heading = ("bytes", "n_params", *shown, "bits_per_weight", "loss_q",
               *(("90 % interval", share) if uncertain else ()))  # fmt: skip
    title = "Largest model in each budget" if by_budget else f"Frontier of {len(found)} points"
    console.print(table(title, heading, drawn))
    for budget in budgets:
        best = best_within(found[found["memory"] == budget] if by_budget else found, budget)
        if best is None:
            console.print(f"Nothing fits {number(budget, 3)} bytes.")
            continue
        name = ", ".join(f"{c} {_word(best[c])}" for c in shown)
        console.print(
            f"Within {number(budget, 3)} bytes: {number(best['n_params'], 3)} parameters at "
            f"{best['bits_per_weight']:.3f} bits per weight ({name}), loss {best['loss_q']:.4f}.",
            markup=False,
        )


def _notes(loss: Fit, delta: Fit, found: pd.DataFrame) -> None:
    """Print what the frontier rests on."""
    from qscale.predict import outside  # noqa: PLC0415

    chosen = found[found["on_frontier"]]
    said = [
        *(f"{loss.name}: {sentence}" for sentence in outside(loss, chosen)),
        *(f"{delta.name}: {sentence}" for sentence in outside(delta, chosen)),
    ]
    if loss.data.name != delta.data.name:
        said.append(
            f"the laws were fitted on {loss.data.name} and {delta.data.name}; their losses are "
            "added as if they were of one kind of model and text."
        )
    for sentence in [*said, *delta.notes]:
        console.print(f"Note: {sentence}", markup=False)


def _word(value: Any) -> str:
    """Print a text or a number; nothing is a dash."""
    if isinstance(value, str):
        return value
    return "-" if value is None or np.isnan(value) else number(value, 6)
