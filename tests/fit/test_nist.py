"""NIST StRD nonlinear regression: certified parameters and standard deviations from both starts.

Each problem is a Python function of the user's, fitted with the identity link through the whole of
`qscale.fit.fit`; the data and certified values are in ``nist/``.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from qscale.fit import fit, load
from qscale.laws.user import law_from_function

FOLDER = Path(__file__).parent / "nist"
TWO_PI = 2 * np.pi


def rational(x, above, below):
    """Polynomial over polynomial, coefficients from the constant upwards."""
    return np.polynomial.polynomial.polyval(x, above) / np.polynomial.polynomial.polyval(x, below)


def bennett5(d, b1, b2, b3):
    return b1 * (b2 + d["x"]) ** (-1 / b3)


def misra1a(d, b1, b2):
    return b1 * (1 - np.exp(-b2 * d["x"]))


def misra1b(d, b1, b2):
    return b1 * (1 - (1 + b2 * d["x"] / 2) ** -2)


def misra1c(d, b1, b2):
    return b1 * (1 - (1 + 2 * b2 * d["x"]) ** -0.5)


def misra1d(d, b1, b2):
    return b1 * b2 * d["x"] / (1 + b2 * d["x"])


def chwirut(d, b1, b2, b3):
    return np.exp(-b1 * d["x"]) / (b2 + b3 * d["x"])


def lanczos(d, b1, b2, b3, b4, b5, b6):
    x = d["x"]
    return b1 * np.exp(-b2 * x) + b3 * np.exp(-b4 * x) + b5 * np.exp(-b6 * x)


def gauss(d, b1, b2, b3, b4, b5, b6, b7, b8):
    x = d["x"]
    peaks = b3 * np.exp(-(((x - b4) / b5) ** 2)) + b6 * np.exp(-(((x - b7) / b8) ** 2))
    return b1 * np.exp(-b2 * x) + peaks


def danwood(d, b1, b2):
    return b1 * d["x"] ** b2


def kirby2(d, b1, b2, b3, b4, b5):
    return rational(d["x"], (b1, b2, b3), (1, b4, b5))


def cubic(d, b1, b2, b3, b4, b5, b6, b7):
    return rational(d["x"], (b1, b2, b3, b4), (1, b5, b6, b7))


def nelson(d, b1, b2, b3):
    return b1 - b2 * d["x1"] * np.exp(-b3 * d["x2"])


def mgh17(d, b1, b2, b3, b4, b5):
    return b1 + b2 * np.exp(-d["x"] * b4) + b3 * np.exp(-d["x"] * b5)


def mgh09(d, b1, b2, b3, b4):
    x = d["x"]
    return b1 * (x**2 + x * b2) / (x**2 + x * b3 + b4)


def mgh10(d, b1, b2, b3):
    return b1 * np.exp(b2 / (d["x"] + b3))


def roszman1(d, b1, b2, b3, b4):
    return b1 - b2 * d["x"] - np.arctan(b3 / (d["x"] - b4)) / np.pi


def enso(d, b1, b2, b3, b4, b5, b6, b7, b8, b9):
    year, first, second = (TWO_PI * d["x"] / period for period in (12, b4, b7))
    return (
        b1
        + b2 * np.cos(year)
        + b3 * np.sin(year)
        + b5 * np.cos(first)
        + b6 * np.sin(first)
        + b8 * np.cos(second)
        + b9 * np.sin(second)
    )


def rat42(d, b1, b2, b3):
    return b1 / (1 + np.exp(b2 - b3 * d["x"]))


def rat43(d, b1, b2, b3, b4):
    return b1 / (1 + np.exp(b2 - b3 * d["x"])) ** (1 / b4)


def eckerle4(d, b1, b2, b3):
    return b1 / b2 * np.exp(-0.5 * ((d["x"] - b3) / b2) ** 2)


MODELS = {
    "Bennett5": bennett5,
    "BoxBOD": misra1a,
    "Chwirut1": chwirut,
    "Chwirut2": chwirut,
    "DanWood": danwood,
    "ENSO": enso,
    "Eckerle4": eckerle4,
    "Gauss1": gauss,
    "Gauss2": gauss,
    "Gauss3": gauss,
    "Hahn1": cubic,
    "Kirby2": kirby2,
    "Lanczos1": lanczos,
    "Lanczos2": lanczos,
    "Lanczos3": lanczos,
    "MGH09": mgh09,
    "MGH10": mgh10,
    "MGH17": mgh17,
    "Misra1a": misra1a,
    "Misra1b": misra1b,
    "Misra1c": misra1c,
    "Misra1d": misra1d,
    "Nelson": nelson,
    "Rat42": rat42,
    "Rat43": rat43,
    "Roszman1": roszman1,
    "Thurber": cubic,
}


@dataclass(frozen=True)
class Certified:
    """One file: data, and per parameter two starts, the estimate and its standard deviation."""

    table: pd.DataFrame
    starts: np.ndarray
    estimates: np.ndarray
    deviations: np.ndarray
    residual: float


def read(name: str) -> Certified:
    """Parse one file by its fixed layout: data from line 61 on, response first."""
    lines = (FOLDER / f"{name}.dat").read_text().splitlines()
    pattern = re.compile(r"^\s*b\d+\s*=" + r"\s+(\S+)" * 4 + r"\s*$")
    hits = [pattern.match(line) for line in lines[40:60]]
    rows = np.array([[float(text) for text in hit.groups()] for hit in hits if hit])
    residual = next(
        line.split(":")[1] for line in lines if line.startswith("Residual Standard Deviation")
    )
    values = np.array([line.split() for line in lines[60:] if line.strip()], dtype=float)
    names = ["y", "x"] if values.shape[1] == 2 else ["y", "x1", "x2"]
    table = pd.DataFrame(values, columns=names).assign(row=np.arange(len(values)))
    if name == "Nelson":
        table["y"] = np.log(table["y"])
    return Certified(table, rows[:, :2].T, rows[:, 2], rows[:, 3], float(residual))


def refit(name: str, start: int, scale: str = "linear"):
    """Fit one problem from start I (0) or II (1), b1 searched for on the given scale."""
    problem = read(name)
    law = law_from_function(
        MODELS[name],
        target="y",
        columns=[c for c in problem.table if c.startswith("x")],
        parameters={
            f"b{i + 1}": {"starts": [value], "scale": "linear" if i else scale}
            for i, value in enumerate(problem.starts[start])
        },
        link="identity",
    )
    made = fit(
        problem.table,
        law,
        random=(),
        cluster="row",
        likelihood="gaussian",
        interval="model",
        name=name,
    )
    return problem, made


def digits(found, certified) -> float:
    """Log relative error of the worst value: significant digits that agree (McCullough 1998)."""
    wrong = np.max(np.abs(np.asarray(found, dtype=float) / certified - 1.0))
    return -np.log10(max(wrong, 1e-16)) if np.isfinite(wrong) else 0.0


# The residuals of Lanczos1 are 9e-14 of targets near one, so that rounding of the targets alone moves
# their standard deviation by a thousandth.
SE_DIGITS = {"Lanczos1": 2.5}
# From the first start of MGH10 the model is 1e7 and the amplitude b1 falls by 1e40 on the way.
LOG_AMPLITUDE = {("MGH10", 0)}


@pytest.mark.parametrize("start", [0, 1], ids=["I", "II"])
@pytest.mark.parametrize("name", MODELS)
def test_certified_values(name: str, start: int) -> None:
    scale = "log" if (name, start) in LOG_AMPLITUDE else "linear"
    problem, made = refit(name, start, scale)
    found = made.parameters()
    assert digits(found["estimate"], problem.estimates) >= 6
    assert digits(found["se"], problem.deviations) >= SE_DIGITS.get(name, 4)
    assert made.effects.residual**0.5 == pytest.approx(
        problem.residual, rel=10 ** -SE_DIGITS.get(name, 4)
    )
    assert made.search.status in ("converged", "not_identified")


def test_a_saved_fit_predicts_with_the_same_function(tmp_path) -> None:
    problem, made = refit("Misra1a", 1)
    made.save(tmp_path / "fit.json")
    again = load(tmp_path / "fit.json")
    np.testing.assert_array_equal(again.center(problem.table), made.center(problem.table))
