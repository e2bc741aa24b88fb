"""Which runs do the others not predict? Each is left out, its mean error set against its spread."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd
from scipy.stats import t as student

from qscale.errors import QscaleError
from qscale.validate.paired import holm
from qscale.validate.scores import scorable
from qscale.validate.splits import leave_one_out

if TYPE_CHECKING:
    from collections.abc import Callable

    from qscale.fit import Fit


def surprises(
    frame: pd.DataFrame, refit: Callable[[pd.DataFrame], Fit], cluster: str = "run"
) -> pd.DataFrame:
    """Refit without each run and ask how surprising its mean deviation from the prediction is.

    A run at the top with a small ``p_holm`` deserves a look at its record: a mistaken learning
    rate, token count or method shows up here.

    Parameters
    ----------
    frame
        A measurement table.
    refit
        Function that fits a law to training rows.
    cluster
        Column whose values mark runs.

    Returns
    -------
    pandas.DataFrame
        One row per run, the most surprising first: ``cluster``, ``rows``, ``log_ratio`` (mean log
        of observed over predicted), ``sd`` (spread that the fit expects of it), ``z`` (their
        ratio), ``p_value`` (two-sided, Student's t) and ``p_holm``, adjusted for the number of
        runs. Runs without which the law cannot be fitted have nulls.
    """
    found = []
    for split in leave_one_out(frame, cluster):
        label = split.name.removeprefix(f"{cluster} ")
        try:
            fitted = refit(frame[split.training])
            rows = frame[split.test]
            rows = rows[scorable(rows, fitted.target)]
            seen = fitted.surprise(rows)
        except QscaleError:
            found.append({"cluster": label, "rows": int(split.test.sum())})
            continue
        z = float(seen.mean[0] / seen.sd[0])
        found.append(
            {
                "cluster": label,
                "rows": len(rows),
                "log_ratio": float(seen.mean[0]),
                "sd": float(seen.sd[0]),
                "z": z,
                "p_value": float(2 * student.sf(abs(z), seen.dof[0])),
            }
        )
    names = ["cluster", "rows", "log_ratio", "sd", "z", "p_value"]
    table = pd.DataFrame(found).reindex(columns=names).sort_values("p_value", ignore_index=True)
    known = table["p_value"].notna()
    table["p_holm"] = pd.Series(holm(list(table.loc[known, "p_value"]))).reindex(table.index)
    return table
