"""Which formats outside libraries have, by library and method; neither they nor torch needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qscale.errors import QscaleError
from qscale.quantize import format as formats
from qscale.quantize.setting import AUTOROUND, AWQ, GPTQ, HQQ, RTN, is_own_code
from qscale.user_code import file_hash

if TYPE_CHECKING:
    from collections.abc import Sequence

    from qscale.quantize.format import Format

_WORDS = {rule: word for word, rule in formats.RULE_WORDS.items()}


@dataclass(frozen=True, slots=True)
class Offer:
    """Formats of one kind that a library rounds to.

    Parameters
    ----------
    fmt
        One of `qscale.quantize.format.FORMATS`.
    bits
        Bits of an element.
    rules
        Scale rules.
    groups
        Group sizes, None among them for a whole row; empty for all.
    per_tensor
        Whether one scale may serve the whole matrix.
    """

    fmt: str
    bits: Sequence[int]
    rules: tuple[str, ...]
    groups: tuple[int | None, ...] = ()
    per_tensor: bool = False

    def covers(self, fmt: Format) -> bool:
        """Whether a format is among these."""
        return (
            fmt.fmt == self.fmt
            and fmt.bits in self.bits
            and fmt.scale_rule in self.rules
            and not fmt.clipped
            and (
                self.per_tensor
                if fmt.per_tensor
                else fmt.group_size in self.groups or not self.groups
            )
        )

    def __str__(self) -> str:
        """Return the words of a spec, with slashes between choices."""
        several = self.fmt in (formats.INT, formats.MXINT)
        head = "fp8" if self.fmt == formats.FP8 else self.fmt
        head += "/".join(map(str, self.bits)) if several else ""
        sizes = ["row" if size is None else f"g{size}" for size in self.groups] or ["any group"]
        sizes += ["tensor"] if self.per_tensor else []
        rules = "/".join(_WORDS[rule] for rule in self.rules if rule in _WORDS)
        return " ".join([head, "/".join(sizes), *([rules] if rules else [])])


def _int(*rules: str, bits: Sequence[int] = range(2, 9), per_tensor: bool = True) -> Offer:
    """Offer integers of any group size."""
    return Offer(formats.INT, bits, rules, per_tensor=per_tensor)


def _mx(fmt: str, *rules: str) -> Offer:
    """Offer one of the MX floats in blocks of 32, as the specification has them."""
    return Offer(fmt, (4 if fmt == formats.MXFP4 else 8,), rules, (32,))


_NVFP4 = Offer(formats.NVFP4, (4,), (formats.ABSMAX_E4M3,), (16,))
_FP8 = Offer(formats.FP8, (8,), (formats.ABSMAX_TOP,), (None,), per_tensor=True)
_BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
_LLMC_INT = _int(formats.ABSMAX_FULL, formats.MINMAX)
_AUTO_INT = _int(formats.ABSMAX_SIGNED, formats.MINMAX)
_MODELOPT_INT = _int(formats.ABSMAX_RESTRICTED)

OFFERS: dict[str, dict[str, tuple[Offer, ...]]] = {
    "auto-round": {
        RTN: (
            _AUTO_INT,
            Offer(formats.MXINT, (2, 4, 8), (formats.POWER_FLOOR,), (32,)),
            _mx(formats.MXFP4, formats.POWER_FLOOR),
            _mx(formats.MXFP8, formats.POWER_FLOOR),
            _NVFP4,
            _FP8,
        ),
        AUTOROUND: (_AUTO_INT,),
    },
    "bitsandbytes": {
        RTN: tuple(
            Offer(fmt, (4,), (formats.ABSMAX_TOP,), _BLOCKS) for fmt in (formats.NF4, formats.FP4)
        )
    },
    "gguf": {
        RTN: (
            Offer(formats.INT, (4, 5), (formats.ABSMAX_SIGNED,), (32,)),  # Q4_0, Q5_0
            Offer(formats.INT, (8,), (formats.ABSMAX_RESTRICTED,), (32,)),  # Q8_0
            _mx(formats.MXFP4, formats.POWER_FLOOR),
        )
    },
    "hqq": {HQQ: (_int(formats.MINMAX, bits=(2, 3, 4, 5, 6, 8), per_tensor=False),)},
    "llmcompressor": {
        RTN: (
            _LLMC_INT,
            _mx(formats.MXFP4, formats.POWER_EVEN),
            _NVFP4,
            _FP8,
        ),
        GPTQ: (_LLMC_INT, _mx(formats.MXFP4, formats.POWER_EVEN), _NVFP4),
    },
    "modelopt": {RTN: (_MODELOPT_INT, _FP8), GPTQ: (_MODELOPT_INT,), AWQ: (_MODELOPT_INT,)},
    "torchao": {
        RTN: (
            _int(formats.ABSMAX_RESTRICTED, formats.ABSMAX_FULL, formats.MINMAX),
            _mx(formats.MXFP4, formats.POWER_FLOOR, formats.POWER_EVEN),
            _mx(formats.MXFP8, formats.POWER_FLOOR, formats.POWER_EVEN),
            _NVFP4,
            _FP8,
        )
    },
}
"""Formats by library and method, as far as the library's own numbers are those of the format.

What else they have has no name here: gguf's Q4_1 and Q5_1, whose lowest level is any real number,
and its K-quants, which the Python package does not quantize to; llmcompressor's MXFP8, which rounds
a block's largest value to the mantissa of FP4 before it takes the power.
"""


def require(library: str, method: str, fmt: Format) -> None:
    """Refuse a format that a library does not have; a user's own function is asked for any.

    Raises
    ------
    QscaleError
        Naming what it does have, or the file that is missing.
    """
    if is_own_code(library):
        file_hash(library.rsplit(":", 1)[0])
        return
    offers = OFFERS[library][method]
    if not any(offer.covers(fmt) for offer in offers):
        raise QscaleError(
            f"library={library} has no {method} {fmt}. By {method} it has "
            f"{'; '.join(map(str, offers))}."
        )
