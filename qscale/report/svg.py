"""Turn axes into SVG text that stands alone or inside a page, the same bytes every time."""

from __future__ import annotations

import re
from io import StringIO
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape, quoteattr

import matplotlib as mpl

from qscale.report.blocks import Figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Stands for the text colour of the page: `to_svg` writes it as currentColor, so that a figure
# follows a light or dark page.
INK = "#0b0c0d"

STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "axes.titlesize": 10,
    "axes.labelsize": 9.5,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "axes.facecolor": "white",
    "figure.facecolor": "white",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": INK,
    "grid.alpha": 0.13,
    "grid.linewidth": 0.6,
    "svg.fonttype": "path",
    "mathtext.fontset": "cm",
}


def to_svg(ax: Axes, *, name: str, alt: str) -> str:
    """Return the figure of some axes as SVG text that stands alone or inside a page.

    Parameters
    ----------
    ax
        Any axes of the figure.
    name
        Prefix that keeps the ids of several figures in one page apart.
    alt
        Text alternative, written as the drawing's title.

    Returns
    -------
    str
        The ``svg`` element: no background, no date, no outside reference, the same bytes for the
        same figure.
    """
    figure = ax.get_figure(root=True)
    if figure is None:
        raise ValueError("the axes belong to no figure")
    text = StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    # A figure with a layout of its own fits its canvas already.
    box = None if figure.get_layout_engine() else "tight"
    with mpl.rc_context({**STYLE, "svg.hashsalt": name}):
        figure.savefig(
            text, format="svg", transparent=True, bbox_inches=box, pad_inches=0.04,
            metadata=nothing,
        )  # fmt: skip
    svg = text.getvalue()
    svg = re.sub(r"<!--.*?-->\n?", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(href="|url\()#', rf"\g<1>#{name}-", svg)
    svg = svg.replace(INK, "currentColor")
    start = f'<svg role="img" aria-label={quoteattr(alt)} '
    title = f">\n<title>{escape(alt)}</title>"
    return svg.replace("<svg ", start, 1).replace(">", title, 1)


def drawn(ax: Axes, *, name: str, alt: str, caption: str = "") -> Figure:
    """Return the figure of some axes as a block of a report."""
    return Figure(name, to_svg(ax, name=name, alt=alt), alt, caption)
