"""Factors that are not linear in what the solver searches, or have no parameters of their own.

Conventions are those of `qscale.laws.factors`: the value is a logarithm, ``theta`` has shape (S, p)
and the gradient is analytic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from qscale.laws.factors import Factor, Parameter, symbol_of, upright

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from qscale.laws.factors import Array, Columns


def _known(
    kind: str,
    columns: tuple[str, ...],
    options: dict[str, Any],
    latex: str,
    basis: Callable[[Columns], Array],
) -> Factor:
    """Build a factor that columns determine, with no parameters."""
    return Factor(
        kind=kind,
        options=options,
        columns=columns,
        parameters=(),
        value=lambda theta, data: np.broadcast_to(basis(data), (len(theta), len(data[columns[0]]))),
        gradient=lambda theta, data: np.zeros((len(theta), len(data[columns[0]]), 0)),
        latex=latex,
        levels_needed={},
        linear=False,  # its value does not vanish with theta
    )


def binary_log(column: str) -> Factor:
    """Binary logarithm ``log2(column)``, Sun et al. (arXiv:2501.02423) for the group size."""
    symbol = symbol_of(column)
    return _known(
        "binary_log",
        (column,),
        {"column": column},
        f"\\log_2 {symbol}",
        lambda data: np.log(np.log2(data[column])),
    )


def drop() -> Factor:
    """Fall of the learning rate so far as a share of its peak, ``1 - lr / lr_peak``.

    The limit of `qscale.laws.schedule.drop_sum` once every drop has had time to take effect, in
    units of the peak; it needs summary columns only.
    """

    def basis(data: Columns) -> Array:
        with np.errstate(divide="ignore"):  # no drop: the term it multiplies is zero
            return np.log(1.0 - data["lr"] / data["lr_peak"])

    return _known("drop", ("lr", "lr_peak"), {}, r"(1-\eta_t/\eta)", basis)


def shifted_power(
    column: str,
    name: str,
    symbol: str | None = None,
    sign: int = 1,
    shift: float | None = None,
    shift_name: str = "shift",
) -> Factor:
    """Power of a column plus a shift, ``(column + shift) ** (sign * name)``.

    Parameters
    ----------
    column
        Column it reads.
    name, symbol
        Of the exponent.
    sign
        Of the exponent.
    shift
        The shift where it is known, as the 0.5 of Sun et al. (arXiv:2501.02423); None estimates it,
        as Cao et al. (arXiv:2410.06722) do.
    shift_name
        Name of an estimated shift.
    """
    symbol = symbol or f"\\{name}"
    exponent = Parameter(name, symbol, -30.0, 30.0, (0.5,) if shift is None else (0.3, 3.0))
    free = Parameter(shift_name, shift_name, 1e-3, 1e6, (1.0, 100.0), scale="log")

    def inner(theta: Array, data: Columns) -> Array:
        return data[column] + (np.exp(theta[:, 1:2]) if shift is None else shift)

    def gradient(theta: Array, data: Columns) -> Array:
        base = np.broadcast_to(inner(theta, data), (len(theta), len(data[column])))
        parts = [sign * np.log(base)]
        if shift is None:
            parts.append(sign * theta[:, :1] * np.exp(theta[:, 1:2]) / base)
        return np.stack(parts, axis=-1)

    minus = "-" if sign < 0 else ""
    added = shift_name if shift is None else f"{shift:g}"
    return Factor(
        kind="shifted_power",
        options={
            "column": column,
            "name": name,
            "symbol": symbol,
            "sign": sign,
            "shift": shift,
            "shift_name": shift_name,
        },
        columns=(column,),
        parameters=(exponent, free) if shift is None else (exponent,),
        value=lambda theta, data: sign * theta[:, :1] * np.log(inner(theta, data)),
        gradient=gradient,
        latex=f"({symbol_of(column)}+{added})^{{{minus}{symbol}}}",
        levels_needed={column: 3 if shift is None else 2},
        linear=shift is not None,
    )


def saturating(column: str, name: str, exponent: str, symbol: str | None = None) -> Factor:
    """Effective share of a model, ``(1 - exp(-column / name)) ** -exponent``.

    Multiplied with ``n_params ** -exponent`` it makes the effective parameters of Kumar et al.
    (arXiv:2411.04330) for one kind of tensor at ``column`` bits in training.
    """
    symbol = symbol or f"\\{name}"
    scale = Parameter(name, symbol, 0.02, 200.0, (0.7, 2.5), scale="reciprocal")
    power = Parameter(exponent, f"\\{exponent}", 0.0, 5.0, (0.25, 0.75))

    def value(theta: Array, data: Columns) -> Array:
        return -theta[:, :1] * np.log(-np.expm1(-theta[:, 1:2] * data[column]))

    def gradient(theta: Array, data: Columns) -> Array:
        bits, rate = data[column], theta[:, 1:2]
        return np.stack(
            [-np.log(-np.expm1(-rate * bits)), -theta[:, :1] * bits / np.expm1(rate * bits)],
            axis=-1,
        )

    return Factor(
        kind="saturating",
        options={"column": column, "name": name, "exponent": exponent, "symbol": symbol},
        columns=(column,),
        parameters=(power, scale),
        value=value,
        gradient=gradient,
        latex=f"(1-e^{{-{symbol_of(column)}/{symbol}}})^{{-\\{exponent}}}",
        levels_needed={column: 2},
        linear=False,
    )


def effective(
    column: str,
    levels: Sequence[float | str],
    exponent: str,
    lossless: float | None = None,
) -> Factor:
    """Effective share of a model per compression, ``eff[level] ** -exponent``.

    Multiplied with ``n_params ** -exponent`` it makes the effective parameters of Frantar et al.
    (arXiv:2502.16440) and Panferov et al. (arXiv:2502.05003).

    Parameters
    ----------
    column
        Column that says how a row was compressed, such as ``bits`` or ``fmt``.
    levels
        Its values, each with a multiplier of its own. Rows with another value are outside the law.
    exponent
        Name of the exponent of the parameters.
    lossless
        Value of a numeric column from which on the multiplier is one. Without one, or without rows
        there, the multipliers are known only relative to one another.
    """
    levels = tuple(levels)
    names = [
        f"eff[{level:g}]" if not isinstance(level, str) else f"eff[{level}]" for level in levels
    ]
    multipliers = tuple(
        Parameter(name, f"f_{{{i + 1}}}", 1e-6, 1e3, (0.5,), scale="log")
        for i, name in enumerate(names)
    )
    power = Parameter(exponent, f"\\{exponent}", 0.0, 5.0, (0.25, 0.75))

    def hits(data: Columns) -> Array:
        found = np.stack([data[column] == level for level in levels], axis=1).astype(float)
        known = found.any(axis=1, keepdims=True)
        if lossless is not None:
            known = known | (data[column] >= lossless)[:, None]
        return np.where(known, found, np.nan)

    def value(theta: Array, data: Columns) -> Array:
        return -theta[:, :1] * (theta[:, 1:] @ hits(data).T)

    def gradient(theta: Array, data: Columns) -> Array:
        hit = hits(data)
        return np.concatenate(
            [-(theta[:, 1:] @ hit.T)[:, :, None], -theta[:, :1, None] * hit[None]], axis=-1
        )

    return Factor(
        kind="effective",
        options={
            "column": column,
            "levels": list(levels),
            "exponent": exponent,
            "lossless": lossless,
        },
        columns=(column,),
        parameters=(power, *multipliers),
        value=value,
        gradient=gradient,
        latex=rf"f({upright(column)})^{{-\{exponent}}}",
        levels_needed={},
        linear=False,
    )


def stable_power(name: str, symbol: str | None = None) -> Factor:
    """Power of the tokens seen before decay began, ``(tokens * (1 - decay_share)) ** name``.

    ``decay_share`` is the share of a checkpoint's tokens seen while the learning rate decayed; see
    `qscale.laws.schedule.decay_share`. Rows without a stable phase are outside the law.
    """
    symbol = symbol or f"\\{name}"

    def basis(data: Columns) -> Array:
        return np.log(data["tokens"] * (1.0 - data["decay_share"]))

    return Factor(
        kind="stable_power",
        options={"name": name, "symbol": symbol},
        columns=("tokens", "decay_share"),
        parameters=(Parameter(name, symbol, -30.0, 30.0, (0.1, 1.0)),),
        value=lambda theta, data: theta * basis(data),
        gradient=lambda theta, data: np.broadcast_to(
            basis(data)[:, None], (len(theta), len(data["tokens"]), 1)
        ),
        latex=f"D_{{stable}}^{{{symbol}}}",
        levels_needed={"tokens": 2},
    )


def kaplan() -> Factor:
    """Kaplan et al.'s loss, ``((N_c / n_params)**(alpha_N / alpha_D) + D_c / tokens)**alpha_D``.

    arXiv:2001.08361, equation 1.5.
    """
    parameters = (
        Parameter("N_c", "N_c", 1e3, 1e30, (1e13, 1e19), scale="log"),
        Parameter("D_c", "D_c", 1e3, 1e30, (1e10, 1e13), scale="log"),
        Parameter("alpha_N", r"\alpha_N", 1e-3, 5.0, (0.05, 0.1), scale="log"),
        Parameter("alpha_D", r"\alpha_D", 1e-3, 5.0, (0.1, 0.4), scale="log"),
    )

    def parts(theta: Array, data: Columns) -> tuple[Array, ...]:
        size, tokens, by_size, by_tokens = (theta[:, i : i + 1] for i in range(4))
        by_size, by_tokens = np.exp(by_size), np.exp(by_tokens)
        excess = size - np.log(data["n_params"])
        limited = by_size / by_tokens * excess
        both = np.logaddexp(limited, tokens - np.log(data["tokens"]))
        return by_size, by_tokens, excess, limited, both, np.exp(limited - both)

    def value(theta: Array, data: Columns) -> Array:
        _, by_tokens, _, _, both, _ = parts(theta, data)
        return by_tokens * both

    def gradient(theta: Array, data: Columns) -> Array:
        by_size, by_tokens, excess, limited, both, share = parts(theta, data)
        return np.stack(
            [
                by_size * share,
                by_tokens * (1.0 - share),
                by_size * share * excess,
                by_tokens * (both - share * limited),
            ],
            axis=-1,
        )

    return Factor(
        kind="kaplan",
        options={},
        columns=("n_params", "tokens"),
        parameters=parameters,
        value=value,
        gradient=gradient,
        latex=r"((N_c/N)^{\alpha_N/\alpha_D}+D_c/D)^{\alpha_D}",
        levels_needed={"n_params": 3, "tokens": 3},
        linear=False,
    )
