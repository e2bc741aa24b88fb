"""A simulated table on disk, a fit of it, and its report."""

import numpy as np
import pandas as pd
import pytest

from qscale import table
from qscale.fit import fit
from qscale.laws import get
from qscale.report import write_report
from tests.simulations import simulate

EVIL = "<script>alert('x')</script> | [a](b) `c`"


def rows(runs: int = 24) -> pd.DataFrame:
    """Rows of two sources and three families, one source's name written to do harm."""
    frame = simulate(runs=runs)
    run = pd.factorize(frame["run"])[0]
    return frame.assign(
        family=np.array(["Ash", "Birch", "Cedar"])[run % 3],
        source=np.array(["paper", EVIL])[run // 3 % 2],
        status="ok",
    )


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory):
    """Folder with a table and two fits of it; do not change it."""
    path = tmp_path_factory.mktemp("report")
    table.write(rows(), path / "rows.csv")
    for law in ("ouyang", "kumar"):
        frame = table.read(path / "rows.csv")
        name = str(path / "rows.csv")
        fit(frame, get(law), offset=["source"], n_boot=60, name=name).save(path / f"{law}.json")
    return path


@pytest.fixture(scope="session")
def written(folder):
    """Report of both fits."""
    fits = [folder / "ouyang.json", folder / "kumar.json"]
    return write_report(fits, folder / "report.html", n_boot=30)
