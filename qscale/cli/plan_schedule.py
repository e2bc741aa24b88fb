"""``qscale plan schedule``: what another learning-rate schedule would do to the increase."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from qscale.cli.console import Seed, console, number, pairs, refuse_existing, span, table
from qscale.cli.facts import NOTHING, Facts, Settings
from qscale.cli.plan_bits import with_stored_bits
from qscale.cli.plan_tokens import SETTING
from qscale.cli.predicted import origin
from qscale.cli.subject import subject_of
from qscale.errors import QscaleError

if TYPE_CHECKING:
    import pandas as pd

    from qscale.fit import Fit

_PLAIN = Settings(bits="3,4")


def schedule(
    fit: str | None = None,
    checkpoint: str | None = None,
    /,
    *,
    try_: Annotated[list[str] | None, Parameter(name="--try")] = None,
    facts: Facts = NOTHING,
    settings: Settings = _PLAIN,
    draws: int = 4000,
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
    force: bool = False,
    seed: Seed = 0,
) -> None:
    r"""Predict what another peak rate, more tokens or another decay would do to the loss increase.

    Describe the run as planned, then each alternative by what changes. The ratio between them is
    the law's, with an interval; a prediction for each is of a new run.

    ```sh
    qscale plan schedule learning_rate_gptq_lr_anneal --n-params 7e9 \
        --tokens 2e12 --lr-peak 3e-4 --lr 0 --method gptq --bits 3,4 \
        --try lr_peak=9e-4 --try tokens=4e12 --try lr=3e-4
    qscale plan schedule learning_rate_gptq_ouyang --n-params 7e9 --tokens 2e12 \
        --method gptq --try tokens=4e12 -o schedules.csv
    ```

    Next: qscale plan next, if the intervals are too wide to choose.

    Parameters
    ----------
    fit
        A fit whose law reads learning rates or tokens, or the name of a shipped one, such as
        learning_rate_gptq_lr_anneal. Left out, the shipped one that reads what is tried and covers
        the checkpoint best is taken.
    checkpoint
        Hugging Face folder or hub id: parameters are counted, its qscale.toml is read.
    try_
        NAME=VALUE, several joined by commas, such as lr_peak=1e-3 or tokens=2e12,lr=1e-3. May be
        repeated. A new lr_peak alone scales lr with it; lr equal to lr_peak is the stable phase.
    draws
        Draws of the ratio.
    output
        Write the table to this .csv or .parquet file.
    force
        Replace the output if it exists.
    seed
        Seed of the draws.
    """
    from qscale import table as tables  # noqa: PLC0415
    from qscale.plan.joint import require_law  # noqa: PLC0415
    from qscale.plan.schedule import alternatives  # noqa: PLC0415

    refuse_existing(output, force)
    if not try_:
        raise QscaleError("give an alternative, such as --try lr_peak=1e-3.")
    changes = [_change(text) for text in try_]
    tried = {name for change in changes for name in change}
    subject = subject_of(fit, checkpoint, facts, settings, reading=tried)
    fitted = require_law(subject.fitted, "the fit")
    rows = with_stored_bits(fitted, subject.known, subject.settings)
    found = alternatives(fitted, rows, changes, count=draws, seed=seed)
    _check_rates(found)
    origin(fitted, subject.chosen)
    _show(fitted, found)
    if output is not None:
        tables.write(found, output)
        console.print(f"Written to {output}.", markup=False)


def _change(text: str) -> dict[str, float]:
    """Parse ``lr_peak=1e-3,tokens=2e12``."""
    import pandas as pd  # noqa: PLC0415

    from qscale import table as tables  # noqa: PLC0415

    found = {}
    for name, value in pairs(text.split(","), "--try").items():
        try:
            found[name] = float(value)
        except ValueError:
            raise QscaleError(f"--try {name}: must be a number. Got {value!r} instead.") from None
    tables.check(pd.DataFrame([found]), f"--try {text}")
    return found


def _check_rates(found: pd.DataFrame) -> None:
    """Raise naming the first alternative whose learning rate is above its peak."""
    if not {"lr", "lr_peak"} <= {*found.columns}:
        return
    above = found[found["lr"] > found["lr_peak"] * (1 + 1e-9)]
    if len(above):
        row = above.iloc[0]
        raise QscaleError(
            f"--try {row['schedule']}: lr must be at most lr_peak. Got {row['lr']:g} above "
            f"{row['lr_peak']:g} instead."
        )


def _show(fitted: Fit, found: pd.DataFrame) -> None:
    """Print the alternatives and what they rest on."""
    from qscale.predict import outside  # noqa: PLC0415

    shown = [c for c in SETTING if c in found.columns]
    rows = [
        (
            row["schedule"],
            *(row[c] if isinstance(row[c], str) else number(row[c], 6) for c in shown),
            number(row[fitted.target], 3),
            span(row["low"], row["high"]),
            number(row["ratio"], 3),
            span(row["ratio_low"], row["ratio_high"]),
        )
        for _, row in found.iterrows()
    ]
    heading = ("schedule", *shown, fitted.target, "90 % of a new run", "ratio", "90 % of the ratio")
    console.print(table("", heading, rows))
    rates = {"lr", "lr_peak"} & set(fitted.columns)
    said = [] if rates else ["the law does not read the learning rate."]
    said += outside(fitted, found)
    said.append(
        "the ratio is the law's for the average run; the loss before quantization also depends on "
        "the schedule, and is not predicted here."
    )
    data = fitted.data
    said.append(
        f"the law has seen {data.clusters} different {data.cluster}s: what it says of rates "
        "between and beyond theirs is its form's, not theirs."
    )
    for sentence in [*said, *fitted.notes]:
        console.print(f"Note: {sentence}", markup=False)
