"""What the commands share: the console, tables of numbers, parsing of lists and pairs."""

from __future__ import annotations

import math
import re
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import numpy as np
from cyclopts import Parameter, validators
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from qscale.atomic import check_place
from qscale.errors import QscaleError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

Seed = Annotated[int, Parameter(validator=validators.Number(gte=0, lt=2**32))]

# Tables piped to a file must not be squeezed to 80 columns.
console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)


def number(value: float | None, digits: int = 4) -> str:
    """Format a number to significant digits; a null prints as a dash.

    Examples
    --------
    >>> number(0.123456), number(1.2e12), number(float("nan"))
    ('0.1235', '1.2e+12', '-')
    """
    return "-" if value is None or np.isnan(value) else f"{value:.{digits}g}"


def span(low: float | None, high: float | None, digits: int = 3) -> str:
    """Format an interval; one that lacks an end prints as a dash.

    Examples
    --------
    >>> span(0.1, 0.25), span(float("nan"), 1.0)
    ('0.1 to 0.25', '-')
    """
    ends = number(low, digits), number(high, digits)
    return "-" if "-" in ends else " to ".join(ends)


@contextmanager
def progress() -> Iterator[
    tuple[Callable[[str, float, float | None], None], Callable[[str], None]]
]:
    """Show one bar that follows the stage at work, and sentences above it.

    Yields a function to report stage, work done and work in all, and one to say a sentence.
    """
    from rich.progress import Progress  # noqa: PLC0415

    stderr = Console(stderr=True)
    with Progress(console=stderr, transient=True, disable=not stderr.is_terminal) as progress:
        task = progress.add_task("opening the checkpoint", total=None)

        def report(stage: str, done: float, total: float | None) -> None:
            progress.update(task, description=stage, completed=done, total=total)

        def say(sentence: str) -> None:
            progress.console.print(f"Note: {sentence}", markup=False)

        yield report, say


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Build a table whose first column is text and whose others are right-aligned."""
    drawn = Table(title=title, title_justify="left", title_style="bold", header_style="")
    for i, column in enumerate(columns):
        drawn.add_column(column, justify="left" if i == 0 else "right")
    for row in rows:
        drawn.add_row(*map(escape, row))
    return drawn


def numbers(text: str, option: str) -> list[float]:
    """Parse ``3,4`` as numbers.

    Raises
    ------
    QscaleError
        Naming the option and the part that is not a number.
    """
    values = []
    for part in text.split(","):
        try:
            value = float(part)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise QscaleError(
                f"{option} must be numbers separated by commas, such as 3,4. "
                f"Got {part!r} instead{how_to_write(part)}."
            )
        values.append(value)
    return values


def how_to_write(text: str) -> str:
    """Say how a number with a unit, such as 7B or 8GB, is written."""
    found = re.fullmatch(r"\s*(?P<value>\d+(\.\d+)?)\s*(?P<unit>[kmbgt])b?\s*", text, re.IGNORECASE)
    if found is None:
        return ""
    power = {"k": 3, "m": 6, "b": 9, "g": 9, "t": 12}[found["unit"].lower()]
    return f"; write {found['value']}e{power}"


def group_sizes(text: str, option: str = "--group-size") -> list[int | None]:
    """Parse ``64,128,row`` as group sizes, None standing for one scale per row.

    Raises
    ------
    QscaleError
        Naming the part that is neither a positive whole number nor ``row``.
    """
    sizes: list[int | None] = []
    for part in text.split(","):
        if part.strip() != "row" and not (part.strip().isdecimal() and int(part) > 0):
            raise QscaleError(
                f"{option} must be whole numbers or row, such as 64,128,row. Got {part!r} instead."
            )
        sizes.append(None if part.strip() == "row" else int(part))
    return sizes


def pairs(items: Iterable[str], option: str) -> dict[str, str]:
    """Parse ``["tokens=D"]`` as ``{"tokens": "D"}``.

    Raises
    ------
    QscaleError
        Naming the option and the item that is not NAME=VALUE, or a name given twice.
    """
    found = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not (name and equals and value):
            raise QscaleError(f"{option} must be NAME=VALUE. Got {item!r} instead.")
        if name.strip() in found:
            raise QscaleError(f"{option} {name.strip()} is given twice; give one value.")
        found[name.strip()] = value.strip()
    return found


def random_terms(items: Sequence[str] | None) -> list[str] | None:
    """Parse random terms; ``none`` alone asks for no random effect.

    Raises
    ------
    QscaleError
        If ``none`` is given beside a term.
    """
    if items is None or "none" not in items:
        return None if items is None else list(items)
    if len(items) > 1:
        raise QscaleError("--random none asks for no random effect; leave it or the others out.")
    return []


def refuse_existing(path: Path | None, force: bool, *endings: str) -> None:
    """Raise before any work if an output is already there, or ends as another kind of file does.

    Raises
    ------
    QscaleError
        Unless ``force`` is set, and if no file can be put there at all.
    """
    if path is None:
        return
    if endings and path.suffix not in endings:
        raise QscaleError(f"--output must end in {' or '.join(endings)}. Got {path} instead.")
    check_place(path)
    if path.exists() and not force:
        raise QscaleError(f"{path} exists already; choose another --output or add --force.")
