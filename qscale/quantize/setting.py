"""One way to quantize a model, and the short text (the spec) that names it; no torch needed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qscale.errors import QscaleError, did_you_mean
from qscale.quantize.format import FP4, Format
from qscale.user_code import NAMED

if TYPE_CHECKING:
    from collections.abc import Mapping

RTN, GPTQ, AWQ = "rtn", "gptq", "awq"
HQQ, AUTOROUND = "hqq", "autoround"
OWN = "qscale"
LIBRARIES = {
    OWN: (RTN, GPTQ, AWQ),
    "auto-round": (RTN, AUTOROUND),
    "bitsandbytes": (RTN,),
    "gguf": (RTN,),
    "hqq": (HQQ,),
    "llmcompressor": (RTN, GPTQ),
    "modelopt": (RTN, GPTQ, AWQ),
    "torchao": (RTN,),
}
"""Who quantizes, and by which methods.

- ``rtn``: round to nearest;
- ``gptq``: later columns make up for the error of earlier ones (Frantar et al., arXiv:2210.17323);
- ``awq``: columns are scaled by what they read before rounding (Lin et al., arXiv:2306.00978);
- ``hqq``: zero points by half-quadratic splitting (Badri & Shaji, 2023);
- ``autoround``: rounding learned by signed gradient steps (Cheng et al., arXiv:2309.05516).
"""

ZERO_POINT_BITS = {HQQ: 16}
"""Bits of a zero point, for methods whose zero points are real numbers."""

CALIBRATED = frozenset((GPTQ, AWQ, AUTOROUND))
"""Methods that need a text to calibrate on."""


_WORD = re.compile(r"[a-z][a-z0-9_-]*")


def is_own_code(library: str) -> bool:
    """Whether a library is a function of the user's, ``FILE.py:FUNCTION``."""
    named = NAMED.fullmatch(library)
    return named is not None and bool(named["name"])


def _check_own(method: str) -> None:
    """Raise unless a method of the user's own has a name that says what it is."""
    if method in CALIBRATED or not _WORD.fullmatch(method):
        raise QscaleError(
            "A method of your own is a word in small letters, such as ternary, other than "
            f"{', '.join(sorted(CALIBRATED))}, which calibrate. Got {method!r} instead."
        )


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to quantize the matrices of a model.

    Parameters
    ----------
    weights
        Format of the weights.
    method
        One of those that `LIBRARIES` has for the library. What is stored does not depend on it.
    activations
        Format that what the matrices read is rounded to, token by token; None for none.
    act_order
        Whether GPTQ goes through columns by decreasing norm of what they read.
    library
        Who quantizes: a key of `LIBRARIES`, or ``FILE.py:FUNCTION``, a function of your own from
        a matrix and its format to the dequantized matrix, whose method has any name that
        `LIBRARIES` does not calibrate.

    Raises
    ------
    QscaleError
        If a value is impossible.
    """

    weights: Format
    method: str = RTN
    activations: Format | None = None
    act_order: bool = True
    library: str = OWN

    def __post_init__(self) -> None:
        """Refuse impossible settings."""
        if self.library not in LIBRARIES and not self.own_code:
            raise QscaleError(
                f"library must be one of {', '.join(LIBRARIES)} or FILE.py:FUNCTION. "
                f"Got {self.library!r} instead.{did_you_mean(self.library, LIBRARIES)}"
            )
        methods = LIBRARIES.get(self.library, ())
        if self.own_code:
            _check_own(self.method)
        elif self.method not in methods:
            whose = "method" if self.library == OWN else f"method with library={self.library}"
            raise QscaleError(
                f"{whose} must be one of {', '.join(methods)}. Got {self.method!r} instead."
                f"{did_you_mean(self.method, methods)}"
            )
        if not self.act_order and self.method != GPTQ:
            raise QscaleError(f"act_order is about {GPTQ}. Leave it out for {self.method}.")
        if self.weights.fmt == FP4 and self.library == OWN:
            raise QscaleError("fp4 is a format of bitsandbytes: add library=bitsandbytes.")
        if self.activations is not None and self.activations.per_tensor:
            raise QscaleError("Activations are rounded token by token: tensor cannot be had.")

    @classmethod
    def parse(cls, spec: str) -> Setting:
        """Parse a spec: a method, a format and options.

        Options are ``acts=FORMAT`` with slashes for spaces, ``act_order=no`` and
        ``library=NAME``.

        Raises
        ------
        QscaleError
            If a word is unknown, or the setting impossible.

        Examples
        --------
        >>> Setting.parse("gptq int4 g128 asym").weights.symmetric
        False
        >>> str(Setting.parse("rtn nvfp4 acts=int8/row"))
        'rtn nvfp4 acts=int8/row'
        """
        words = spec.split()
        options = dict(word.split("=", 1) for word in words if "=" in word)
        method, *rest = [word for word in words if "=" not in word] or [""]
        if len(options) != sum("=" in word for word in words):
            raise QscaleError(f"Spec {spec!r} gives an option twice. Give it once.")
        known = ("acts", "act_order", "library")
        for name in options:
            if name not in known:
                raise QscaleError(
                    f"Spec {spec!r}: options are {', '.join(known)}. Got {name!r} instead."
                    f"{did_you_mean(name, known)}"
                )
        order = options.get("act_order", "yes")
        if order not in ("yes", "no"):
            raise QscaleError(f"Spec {spec!r}: act_order must be yes or no. Got {order!r} instead.")
        try:
            acts = options.get("acts")
            return cls(
                Format.parse(" ".join(rest)),
                method,
                None if acts is None else Format.parse(acts.replace("/", " ")),
                order == "yes",
                options.get("library", OWN),
            )
        except QscaleError as error:
            raise QscaleError(f"Spec {spec!r}: {error}") from None

    def __str__(self) -> str:
        """Return the spec: what `parse` reads, without what goes without saying."""
        words = [self.method, str(self.weights)]
        if self.activations is not None:
            words.append("acts=" + str(self.activations).replace(" ", "/"))
        words += [] if self.act_order else ["act_order=no"]
        return " ".join([*words, *([] if self.library == OWN else [f"library={self.library}"])])

    @property
    def own_code(self) -> bool:
        """Whether a function of the user's quantizes."""
        return is_own_code(self.library)

    @property
    def calibrated(self) -> bool:
        """Whether the method needs a text to calibrate on."""
        return self.method in CALIBRATED

    def format_of(self, name: str) -> Format | None:  # noqa: ARG002 - a mix needs it
        """Return the format of a matrix: the same for all."""
        return self.weights

    def columns(self, shapes: Mapping[str, tuple[int, int]]) -> dict[str, object]:  # noqa: ARG002
        """Return the setting under the measurement table's column names; any shapes will do."""
        acts = self.activations
        return {
            "spec": str(self),
            "method": self.method,
            **self.weights.columns(),
            "bits_activation": None if acts is None else float(acts.bits),
        }

    def bits_per_weight(self, shapes: Mapping[str, tuple[int, int]]) -> float:
        """Return the stored bits per weight over matrices of the given (rows, columns)."""
        return self.weights.bits_per_weight(shapes.values(), ZERO_POINT_BITS.get(self.method))
