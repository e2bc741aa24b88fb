"""``qscale compare``: a league table of laws and regressions on rows they have not seen."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from qscale.cli.console import (
    Seed,
    console,
    number,
    pairs,
    random_terms,
    refuse_existing,
    span,
    table,
)
from qscale.errors import QscaleError

if TYPE_CHECKING:
    from collections.abc import Callable

    from qscale.validate import League


def compare(
    data: str,
    /,
    *,
    split: str,
    laws: str = "",
    regressions: str = "",
    target: str = "delta_loss",
    map_: Annotated[list[str] | None, Parameter(name="--map")] = None,
    where: str | None = None,
    offset: list[str] | None = None,
    random: list[str] | None = None,
    likelihood: Literal["huber", "gaussian", "student_t"] = "huber",
    cluster: str = "run",
    given_rows: int = 0,
    seed: Seed = 0,
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
    force: bool = False,
) -> None:
    r"""Refit laws and regressions without some rows, predict those, and say which does best.

    The mean of each method and bit width is always in the table: what a model must beat. The best
    is tested against each other one on the same rows.

    ```sh
    # Which carries over to a model family that it has not seen?
    qscale compare published_ptq --laws ouyang,kumar --regressions ols \
        --split family --where "method == 'gptq'" --offset source
    # Which holds for more tokens than it was fitted on?
    qscale compare ptq_vs_learning_rate --laws ouyang,lr_anneal \
        --target relative_delta --split latest:tokens -o league.md
    ```

    Next: qscale fit the best on all rows; qscale select asks which factors it lacks.

    Parameters
    ----------
    data
        A .csv or .parquet table, or the name of a shipped dataset (see qscale datasets).
    split
        What to hold out: a column, such as family or lr_peak, each value of which is left out in
        turn; largest:n_params, latest:tokens or lowest:bits; or expanding:tokens, a back-test that
        trains up to some tokens and predicts what follows.
    laws
        Laws, separated by commas: names (see qscale laws) or files, as in qscale fit.
    regressions
        Regressions, separated by commas, such as ols,forest.
    target
        Column that all of them predict.
    map_
        NAME=THEIRS reads the table's column THEIRS as NAME, such as tokens=D. May be repeated.
    where
        Rows to use, as a pandas query such as "method == 'gptq' and bits >= 3".
    offset
        Text column with a multiplier for each of its values in every law, such as source. May be
        repeated.
    random
        Random deviation of every law: a column (run), a combination (run:bits) or a slope by group
        (bits|run). May be repeated. Left out, it is the cluster column.
    likelihood
        Distribution of the laws' residuals.
    cluster
        Column whose values mark rows with shared noise.
    given_rows
        Measured rows of each held-out cluster that every model is told before it predicts the
        others: the one nearest to plain rounding to 4 bits first, else to the median bits.
    seed
        Seed of the intervals and tests.
    output
        Write the league to this .json (held-out rows included), .md or .csv file.
    force
        Replace the output if it exists.
    """
    from qscale import datasets  # noqa: PLC0415
    from qscale import table as tables  # noqa: PLC0415
    from qscale.fit.grouping import parse as parse_term  # noqa: PLC0415
    from qscale.fit.rows import matches  # noqa: PLC0415
    from qscale.validate import compare as compare_models  # noqa: PLC0415
    from qscale.validate import parse  # noqa: PLC0415
    from qscale.validate.league import check_suffix  # noqa: PLC0415

    refuse_existing(output, force)
    if output is not None:
        check_suffix(output)
    if given_rows < 0:
        raise QscaleError(f"--given-rows must be zero or more. Got {given_rows} instead.")
    shared = {"offset": offset or (), "cluster": cluster}
    models = {
        **_laws(laws, target, **shared, random=random_terms(random), likelihood=likelihood),
        **_regressions(regressions, target, cluster=cluster, seed=seed),
    }
    if not models:
        raise QscaleError("nothing to compare; give --laws ouyang,kumar or --regressions ols.")
    frame = tables.read(datasets.find(data), pairs(map_ or [], "--map"))
    if where:
        frame = frame[matches(frame, where, data)].reset_index(drop=True)
    if frame.empty:
        raise QscaleError(f"{data}: no row is {where}.")
    grouped = [column for term in random_terms(random) or () for column in parse_term(term).columns]
    tables.require(frame, [cluster, *(offset or ()), *grouped], data)
    with console.status("Refitting") as status:
        league = compare_models(
            frame,
            models,
            parse(split, frame),
            target=target,
            # Rows left out together share one training set, and so the errors of its fit.
            cluster=cluster if ":" in split else split,
            given_rows=given_rows,
            given_by=cluster,
            seed=seed,
            progress=status.update,
        )
    show(league)
    if output is not None:
        league.save(output)
        console.print(f"Written to {output}.", markup=False)


def _laws(names: str, target: str, **options: Any) -> dict[str, Callable[..., Any]]:
    """Return refits of laws by name."""
    from qscale.fit import fit  # noqa: PLC0415
    from qscale.laws.user import resolve  # noqa: PLC0415

    return {
        name: partial(
            fit, law=resolve(name, target), interval="model", name="training rows", **options
        )
        for name in _listed(names)
    }


def _regressions(names: str, target: str, **options: Any) -> dict[str, Callable[..., Any]]:
    """Return refits of regressions by name."""
    if not _listed(names):
        return {}
    from qscale.regress import check_kind, regress  # noqa: PLC0415

    for name in _listed(names):  # before any work
        check_kind(name)
    return {
        name: partial(regress, kind=name, target=target, name="training rows", **options)
        for name in _listed(names)
    }


def _listed(text: str) -> list[str]:
    """Split ``ouyang, kumar`` at its commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def show(league: League) -> None:
    """Print the league, the tests of the best and the notes."""
    ranked = [
        (
            row["model"],
            number(row["mean_abs_log_error"], 3),
            span(row["mean_abs_log_error_low"], row["mean_abs_log_error_high"]),
            number(row["median_abs_log_error"], 3),
            number(row["bias"], 2),
            f"{number(row['coverage_50'], 2)} / {number(row['coverage_90'], 2)}",
            number(row["width_90"], 3),
            number(row["pinball"], 3),
        )
        for _, row in league.table.iterrows()
    ]
    first = league.table.iloc[0]
    title = (
        f"Held-out {league.target}: {first['rows']} rows in {first['clusters']} clusters "
        f"({league.cluster}), log errors"
    )
    heading = ("model", "mean |error|", "90 % interval", "median", "bias", "inside 50/90 %",
               "90 % width", "pinball")  # fmt: skip
    console.print(table(title, heading, ranked))
    tested = [
        (
            row["model"],
            number(row["difference"], 3),
            span(row["low"], row["high"]),
            number(row["p_value"], 2),
            number(row["p_holm"], 2),
        )
        for _, row in league.tests.iterrows()
    ]
    title = f"{first['model']} against each other model, same rows"
    columns = ("model", "mean |error| beyond the best's", "90 % interval", "p", "p, all pairs")
    console.print(table(title, columns, tested))
    for note in league.notes:
        console.print(f"Note: {note}", markup=False)
