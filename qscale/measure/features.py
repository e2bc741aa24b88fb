"""Features by name: what each measures, the columns it fills and the side tables it writes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch

from qscale.errors import QscaleError, did_you_mean
from qscale.measure.curvature.along import second_order_along
from qscale.measure.curvature.spectrum import spectral_density, top_eigenvalues
from qscale.measure.directions import direction_norm, filter_normalized_direction
from qscale.measure.flatness import fisher_rao_norm, relative_flatness
from qscale.measure.head_geometry import head_geometry
from qscale.measure.hidden import error_growth
from qscale.measure.landscape import RadialCurve, loss_slice, radial_loss
from qscale.measure.residual import swapped
from qscale.measure.sharpness import Sharpness, adaptive_sharpness, keskar_sharpness, sam_sharpness
from qscale.measure.stream.features import weight_features

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from qscale.measure.curvature.kronecker import KroneckerFactors
    from qscale.measure.curvature.spectrum import Eigenvalues
    from qscale.measure.loss import Reference
    from qscale.measure.subject import Subject

    Tick = Callable[[float], None]

EIGENVALUES = 5
RADII = tuple(np.geomspace(1 / 16, 4, 13).tolist())
RANDOM_DIRECTIONS = 3
SLICE_STEPS = 11


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """What a feature found.

    Parameters
    ----------
    columns
        Values under the measurement table's column names; None where there is none.
    tables
        Side tables by name.
    notes
        What a user should be told.
    """

    columns: dict[str, Any] = field(default_factory=dict)
    tables: dict[str, pd.DataFrame] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Quantized:
    """A checkpoint's matrices under one quantizer setting.

    Parameters
    ----------
    weights
        Dequantized matrices by parameter name.
    errors
        Their difference from the checkpoint's own.
    full
        Outputs of the full-precision model on the evaluation windows.
    factors
        Kronecker factors of the checkpoint's curvature, or None if they were not measured.
    batch_windows
        Windows in one forward pass; changes speed and memory only.
    """

    weights: Mapping[str, torch.Tensor]
    errors: Mapping[str, torch.Tensor]
    full: Reference
    factors: KroneckerFactors | None = None
    batch_windows: int = 1


def weights(subject: Subject, seed: int, tick: Tick) -> Found:
    """Norms, moments, outliers and earlier quantization grids, read off the files."""
    del seed
    if subject.checkpoint.description.gguf:
        return Found(notes=("Features of the weights are read off safetensors files, not GGUF.",))
    folder = subject.checkpoint.description.folder
    found = weight_features(folder, on_progress=lambda done, total: tick(done / total))
    blocks = found.matrices[found.matrices["kind"] == "block"]
    share = blocks["n"] / blocks["n"].sum()
    note = found.grid_note()
    columns = {
        "weight_spectral_max": blocks["spectral_norm"].max(),
        "weight_stable_rank": blocks["stable_rank"].median(),
        "weight_kurtosis": (blocks["kurtosis"] * share).sum(),
        "weight_outliers_6": (blocks["outliers_6"] * share).sum(),
        "weight_absmax": blocks["absmax"].max(),
        "weight_grid_bits": blocks["grid_bits"].median() if note else None,
    }
    return Found(_plain(columns), {"weights": found.matrices}, (note,) if note else ())


def spectrum(subject: Subject, seed: int, tick: Tick) -> Found:
    """Largest and smallest eigenvalues of the Hessian over the matrices, and its density."""
    model, ids, names = _probed(subject)
    top, bottom = (
        top_eigenvalues(model, ids, names, EIGENVALUES, which=which, seed=seed, on_step=tick)
        for which in ("largest", "smallest")
    )
    found = spectral_density(model, ids, names, seed=seed, on_step=tick)
    grid = found.grid()
    density, density_se = found.density(grid)
    columns = {
        "hessian_top": top.values[0],
        "hessian_top_residual": top.residuals[0],
        "hessian_bottom": bottom.values[0],
    }
    tables = {
        "eigenvalues": pd.concat([_ends("largest", top), _ends("smallest", bottom)]),
        "density": pd.DataFrame({"eigenvalue": grid, "density": density, "density_se": density_se}),
    }
    return Found(_plain(columns), tables)


def sharpness(subject: Subject, seed: int, tick: Tick) -> Found:
    """Largest rises of the loss near the weights, Fisher-Rao norm and relative flatness."""
    model, ids, names = _probed(subject)
    found = {
        "sam": sam_sharpness(model, ids, names, on_step=tick),
        "adaptive": adaptive_sharpness(model, ids, names, on_step=tick),
        "keskar": keskar_sharpness(model, ids, names, on_step=tick),
    }
    fisher_rao, fisher_rao_se = fisher_rao_norm(model, ids, names)
    flat = relative_flatness(model, ids, names, seed=seed, on_probe=tick)
    columns = {
        **{f"sharpness_{name}": one.value for name, one in found.items()},
        **{f"sharpness_{name}_se": one.value_se for name, one in found.items()},
        "fisher_rao_norm": fisher_rao,
        "fisher_rao_norm_se": fisher_rao_se,
        "relative_flatness": flat.total,
        "relative_flatness_se": flat.se,
    }
    return Found(_plain(columns), {"sharpness": _sharpness_table(found)})


def second_order(subject: Subject, quantized: Quantized, seed: int, tick: Tick) -> Found:
    """Taylor terms of the loss along the quantization error itself."""
    del seed
    model, ids, _ = _probed(subject)
    found = second_order_along(
        model, ids, quantized.errors, batch_windows=quantized.batch_windows, on_windows=tick
    )
    terms = {
        "first_order_delta": found.first_order,
        "gauss_newton_delta": found.gauss_newton,
        "hessian_delta": found.hessian,
    }
    columns: dict[str, float] = {}
    for name, term in terms.items():
        if term is not None:
            columns |= {name: term.value, f"{name}_se": term.se}
    if quantized.factors is None:
        return Found(_plain(columns))
    parts = quantized.factors.quadratic(quantized.errors)
    columns["kronecker_delta"] = sum(value for value, _ in parts.values())
    table = pd.DataFrame(
        [
            {
                "matrix": name,
                "squared_error": float(quantized.errors[name].double().square().sum()),
                "kronecker_delta": value,
                "kronecker_delta_se": se,
            }
            for name, (value, se) in parts.items()
        ]
    )
    return Found(_plain(columns), {"errors": table})


def landscape(subject: Subject, quantized: Quantized, seed: int, tick: Tick) -> Found:
    """Loss along the quantization error and along random directions, and on a plane of both."""
    model, ids, _ = _probed(subject)
    rays = {"quantization": quantized.errors}
    length = direction_norm(quantized.errors)
    for i in range(RANDOM_DIRECTIONS):
        ray = filter_normalized_direction(subject.weights, seed=seed + i)
        scale = length / direction_norm(ray)
        rays[f"random {i + 1}"] = {name: scale * d for name, d in ray.items()}
    curves = {
        name: radial_loss(model, ids, ray, RADII, on_point=tick) for name, ray in rays.items()
    }
    plane = loss_slice(
        model, ids, quantized.errors, rays["random 1"], steps=SLICE_STEPS, on_point=tick
    )
    radial = pd.concat([c.frame().assign(direction=name) for name, c in curves.items()])
    columns = _radial_columns(curves["quantization"])
    return Found(_plain(columns), {"radial": radial, "slice": plane})


def hidden(subject: Subject, quantized: Quantized, seed: int, tick: Tick) -> Found:
    """Growth of the hidden-state error from block to block."""
    del seed
    ids = torch.from_numpy(quantized.full.windows.ids)
    found = error_growth(
        subject.checkpoint.model,
        ids,
        quantized.weights,
        batch_windows=quantized.batch_windows,
        on_windows=lambda n: tick(n / len(ids)),
    )
    return Found(found.columns(), {"blocks": found.blocks})


def head(subject: Subject, quantized: Quantized, seed: int, tick: Tick) -> Found:
    """Geometry of the LM head's input: how far it turned and what became of the tokens."""
    del seed
    count = len(quantized.full.windows)
    with swapped(subject.checkpoint.model, quantized.weights):
        found = head_geometry(
            subject.checkpoint.model, quantized.full, on_windows=lambda n: tick(n / count)
        )
    return Found(found.columns(), {"ranks": found.ranks})


OF_CHECKPOINT = {"weights": weights, "spectrum": spectrum, "sharpness": sharpness}
OF_SETTING = {
    "second_order": second_order,
    "landscape": landscape,
    "hidden": hidden,
    "head": head,
}
FEATURES = ("curvature", *OF_CHECKPOINT, *OF_SETTING)
"""Names of all features; ``curvature`` is the traces and ``quadratic_delta``."""


def parse(names: str | Iterable[str]) -> tuple[str, ...]:
    """Parse names of features; ``all`` stands for every one, and an empty text for none.

    Raises
    ------
    QscaleError
        If a name is unknown.

    Examples
    --------
    >>> parse("weights,curvature")
    ('curvature', 'weights')
    """
    asked = [n.strip() for n in (names.split(",") if isinstance(names, str) else names)]
    for name in filter(None, asked):
        if name not in (*FEATURES, "all"):
            raise QscaleError(
                f"--features must be among all, {', '.join(FEATURES)}. Got {name!r} instead."
                f"{did_you_mean(name, FEATURES)}"
            )
    return FEATURES if "all" in asked else tuple(name for name in FEATURES if name in asked)


def _probed(subject: Subject) -> tuple[Any, torch.Tensor, list[str]]:
    """Return the model, the curvature windows and the names of the matrices."""
    return subject.checkpoint.model, torch.from_numpy(subject.probe.ids), list(subject.weights)


def _ends(which: str, found: Eigenvalues) -> pd.DataFrame:
    """Eigenvalues at one end of the spectrum, from the end inwards."""
    return pd.DataFrame(
        {
            "which": which,
            "rank": np.arange(1, len(found.values) + 1),
            "eigenvalue": found.values,
            "residual": found.residuals,
            "converged": found.converged,
        }
    )


def _sharpness_table(found: Mapping[str, Sharpness]) -> pd.DataFrame:
    """One row for each ball."""
    rows = [
        {
            "ball": name,
            "radius": one.radius,
            "steps": one.steps,
            "value": one.value,
            "value_se": one.value_se,
            "one_step": one.one_step,
            "first_order": one.first_order,
            "percent": one.percent,
        }
        for name, one in found.items()
    ]
    return pd.DataFrame(rows)


def _radial_columns(curve: RadialCurve) -> dict[str, float | None]:
    """Slope and step radius of the curve along the quantization error."""
    slope, slope_se = curve.slope()
    radius, radius_se = curve.step_radius()
    return {
        "radial_slope": slope,
        "radial_slope_se": slope_se,
        "radial_step": radius,
        "radial_step_se": radius_se,
    }


def _plain(columns: Mapping[str, Any]) -> dict[str, float | None]:
    """Turn numpy's numbers into Python's, and what is not a number into None."""
    return {
        name: None if value is None or not math.isfinite(value) else float(value)
        for name, value in columns.items()
    }
