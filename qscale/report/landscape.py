"""Figures of a checkpoint: functions that take side tables, draw on axes and return them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from qscale.report.figures import COLOURS, MARKERS, label, new_axes, styled
from qscale.report.svg import INK

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

FORMS = ("quadratic_delta", "kronecker_delta", "gauss_newton_delta")
"""Columns that predict the loss increase with nothing fitted."""


@styled
def spectral_density(density: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Draw the density of the Hessian's eigenvalues on a logarithmic scale.

    Parameters
    ----------
    density
        Side table ``density`` of one checkpoint.
    ax
        Axes to draw on; new ones by default.
    """
    ax = new_axes(ax, 4.8, 3.2)
    x, y, se = (density[c].to_numpy() for c in ("eigenvalue", "density", "density_se"))
    floor = max(y.max() * 1e-7, np.finfo(float).tiny)
    ax.fill_between(x, np.maximum(y - se, floor), np.maximum(y + se, floor), alpha=0.25, lw=0)
    ax.plot(x, np.maximum(y, floor), color=COLOURS[0], lw=1.2)
    ax.set(yscale="log", ylim=(floor, None), xlabel="Hessian eigenvalue", ylabel="density ± SE")
    return ax


@styled
def radial_loss(radial: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Draw the rise of the loss along the quantization error and along random directions.

    Parameters
    ----------
    radial
        Side table ``radial`` of one checkpoint and setting.
    ax
        Axes to draw on; new ones by default.
    """
    ax = new_axes(ax, 4.8, 3.4)
    rays = radial["direction"].drop_duplicates().tolist()
    for name in rays:
        own = name == "quantization"
        ray = radial[(radial["direction"] == name) & (radial["delta_loss"] > 0)]
        said = "random" if name == rays[-1] else None
        ax.errorbar(
            ray["radius"],
            ray["delta_loss"],
            yerr=ray["delta_loss_se"],
            color=COLOURS[0] if own else COLOURS[4],
            marker=MARKERS[0] if own else None,
            ms=3.5,
            lw=1.4 if own else 0.8,
            label="quantization error" if own else said,
        )
    ax.axvline(1, color=INK, lw=0.8, ls=":")
    ax.set(xscale="log", yscale="log", ylabel=label("delta_loss"))
    ax.set_xlabel("distance, in lengths of the quantization error")
    ax.legend()
    return ax


@styled
def loss_slice(plane: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Draw the loss on the plane of the quantization error and a random direction.

    Parameters
    ----------
    plane
        Side table ``slice`` of one checkpoint and setting.
    ax
        Axes to draw on; new ones by default.
    """
    ax = new_axes(ax, 4.6, 3.8)
    grid = plane.pivot_table(index="beta", columns="alpha", values="delta_loss", dropna=False)
    levels = np.quantile(grid.to_numpy()[np.isfinite(grid)], np.linspace(0, 1, 11))
    drawn = ax.contourf(grid.columns, grid.index, grid, levels=np.unique(levels), cmap="cividis")
    for x, name, marker in ((0, "checkpoint", "o"), (1, "quantized", "X")):
        ax.plot(x, 0, marker, color="white", mec=INK, ms=8, label=name)
    bar = ax.figure.colorbar(drawn, ax=ax)
    bar.set_label(label("delta_loss"))
    ax.set(xlabel="along the quantization error", ylabel="along a random direction")
    ax.legend(labelcolor="white", loc="upper left")
    ax.grid(visible=False)
    return ax


@styled
def error_growth(blocks: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Draw the relative error of the hidden state after each block, one line for each setting.

    Parameters
    ----------
    blocks
        Side table ``blocks`` of one checkpoint.
    ax
        Axes to draw on; new ones by default.
    """
    ax = new_axes(ax, 4.8, 3.4)
    for i, (name, part) in enumerate(_by_setting(blocks)):
        line = part.sort_values("block")
        ax.errorbar(
            line["block"],
            line["relative_error"],
            yerr=line["relative_error_se"],
            color=COLOURS[i % len(COLOURS)],
            marker=MARKERS[i % len(MARKERS)],
            ms=3.5,
            lw=1.2,
            label=name,
        )
    ax.set(xlabel="block", ylabel="|δh| / |h|, mean ± SE")
    ax.set_xticks(sorted(blocks["block"].unique()))
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return ax


@styled
def sensitivity(matrices: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Draw each matrix's mean curvature per weight, the price of a unit of squared error.

    Parameters
    ----------
    matrices
        Side table ``matrices`` of one checkpoint.
    ax
        Axes to draw on; new ones by default.
    """
    count = len(matrices)
    ax = new_axes(ax, 6.0, max(2.4, 0.17 * count + 0.8))
    at = np.arange(count)[::-1]
    for i, kind in enumerate(("ggn", "hessian")):
        ax.errorbar(
            matrices[f"{kind}_trace"] / matrices["n"],
            at,
            xerr=matrices[f"{kind}_trace_se"] / matrices["n"],
            fmt=MARKERS[i],
            color=COLOURS[i],
            ms=4,
            label={"ggn": "Gauss-Newton", "hessian": "Hessian"}[kind],
        )
    names = matrices["matrix"].str.removesuffix(".weight")
    ax.set_yticks(at, names, fontsize=7)
    ax.set(xlabel="trace per weight ± SE", xscale="symlog" if _signed(matrices) else "log")
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
    return ax


@styled
def zero_fit(rows: pd.DataFrame, forms: Sequence[str] = FORMS, *, ax: Axes | None = None) -> Axes:
    """Draw measured loss increases against predictions with nothing fitted.

    Parameters
    ----------
    rows
        Rows of a measurement table with status ok.
    forms
        Columns that predict, of which those that the table has are drawn.
    ax
        Axes to draw on; new ones by default.
    """
    ax = new_axes(ax, 4.8, 4.4)
    rows = rows[rows["delta_loss"] > 2 * rows["delta_loss_se"]]
    for i, name in enumerate(form for form in forms if form in rows):
        used = rows[rows[name] > 0]
        ax.errorbar(
            used[name],
            used["delta_loss"],
            yerr=used["delta_loss_se"],
            fmt=MARKERS[i],
            color=COLOURS[i],
            ms=3.5,
            lw=0.7,
            alpha=0.8,
            label=name,
        )
    ends = np.array([rows["delta_loss"].min() / 2, rows["delta_loss"].max() * 2])
    ax.plot(ends, ends, color=INK, lw=1)
    ax.set(xscale="log", yscale="log", ylabel=f"measured {label('delta_loss')}")
    ax.set_xlabel("predicted (nats/token)")
    ax.legend()
    return ax


def setting_name(row: pd.Series) -> str:
    """Name a quantizer setting: ``gptq 4 bits, group 128``."""
    group = "row" if pd.isna(row["group_size"]) else f"group {row['group_size']:g}"
    return f"{row['method']} {row['bits']:g} bits, {group}"


def _by_setting(frame: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Split a side table by setting."""
    names = frame.apply(setting_name, axis=1)
    return [(name, frame[names == name]) for name in names.drop_duplicates()]


def _signed(matrices: pd.DataFrame) -> bool:
    """Whether a trace is not above zero and has no place on a logarithmic axis."""
    return bool((matrices[["ggn_trace", "hessian_trace"]] <= 0).to_numpy().any())
