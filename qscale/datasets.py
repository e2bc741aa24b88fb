"""Shipped data by name: list, describe, find and load the measurement tables in ``data``."""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from qscale import table
from qscale.errors import TableError, did_you_mean

if TYPE_CHECKING:
    import pandas as pd

Reading = Literal["measured", "transcribed", "digitised"]


@dataclass(frozen=True, slots=True)
class Dataset:
    """What a shipped table is and where it comes from.

    Parameters
    ----------
    name
        Name on the command line and of the folder under ``data``.
    title
        One line.
    kind
        How the numbers were read: ``measured`` (the authors' own files), ``transcribed`` (typed
        from printed tables) or ``digitised`` (read off figures).
    licence
        Licence of the source as far as it states one.
    source
        Repository and commit, or paper.
    citation
        Whom to cite.
    description
        What the rows hold and what they are good for.
    rows
        Number of rows.
    path
        The table's file.
    """

    name: str
    title: str
    kind: Reading
    licence: str
    source: str
    citation: str
    description: str
    rows: int
    path: Path


def names() -> tuple[str, ...]:
    """Return the names of the shipped datasets in alphabetical order.

    Examples
    --------
    >>> "published_ptq" in names()
    True
    """
    return tuple(sorted(path.parent.name for path in _root().glob("*/dataset.toml")))


def describe(name: str) -> Dataset:
    """Return title, source, licence and file of a shipped dataset.

    Raises
    ------
    TableError
        If there is no dataset of that name.

    Examples
    --------
    >>> describe("quest_qat").kind
    'measured'
    """
    folder = _folder(name)
    facts = tomllib.loads((folder / "dataset.toml").read_text(encoding="utf-8"))
    tables = [folder / f"table{suffix}" for suffix in (".csv", ".csv.gz", ".parquet")]
    return Dataset(**facts, path=next(path for path in tables if path.is_file()))


def load(name: str) -> pd.DataFrame:
    """Return a shipped dataset as a checked measurement table.

    Raises
    ------
    TableError
        If there is no dataset of that name.
    """
    return table.read(describe(name).path)


def datasheet(name: str) -> str:
    """Return a dataset's datasheet: who measured what and how, its columns, licence and traps.

    Raises
    ------
    TableError
        If there is no dataset of that name.
    """
    return (_folder(name) / "datasheet.md").read_text(encoding="utf-8")


def find(name_or_path: str | Path) -> Path:
    """Return the file of a shipped dataset or of the user's own table.

    A dataset's name wins over a file of the same name; write ``./name`` for the file.

    Raises
    ------
    TableError
        If it is neither.
    """
    if str(name_or_path) in names():
        return describe(str(name_or_path)).path
    path = Path(name_or_path)
    if path.is_file():
        return path
    if path.is_dir():
        raise TableError(f"{path}: is a folder. Give a .csv or .parquet table.")
    raise TableError(f"{path}: no such file or dataset. {_suggestion(path.name)}")


def _folder(name: str) -> Path:
    """Return a dataset's folder."""
    if name not in names():
        raise TableError(f"{name}: no such dataset. {_suggestion(name)}")
    return _root() / name


def _suggestion(name: str) -> str:
    """Say which datasets there are and which one the user may have meant."""
    return f"Datasets are: {', '.join(names())}.{did_you_mean(name.lower(), names())}"


@functools.cache
def _root() -> Path:
    """Return the data folder: inside the package when installed, beside it in a checkout."""
    package = Path(__file__).resolve().parent
    for root in (package / "data", package.parent / "data"):
        if any(root.glob("*/dataset.toml")):
            return root
    raise TableError(f"{package / 'data'}: the shipped datasets are missing. Reinstall qscale.")
