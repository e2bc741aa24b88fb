"""``qscale regress``: fit a regression beside the laws, judged on clusters it has not seen."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from qscale.cli.console import Seed, console, number, pairs, refuse_existing, span, table

if TYPE_CHECKING:
    from qscale.regress import Regression


def regress(
    data: str,
    /,
    *,
    kind: str,
    formula: str | None = None,
    target: str = "delta_loss",
    map_: Annotated[list[str] | None, Parameter(name="--map")] = None,
    where: str | None = None,
    cluster: str = "run",
    law: str | None = None,
    seed: Seed = 0,
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
    force: bool = False,
) -> None:
    r"""Fit a regression of the log target, such as a random forest, to a measurement table.

    It is refitted without each cluster, or each of up to twenty parts of them (ten for learned
    kinds), and predicts the rows left out: how far off it is there is printed, and is the width of
    its predictions.

    ```sh
    qscale regress published_ptq --kind ols --where "method == 'gptq'" \
        --formula "log(n_params) + log(tokens) + bits" -o ols.fit
    qscale regress published_ptq --kind forest -o forest.fit
    ```

    Next: qscale predict forest.fit --n-params 13e9 --tokens 2e12; qscale compare --regressions sets
    it beside laws.

    Parameters
    ----------
    data
        A .csv or .parquet table, or the name of a shipped dataset (see qscale datasets).
    kind
        Linear: ols, rlm (robust), mixedlm (a random intercept for each cluster) or quantreg
        (median). Learned: forest, boosting or gp (a Gaussian process on what a law leaves over).
    formula
        Inputs, such as "log(n_params) + log(tokens) * method". Left out, all that the kind knows,
        that vary and are known in nine of ten rows.
    target
        Column to predict.
    map_
        NAME=THEIRS reads the table's column THEIRS as NAME, such as tokens=D. May be repeated.
    where
        Rows to use, as a pandas query such as "method == 'gptq' and bits >= 3".
    cluster
        Column whose values mark rows with shared noise; there must be at least three.
    law
        Law under a gp: a name (see qscale laws) or a file as in qscale fit; ouyang if left out.
    seed
        Seed of forests, boosting and processes.
    output
        Write the regression to this file, for qscale predict.
    force
        Replace the output if it exists.
    """
    from qscale import datasets  # noqa: PLC0415
    from qscale import table as tables  # noqa: PLC0415
    from qscale.laws.user import resolve  # noqa: PLC0415
    from qscale.regress import regress as fit_regression  # noqa: PLC0415

    under = None if law is None else resolve(law, target)
    refuse_existing(output, force, ".fit", ".json")
    mapping = pairs(map_ or [], "--map")
    frame = tables.read(datasets.find(data), mapping)
    with console.status("Refitting without a part of the clusters at a time"):
        result = fit_regression(
            frame,
            kind=kind,
            target=target,
            formula=formula,
            where=where,
            cluster=cluster,
            law=under,
            seed=seed,
            name=data,
            mapping=mapping,
        )
    summary(result)
    if output is not None:
        result.save(output)
        console.print(f"Written to {output}.")


def summary(result: Regression) -> None:
    """Print a regression: inputs, data, coefficients of a linear kind, errors on rows left out."""
    from qscale.fit import explain  # noqa: PLC0415
    from qscale.regress.models import LINEAR  # noqa: PLC0415

    data, main = result.data, result.main
    inputs = " + ".join(main.inputs.terms)
    base = f", on what law {main.base.law.name} leaves over" if main.base else ""
    console.print(f"\n{result.kind}: log({result.target}) ~ {inputs}{base}", markup=False)
    console.print(
        f"{data.rows} rows of {data.name} in {data.clusters} clusters ({data.cluster}). "
        f"{explain(data.set_aside)}",
        markup=False,
    )
    for column, levels in result.categories.items():
        console.print(f"Values of {column}: {', '.join(levels)}.", markup=False)
    if result.kind in LINEAR:
        rows = [
            (str(name), number(row.estimate), span(row.low, row.high, 4))
            for name, row in result.parameters().iterrows()
        ]
        console.print(table("", ("coefficient", "estimate", "90 % interval"), rows))
        console.print(
            "Intervals are Student's t with "
            + ("the model's" if result.kind == "mixedlm" else "cluster-robust")
            + " standard errors and one degree of freedom less than there are clusters."
        )
    console.print(_errors(result))
    for sentence in result.notes:
        console.print(f"Note: {sentence}", markup=False)


def _errors(result: Regression) -> str:
    """Say how far off rows were that were predicted without their cluster."""
    spreads = [f"{number(sd, 3)} between {what}" for what, sd in result.effects.spreads]
    return (
        f"Rows predicted without their {result.data.cluster}: median |log error| "
        f"{number(result.median_error, 3)}; standard deviations in log: "
        f"{', '.join(spreads)}."
    )
