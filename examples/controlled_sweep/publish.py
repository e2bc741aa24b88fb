"""Turn what ``qscale sweep collect`` wrote into the shipped dataset ``controlled_sweep``.

    python examples/controlled_sweep/publish.py measured.parquet --spectra spectra.parquet

Rows are named by run and checkpoint instead of by task; columns that hold nothing, and the value of
each single probe, are left out. Eigenvalues, which are of a checkpoint, go to each of its rows.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd
from measuring import KEPT_TABLES

from qscale import table
from qscale.atomic import replacing
from qscale.sweep import plan

PROBES = ["ggn_probes", "hessian_probes"]
PLAN = Path(__file__).resolve().parent / "plan.toml"


def named(frame: pd.DataFrame, names: dict[str, str]) -> pd.DataFrame:
    """Give each row its checkpoint's name in place of the task's hash."""
    frame = frame.assign(name=frame["task"].map(names))
    frame = frame.drop(columns=["task", *PROBES], errors="ignore")
    return frame.dropna(axis="columns", how="all")


def with_spectra(rows: pd.DataFrame, spectra: pd.DataFrame) -> pd.DataFrame:
    """Give each row its checkpoint's eigenvalues, missing where they were not sought."""
    found = spectra.drop(columns="task").rename(columns={"checkpoint": "name"})
    return table.in_order(rows.merge(found, on="name", how="left", validate="many_to_one"))


def main() -> None:
    """Write rows and side tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("table", type=Path, help="collected table, its side tables beside it")
    parser.add_argument("--spectra", type=Path, help="what was collected of spectrum.toml")
    parser.add_argument("--out", type=Path, default=Path("data/controlled_sweep"))
    args = parser.parse_args()
    names = {task.hash: task.params["checkpoint"] for task in plan.read(PLAN).tasks}
    target = args.out / "table.parquet"
    found = {args.table: target} | {
        table.side_path(args.table, kind): table.side_path(target, kind) for kind in KEPT_TABLES
    }
    for source, goal in found.items():
        if not source.is_file():
            continue
        frame = named(pd.read_parquet(source), names)
        if source == args.table and args.spectra:
            frame = with_spectra(frame, pd.read_parquet(args.spectra))
        with replacing(goal) as partial:
            frame.to_parquet(partial, compression="zstd", index=False)
        print(f"{goal}: {len(frame)} rows, {goal.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
