"""Number formats: levels, groups, scales and storage; no torch needed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qscale.errors import QscaleError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

INT, MXINT, MXFP4, MXFP8 = "int", "mxint", "mxfp4", "mxfp8"
NVFP4, FP8, NF4, FP4 = "nvfp4", "fp8_e4m3", "nf4", "fp4"

ABSMAX_RESTRICTED = "absmax/(2^(b-1)-1)"
ABSMAX_FULL = "absmax/((2^b-1)/2)"
ABSMAX_SIGNED = "signed absmax/-2^(b-1)"
MINMAX = "(max-min)/(2^b-1)"
POWER_FLOOR = "2^floor(log2 absmax)"
POWER_EVEN = "2^floor(log2 rounded absmax)"
ABSMAX_TOP = "absmax/largest"
ABSMAX_E4M3 = "absmax/largest in e4m3"
"""Step between levels, as a function of a group's values and the bits b.

- restricted: symmetric levels -(2^(b-1)-1) .. 2^(b-1)-1 times the step, every value on the range;
- full: symmetric levels -2^(b-1) .. 2^(b-1)-1, the largest value rounded by up to half a step, as
  llm-compressor and compressed-tensors do;
- signed: the value of largest magnitude is level -2^(b-1), as auto-round, ONNX Runtime and
  llama.cpp's Q4_0 do;
- min-max: levels 0 .. 2^b-1 less an integer zero point, with zero always in the range, as
  compressed-tensors, torchao and others do;
- power floor: a power of two by the exponent of the largest value, as the OCP microscaling
  specification says (v1.0, section 6.3);
- power even: the largest value is first rounded to the element's mantissa, so that less of it is
  cut off, as torchao and, for MXFP4, llm-compressor do;
- absmax/largest: the largest value becomes the format's largest;
- absmax/largest in e4m3: the same, rounded to FP8 after a scale of the whole matrix, as NVFP4 asks.

At two bits the rule alone changes the loss increase several times over, so rows name it.
"""

RULE_WORDS = {
    "restricted": ABSMAX_RESTRICTED,
    "full": ABSMAX_FULL,
    "signed": ABSMAX_SIGNED,
    "asym": MINMAX,
    "floor": POWER_FLOOR,
    "even": POWER_EVEN,
}
"""What a spec calls those scale rules between which a format leaves a choice."""

_RULE_WORD = {rule: word for word, rule in RULE_WORDS.items()}


@dataclass(frozen=True, slots=True)
class _Kind:
    """What a format allows: bits, scale rules and groups, the first being the default."""

    bits: Sequence[int]
    rules: tuple[str, ...]
    group_size: int | None
    scale_bits: int
    free_group: bool = True  # any group size, or only the default
    whole: bool = False  # one scale per row or per matrix allowed
    float_bits: tuple[int, int] | None = None  # exponent and mantissa


_INT_RULES = (ABSMAX_RESTRICTED, ABSMAX_FULL, ABSMAX_SIGNED, MINMAX)
_POWERS = (POWER_FLOOR, POWER_EVEN)

# Scales of integers and of FP8 are kept in half precision, those of the others as they define.
_KINDS: dict[str, _Kind] = {
    INT: _Kind(range(2, 9), _INT_RULES, None, 16, whole=True),
    MXINT: _Kind(range(2, 9), (POWER_FLOOR,), 32, 8),
    MXFP4: _Kind((4,), _POWERS, 32, 8, float_bits=(2, 1)),
    MXFP8: _Kind((8,), _POWERS, 32, 8, float_bits=(4, 3)),
    NVFP4: _Kind((4,), (ABSMAX_E4M3,), 16, 8, free_group=False, float_bits=(2, 1)),
    FP8: _Kind((8,), (ABSMAX_TOP,), None, 16, whole=True, float_bits=(4, 3)),
    NF4: _Kind((4,), (ABSMAX_TOP,), 64, 32),
    FP4: _Kind((4,), (ABSMAX_TOP,), 64, 32),
}
FORMATS = tuple(_KINDS)
"""Names of the formats, as the measurement table has them.

- ``int``: integers (2 to 8 bits) times a real scale;
- ``mxint``: integers (2 to 8 bits) times a power of two that a block shares;
- ``mxfp4``, ``mxfp8``: E2M1 and E4M3 floats times a power of two (OCP microscaling v1.0);
- ``nvfp4``: E2M1 floats times an E4M3 scale for 16 values and a float32 one for the matrix;
- ``fp8_e4m3``: E4M3 floats times a real scale;
- ``nf4``: quantiles of a Gaussian (Dettmers et al., arXiv:2305.14314, appendix E);
- ``fp4``: the four-bit floats of bitsandbytes, which only that library rounds to.
"""

_WORD = re.compile(r"(int|mxint)(\d+)")


@dataclass(frozen=True, slots=True)
class Format:
    """How numbers are stored.

    Parameters
    ----------
    fmt
        One of `FORMATS`.
    bits
        Bits of an element.
    group_size
        Consecutive elements of a row that share a scale; None for the whole row. Where it does
        not divide the row, the last group is shorter.
    scale_rule
        One of the rules that the format allows; empty for its first.
    per_tensor
        Whether one scale serves the whole matrix; ``group_size`` is None then.
    clipped
        Whether each group's range is shrunk to where the squared error is least.

    Raises
    ------
    QscaleError
        If a value is impossible.
    """

    fmt: str
    bits: int
    group_size: int | None = None
    scale_rule: str = ""
    per_tensor: bool = False
    clipped: bool = False

    def __post_init__(self) -> None:
        """Refuse impossible formats, and name the default rule."""
        if self.fmt not in _KINDS:
            raise QscaleError(f"fmt must be one of {', '.join(FORMATS)}. Got {self.fmt!r} instead.")
        kind = _KINDS[self.fmt]
        if not isinstance(self.bits, int) or self.bits not in kind.bits:
            allowed = f"{kind.bits[0]}" if len(kind.bits) == 1 else "an integer from 2 to 8"
            raise QscaleError(f"bits must be {allowed}. Got {self.bits!r} instead.")
        if self.group_size is not None and self.per_tensor:
            raise QscaleError("group_size must be left out where one scale serves the matrix.")
        self._check_group(kind)
        object.__setattr__(self, "scale_rule", self.scale_rule or kind.rules[0])
        if self.scale_rule not in kind.rules:
            rules = [f"{r} ({_RULE_WORD[r]})" if r in _RULE_WORD else r for r in kind.rules]
            raise QscaleError(
                f"scale_rule of {self.fmt} must be {' or '.join(rules)}. "
                f"Got {_RULE_WORD.get(self.scale_rule, self.scale_rule)!r} instead."
            )

    def _check_group(self, kind: _Kind) -> None:
        """Refuse groups that the format does not allow."""
        size = self.group_size
        if size is None:
            possible, got = kind.whole, "tensor" if self.per_tensor else "row"
        else:
            possible, got = isinstance(size, int) and size >= 1, f"{size!r}"
            possible = possible and (kind.free_group or size == kind.group_size)
        if not possible:
            allowed = "at least 1" if kind.free_group else f"{kind.group_size}"
            row = ", or row or tensor" if kind.whole else ""
            raise QscaleError(
                f"group_size of {self.fmt} must be {allowed}{row}. Got {got} instead."
            )

    @classmethod
    def parse(cls, text: str) -> Format:
        """Parse words such as ``int4 g128 asym``, ``mxint3``, ``fp8 tensor`` or ``int2 row mse``.

        Raises
        ------
        QscaleError
            If a word is unknown, or the format impossible.

        Examples
        --------
        >>> Format.parse("int4 g128 asym").bits_per_weight([(1, 256)])
        4.15625
        >>> str(Format.parse("mxfp4 g32 floor"))
        'mxfp4'
        """
        head, *words = text.split() or [""]
        match = _WORD.fullmatch(head)
        fmt, bits = (match[1], int(match[2])) if match else ({"fp8": FP8}.get(head, head), None)
        if fmt not in _KINDS or (fmt in (INT, MXINT)) != bool(match):
            known = ("int4", "mxint4", "mxfp4", "mxfp8", "nvfp4", "fp8", "nf4", "fp4")
            raise QscaleError(
                f"A format must be int or mxint with 2 to 8 bits, or one of "
                f"{', '.join(known[2:])}. Got {head!r} instead.{did_you_mean(head, known)}"
            )
        kind = _KINDS[fmt]
        found: dict[str, object] = {"group_size": kind.group_size}
        said: set[str] = set()
        for word in words:
            fields = _fields(word)
            if said & fields.keys():
                raise QscaleError(f"{text!r}: {word} repeats or contradicts a word before it.")
            said |= fields.keys()
            found |= fields
        return cls(fmt, kind.bits[0] if bits is None else bits, **found)  # type: ignore[arg-type]

    def __str__(self) -> str:
        """Return the words that `parse` reads, without those that go without saying."""
        kind = _KINDS[self.fmt]
        bits = f"{self.bits}" if len(kind.bits) > 1 else ""
        words = [self.fmt.removesuffix("_e4m3") + bits]
        if self.per_tensor:
            words.append("tensor")
        elif self.group_size is None:
            words.append("row")
        elif self.group_size != kind.group_size:
            words.append(f"g{self.group_size}")
        if self.scale_rule != kind.rules[0]:
            words.append(_RULE_WORD[self.scale_rule])
        return " ".join([*words, *(["mse"] if self.clipped else [])])

    @property
    def symmetric(self) -> bool:
        """Whether groups need no zero point."""
        return self.scale_rule != MINMAX

    @property
    def rowwise(self) -> bool:
        """Whether each row's levels depend on that row alone."""
        return not self.per_tensor and self.fmt != NVFP4

    def columns(self) -> dict[str, object]:
        """Return the format under the measurement table's column names."""
        exponent, mantissa = _KINDS[self.fmt].float_bits or (None, None)
        extras = [*(["per tensor"] if self.per_tensor else []), *(["mse"] if self.clipped else [])]
        return {
            "fmt": self.fmt,
            "bits": float(self.bits),
            "exponent_bits": None if exponent is None else float(exponent),
            "mantissa_bits": None if mantissa is None else float(mantissa),
            "group_size": None if self.group_size is None else float(self.group_size),
            "symmetric": self.symmetric,
            "scale_rule": ", ".join([self.scale_rule, *extras]),
        }

    def stored_bits(self, rows: int, columns: int, zero_point_bits: int | None = None) -> int:
        """Bits that one matrix takes: elements, scales and, if asymmetric, zero points.

        A zero point is a level and takes as many bits, unless another number is given.

        Examples
        --------
        >>> Format("int", 4, 128).stored_bits(1, 256)  # 256 elements, 2 scales of 16 bits
        1056
        >>> Format("nvfp4", 4, 16).stored_bits(1, 16)  # one E4M3 scale, one float32
        104
        """
        kind = _KINDS[self.fmt]
        groups = rows * (1 if self.group_size is None else -(-columns // self.group_size))
        groups = 1 if self.per_tensor else groups
        zero_point = self.bits if zero_point_bits is None else zero_point_bits
        zero_point = 0 if self.symmetric else zero_point
        matrix = 32 if self.fmt == NVFP4 else 0
        return rows * columns * self.bits + groups * (kind.scale_bits + zero_point) + matrix

    def bits_per_weight(
        self, shapes: Iterable[tuple[int, int]], zero_point_bits: int | None = None
    ) -> float:
        """Return the stored bits per weight over matrices of the given (rows, columns).

        Examples
        --------
        >>> Format("int", 4, 128).bits_per_weight([(1, 256), (8, 128)])
        4.125
        """
        stored = [
            (self.stored_bits(*shape, zero_point_bits), shape[0] * shape[1]) for shape in shapes
        ]
        return sum(bits for bits, _ in stored) / sum(size for _, size in stored)


def _fields(word: str) -> dict[str, object]:
    """Return the fields that one word after a format's name sets."""
    if re.fullmatch(r"g\d+", word):
        return {"group_size": int(word[1:]), "per_tensor": False}
    if word in RULE_WORDS:
        return {"scale_rule": RULE_WORDS[word]}
    plain: dict[str, dict[str, object]] = {
        "row": {"group_size": None, "per_tensor": False},
        "tensor": {"group_size": None, "per_tensor": True},
        "mse": {"clipped": True},
    }
    if word not in plain:
        words = (*plain, *RULE_WORDS)
        raise QscaleError(
            f"After a format may come g and a group size, {', '.join(words)}. "
            f"Got {word!r} instead.{did_you_mean(word, words)}"
        )
    return plain[word]
