"""The parts a report is made of, the same for HTML and Markdown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True)
class Heading:
    """A heading; ``anchor`` is what links point at, empty for none."""

    text: str
    level: int = 2
    anchor: str = ""
    kind: ClassVar[str] = "heading"


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph; a leading one is set larger."""

    text: str
    leading: bool = False
    kind: ClassVar[str] = "text"


@dataclass(frozen=True, slots=True)
class Bullets:
    """A list of sentences; ``title`` and a frame around it make it a warning."""

    items: tuple[str, ...]
    title: str = ""
    kind: ClassVar[str] = "bullets"


@dataclass(frozen=True, slots=True)
class Table:
    """A frame whose index holds the row names."""

    frame: pd.DataFrame
    caption: str
    kind: ClassVar[str] = "table"


@dataclass(frozen=True, slots=True)
class Figure:
    """A drawing: its file name without suffix, SVG text and text alternative."""

    name: str
    svg: str
    alt: str
    caption: str


@dataclass(frozen=True, slots=True)
class Figures:
    """Drawings set side by side where there is room."""

    figures: tuple[Figure, ...]
    kind: ClassVar[str] = "figures"


@dataclass(frozen=True, slots=True)
class Code:
    """Lines to copy."""

    text: str
    kind: ClassVar[str] = "code"


@dataclass(frozen=True, slots=True)
class Panel:
    """A fit to play with: prefix of its ids, what it is computed from, and its first prediction."""

    name: str
    law: dict[str, Any]
    caption: str
    start: dict[str, Any]
    kind: ClassVar[str] = "panel"


Block = Heading | Text | Bullets | Table | Figures | Code | Panel
