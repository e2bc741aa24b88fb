"""Named laws with their sources and the constants their papers publish."""

from __future__ import annotations

import difflib
from dataclasses import replace

from qscale.errors import FitError
from qscale.laws.compose import total
from qscale.laws.factors import anneal, constant, exponential, log_power, power
from qscale.laws.law import Law, Published

OUYANG = Law(
    name="ouyang",
    target="delta_loss",
    factors=(
        constant("k"),
        power("tokens", "beta"),
        power("n_params", "alpha", sign=-1),
        power("bits", "gamma", sign=-1),
    ),
    source="Ouyang et al., Low-Bit Quantization Favors Undertrained LLMs, arXiv:2411.17691",
    note="Fitted by its authors on checkpoints along cosine runs, where tokens, learning rate and "
    "decay move together.",
    published=(
        Published(
            "GPTQ, Pythia 160M-12B, RefinedWeb",
            {"k": 0.017, "beta": 0.5251, "alpha": 0.2261, "gamma": 5.4967},
            "arXiv:2411.17691, joint fit",
            "reproduces the 2-bit cells of their Table 1 within 3 %; its 3- and 4-bit cells are "
            "off by up to 60 % and must come from fits per bit width",
        ),
    ),
)

KUMAR = Law(
    name="kumar",
    target="delta_loss",
    factors=(
        constant("C_T", "C_T"),
        power("tokens", "gamma_D", r"\gamma_D"),
        power("n_params", "gamma_N", r"\gamma_N", sign=-1),
        exponential("bits", "gamma_post", r"\gamma_{\mathrm{post}}"),
    ),
    source="Kumar et al., Scaling Laws for Precision, arXiv:2411.04330, equation for PTQ",
    note="Fitted by its authors with a full cosine per run at one peak learning rate.",
    published=(
        Published(
            "GPTQ weights, 30-220M parameters, Dolma",
            {"gamma_D": 0.5068, "gamma_N": 0.3439},
            "arXiv:2411.04330, appendix K, table 2",
            "exponents only, from secondary transcriptions; the amplitude and gamma_post could not "
            "be read in a source and are not given",
        ),
    ),
)

CHEN = Law(
    name="chen",
    target="delta_loss",
    factors=(
        constant("k"),
        power("tokens", "gamma_D", r"\gamma_D"),
        log_power("group_size", "gamma_G", r"\gamma_G"),
        power("n_params", "gamma_N", r"\gamma_N", sign=-1),
    ),
    source="Chen et al., Scaling Law for Quantization-Aware Training, arXiv:2505.14302",
    note="A law for 4-bit quantization-aware training; it has no bit width.",
    published=tuple(
        Published(
            setting,
            dict(zip(("k", "gamma_N", "gamma_D", "gamma_G"), values, strict=True)),
            "arXiv:2505.14302, table of fitted constants",
            "W4A4 gives 0.057 nats at 595e6 parameters, 100e9 tokens, groups of 128, as published"
            if setting == "W4A4"
            else "transcribed, not checked against a published value",
        )
        for setting, values in {
            "W4A4": (0.1582, 0.2186, 0.0745, 0.7779),
            "W4A16": (0.2522, 0.3589, 0.1610, 0.3533),
            "W16A4": (0.1004, 0.1816, 0.0331, 0.9812),
        }.items()
    ),
)

LR_ANNEAL = Law(
    name="lr_anneal",
    target="delta_loss",
    factors=(
        *OUYANG.factors,
        power("lr_peak", "s", "s", sign=-1),
        anneal("c"),
    ),
    source="This project; motivated by Catalan-Tatjer, Ajroldi and Geiping, arXiv:2510.06213",
    note="Ouyang's form times a power of the peak learning rate and a factor for how far the "
    "learning rate has decayed. No constants are published.",
)

CHINCHILLA = Law(
    name="chinchilla",
    target="loss_fp",
    factors=(
        total(
            (constant("E", bounds=(1e-6, 1e3), starts=(0.4, 1.6)),),
            (
                constant("A", bounds=(1e-10, 1e15), starts=(150.0, 22_000.0)),
                power("n_params", "alpha", sign=-1, bounds=(0.0, 5.0), starts=(0.25, 0.75)),
            ),
            (
                constant("B", bounds=(1e-10, 1e15), starts=(150.0, 22_000.0)),
                power("tokens", "beta", sign=-1, bounds=(0.0, 5.0), starts=(0.25, 0.75)),
            ),
        ),
    ),
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

LAWS: dict[str, Law] = {law.name: law for law in (OUYANG, KUMAR, CHEN, LR_ANNEAL, CHINCHILLA)}


def get(name: str, target: str | None = None) -> Law:
    """Return a named law, for another target column if one is given.

    Raises
    ------
    FitError
        If there is no law of that name.

    Examples
    --------
    >>> get("ouyang").formula
    'ΔL = k · D^β · N^-α · P^-γ'
    """
    if name not in LAWS:
        close = difflib.get_close_matches(name, LAWS, n=1)
        guess = f" Did you mean {close[0]!r}?" if close else ""
        raise FitError(f"no law named {name!r}. Laws are: {', '.join(LAWS)}.{guess}")
    return LAWS[name] if target is None else replace(LAWS[name], target=target)
