"""The figure of the controlled sweep."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np

if TYPE_CHECKING:
    import pandas as pd

RATES = plt.get_cmap("viridis")


def draw(frame: pd.DataFrame, medians: pd.DataFrame, floor: float) -> plt.Figure:
    """Draw the loss increase by tokens and rate, its prediction by curvature, and the tests.

    Parameters
    ----------
    frame
        Rows of one method at 3 to 5 bits.
    medians
        Median |log error| of each model (columns) in each test (rows).
    floor
        The same of a law that is right for every cell, from seeds.
    """
    mpl.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(1, 3, figsize=(14, 4.4), layout="constrained")
    _tokens(axes[0], frame)
    _curvature(axes[1], frame)
    _tests(axes[2], medians, floor)
    return figure


def _colour(lr: float, rates: np.ndarray) -> tuple[float, ...]:
    """Return a rate's colour."""
    return RATES(0.9 * list(rates).index(lr) / max(len(rates) - 1, 1))


def _tokens(axis: plt.Axes, frame: pd.DataFrame) -> None:
    """Loss increase at 3 bits of the smallest size, along stable phases and at ends of decays."""
    part = frame[
        (frame["n_params"] == frame["n_params"].min())
        & (frame["bits"] == 3) & (frame["group"] == "g32")
        & (frame["weight_decay"] == frame["weight_decay"].max())
        & frame["run"].str.endswith("wsd-seed0") & (frame["averaging"] == "none")
    ]  # fmt: skip
    rates = np.sort(part["lr_peak"].unique())
    part = part[part["decay_fraction"].isin([0, 1])].sort_values("tokens")
    for (lr, schedule), run in part.groupby(["lr_peak", "lr_schedule"]):
        stable = schedule == "constant"
        axis.plot(run["tokens"], run["delta_loss"], "o-" if stable else "s--", ms=4,
                  color=_colour(lr, rates), mfc=None if stable else "white",
                  label=f"{lr:g}" if stable else None)  # fmt: skip
    axis.plot([], [], "s--", color="0.4", mfc="white", label="after decay")
    size = part["n_params"].iloc[0] / 1e6
    axis.set(title=f"{size:.2f}M parameters, 3 bits, groups of 32", xscale="log", yscale="log",
             xlabel="tokens", ylabel="delta_loss (nats per token)")  # fmt: skip
    axis.legend(title="lr_peak", frameon=False)


def _curvature(axis: plt.Axes, frame: pd.DataFrame) -> None:
    """Measured loss increase against curvature times noise."""
    rates = np.sort(frame["lr_peak"].unique())
    markers = dict(zip(np.sort(frame["n_params"].unique()), "os^", strict=False))
    for (size, lr), part in frame.groupby(["n_params", "lr_peak"]):
        axis.plot(part["quadratic_delta"], part["delta_loss"], markers[size], ms=3, alpha=0.6,
                  mew=0, color=_colour(lr, rates))  # fmt: skip
    low, high = frame["quadratic_delta"].min(), frame["quadratic_delta"].max()
    axis.plot([low, high], [low, high], color="0.3", lw=1, label="equal: nothing fitted")
    for size, marker in markers.items():
        axis.plot([], [], marker, color="0.4", ms=4, label=f"{size / 1e6:.2f}M parameters")
    axis.set(title="Curvature times noise, all runs, 3 to 5 bits", xscale="log", yscale="log",
             xlabel="quadratic_delta (nats per token)",
             ylabel="delta_loss (nats per token)")  # fmt: skip
    axis.legend(frameon=False)


def _tests(axis: plt.Axes, medians: pd.DataFrame, floor: float) -> None:
    """Median |log error| of each model on each held-out test."""
    tests, names = list(medians.index), list(medians.columns)
    for i, name in enumerate(names):
        place = np.arange(len(tests)) + 0.8 * (i / max(len(names) - 1, 1) - 0.5)
        axis.plot(medians[name], place, "o", ms=4.5, color=plt.get_cmap("tab10")(i), label=name)
    axis.axvline(floor, color="0.5", ls=":", label="seeds: floor")
    axis.set_yticks(range(len(tests)), tests)
    axis.invert_yaxis()
    axis.set(title="Held-out rows", xscale="log", xlabel="median |log error| of delta_loss")
    axis.legend(frameon=False, fontsize=7)
