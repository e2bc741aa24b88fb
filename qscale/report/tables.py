"""Numbers and data frames as text: digits decided in one place, tables as HTML and Markdown."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import TYPE_CHECKING

import pandas as pd
from markupsafe import Markup

if TYPE_CHECKING:
    from collections.abc import Iterator

NOTHING = "–"
_MULTIPLES = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


class Markdown(str):
    """Text that is Markdown already and must not be escaped again."""

    __slots__ = ()


def number(value: object, digits: int = 4) -> str:
    """Format one cell: four significant digits, a dash for nothing, text as it is.

    Examples
    --------
    >>> number(0.34731512), number(8.18e10), number(float("nan")), number(12345), number("OPT")
    ('0.3473', '8.18e10', '–', '12,345', 'OPT')
    """
    if value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value)):
        return NOTHING
    if isinstance(value, bool) or not isinstance(value, Real):
        return str(value)
    if isinstance(value, Integral):
        return f"{int(value):,}"
    value = float(value)
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if value == 0 or 1e-3 <= abs(value) < 10**digits:
        return f"{value:.{digits}g}"
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def count(value: float) -> str:
    """Format a number of parameters or tokens the way the field writes it.

    Examples
    --------
    >>> count(6.7e9), count(3e11), count(162e6), count(512)
    ('6.7B', '300B', '162M', '512')
    """
    for size, letter in _MULTIPLES:
        # A value that would round up to the next multiple is written in it.
        if abs(value) >= 0.9995 * size:
            return f"{value / size:.3g}{letter}"
    return f"{value:g}"


def escape_markdown(text: str) -> Markdown:
    """Escape text so that no Markdown viewer reads markup, links or HTML into it."""
    text = text.replace("\\", "\\\\").replace("&", "&amp;").replace("<", "&lt;")
    for mark in "`*[]|":
        text = text.replace(mark, f"\\{mark}")
    return Markdown(" ".join(text.splitlines()))


def to_html(frame: pd.DataFrame) -> Markup:
    """Return a frame as an HTML table, its index as row headers, all text escaped."""
    right = [pd.api.types.is_numeric_dtype(frame[name]) for name in frame.columns]
    head = [Markup('<th scope="col">{}</th>').format(frame.index.name or "")]
    head += [
        Markup('<th scope="col"{}>{}</th>').format(_style("", is_number), name)
        for is_number, name in zip(right, frame.columns, strict=True)
    ]
    body = []
    for label, cells in _cells(frame):
        row = [Markup('<th scope="row"{}>{}</th>').format(_style(label, False), label)]
        row += [
            Markup("<td{}>{}</td>").format(_style(cell, is_number), cell)
            for is_number, cell in zip(right, cells, strict=True)
        ]
        body.append(Markup("<tr>{}</tr>").format(Markup("").join(row)))
    return Markup('<table class="data"><thead><tr>{}</tr></thead><tbody>{}</tbody></table>').format(
        Markup("").join(head), Markup("\n").join(body)
    )


def _style(cell: str, is_number: bool) -> Markup:
    """Return the class of a cell: numbers to the right, long text may break anywhere."""
    if is_number:
        return Markup(' class="n"')
    return Markup(' class="long"') if len(cell) > 16 else Markup("")


def to_markdown(frame: pd.DataFrame) -> Markdown:
    """Return a frame as a pipe table, its index as the first column, all text escaped."""
    right = ["---:" if pd.api.types.is_numeric_dtype(frame[n]) else ":---" for n in frame.columns]
    rows = [[str(frame.index.name or ""), *map(str, frame.columns)]]
    rows += [[label, *cells] for label, cells in _cells(frame)]
    lines = ["| " + " | ".join(escape_markdown(cell) for cell in row) + " |" for row in rows]
    lines.insert(1, "| " + " | ".join([":---", *right]) + " |")
    return Markdown("\n".join(lines))


def _cells(frame: pd.DataFrame) -> Iterator[tuple[str, list[str]]]:
    """Yield each row's label and formatted cells; iterating columns keeps whole numbers whole."""
    columns = [[number(value) for value in frame[name].tolist()] for name in frame.columns]
    for i, label in enumerate(frame.index):
        yield number(label), [str(column[i]) for column in columns]
