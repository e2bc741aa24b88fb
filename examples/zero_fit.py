"""How far the loss increase predicted from curvature, nothing fitted, is from the measured one.

``measurements/zero_fit.csv`` holds seven small language models of four architectures that
``qscale measure`` quantized by round-to-nearest and by GPTQ, with three predictions of the loss
increase beside the measured one: the Gauss-Newton trace times the squared error
(``quadratic_delta``), which takes the error to have no preferred direction; the Kronecker form
``tr(E A E^T B)`` of each matrix (``kronecker_delta``); and the Gauss-Newton form of the error
itself (``gauss_newton_delta``). Then one parameter for large increases is fitted to all models
but one and tested on that one. The figure goes to ``out/``::

    python examples/zero_fit.py

The models were trained by ``examples/train_small_lms.py`` and ``examples/train_tiny_lm.py`` and
measured, each, by::

    qscale measure MODEL --text examples/texts/austen-wilde-darwin.txt \
        --calibration books.txt --calibration-samples 32 --method rtn,gptq \
        --bits 2,3,4,5,6 --group-size 32,row --max-windows 40 --probe-windows 8 \
        --features curvature,weights,second_order -o rows.csv

but for the largest, which took ``--group-size 64,row --max-windows 24 --probe-windows 6``; the
calibration text was 2 MB of the training books. ``zero_fit_formats.csv`` holds the same models in
other formats and by AWQ (``--spec "rtn mxfp4" --spec "awq int3 g32 asym" ...``), and
``smollm2_135m.csv`` a real model, SmolLM2-135M-Instruct, opened from its Q4_1 file, so that its
weights sit on a 4-bit grid already::

    qscale measure SmolLM2-135M-Instruct.Q4_1.gguf --context 256 --probe-windows 3 \
        --max-windows 12 --method rtn,gptq --bits 2,3,4,5 --group-size 64 \
        --calibration books.txt --calibration-samples 16 \
        --features curvature,second_order --text ... -o smollm2.csv
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from rich.console import Console
from rich.table import Table
from scipy.optimize import minimize_scalar

from qscale import table
from qscale.report.landscape import zero_fit

MEASUREMENTS = Path(__file__).parent / "measurements"
ROWS = MEASUREMENTS / "zero_fit.csv"
FORMATS = MEASUREMENTS / "zero_fit_formats.csv"
REAL = MEASUREMENTS / "smollm2_135m.csv"
MODEL_ERROR = 0.15
FORMS = ("quadratic_delta", "kronecker_delta", "gauss_newton_delta", "second_order_delta")


def usable(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with status ok, with the Taylor value to second order added."""
    rows = rows.assign(second_order_delta=rows["first_order_delta"] + rows["hessian_delta"])
    return rows[rows["status"] == "ok"]


def above_noise(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows whose increase is above twice its standard error, so that it has a logarithm."""
    return rows[rows["delta_loss"] > 2 * rows["delta_loss_se"]]


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


def ratios(rows: pd.DataFrame, by: tuple[str, ...] = ("method", "bits")) -> pd.DataFrame:
    """Sum of the predictions over that of the measurements, by method and bits, over all rows.

    Keeping rows above their noise alone would favour those whose noise was upwards. Rows of a
    model share their windows, so the standard error adds theirs up as if they moved together.
    """
    lines = []
    for key, part in rows.groupby(list(by), sort=by == ("method", "bits")):
        measured = part["delta_loss"].sum()
        by_model = part.groupby("run")["delta_loss_se"].sum()
        relative = np.sqrt((by_model**2).sum()) / measured
        line: dict[str, object] = dict(zip(by, map(str, key), strict=True)) | {"rows": len(part)}
        for form in FORMS:
            ratio = part[form].sum() / measured
            line[form] = f"{ratio:.2f} ± {abs(ratio * relative):.2f}"
        lines.append(line)
    return pd.DataFrame(lines)


def fit_link(rows: pd.DataFrame, form: str) -> float:
    """Fit ``s`` of ``delta = q (1 + q / s)``, which leaves small increases as they are.

    Least squares over all rows; a prediction is taken to be off by 15 % beside the measurement's
    own error.
    """
    q, delta = rows[form].to_numpy(), rows["delta_loss"].to_numpy()
    scale = np.sqrt(rows["delta_loss_se"].to_numpy() ** 2 + (MODEL_ERROR * q) ** 2)

    def misfit(log_s: float) -> float:
        return float((((delta - q * (1 + q / np.exp(log_s))) / scale) ** 2).sum())

    return float(np.exp(minimize_scalar(misfit, bounds=(-5, 5), method="bounded").x))


def left_out(rows: pd.DataFrame, form: str) -> pd.DataFrame:
    """Predict each model by the link fitted to the others: sums of predictions over measured."""
    lines = []
    for model in rows["run"].unique():
        own = rows[rows["run"] == model]
        s = fit_link(rows[rows["run"] != model], form)
        line: dict[str, object] = {"model left out": model, "s": f"{s:.2f}"}
        for name, part in (("2 bits", own[own["bits"] == 2]), ("3 to 6", own[own["bits"] > 2])):
            q, measured = part[form], part["delta_loss"].sum()
            line[f"{name}, nothing fitted"] = f"{q.sum() / measured:.2f}"
            line[f"{name}, link"] = f"{(q * (1 + q / s)).sum() / measured:.2f}"
        lines.append(line)
    return pd.DataFrame(lines)


def beside(rows: pd.DataFrame) -> pd.DataFrame:
    """Measured increase with its standard error, and what each form says, row by row."""
    found = pd.DataFrame({"spec": rows["spec"]})
    found["delta_loss"] = [
        f"{value:.3f} ± {se:.3f}"
        for value, se in zip(rows["delta_loss"], rows["delta_loss_se"], strict=True)
    ]
    for form in FORMS:
        found[form] = rows[form].map("{:.3f}".format)
    return found


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
    show("Sum of predictions / sum of measured increases, all rows", ratios(rows), console)
    title = "Increases above 2 SE: median log(prediction / measured) and of its absolute value"
    show(title, by_bits(above_noise(rows)), console)
    for method in ("rtn", "gptq"):
        part = rows[rows["method"] == method]
        title = f"{method} by gauss_newton_delta: predicted over measured, the link from the others"
        show(title, left_out(part, "gauss_newton_delta"), console)
    formats = usable(table.read(FORMATS))
    show("Other formats and methods: the same sums", ratios(formats, ("spec",)), console)
    show("SmolLM2-135M, from its 4-bit file", beside(usable(table.read(REAL))), console)
    out = Path("out")
    out.mkdir(exist_ok=True)
    figure = zero_fit(rows).get_figure(root=True)
    assert figure is not None
    figure.savefig(out / "zero_fit.png", dpi=160, facecolor="white")
    console.print(f"Figure: {out / 'zero_fit.png'}")


if __name__ == "__main__":
    main()
