"""``qscale fit``: fit a law to a measurement table and say how sure the result is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter
from rich.console import Console

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
    from qscale.fit import Fit


def fit(
    data: str,
    /,
    *,
    law: str,
    target: str | None = None,
    map_: Annotated[list[str] | None, Parameter(name="--map")] = None,
    where: str | None = None,
    offset: list[str] | None = None,
    fix: list[str] | None = None,
    cluster: str = "run",
    random: list[str] | None = None,
    likelihood: Literal["huber", "gaussian", "student_t"] = "huber",
    huber_delta: float | None = None,
    floor: float = 2.0,
    ceiling: float | None = None,
    interval: Literal["model", "sandwich", "bootstrap", "profile", "conformal"] | None = None,
    boots: int = 1000,
    seed: Seed = 0,
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
    force: bool = False,
    track: str | None = None,
) -> None:
    r"""Fit a law to a measurement table: estimates, intervals, status, and which rows were used.

    ```sh
    # Published GPTQ results, with a multiplier for each source and protocol
    qscale fit published_ptq --law kumar --where "method == 'gptq'" \
        --offset source --offset protocol -o kumar.json
    # The relative increase, which learning rates explain
    qscale fit ptq_vs_learning_rate --law lr_anneal --target relative_delta \
        --where "averaging != 'lawa'" -o rates.json
    # A table that calls tokens D, and a law of your own
    qscale fit mine.csv --law mine.toml --map tokens=D -o mine.json
    ```

    Next: qscale report kumar.json -o kumar.html draws the fit and judges it; qscale predict and
    qscale plan read it; qscale compare and qscale select ask whether another law is better.

    Parameters
    ----------
    data
        A .csv or .parquet table, or the name of a shipped dataset (see qscale datasets).
    law
        Name of the law (see qscale laws), or your own: a .toml file of factors, or
        FILE.py:FUNCTION.
    target
        Column to predict instead of the law's own, such as relative_delta or kl.
    map_
        NAME=THEIRS reads the table's column THEIRS as NAME, such as tokens=D. May be repeated.
    where
        Rows to use, as a pandas query such as "method == 'gptq' and bits >= 3".
    offset
        Text column with a multiplier for each of its values, such as source. May be repeated.
    fix
        PARAMETER=VALUE holds a parameter instead of estimating it. May be repeated.
    cluster
        Column whose values mark rows with shared noise.
    random
        Random effect: a column (run), a combination (run:bits) or a slope by group (bits|run). May
        be repeated. Left out, the cluster column has one; none asks for none.
    likelihood
        Distribution of residuals: huber, gaussian or student_t. Rows with a known standard error
        are Gaussian around the law whichever is chosen.
    huber_delta
        Log residual at which the loss turns from quadratic to linear. Left out, it is 1.345 robust
        standard deviations of the residuals.
    floor
        Rows at or under this multiple of their standard error count as below it (censored), all
        others as measured with that error; 0 ignores standard errors.
    ceiling
        Target above which rows, collapsed ones included, count as above it (censored).
    interval
        Where intervals come from: the mixed model's likelihood, a cluster-robust sandwich, a
        cluster bootstrap, the profile likelihood, or errors of left-out clusters (conformal). Left
        out, model with random effects and bootstrap without.
    boots
        Refits of a bootstrap.
    seed
        Seed of the bootstrap.
    output
        Write the fit to this JSON file.
    force
        Replace the output if it exists.
    track
        Log options, estimates and scores in an experiment tracker too: mlflow, mlflow:URI such as
        mlflow:sqlite:///mlflow.db, or a file ending in .jsonl. MLflow needs the tracking extra.
    """
    from qscale import datasets  # noqa: PLC0415
    from qscale import table as tables  # noqa: PLC0415
    from qscale.fit import fit as fit_law  # noqa: PLC0415
    from qscale.laws.user import resolve  # noqa: PLC0415
    from qscale.trackers import of_fit, open_tracker  # noqa: PLC0415

    chosen = resolve(law, target)
    refuse_existing(output, force, ".json")
    tracker = open_tracker(track, _note) if track else None
    if boots < 0:
        raise QscaleError(f"--boots must be zero or more. Got {boots} instead.")
    mapping = pairs(map_ or [], "--map")
    result = fit_law(
        tables.read(datasets.find(data), mapping),
        chosen,
        where=where,
        offset=offset or (),
        fixed=_values(fix or []),
        cluster=cluster,
        random=random_terms(random),
        likelihood=likelihood,
        huber_delta=huber_delta,
        floor=floor or None,
        ceiling=ceiling,
        interval=interval,
        n_boot=boots,
        seed=seed,
        name=data,
        mapping=mapping,
    )
    summary(result)
    if output is not None:
        result.save(output)
        console.print(f"Written to {output}.")
    if tracker is not None:
        tracker.log(of_fit(result))


def _note(sentence: str) -> None:
    """Print a warning apart from the results."""
    Console(stderr=True).print(f"Note: {sentence}", markup=False)


def _values(items: list[str]) -> dict[str, float]:
    """Parse ``alpha=0.3`` items."""
    values = {}
    for name, text in pairs(items, "--fix").items():
        try:
            values[name] = float(text)
        except ValueError:
            raise QscaleError(f"--fix {name}: must be a number. Got {text!r} instead.") from None
    return values


def summary(result: Fit) -> None:
    """Print a fit: data, equation, parameters, status."""
    from qscale.fit import FEW_CLUSTERS, INTERVAL_MEANING, STATUS_MEANING, explain  # noqa: PLC0415
    from qscale.fit.record import FEWEST_RESAMPLED  # noqa: PLC0415

    data, search = result.data, result.search
    console.print(f"\n[bold]{result.law.name}[/bold]  {result.law.formula}", soft_wrap=True)
    console.print(
        f"{data.rows} rows of {data.name} in {data.clusters} clusters ({data.cluster}). "
        f"{explain(data.set_aside)}",
        markup=False,
    )
    parameters = result.parameters()
    published = result.published()
    rows = [
        (
            str(name),
            number(row.estimate),
            _interval(str(name), row, result),
            number(published.values.get(str(name))) if published else "-",
        )
        for name, row in parameters.iterrows()
    ]
    heading = ("parameter", "estimate", "90 % interval", "published")
    console.print(table("", heading, rows))
    console.print(
        f"Status: {search.status} ({search.detail}). {STATUS_MEANING[search.status]} "
        f"Sum of losses of the pooled fit {number(search.objective)}; "
        f"condition number {number(search.condition_number, 2)}.",
        markup=False,
    )
    resampled = result.interval == "bootstrap"
    without = resampled and data.clusters < FEWEST_RESAMPLED  # its note says so
    meaning = () if without else (INTERVAL_MEANING[result.interval],)
    for sentence in (*meaning, *_scatter(result), *search.notes):
        console.print(sentence, markup=False)
    if resampled and not without:
        console.print(
            f"{search.boots_converged} of {search.boots} refits over {data.cluster} converged."
            + " Intervals need twenty; raise --boots." * (search.boots_converged < 20)
        )
    if published:
        console.print(f"Published: {published.source}, {published.setting}.")
    if data.clusters < FEW_CLUSTERS[result.interval] and not without:
        console.print(
            f"Only {data.clusters} cluster{'s' * (data.clusters > 1)}: {result.interval} intervals "
            "are too narrow with so few."
        )


def _interval(name: str, row: Any, result: Fit) -> str:
    """Say between what ends a parameter lies, or why there are none."""
    if name in result.data.options["fixed"]:
        return "held"
    if name in result.search.undetermined:
        return "not determined"
    return span(row.low, row.high, 4)


def _scatter(result: Fit) -> list[str]:
    """Say how far rows and their groups scatter around the law."""
    unit = " in log" if result.law.link == "log" else ""
    spreads = [f"{number(sd, 3)} between {what}" for what, sd in result.effects.spreads]
    return [f"Standard deviations{unit}: {', '.join(spreads)}."]
