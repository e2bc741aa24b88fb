"""Quantizer settings from the command line: bit widths crossed with group sizes, or specs."""

from __future__ import annotations

from typing import Literal

from qscale.cli.console import group_sizes, numbers
from qscale.errors import QscaleError
from qscale.quantize.format import ABSMAX_FULL, ABSMAX_RESTRICTED, MINMAX, Format
from qscale.quantize.setting import LIBRARIES, OWN, RTN, Setting

ScaleRule = Literal["restricted", "full"]


def quantizer_settings(
    bits: str,
    group_size: str,
    *,
    asymmetric: bool = False,
    scale_rule: ScaleRule = "restricted",
    method: str = RTN,
) -> list[Setting]:
    """Cross ``3,4`` bits with ``64,row`` group sizes and ``rtn,gptq`` methods.

    Raises
    ------
    QscaleError
        If a width is not a whole number from 2 to 8, a group size is neither a whole number nor
        ``row``, or a symmetric rule is asked for asymmetric levels.
    """
    if asymmetric and scale_rule != "restricted":
        raise QscaleError("--scale-rule is about symmetric levels; leave it out or --asymmetric.")
    rule = {"restricted": ABSMAX_RESTRICTED, "full": ABSMAX_FULL}[scale_rule]
    widths = numbers(bits, "--bits")
    for width in widths:
        if width not in range(2, 9):
            raise QscaleError(f"--bits must be whole numbers from 2 to 8. Got {width:g} instead.")
    sizes = group_sizes(group_size)
    methods = [name.strip() for name in method.split(",")]
    allowed = LIBRARIES[OWN]
    for name in methods:
        if name not in allowed:
            raise QscaleError(f"--method must be among {', '.join(allowed)}. Got {name!r} instead.")
    rule = MINMAX if asymmetric else rule
    formats = [Format("int", int(b), g, rule) for b in widths for g in sizes]
    return [Setting(fmt, name) for name in methods for fmt in formats]
