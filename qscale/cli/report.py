"""``qscale report``: what fits say and how sure they are, as HTML, Markdown and figures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from qscale.cli.console import console
from qscale.errors import QscaleError


def report(
    *fits: str,
    table: str | None = None,
    output: Annotated[Path, Parameter(name=["--output", "-o"])],
    tables: Path | None = None,
    model_card: Path | None = None,
    force: bool = False,
) -> None:
    r"""Write a report of one or several fits: answers, parameters, residuals, held-out scores.

    ```sh
    qscale report published_gptq_kumar -o report.html
    qscale report published_gptq_kumar published_gptq_ouyang -o both.html \
        --tables tables --model-card card.md
    ```

    Next: qscale compare tests the laws on held-out rows, qscale predict uses a fit.

    Parameters
    ----------
    fits
        Fits written by qscale fit, or names of shipped fits.
    table
        Table or dataset to take the rows from, if it is not where the fits say.
    output
        The .html file; the same in .md and a folder of figures are put beside it.
    tables
        Folder for every table of the report, as CSV and as LaTeX (packages booktabs, graphicx).
    model_card
        The .md file for a model card for the Hugging Face Hub.
    force
        Replace outputs that exist.
    """
    from rich.markup import escape  # noqa: PLC0415

    from qscale.fit import Fit  # noqa: PLC0415
    from qscale.load import load_fitted  # noqa: PLC0415
    from qscale.report import write_report  # noqa: PLC0415

    for name in fits:
        if not isinstance(load_fitted(name), Fit):
            raise QscaleError(
                f"{name}: is a regression, and reports are of laws. Set it beside laws on held-out "
                "rows with qscale compare --regressions."
            )

    with console.status("Reading") as status:

        def progress(step: str) -> None:
            status.update(escape(step))

        written = write_report(
            fits,
            output,
            table=table,
            tables_in=tables,
            card=model_card,
            force=force,
            progress=progress,
        )
    console.print(f"Report: {written.html}", markup=False, soft_wrap=True)
    console.print(f"Markdown: {written.markdown}", markup=False, soft_wrap=True)
    console.print(f"Figures: {written.figures}", markup=False, soft_wrap=True)
    if written.tables is not None:
        console.print(f"Tables: {written.tables}", markup=False, soft_wrap=True)
    if written.card is not None:
        console.print(f"Model card: {written.card}", markup=False, soft_wrap=True)
