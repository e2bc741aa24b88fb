"""Where the error's direction matters: curvature forms of each kind of matrix, side by side.

A model is quantized by round-to-nearest and by GPTQ. For each kind of matrix the loss increase
that curvature predicts is printed in three forms: for an error without direction (trace times
squared error), along the error itself, and by Kronecker factors; then how many tokens each form
takes to a standard error of 10 %. Needs the measure extra. Without arguments it takes the shipped
model and shares out the shipped text::

    python examples/matrix_forms.py [FOLDER --calibration TEXT]
"""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import torch
from rich.console import Console
from rich.table import Table

from qscale.measure.curvature.kronecker import kronecker_factors
from qscale.measure.forms import QuadraticForms, quadratic_forms
from qscale.measure.subject import calibration_windows, open_subject
from qscale.quantize.apply import apply
from qscale.quantize.setting import Setting

if TYPE_CHECKING:
    from qscale.measure.subject import Subject

ROOT = Path(__file__).resolve().parent
MODEL = ROOT / "checkpoints" / "tiny-wsd-decayed"
TEXT = ROOT / "texts" / "austen-wilde-darwin.txt"
SPECS = ("rtn int4 g64", "rtn int3 g64", "gptq int4 g64", "gptq int3 g64")
PROBES = 6
RTOL = 0.1


def shared_out(folder: Path) -> tuple[Path, Path]:
    """Write a third of the shipped text for calibration, and the rest, to a folder."""
    text = TEXT.read_text()
    cut = len(text) // 3
    calibration, rest = folder / "calibration.txt", folder / "rest.txt"
    calibration.write_text(text[:cut])
    rest.write_text(text[cut:])
    return calibration, rest


def errors_of(subject: Subject, calibration: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Quantize by each spec and return the errors by matrix."""
    settings = {spec: Setting.parse(spec) for spec in SPECS}
    windows = calibration_windows(subject, list(settings.values()), calibration, 32)
    found = {}
    for spec, setting in settings.items():
        ids = torch.from_numpy(windows.ids) if setting.calibrated else None
        weights = apply(subject.checkpoint.model, subject.weights, setting, ids).weights
        found[spec] = {name: weights[name] - w.detach() for name, w in subject.weights.items()}
    return found


def by_kind(
    forms: QuadraticForms, kronecker: dict[str, dict[str, tuple[float, float]]]
) -> pd.DataFrame:
    """Sum the forms over matrices of one kind, such as ``q_proj``."""
    rows = []
    for spec in forms.settings:
        isotropic, along = forms.isotropic_each(spec), forms.block_diagonal_each(spec)
        rows += [
            {
                "spec": spec,
                "matrix": name.split(".")[-2],
                "isotropic": isotropic[name].value,
                "along": along[name].value,
                "along_var": along[name].se ** 2,
                "kronecker": kronecker[spec][name][0],
            }
            for name in forms.names
        ]
    return pd.DataFrame(rows).groupby(["spec", "matrix"], sort=False).sum().reset_index()


def tokens_needed(forms: QuadraticForms) -> pd.DataFrame:
    """Tokens at which each form's standard error, text and probes together, is `RTOL`."""
    tokens = int(forms.counts.sum())
    rows = []
    for spec in forms.settings:
        line: dict[str, object] = {"spec": spec}
        for name, found in {
            "isotropic": forms.isotropic(spec),
            "along, by block": forms.block_diagonal(spec),
            "along": forms.full(spec),
        }.items():
            needed = tokens * (found.se / found.value / RTOL) ** 2
            probes = (found.probe_se / found.se) ** 2
            line[name] = f"{needed:,.0f} ({min(probes, 1):.0%} from probes)"
        rows.append(line)
    return pd.DataFrame(rows)


def shown(frame: pd.DataFrame, title: str) -> Table:
    """Lay a frame out."""
    made = Table(*frame.columns, title=title, title_justify="left")
    for row in frame.itertuples(index=False):
        made.add_row(*map(str, row))
    return made


def main() -> None:
    """Print the comparison by matrix and the tokens needed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=MODEL)
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--windows", type=int, default=32)
    options = parser.parse_args()
    console = Console(width=110)
    with tempfile.TemporaryDirectory() as folder:
        calibration, text = shared_out(Path(folder))
        subject = open_subject(
            options.folder, text, probe_windows=options.windows, max_windows=2, context=256
        )
        errors = errors_of(subject, options.calibration or calibration)
    model, ids = subject.checkpoint.model, torch.from_numpy(subject.probe.ids)
    names = list(subject.weights)
    taken = {spec: error.__getitem__ for spec, error in errors.items()}
    forms = quadratic_forms(model, ids, names, taken, num_probes=PROBES)
    factors = kronecker_factors(model, ids, names, num_probes=PROBES)
    kronecker = {spec: factors.quadratic(error) for spec, error in errors.items()}

    kinds = by_kind(forms, kronecker)
    table = pd.DataFrame(
        {
            "spec": kinds["spec"],
            "matrix": kinds["matrix"],
            "along the error": [
                f"{value:.2e} ± {math.sqrt(var):.0e}"
                for value, var in zip(kinds["along"], kinds["along_var"], strict=True)
            ],
            "isotropic / along": (kinds["isotropic"] / kinds["along"]).map("{:.2f}".format),
            "Kronecker / along": (kinds["kronecker"] / kinds["along"]).map("{:.2f}".format),
        }
    )
    console.print(shown(table, f"{options.folder.name}: half the Gauss-Newton form, nats a token"))
    for spec in SPECS:
        own = kinds[kinds["spec"] == spec]
        whole, blocks = forms.full(spec), forms.block_diagonal(spec)
        spread = np.log(own["isotropic"] / own["along"]).std()
        console.print(
            f"{spec}: all matrices along the error {whole.value:.4f} ± {whole.se:.4f}, the sum of "
            f"their own {blocks.value:.4f} ± {blocks.se:.4f}; isotropic "
            f"{own['isotropic'].sum() / blocks.value:.2f} times that, log spread {spread:.2f} "
            "between kinds."
        )
    console.print(
        shown(tokens_needed(forms), f"Tokens to a standard error of {RTOL:.0%}, {PROBES} probes")
    )


if __name__ == "__main__":
    main()
