"""Named laws for a loss itself: of full-precision training, and of training in low precision."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from qscale.laws.compose import total
from qscale.laws.factors import constant, power
from qscale.laws.law import Law, Published
from qscale.laws.shapes import binary_log, effective, kaplan, saturating, shifted_power

if TYPE_CHECKING:
    from collections.abc import Mapping

    from qscale.laws.factors import Array, Factor


def _amplitude(name: str) -> Factor:
    return constant(name, bounds=(1e-10, 1e15), starts=(150.0, 22_000.0))


def _exponent(column: str, name: str, sign: int = -1) -> Factor:
    return power(column, name, sign=sign, bounds=(0.0, 5.0), starts=(0.25, 0.75))


_FLOOR = (constant("E", bounds=(1e-6, 1e3), starts=(0.4, 1.6)),)
_SIZE = (_amplitude("A"), _exponent("n_params", "alpha"))
_TOKENS = (_amplitude("B"), _exponent("tokens", "beta"))

CHINCHILLA = Law(
    name="chinchilla",
    target="loss_fp",
    factors=(total(_FLOOR, _SIZE, _TOKENS),),
    source="Hoffmann et al., Training Compute-Optimal Large Language Models, arXiv:2203.15556",
    note="A law for the full-precision loss.",
    published=(
        Published(
            "replication",
            {"A": 482.01, "B": 2085.43, "E": 1.8172, "alpha": 0.3478, "beta": 0.3658},
            "Besiroglu et al., arXiv:2404.10102",
            "the exact minimum on the extracted points is within a tenth of a standard error",
        ),
        Published(
            "original",
            {"A": 406.4, "B": 410.7, "E": 1.6934, "alpha": 0.33917, "beta": 0.28491},
            "Hoffmann et al., arXiv:2203.15556, approach 3",
            "transcribed; the replication could not reproduce it",
        ),
    ),
)

KAPLAN = Law(
    name="kaplan",
    target="loss_fp",
    factors=(kaplan(),),
    source="Kaplan et al., Scaling Laws for Neural Language Models, arXiv:2001.08361",
    note="A law for the full-precision loss. Parameters are non-embedding ones.",
    published=(
        Published(
            "Pythia 160M-12B, RefinedWeb",
            {"N_c": 4.74e19, "D_c": 7.63e10, "alpha_N": 0.045, "alpha_D": 0.399},
            "Ouyang et al., arXiv:2411.17691",
            "transcribed from a secondary source, not checked against a published loss",
        ),
    ),
)

KUMAR_TRAINING = Law(
    name="kumar_training",
    target="loss_q",
    factors=(
        total(_FLOOR, (*_SIZE, saturating("bits", "gamma_w", "alpha", r"\gamma_w")), _TOKENS),
    ),
    source="Kumar et al., Scaling Laws for Precision, arXiv:2411.04330, training precision",
    note="Weights trained at the given bits; for activations or the cache multiply the term in "
    "parameters by further saturating factors of the same exponent.",
    published=(
        Published(
            "30-220M parameters, Dolma",
            {"A": 4.299e3, "alpha": 0.4965, "beta": 0.4965, "gamma_w": 2.6745},
            "arXiv:2411.04330, appendix K, table 2, alpha and beta tied",
            "from secondary transcriptions; B, E and the table's shifts could not be read in a "
            "source, so the law cannot be evaluated with them",
        ),
    ),
)

QUEST = Law(
    name="quest",
    target="loss_q",
    factors=(
        total(
            _FLOOR,
            (*_SIZE, effective("bits", (1.0, 2.0, 3.0, 4.0), "alpha", lossless=8.0)),
            _TOKENS,
            levels_needed={"n_params": 3, "tokens": 3},
        ),
    ),
    source="Panferov et al., QuEST, arXiv:2502.05003",
    note="Weights and activations trained at the same bits. From 8 bits on a model counts as "
    "lossless; the paper's own multiplier for 8 bits is 1.016.",
    published=(
        Published(
            "QuEST, Hadamard, C4",
            {
                "A": 8.134,
                "alpha": 0.0627,
                "B": 86.41,
                "beta": 0.2413,
                "E": 0.0014,
                "eff[1]": 0.0205,
                "eff[2]": 0.152,
                "eff[3]": 0.433,
                "eff[4]": 0.692,
            },
            "result stored in the notebook of the authors' repository",
            "predict the shipped rotated integer runs, weights and activations at the same bits, "
            "within 2 % of the loss",
        ),
    ),
)

FRANTAR = Law(
    name="frantar",
    target="loss_q",
    factors=(
        total(
            _FLOOR,
            (*_SIZE, effective("fmt", ("fp4", "int", "int-sparse-4:8"), "alpha")),
            _TOKENS,
            levels_needed={"n_params": 3, "tokens": 3},
        ),
    ),
    source="Frantar et al., Compression Scaling Laws, arXiv:2502.16440",
    note="One multiplier of the parameters per number format, at one bit width. They are relative "
    "to one another: hold one, such as --fix 'eff[int]=1'. No multipliers could be read.",
)

_SUN_NOISE = (
    _exponent("tokens", "beta", sign=1),
    _exponent("n_params", "alpha"),
    binary_log("group_size"),
    constant("gamma", r"\gamma", bounds=(1e-3, 1e12), starts=(1e4,), sign=-1),
    shifted_power("exponent_bits", "delta", sign=-1, shift=0.5),
    shifted_power("mantissa_bits", "nu", sign=-1, shift=0.5),
)

SUN = Law(
    name="sun",
    target="loss_q",
    factors=(
        total(
            (_amplitude("n"), _exponent("n_params", "alpha")),
            (_amplitude("d"), _exponent("tokens", "beta")),
            (constant("eps", r"\epsilon", bounds=(1e-6, 1e3), starts=(0.4, 1.6)),),
            _SUN_NOISE,
            levels_needed={"n_params": 3, "tokens": 3, "exponent_bits": 2, "mantissa_bits": 2},
        ),
    ),
    source="Sun et al., Scaling Laws for Floating-Point Quantization Training, arXiv:2501.02423",
    note="Floating-point training. Columns exponent_bits and mantissa_bits are of the format; for "
    "one scale per channel the paper's log2 of the group size is 13.1567.",
    published=(
        Published(
            "weights, 41-679M parameters",
            {
                "n": 69.2343,
                "alpha": 0.2368,
                "d": 68973.0621,
                "beta": 0.5162,
                "eps": 1.9061,
                "gamma": 11334.5197,
                "delta": 3.1926,
                "nu": 2.9543,
            },
            "arXiv:2501.02423, fitted constants",
            "reproduce the critical tokens of 1e9 parameters in E2M1, 0.4e12, and E4M3, 27e12",
        ),
    ),
)

LOSS_LAWS = (CHINCHILLA, KAPLAN, KUMAR_TRAINING, QUEST, FRANTAR, SUN)


def critical_tokens(
    n_params: Array | float,
    group_size: Array | float,
    exponent_bits: Array | float,
    mantissa_bits: Array | float,
    values: Mapping[str, float] | None = None,
) -> Array:
    """Tokens beyond which more training raises the loss of a floating-point model.

    Where the terms of `SUN` in tokens have their minimum, Sun et al. (arXiv:2501.02423).

    Parameters
    ----------
    n_params
        Parameters.
    group_size
        Elements sharing a scale.
    exponent_bits, mantissa_bits
        Of the format; E2M1 has 2 and 1.
    values
        Constants of the law; None takes the published ones.

    Returns
    -------
    numpy.ndarray
        Tokens, in the common shape of the arguments.

    Examples
    --------
    >>> print(f"{critical_tokens(1e9, 128, 2, 1):.2g}")
    3.9e+11
    """
    v = dict(values or SUN.published[0].values)
    format_size = (exponent_bits + 0.5) ** v["delta"] * (mantissa_bits + 0.5) ** v["nu"]
    scale = v["d"] * v["gamma"] * n_params ** v["alpha"] * format_size
    return np.asarray((scale / np.log2(group_size)) ** (1.0 / (2.0 * v["beta"])))
