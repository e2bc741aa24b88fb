"""Make the shipped fits and their reports: ``python fits/build.py [NAME ...]``.

They come from the datasets in ``data/``, and the tested errors of the prediction from curvature
from the measured rows in ``examples/measurements/``.
"""

from __future__ import annotations

import argparse
import tempfile
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from qscale import datasets, table
from qscale.fit import fit
from qscale.laws import get
from qscale.report import write_report

if TYPE_CHECKING:
    from qscale.fit import Fit

HERE = Path(__file__).resolve().parent
MEASUREMENTS = HERE.parent / "examples" / "measurements"
_OF_TABLE = ("table", "tables", "law", "target")


def entries() -> dict[str, dict[str, Any]]:
    """Read the list of fits."""
    return tomllib.loads((HERE / "fits.toml").read_text())


def rows(entry: dict[str, Any]) -> pd.DataFrame:
    """Read the rows of an entry: a dataset, or measured tables one after the other."""
    if "table" in entry:
        return datasets.load(entry["table"])
    parts = [table.read(MEASUREMENTS / name) for name in entry["tables"]]
    return table.check(pd.concat(parts, ignore_index=True), "measured rows")


def name_of(entry: dict[str, Any]) -> str:
    """Name the rows of an entry."""
    return entry.get("table", "examples/measurements")


def make(entry: dict[str, Any]) -> Fit:
    """Fit one entry of the list."""
    options = {key: value for key, value in entry.items() if key not in _OF_TABLE}
    law = get(entry["law"], entry.get("target"))
    return fit(rows(entry), law, name=name_of(entry), **options)


def report(entry: dict[str, Any], path: Path) -> None:
    """Write the report beside a fit."""
    with tempfile.TemporaryDirectory() as temporary:
        joined = None
        if "tables" in entry:
            joined = Path(temporary) / "rows.parquet"
            table.write(rows(entry), joined)
        write_report([path], path.with_name("report.html"), table=joined, force=True)


def main() -> None:
    """Make the fits named on the command line, or all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="fits to make; all if none is given")
    chosen = parser.parse_args().names or list(entries())
    for name in chosen:
        if name not in entries():
            parser.error(f"no fit named {name!r} in fits.toml; it has {', '.join(entries())}")
        folder = HERE / name
        folder.mkdir(exist_ok=True)
        made = make(entries()[name])
        made.save(folder / "fit.json")
        report(entries()[name], folder / "fit.json")
        print(f"{name}: {made.search.status}, {made.data.rows} rows")


if __name__ == "__main__":
    main()
