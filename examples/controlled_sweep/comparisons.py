"""Pairs of checkpoints that differ in one thing: seed, decay, averaging, weight decay."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from qscale.validate import paired

if TYPE_CHECKING:
    from collections.abc import Sequence

SETTING = ["method", "bits", "group", "evaluation"]
CELL = [
    "n_params", "lr_peak", "weight_decay", "lr_schedule", "averaging", "step", "decay_fraction",
]  # fmt: skip
QUANTITIES = ("loss_fp", "delta_loss", "kl", "quadratic_delta", "ggn_trace", "quantization_noise")


def matched(left: pd.DataFrame, right: pd.DataFrame, on: Sequence[str]) -> pd.DataFrame:
    """Pair the rows of two selections that are equal in some columns and in their setting."""
    return left.merge(right, on=[*on, *SETTING], suffixes=("", "_other"), validate="1:1")


def seeds(frame: pd.DataFrame) -> pd.DataFrame:
    """Pair checkpoints that differ in nothing but the seed of their weights and data."""
    first = frame["run"].str.endswith("seed0")
    return matched(frame[first], frame[~first], CELL)


def decays(frame: pd.DataFrame) -> pd.DataFrame:
    """Pair the end of each decay with the checkpoint of the stable phase where it began."""
    frame = frame.assign(begin=(frame["step"] * (1 - frame["decay_share"])).round())
    ended = frame[(frame["lr_schedule"] == "wsd") & (frame["decay_fraction"] == 1)]
    return matched(ended, _stable(frame), ["run", "begin"])


def averages(frame: pd.DataFrame) -> pd.DataFrame:
    """Pair each average of the stable phase's last fifth with the last of what it averages."""
    return matched(frame[frame["averaging"] == "lawa"], _stable(frame), ["run", "step"])


def weight_decays(frame: pd.DataFrame) -> pd.DataFrame:
    """Pair checkpoints at the lower weight decay with those at the usual one, of the same seed."""
    frame = frame[frame["run"].str.endswith("seed0")]
    low = frame["weight_decay"] == frame["weight_decay"].min()
    return matched(frame[low], frame[~low], [name for name in CELL if name != "weight_decay"])


def _stable(frame: pd.DataFrame) -> pd.DataFrame:
    """Return raw checkpoints at constant rate."""
    return frame[(frame["lr_schedule"] == "constant") & (frame["averaging"] == "none")]


def changes(pairs: pd.DataFrame, quantities: Sequence[str] = QUANTITIES) -> pd.DataFrame:
    """Return the mean log ratio of each quantity over pairs, with an interval over runs."""
    found = {}
    for name in quantities:
        both = pairs[(pairs[name] > 0) & (pairs[f"{name}_other"] > 0)]
        ratio = np.log(both[name] / both[f"{name}_other"]).to_numpy()
        found[name] = asdict(paired(ratio, both["run"].to_numpy()))
    return pd.DataFrame(found).T


def differences(pairs: pd.DataFrame, quantities: Sequence[str]) -> pd.DataFrame:
    """Return the mean difference of each quantity over pairs, with an interval over runs."""
    found = {}
    for name in quantities:
        both = pairs.dropna(subset=[name, f"{name}_other"])
        difference = (both[name] - both[f"{name}_other"]).to_numpy()
        found[name] = asdict(paired(difference, both["run"].to_numpy()))
    return pd.DataFrame(found).T


def noise_floor(frame: pd.DataFrame, target: str) -> tuple[float, int]:
    """Return the median |log error| of a law that is right for every cell, and the pairs behind it.

    Two seeds of a cell differ by the noise of both, so their log ratio is sqrt(2) as wide as the
    error that one seed has around its cell.
    """
    pairs = seeds(frame)
    both = pairs[(pairs[target] > 0) & (pairs[f"{target}_other"] > 0)]
    ratio = np.log(both[target] / both[f"{target}_other"]).abs()
    return float(ratio.median() / np.sqrt(2)), len(both)
