"""``qscale select``: which factors a table supports, and which it cannot tell apart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from qscale.atomic import write_text
from qscale.cli.console import Seed, console, number, pairs, refuse_existing, span, table
from qscale.errors import QscaleError

if TYPE_CHECKING:
    import pandas as pd

    from qscale.select import Selected


def select(
    data: str,
    /,
    *,
    law: str,
    candidates: str,
    target: str | None = None,
    map_: Annotated[list[str] | None, Parameter(name="--map")] = None,
    where: str | None = None,
    offset: list[str] | None = None,
    cluster: str = "run",
    alpha: float = 0.05,
    seed: Seed = 0,
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
    force: bool = False,
) -> None:
    r"""Add factors to a law as long as a test or held-out runs support them; warn of confounding.

    ```sh
    qscale select ptq_vs_learning_rate --target relative_delta \
        --where "averaging != 'lawa'" --law ouyang --candidates lr_peak,anneal
    qscale select published_ptq --law kumar --where "bits >= 3" \
        --candidates method,group_size --offset source -o chosen.toml
    ```

    Next: qscale fit --law chosen.toml, qscale compare --split --laws chosen.toml,kumar to test it
    on what it has not seen.

    Parameters
    ----------
    data
        A .csv or .parquet table, or the name of a shipped dataset (see qscale datasets).
    law
        Law to start from: a name (see qscale laws) or a .toml file, as in qscale fit.
    candidates
        Factors, separated by commas: a column of numbers (a power of it), a column of text (a
        multiplier for each value), anneal, or KIND:COLUMN such as exponential:bits.
    target
        Column to predict instead of the law's own, such as relative_delta or kl.
    map_
        NAME=THEIRS reads the table's column THEIRS as NAME, such as tokens=D. May be repeated.
    where
        Rows to use, as a pandas query such as "method == 'gptq' and bits >= 3".
    offset
        Text column with a multiplier for each of its values throughout. May be repeated.
    cluster
        Column whose values mark rows with shared noise: what is resampled and left out.
    alpha
        Level at which p-values, adjusted for the number of candidates, count as support.
    seed
        Seed of the bootstrap.
    output
        Write the law with its supported factors to this .toml file, which --law takes.
    force
        Replace an output that is there.
    """
    from qscale import datasets  # noqa: PLC0415
    from qscale import table as tables  # noqa: PLC0415
    from qscale.laws.user import resolve, to_toml  # noqa: PLC0415
    from qscale.select import select_factors  # noqa: PLC0415

    refuse_existing(output, force, ".toml")
    if not 0 < alpha < 1:
        raise QscaleError(f"--alpha must be between 0 and 1. Got {alpha:g} instead.")
    names = [name.strip() for name in candidates.split(",") if name.strip()]
    if not names:
        raise QscaleError("--candidates names no factor; give some, such as lr_peak,anneal.")
    result = select_factors(
        tables.read(datasets.find(data), pairs(map_ or [], "--map")),
        resolve(law, target),
        names,
        where=where,
        offset=offset or (),
        cluster=cluster,
        alpha=alpha,
        seed=seed,
        name=data,
    )
    show(result)
    if output is not None:
        note = f"Selected on {data} from {law} and {', '.join(names)}."
        write_text(output, to_toml(replace(result.law, name=output.stem, note=note)))
        console.print(f"Written to {output}.", markup=False)


def show(result: Selected) -> None:
    """Print the steps, the final factors and the warnings."""
    from qscale.fit import explain  # noqa: PLC0415

    console.print(
        f"{result.rows} rows in {result.clusters} clusters ({result.cluster}). "
        f"{explain(result.set_aside)}",
        markup=False,
    )
    for step, rows in result.steps.groupby("step"):
        console.print(_table(f"Step {step}", rows))
    console.print(_table("Each factor of the final law, given the others", result.support))
    found = ", ".join(result.chosen) or "none of the candidates"
    console.print(f"Supported at {result.alpha:g}: {found}.", markup=False)
    console.print(f"{result.law.formula}", markup=False)
    for sentence in result.confounding.warnings:
        console.print(f"Warning: {sentence}", markup=False)
    if result.idle:
        console.print(f"Note: {', '.join(result.idle)} did not vary and took no part.")
    if result.steps["error_with"].isna().any():
        console.print(
            f"Note: a dash means that a coefficient is not determined once a {result.cluster} is "
            "left out."
        )
    least = 2 / 2**result.clusters
    if least >= result.alpha:
        console.print(
            f"Note: with {result.clusters} clusters the p-value of a gain cannot be below "
            f"{least:.2g}; only the Wald test can support a factor at {result.alpha:g}."
        )


def _table(title: str, rows: pd.DataFrame) -> object:
    """Build the table of some steps."""
    steps = "action" in rows.columns
    drawn = [
        (
            f"{row['action']} {row['factor']}" if steps else row["factor"],
            number(row["f"], 3),
            number(row["p_holm"], 2),
            number(row["error_without"], 3),
            number(row["error_with"], 3),
            span(row["low"], row["high"], 2),
            number(row["gain_p_holm"], 2),
            row["supported"],
            *((("yes" if row["taken"] else ""),) if steps else ()),
        )
        for _, row in rows.iterrows()
    ]
    heading = ("factor", "Wald F", "p", "error without", "with", "gain, 90 %", "p", "supported by",
               *(("taken",) if steps else ()))  # fmt: skip
    return table(title, heading, drawn)
