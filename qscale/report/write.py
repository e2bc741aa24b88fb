"""Write a report: find the tables, gather the evidence, render, and put the files in place."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from qscale import datasets
from qscale import table as tables
from qscale.atomic import write_text
from qscale.errors import QscaleError
from qscale.fit.shipped import find
from qscale.report import figures as drawings
from qscale.report.blocks import Figures, Heading
from qscale.report.card import model_card
from qscale.report.content import blocks
from qscale.report.evidence import Group, comparable, gather, held_out
from qscale.report.export import write_tables
from qscale.report.tables import Markdown, escape_markdown, number, to_html, to_markdown

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pandas as pd

    from qscale.fit import Fit
    from qscale.report.blocks import Block


@dataclass(frozen=True, slots=True)
class Written:
    """Where a report is.

    Parameters
    ----------
    html
        The self-contained page.
    markdown
        The same in Markdown, which shows the figures of the folder.
    figures
        Folder of the figures as SVG.
    tables
        Folder of the tables as CSV and LaTeX, if asked for.
    card
        Model card for the Hugging Face Hub, if asked for.
    """

    html: Path
    markdown: Path
    figures: Path
    tables: Path | None = None
    card: Path | None = None


def _silent(_: str) -> None:
    """Report no progress."""


def write_report(
    fits: Mapping[str, Fit] | Sequence[str | Path],
    output: str | Path,
    *,
    table: str | Path | None = None,
    tables_in: str | Path | None = None,
    card: str | Path | None = None,
    force: bool = False,
    n_boot: int = 200,
    progress: Callable[[str], None] = _silent,
) -> Written:
    """Write a report of one or several fits.

    Parameters
    ----------
    fits
        Fits by the name they have in the report, or their files (or names of shipped fits), which
        are then named after the files.
    output
        The ``.html`` file; ``.md`` and a folder ``_figures`` of the same stem are put beside it.
    table
        Table or dataset to take the rows from instead of those the fits name.
    tables_in
        Folder for every table of the report as CSV and LaTeX.
    card
        ``.md`` file for a model card for the Hugging Face Hub.
    force
        Replace outputs that exist.
    n_boot
        Refits behind the intervals scored on held-out rows, of fits whose intervals are a
        bootstrap's.
    progress
        Called with what is being done.

    Returns
    -------
    Written
        Where the files are.

    Raises
    ------
    QscaleError
        If an output exists and ``force`` is not set, a table cannot be read or has no usable row.
    """
    written = _places(
        Path(output),
        force,
        tables=None if tables_in is None else Path(tables_in),
        card=None if card is None else Path(card),
    )
    if not isinstance(fits, Mapping):
        fits = dict(zip(labels(fits), map(find, fits), strict=True))
    if not fits:
        raise QscaleError("a report needs at least one fit. Make one with qscale fit.")
    name = None if table is None else str(table)
    loaded: dict[tuple[object, ...], pd.DataFrame] = {}
    evidence = []
    for label, fit in fits.items():
        progress(f"{label}: refitting")
        evidence.append(gather(label, fit, _table(fit, table, loaded), name))
    groups = [
        Group(tuple(members), held_out(members, n_boot=n_boot, progress=progress))
        for members in comparable(evidence)
    ]
    content = blocks(groups)
    drawn = {
        f"{figure.name}.svg": figure.svg
        for block in content
        if isinstance(block, Figures)
        for figure in block.figures
    }
    title = f"qscale report: {', '.join(fits)}"
    _place_figures(drawn, written.figures)
    write_text(written.markdown, render_markdown(content, written.figures.name))
    write_text(written.html, render_html(content, title))
    if written.tables is not None:
        write_tables(content, written.tables)
    if written.card is not None:
        write_text(written.card, model_card(groups))
    return written


def labels(paths: Sequence[str | Path]) -> list[str]:
    """Name fits by their files, or by their folders where a file is called ``fit.json``.

    Raises
    ------
    QscaleError
        If a fit is given twice.

    Examples
    --------
    >>> labels(["gptq/fit.json", "rtn.json", "a/awq.json", "b/awq.json"])
    ['gptq', 'rtn', 'a/awq.json', 'b/awq.json']
    """
    texts = [str(path) for path in paths]
    if len(set(texts)) < len(texts):
        raise QscaleError("the same fit is given twice.")
    stems = [Path(text).stem for text in texts]
    named = [
        Path(text).parent.name or stem if stem == "fit" else stem
        for text, stem in zip(texts, stems, strict=True)
    ]
    return [
        name if named.count(name) == 1 else text for text, name in zip(texts, named, strict=True)
    ]


def _places(output: Path, force: bool, tables: Path | None, card: Path | None) -> Written:
    """Name the outputs and refuse to replace what is there."""
    if output.suffix != ".html":
        raise QscaleError(f"{output}: --output must end in .html.")
    if card is not None and (card.suffix != ".md" or card == output.with_suffix(".md")):
        raise QscaleError(
            f"{card}: --model-card must end in .md and have another name than the report."
        )
    markdown, figures = output.with_suffix(".md"), output.with_name(f"{output.stem}_figures")
    written = Written(output, markdown, figures, tables, card)
    places = [(output, False), (markdown, False), (figures, True), (tables, True), (card, False)]
    for path, folder in places:
        if path is None or not path.exists():
            continue
        if not force:
            raise QscaleError(f"{path} exists already; choose another name or add --force.")
        if path.is_dir() != folder:
            raise QscaleError(f"{path} is {'a file' if folder else 'a folder'} and in the way.")
    return written


def _table(
    fit: Fit, given: str | Path | None, loaded: dict[tuple[object, ...], pd.DataFrame]
) -> pd.DataFrame:
    """Read a fit's table, once for all the fits that share it."""
    mapping = fit.data.options.get("mapping", {})
    name = str(fit.data.name if given is None else given)
    key = (name, *sorted(mapping.items()))
    if key not in loaded:
        try:
            loaded[key] = tables.read(datasets.find(name), mapping)
        except QscaleError as error:
            if given is not None:
                raise
            raise QscaleError(f"{error} Say with --table where the fit's rows are.") from error
    return loaded[key]


def render_html(content: Sequence[Block], title: str) -> str:
    """Return the report as one HTML page with its styles and figures inside."""
    page = _environment(autoescape=True).get_template("report.html.j2")
    contents = [b for b in content if isinstance(b, Heading) and b.anchor]
    script = "\n".join(_template(name) for name in ("law.js", "page.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return page.render(
        blocks=content,
        title=title,
        contents=contents,
        to_html=to_html,
        number=number,
        label=drawings.label,
        shortest=lambda value: repr(value).removesuffix(".0"),
        script=Markup(script),
        script_hash=f"sha256-{digest}",
    )


def _template(name: str) -> str:
    """Return the text of a file beside the templates."""
    return resources.files("qscale.report").joinpath("templates", name).read_text("utf-8")


def render_markdown(content: Sequence[Block], figures: str) -> str:
    """Return the report as Markdown that shows the figures of a folder beside it."""
    page = _environment(autoescape=False).get_template("report.md.j2")
    hashes = {level: Markdown("#" * level) for level in (1, 2, 3)}
    return page.render(
        blocks=content, figures=figures, hashes=hashes, to_markdown=to_markdown, fenced=fenced
    )


def fenced(text: str) -> Markdown:
    """Return lines to copy as a Markdown code block that nothing in them can end."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return Markdown(f"{fence}\n{text}\n{fence}")


def _environment(*, autoescape: bool) -> Environment:
    """Set up templates that escape every text, as HTML or as Markdown."""

    def escaped(value: object) -> object:
        return value if isinstance(value, Markdown) else escape_markdown(str(value))

    return Environment(
        loader=PackageLoader("qscale.report"),
        autoescape=autoescape,
        finalize=None if autoescape else escaped,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def _place_figures(drawn: Mapping[str, str], folder: Path) -> None:
    """Put drawings into a folder and take away those of an earlier report."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, svg in drawn.items():
        write_text(folder / name, svg)
    for path in folder.glob("*.svg"):
        if path.name not in drawn:
            path.unlink()
