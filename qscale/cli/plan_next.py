"""``qscale plan next``: the measurements that most narrow a prediction."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from qscale.cli.console import console, number, refuse_existing, table
from qscale.cli.facts import NOTHING, Facts, Settings
from qscale.cli.plan_bits import with_stored_bits
from qscale.cli.predicted import origin
from qscale.cli.subject import subject_of
from qscale.errors import QscaleError

if TYPE_CHECKING:
    import pandas as pd

    from qscale.fit import Fit

_PLAIN = Settings(bits="3")
_SHOWN = ("run", "family", "n_params", "tokens", "lr_peak", "lr", "bits", "group_size", "method")


def next_(
    fit: str | None = None,
    checkpoint: str | None = None,
    /,
    *,
    candidates: str,
    count: int = 5,
    where: str | None = None,
    criterion: Literal["target", "parameters"] = "target",
    facts: Facts = NOTHING,
    settings: Settings = _PLAIN,
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
    force: bool = False,
) -> None:
    r"""Choose the measurements that would most narrow the prediction of a described checkpoint.

    What a measurement will teach follows from the fit's covariance before it is made.

    ```sh
    # Which three of the published settings would say most of this model?
    qscale plan next published_gptq_kumar --n-params 13e9 --tokens 2e12 \
        --method gptq --candidates published_ptq \
        --where "method == 'gptq'" --count 3
    # Which settings of your own table would say most of the law?
    qscale plan next mine.json --candidates could_measure.csv \
        --criterion parameters --n-params 13e9 --tokens 2e12 -o chosen.csv
    ```

    Next: qscale measure those, add the rows to the table, and qscale fit again; or qscale predict
    --given them.

    Parameters
    ----------
    fit
        A fit of a law, written by qscale fit, or the name of a shipped one. May be left out, as in
        qscale predict.
    checkpoint
        Hugging Face folder or hub id of the checkpoint to be predicted.
    candidates
        A .csv or .parquet table of settings that could be measured, with the fit's columns and run;
        without a column run they are of the checkpoint itself. Or the name of a shipped dataset.
    count
        Number of measurements.
    where
        Candidates to use, as a pandas query.
    criterion
        Narrow the described prediction, or all parameters of the law together.
    output
        Write the choice to this .csv or .parquet file.
    force
        Replace the output if it exists.
    """
    from qscale import datasets  # noqa: PLC0415
    from qscale import table as tables  # noqa: PLC0415
    from qscale.fit.rows import matches  # noqa: PLC0415
    from qscale.plan.joint import require_law  # noqa: PLC0415
    from qscale.plan.next import choose  # noqa: PLC0415

    refuse_existing(output, force)
    subject = subject_of(fit, checkpoint, facts, settings)
    fitted = require_law(subject.fitted, "the fit")
    targets = with_stored_bits(fitted, subject.known, subject.settings)
    pool = tables.read(datasets.find(candidates))
    if where is not None:
        pool = pool[matches(pool, where, candidates)]
        if pool.empty:
            raise QscaleError(f"no row of {candidates} is {where}.")
    tables.require(pool, fitted.columns, candidates)
    pool = pool[pool[list(fitted.columns)].notna().all(axis=1)]
    own = {c: targets[c].iloc[0] for c in _grouping(fitted) if c in targets and c not in pool}
    found = choose(fitted, pool.assign(**own), targets, count, criterion=criterion)
    origin(fitted, subject.chosen)
    _show(fitted, found, targets, len(pool))
    if output is not None:
        tables.write(found, output)
        console.print(f"Written to {output}.", markup=False)


def _grouping(fitted: Fit) -> list[str]:
    """Columns whose values share a deviation."""
    return [column for term in fitted.effects.terms for column in term.columns]


def _show(fitted: Fit, found: pd.DataFrame, targets: pd.DataFrame, pool: int) -> None:
    """Print the order and how the interval narrows."""
    sd, width = found.attrs["before"]
    log = fitted.law.link == "log"

    def spans(width: float) -> str:
        return f"x {math.exp(width / 2):.3g}" if log else f"± {number(width / 2, 3)}"

    known = [c for c in _SHOWN if c in found.columns and found[c].notna().any()]
    known = [c for c in known if c in ("run", "bits") or len(found[c].unique()) > 1]
    rows = [("", *("" for _ in known), number(sd, 3), spans(width))]
    rows += [
        (
            str(place),
            *(row[c] if isinstance(row[c], str) else number(row[c], 4) for c in known),
            number(row["sd"], 3),
            spans(row["width"]),
        )
        for place, (_, row) in enumerate(found.iterrows(), 1)
    ]  # fmt: skip
    aims = "prediction" if len(targets) == 1 else f"{len(targets)} predictions"
    heading = ("next", *known, "sd after", "90 % interval, either way")
    console.print(table(f"{len(found)} of {pool} candidates for the {aims}", heading, rows))
    console.print(
        "Note: expected from the fit's covariance and variances, with the law taken as right; a "
        "measurement that contradicts the law teaches more.",
    )
    for sentence in fitted.notes:
        console.print(f"Note: {sentence}", markup=False)
