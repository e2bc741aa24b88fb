"""Named laws of quantization degradation, with sources and published constants; all of `LAWS`."""

from __future__ import annotations

from dataclasses import replace

from qscale.errors import FitError, did_you_mean
from qscale.laws.compose import total
from qscale.laws.factors import anneal, constant, exponential, growth, log_power, power
from qscale.laws.law import Law, Published
from qscale.laws.named_loss import LOSS_LAWS
from qscale.laws.shapes import drop, shifted_power, stable_power

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

LR_POWER = Law(
    name="lr_power",
    target="delta_loss",
    factors=(*OUYANG.factors, power("lr_peak", "s", "s", sign=-1)),
    source="This project; motivated by Catalan-Tatjer, Ajroldi and Geiping, arXiv:2510.06213",
    note="Ouyang's form times a power of the peak learning rate. No constants are published.",
)

DROP_SUM = Law(
    name="drop_sum",
    target="delta_loss",
    factors=(
        constant("k"),
        power("n_params", "alpha", sign=-1),
        power("bits", "gamma", sign=-1),
        power("lr_peak", "s", "s", sign=-1),
        total(
            (power("tokens", "beta", bounds=(0.0, 5.0), starts=(0.1, 0.5)),),
            (constant("B", bounds=(1e-6, 1e9), starts=(1.0, 100.0)), drop()),
            levels_needed={"tokens": 3, "lr": 2},
        ),
    ),
    source="This project; the sum over drops is that of Luo et al., arXiv:2503.12811",
    note="Growth with tokens plus growth with the fall of the learning rate, so that decay costs "
    "the same however long the run. The fall, 1 - lr / lr_peak, is the limit in which every drop "
    "has taken effect; qscale.laws.schedule.drop_sum has the sum for a whole schedule. A "
    "conjecture: no constants are published.",
)

STABLE_TOKENS = Law(
    name="stable_tokens",
    target="delta_loss",
    factors=(
        constant("k"),
        stable_power("beta"),
        power("n_params", "alpha", sign=-1),
        power("bits", "gamma", sign=-1),
    ),
    source="This project; motivated by Catalan-Tatjer, Ajroldi and Geiping, arXiv:2510.06213",
    note="Ouyang's form with the tokens of the stable phase only. The column decay_share is the "
    "share of a checkpoint's tokens seen while the learning rate decayed; "
    "qscale.laws.schedule.decay_share finds it from decay_fraction along a run.",
)

CURVATURE = Law(
    name="curvature",
    target="delta_loss",
    factors=(constant("c"), power("quadratic_delta", "gamma", starts=(1.0,))),
    source="This project; the second-order expansion of the loss around its weights",
    note="Calibrates the prediction of curvature times quantization noise, which needs no fit and "
    "is the law with c = gamma = 1.",
)

CAO = Law(
    name="cao",
    target="delta_loss",
    factors=(
        constant("C"),
        growth("quantized_share", "A", "A"),
        power("n_params", "gamma_N", r"\gamma_N", sign=-1),
        shifted_power("group_size", "gamma_c", r"\gamma_c", shift_name="d"),
    ),
    source="Cao et al., Scaling Laws for Mixed Quantization, arXiv:2410.06722",
    note="The column quantized_share is the share of the parameters in low precision, 0 to 1; "
    "group_size counts elements sharing a scale. One fit per method and format. No constants "
    "could be read in a source.",
)

ZHOU = Law(
    name="zhou",
    target="neg_log_accuracy",
    factors=(
        constant("A"),
        power("n_params", "alpha"),
        log_power("bits", "beta"),
        log_power("calibration_samples", "gamma"),
        power("group_size", "delta"),
    ),
    source="Zhou et al., arXiv:2508.18609",
    note="The column neg_log_accuracy is -ln((accuracy - chance) / (1 - chance)), and "
    "calibration_samples the number of calibration sequences.",
    published=tuple(
        Published(
            task,
            dict(zip(("alpha", "beta", "gamma", "delta"), values, strict=True)),
            "arXiv:2508.18609v3",
            "exponents only, from a secondary source" + rounded,
        )
        for task, values, rounded in (
            ("all tasks", (-0.359, -1.067, -0.032, 0.073), ""),
            ("memory", (-0.315, -0.964, -0.040, 0.064), " that appears to round them"),
            ("application", (-0.400, -1.100, -0.030, 0.075), " that appears to round them"),
            ("reasoning", (-0.320, -1.200, -0.025, 0.085), " that appears to round them"),
        )
    ),
)

SIZE_EXPONENTIAL = Law(
    name="size_exponential",
    target="kl",
    factors=(
        constant("k"),
        power("n_params", "alpha", sign=-1),
        exponential("bits_per_weight", "g", "g"),
    ),
    source="This project; Kumar's form without tokens",
    note="For models of one family and recipe, whose tokens do not vary.",
)

SIZE_POWER = Law(
    name="size_power",
    target="kl",
    factors=(
        constant("k"),
        power("n_params", "alpha", sign=-1),
        power("bits_per_weight", "gamma", sign=-1),
    ),
    source="This project; Ouyang's form without tokens",
    note="For models of one family and recipe, whose tokens do not vary.",
)

LAWS: dict[str, Law] = {
    law.name: law
    for law in (
        OUYANG,
        KUMAR,
        CHEN,
        CAO,
        ZHOU,
        LR_POWER,
        LR_ANNEAL,
        DROP_SUM,
        STABLE_TOKENS,
        CURVATURE,
        SIZE_EXPONENTIAL,
        SIZE_POWER,
        *LOSS_LAWS,
    )
}


def get(name: str, target: str | None = None) -> Law:
    """Return a named law, for another target column if one is given.

    Raises
    ------
    FitError
        If there is no law of that name, or it is no text.

    Examples
    --------
    >>> get("ouyang").formula
    'ΔL = k · D^β · N^-α · P^-γ'
    """
    if not isinstance(name, str):
        raise FitError(f"a law's name must be a text, such as 'kumar'. Got {name!r} instead.")
    if name not in LAWS:
        raise FitError(
            f"no law named {name!r}. Laws are: {', '.join(LAWS)}.{did_you_mean(name, LAWS)}"
        )
    return LAWS[name] if target is None else replace(LAWS[name], target=target)


def is_named(law: Law) -> bool:
    """Whether a law, but for its offsets, has the factors of the one in `LAWS` of its name."""
    known = LAWS.get(law.name)
    return known is not None and known.spec()["factors"] == law.without_offsets().spec()["factors"]


def published(law: Law) -> tuple[Published, ...]:
    """Return the published constants of a law, none unless it is a named law for its own target."""
    same = is_named(law) and LAWS[law.name].target == law.target
    return LAWS[law.name].published if same else ()
