"""Which factors move together in a table, so that their parameters cannot be told apart."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from scipy.stats import rankdata

if TYPE_CHECKING:
    from collections.abc import Mapping

    Array = np.ndarray

CORRELATED = 0.9
SAME_ORDER = 0.95
INFLATED = 10.0
_FLAT = 1e-9  # a column that varies less than this share of its size is constant


@dataclass(frozen=True, slots=True)
class Confounding:
    """How far each term of a regression can be told from the others.

    Parameters
    ----------
    terms
        One row per varying term: ``term``, ``share_within`` (share of its variance inside runs),
        and its variance inflation given the others over all rows (``vif``), inside runs
        (``vif_within``) and between run means (``vif_between``); infinite is no own information,
        null is no variation there.
    pairs
        One row per pair: ``first``, ``second``, their correlation and rank correlation inside runs
        (``within``, ``rank_within``) and the correlation of run means (``between``).
    warnings
        What follows, in sentences.
    """

    terms: pd.DataFrame
    pairs: pd.DataFrame
    warnings: tuple[str, ...]


def confounding(terms: Mapping[str, Array], clusters: Array, cluster: str = "run") -> Confounding:
    """Diagnose which terms move together, inside runs and between them.

    Parameters
    ----------
    terms
        ``{name: columns}``: what multiplies a term's parameters on the log scale, shape (n,) or
        (n, k). Terms that never vary, such as a law's amplitude, are passed over.
    clusters
        Integer run of each row, shape (n,), counted from zero.
    cluster
        What a run is called in sentences.

    Returns
    -------
    Confounding
        Variance inflation as in Belsley, Kuh and Welsch (1980). A rank correlation of one says
        that two terms follow one clock: then only the shapes that the law assumes tell them apart.

    Examples
    --------
    >>> tokens = np.linspace(1.0, 3.0, 20)
    >>> confounding({"tokens": tokens, "decay": tokens**2}, np.zeros(20, int)).warnings[0]
    'tokens and decay move together within every run (correlation 0.99, rank correlation 1.00): \
their exponents cannot be told apart.'
    """
    blocks = {name: np.reshape(x, (len(clusters), -1)).astype(float) for name, x in terms.items()}
    blocks = {name: x for name, x in blocks.items() if _varies(x - x.mean(axis=0), x)}
    means = {name: _run_means(x, clusters) for name, x in blocks.items()}
    within = {name: x - means[name][clusters] for name, x in blocks.items()}
    inside = {name: x for name, x in within.items() if _varies(x, blocks[name])}
    groups = int(clusters.max()) + 1
    inflation = {
        "vif": _inflation({name: x - x.mean(axis=0) for name, x in blocks.items()}),
        "vif_within": _inflation(inside),
        "vif_between": _inflation({name: m - m.mean(axis=0) for name, m in means.items()}),
    }
    table = pd.DataFrame(
        {
            "term": list(blocks),
            "share_within": [
                float((within[name] ** 2).sum() / ((x - x.mean(axis=0)) ** 2).sum())
                for name, x in blocks.items()
            ],
            **{key: [found.get(n, np.nan) for n in blocks] for key, found in inflation.items()},
        }
    )
    pairs = _pairs(blocks, inside, means, clusters)
    constant = [name for name in blocks if name not in inside]
    warnings = (
        *_pair_warnings(pairs, inflation["vif"], groups, cluster),
        *_combination_warnings(inflation["vif"], pairs),
        *_constant_warnings(constant, bool(inside), groups, cluster),
    )
    return Confounding(table, pairs, warnings)


def _varies(deviations: Array, values: Array) -> bool:
    """Whether deviations from a mean are more than rounding."""
    return bool(np.abs(deviations).max() > _FLAT * max(1.0, np.abs(values).max()))


def _run_means(values: Array, clusters: Array) -> Array:
    """Mean of each run, shape (G, k)."""
    sums = np.stack([np.bincount(clusters, weights=column) for column in values.T], axis=1)
    return sums / np.bincount(clusters)[:, None]


def _inflation(centred: Mapping[str, Array]) -> dict[str, float]:
    """Largest variance inflation of each term's columns given all other terms."""
    found = {}
    for name, own in centred.items():
        others = [x for other, x in centred.items() if other != name]
        rest = own
        if others:
            design = np.concatenate(others, axis=1)
            scale = np.linalg.norm(design, axis=0)
            design = design[:, scale > 0] / scale[scale > 0]
            rest = own - design @ np.linalg.lstsq(design, own, rcond=1e-10)[0]
        left, whole = (rest**2).sum(axis=0), (own**2).sum(axis=0)
        exact = left <= 1e-12 * whole
        ratio = np.divide(whole, left, out=np.full(len(whole), np.inf), where=~exact)
        found[name] = float(ratio[whole > 0].max()) if (whole > 0).any() else np.nan
    return found


def _pairs(
    blocks: Mapping[str, Array],
    inside: Mapping[str, Array],
    means: Mapping[str, Array],
    clusters: Array,
) -> pd.DataFrame:
    """Correlate each pair of single-column terms, inside runs and between run means."""
    single = [name for name, x in blocks.items() if x.shape[1] == 1]
    ranks = {name: _ranks_within(blocks[name][:, 0], clusters) for name in single}
    rows = []
    for first, second in itertools.combinations(single, 2):
        both = first in inside and second in inside
        rows.append(
            {
                "first": first,
                "second": second,
                "within": _correlation(inside[first], inside[second]) if both else np.nan,
                "rank_within": _correlation(ranks[first], ranks[second]) if both else np.nan,
                "between": _correlation(*(m - m.mean() for m in (means[first], means[second]))),
            }
        )
    return pd.DataFrame(rows, columns=["first", "second", "within", "rank_within", "between"])


def _ranks_within(values: Array, clusters: Array) -> Array:
    """Rank of each row in its run, centred there and spread from -1/2 to 1/2, shape (n,)."""
    ranks = np.zeros(len(values))
    for group in np.unique(clusters):
        rows = clusters == group
        ranks[rows] = rankdata(values[rows].round(12)) / rows.sum()
        ranks[rows] -= ranks[rows].mean()
    return ranks


def _correlation(first: Array, second: Array) -> float:
    """Correlation of two centred columns; null if one is constant."""
    size = np.linalg.norm(first) * np.linalg.norm(second)
    return float((first * second).sum() / size) if size > 0 else np.nan


def _pair_warnings(
    pairs: pd.DataFrame, vif: Mapping[str, float], groups: int, cluster: str
) -> list[str]:
    """Say which two terms move together."""
    found = []
    for _, row in pairs.iterrows():
        names = f"{row['first']} and {row['second']}"
        hopeless = min(vif[row["first"]], vif[row["second"]]) > INFLATED or groups == 1
        if abs(row["within"]) >= CORRELATED or abs(row["rank_within"]) >= SAME_ORDER:
            rest = f" there; only the {groups} {cluster}s' differences and the assumed shapes do"
            found.append(
                f"{names} move together within every {cluster} (correlation {row['within']:.2f}, "
                f"rank correlation {row['rank_within']:.2f}): their exponents cannot be told apart"
                f"{'' if hopeless else rest}."
            )
        elif abs(row["between"]) >= CORRELATED and np.isnan(row["within"]) and groups > 2:
            found.append(
                f"{names} move together between the {groups} {cluster}s (correlation "
                f"{row['between']:.2f}): their exponents cannot be told apart."
            )
    return found


def _combination_warnings(vif: Mapping[str, float], pairs: pd.DataFrame) -> list[str]:
    """Name terms that several others make up together without a single partner."""
    paired = pairs[
        (pairs[["within", "between"]].abs() >= CORRELATED).any(axis=1)
        | (pairs["rank_within"].abs() >= SAME_ORDER)
    ]
    named = {*paired["first"], *paired["second"]}
    return [
        f"{name} is nearly a combination of the other terms (variance inflation {value:.3g})."
        for name, value in vif.items()
        if value > INFLATED and name not in named
    ]


def _constant_warnings(
    constant: list[str], some_vary: bool, groups: int, cluster: str
) -> list[str]:
    """Name terms that never vary inside a run."""
    if not constant or not some_vary:
        return []
    verb = "is" if len(constant) == 1 else "are"
    sentence = (
        f"{', '.join(constant)} {verb} constant within every {cluster}: only the differences "
        f"between the {groups} {cluster}s inform {'it' if len(constant) == 1 else 'them'}"
    )
    if len(constant) >= groups - 1:
        sentence += f", and {groups} {cluster}s are too few to tell {len(constant)} from chance"
    return [f"{sentence}."]
