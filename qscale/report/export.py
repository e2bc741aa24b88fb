"""The tables of a report as CSV, with every digit, and as LaTeX, as they are shown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qscale.atomic import write_text
from qscale.report.blocks import Heading, Table
from qscale.report.tables import number
from qscale.report.words import slug

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import pandas as pd

    from qscale.report.blocks import Block

_SYMBOLS = {
    "×": r"$\times$", "∞": r"$\infty$", "–": "--", "α": r"$\alpha$", "β": r"$\beta$",
    "γ": r"$\gamma$", "δ": r"$\delta$", "Δ": r"$\Delta$", "η": r"$\eta$", "σ": r"$\sigma$",
    "≥": r"$\geq$", "≤": r"$\leq$", "·": r"$\cdot$", "±": r"$\pm$", "…": r"\dots{}",
}  # fmt: skip
_SPECIAL = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}",
}  # fmt: skip


def write_tables(content: Sequence[Block], folder: Path) -> list[Path]:
    """Write every table of a report as ``.csv`` and ``.tex``.

    Parameters
    ----------
    content
        Blocks of the report. A table is named after the headings above it.
    folder
        Made if need be; files of the same names are replaced.

    Returns
    -------
    list of pathlib.Path
        The files, in the order of the report.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, (title, table) in named_tables(content).items():
        caption = f"{title}. {table.caption}"
        texts = {
            ".csv": table.frame.to_csv(),
            ".tex": to_latex(table.frame, caption, f"tab:{name}"),
        }
        for suffix, text in texts.items():
            written.append(folder / f"{name}{suffix}")
            write_text(written[-1], text)
    return written


def named_tables(content: Sequence[Block]) -> dict[str, tuple[str, Table]]:
    """Name the tables of a report after the headings above them, and give those as titles."""
    found: dict[str, tuple[str, Table]] = {}
    above: dict[int, Heading] = {}
    for block in content:
        if isinstance(block, Heading):
            above = {level: heading for level, heading in above.items() if level < block.level}
            above[block.level] = block
        elif isinstance(block, Table):
            headings = [heading for level, heading in above.items() if level > 1]
            name = "-".join(one.anchor or slug(one.text) for one in headings) or "table"
            same = sum(key == name or key.startswith(f"{name}--") for key in found)
            titles = [one.anchor or one.text for one in headings[:-1]]
            title = ": ".join([*titles, *(one.text for one in headings[-1:])]) or "Table"
            found[f"{name}--{same + 1}" if same else name] = (title, block)
    return found


def to_latex(frame: pd.DataFrame, caption: str, label: str) -> str:
    r"""Return a frame as a LaTeX table, numbers as in the report, no wider than the text.

    The document needs ``\usepackage{booktabs,graphicx}``.

    Examples
    --------
    >>> import pandas as pd
    >>> print(to_latex(pd.DataFrame({"se": [0.5]}, index=["c_1"]), "All & more.", "tab:x"))
    \begin{table}
      \centering
      \caption{All \& more.}
      \label{tab:x}
      \resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%
      \begin{tabular}{lr}
        \toprule
         & se \\
        \midrule
        c\_1 & 0.5 \\
        \bottomrule
      \end{tabular}}
    \end{table}
    <BLANKLINE>
    """
    kinds = "".join("r" if dtype.kind in "iuf" else "l" for dtype in frame.dtypes)
    names = [frame.index.name or "", *frame.columns]
    columns = [[number(value) for value in frame[name].tolist()] for name in frame.columns]
    labels = [number(value) for value in frame.index]
    rows = [" & ".join(map(escape_latex, cells)) for cells in zip(labels, *columns, strict=True)]
    lines = [
        r"\begin{table}",
        r"  \centering",
        rf"  \caption{{{escape_latex(caption)}}}",
        rf"  \label{{{label}}}",
        r"  \resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",
        rf"  \begin{{tabular}}{{l{kinds}}}",
        r"    \toprule",
        f"    {' & '.join(map(escape_latex, names))} \\\\",
        r"    \midrule",
        *(f"    {row} \\\\" for row in rows),
        r"    \bottomrule",
        r"  \end{tabular}}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def escape_latex(text: object) -> str:
    r"""Escape text so that LaTeX prints it as it is, symbols of the report included.

    Examples
    --------
    >>> escape_latex("n_params >= 50 %, ×2")
    'n\\_params \\textgreater{}= 50 \\%, $\\times$2'
    """
    marks = {**_SPECIAL, **_SYMBOLS}
    return "".join(marks.get(mark, mark) for mark in " ".join(str(text).split()))
