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
    force: bool = False,
) -> None:
    """Write a report of one or several fits: answers, parameters, residuals, held-out scores.

    Parameters
    ----------
    fits
        Fits written by qscale fit, or names of shipped fits.
    table
        Table or dataset to take the rows from, if it is not where the fits say.
    output
        The .html file; the same in .md and a folder of figures are put beside it.
    force
        Replace outputs that exist.
    """
    from qscale.fit.shipped import find  # noqa: PLC0415
    from qscale.report import write  # noqa: PLC0415

    named = dict(zip(_labels(fits), map(find, fits), strict=True))
    with console.status("Reading") as status:
        written = write(named, output, table=table, force=force, progress=status.update)
    console.print(f"Report: {written.html}", markup=False, soft_wrap=True)
    console.print(f"Markdown: {written.markdown}", markup=False, soft_wrap=True)
    console.print(f"Figures: {written.figures}", markup=False, soft_wrap=True)


def _labels(fits: tuple[str, ...]) -> list[str]:
    """Name fits by their files, in full where two files have one name."""
    if len(set(fits)) < len(fits):
        raise QscaleError("the same fit is given twice.")
    stems = [Path(fit).stem for fit in fits]
    return [stem if stems.count(stem) == 1 else fit for fit, stem in zip(fits, stems, strict=True)]
