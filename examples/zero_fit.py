"""How far the loss increase predicted from curvature, nothing fitted, is from the measured one.

``measurements/zero_fit.csv`` holds seven small language models of four architectures that
``qscale measure`` quantized by round-to-nearest and by GPTQ, with three predictions of the loss
increase beside the measured one: the Gauss-Newton trace times the squared error
(``quadratic_delta``), which takes the error to have no preferred direction; the Kronecker form
``tr(E A E^T B)`` of each matrix (``kronecker_delta``); and the Gauss-Newton form of the error
itself (``gauss_newton_delta``). Then a factor and an exponent are fitted to all models but one
and tested on that one. The figure goes to ``out/``::

    python examples/zero_fit.py

The models were trained by ``examples/train_small_lms.py`` and ``examples/train_tiny_lm.py`` and
measured, each, by::

    qscale measure MODEL --text examples/texts/austen-wilde-darwin.txt \
        --calibration books.txt --calibration-samples 32 --method rtn,gptq \
        --bits 2,3,4,5,6 --group-size 32,row --max-windows 40 --probe-windows 8 \
        --features curvature,weights,second_order -o rows.csv
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from rich.console import Console
from rich.table import Table

from qscale import table
from qscale.report.landscape import zero_fit

ROWS = Path(__file__).parent / "measurements" / "zero_fit.csv"
FORMS = ("quadratic_delta", "kronecker_delta", "gauss_newton_delta", "second_order_delta")


def usable(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows whose increase is above twice its standard error, with the full Taylor value added."""
    kept = rows[(rows["status"] == "ok") & (rows["delta_loss"] > 2 * rows["delta_loss_se"])]
    return kept.assign(second_order_delta=kept["first_order_delta"] + kept["hessian_delta"])


def log_ratio(rows: pd.DataFrame, form: str) -> pd.Series:
    """Logarithm of prediction over measurement, null where the prediction is not above zero."""
    return np.log((rows[form].where(rows[form] > 0) / rows["delta_loss"]).astype(float))


def by_bits(rows: pd.DataFrame) -> pd.DataFrame:
    """Median log ratio and median absolute one, by method and bits, for each form."""
    lines = []
    for (method, bits), part in rows.groupby(["method", "bits"]):
        line: dict[str, object] = {"method": method, "bits": f"{bits:g}", "rows": len(part)}
        for form in FORMS:
            ratio = log_ratio(part, form)
            line[form] = f"{ratio.median():+.2f} ({ratio.abs().median():.2f})"
        lines.append(line)
    return pd.DataFrame(lines)


def left_out(rows: pd.DataFrame, form: str) -> pd.DataFrame:
    """Predict each model by ``log delta = a + b log q`` fitted to the others, at 3 bits and up."""
    rows = rows[(rows["bits"] >= 3) & (rows[form] > 0)]
    lines = []
    for model in rows["run"].unique():
        rest, own = rows[rows["run"] != model], rows[rows["run"] == model]
        b, a = np.polyfit(np.log(rest[form]), np.log(rest["delta_loss"]), 1)
        raw = log_ratio(own, form)
        linked = a + b * np.log(own[form]) - np.log(own["delta_loss"])
        lines.append(
            {
                "model left out": model,
                "rows": str(len(own)),
                "factor": f"{np.exp(a):.2f}",
                "exponent": f"{b:.2f}",
                "nothing fitted": f"{raw.abs().median():.2f}",
                "with the link": f"{linked.abs().median():.2f}",
            }
        )
    return pd.DataFrame(lines)


def show(title: str, frame: pd.DataFrame, console: Console) -> None:
    """Print a frame."""
    drawn = Table(*frame.columns, title=title, title_justify="left")
    for row in frame.astype(str).itertuples(index=False):
        drawn.add_row(*row)
    console.print(drawn)


def main() -> None:
    """Print the tables and draw the figure."""
    console = Console(width=140)
    rows = usable(table.read(ROWS))
    title = "Median log(prediction / measured), in brackets the median of its absolute value"
    show(title, by_bits(rows), console)
    for method, form in (("rtn", "quadratic_delta"), ("gptq", "gauss_newton_delta")):
        part = rows[rows["method"] == method]
        show(f"{method} by {form}: median |log ratio|", left_out(part, form), console)
    everything = left_out(rows, "gauss_newton_delta")
    show("both methods by gauss_newton_delta: median |log ratio|", everything, console)
    out = Path("out")
    out.mkdir(exist_ok=True)
    figure = zero_fit(rows).get_figure(root=True)
    assert figure is not None
    figure.savefig(out / "zero_fit.png", dpi=160, facecolor="white")
    console.print(f"Figure: {out / 'zero_fit.png'}")


if __name__ == "__main__":
    main()
