"""Make the shipped fits and their reports from ``data/``: ``python fits/build.py [NAME ...]``."""

from __future__ import annotations

import argparse
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qscale import datasets
from qscale.fit import fit
from qscale.laws import get
from qscale.report import write_report

if TYPE_CHECKING:
    from qscale.fit import Fit

HERE = Path(__file__).resolve().parent


def entries() -> dict[str, dict[str, Any]]:
    """Read the list of fits."""
    return tomllib.loads((HERE / "fits.toml").read_text())


def make(entry: dict[str, Any]) -> Fit:
    """Fit one entry of the list."""
    options = {key: value for key, value in entry.items() if key not in ("table", "law", "target")}
    law = get(entry["law"], entry.get("target"))
    return fit(datasets.load(entry["table"]), law, name=entry["table"], **options)


def main() -> None:
    """Make the fits named on the command line, or all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="fits to make; all if none is given")
    chosen = parser.parse_args().names or list(entries())
    for name in chosen:
        if name not in entries():
            parser.error(f"no fit named {name!r} in fits.toml; it has {', '.join(entries())}")
        folder = HERE / name
        made = make(entries()[name])
        made.save(folder / "fit.json")
        write_report([folder / "fit.json"], folder / "report.html", force=True)
        print(f"{name}: {made.search.status}, {made.data.rows} rows")


if __name__ == "__main__":
    main()
