"""Say how weights are quantized and what that costs in storage; no torch needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qscale.errors import QscaleError

if TYPE_CHECKING:
    from collections.abc import Iterable

ABSMAX_RESTRICTED = "absmax/(2^(b-1)-1)"
ABSMAX_FULL = "absmax/((2^b-1)/2)"
MINMAX = "(max-min)/(2^b-1)"
SCALE_RULES = (ABSMAX_RESTRICTED, ABSMAX_FULL, MINMAX)
"""Step between levels, as a function of a group's values and the bits b.

- restricted: symmetric levels -(2^(b-1)-1) .. 2^(b-1)-1 times the step, every value on the range;
- full: symmetric levels -2^(b-1) .. 2^(b-1)-1, the largest value rounded by up to half a step, as
  llm-compressor and compressed-tensors do;
- min-max: levels 0 .. 2^b-1 less an integer zero point, with zero always in the range, as
  compressed-tensors, torchao and others do.

At two bits the rule alone changes the loss increase several times over, so rows name it.
"""

RTN, GPTQ = "rtn", "gptq"
METHODS = (RTN, GPTQ)
"""Round-to-nearest, and error feedback along the rows by Frantar et al. (arXiv:2210.17323)."""

SCALE_BITS = 16
"""Storage of one scale; formats in use keep scales in half precision."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to quantize every matrix of a model to integers.

    Parameters
    ----------
    bits
        Bits of an element, 2 to 8.
    group_size
        Consecutive elements of a row that share a scale; None for the whole row. Where it does
        not divide the row, the last group is shorter.
    scale_rule
        One of `SCALE_RULES`.
    method
        One of `METHODS`. What is stored does not depend on it.
    fmt
        As the measurement table names it.

    Raises
    ------
    QscaleError
        If a value is impossible.
    """

    bits: int
    group_size: int | None = None
    scale_rule: str = ABSMAX_RESTRICTED
    method: str = RTN
    fmt: str = "int"

    def __post_init__(self) -> None:
        """Refuse impossible settings."""
        if self.bits not in range(2, 9):
            raise QscaleError(f"bits must be an integer from 2 to 8. Got {self.bits!r} instead.")
        if self.group_size is not None and self.group_size < 1:
            raise QscaleError(
                f"group_size must be at least 1, or row. Got {self.group_size!r} instead."
            )
        for name, value, allowed in (
            ("scale_rule", self.scale_rule, SCALE_RULES),
            ("method", self.method, METHODS),
            ("fmt", self.fmt, ("int",)),
        ):
            if value not in allowed:
                raise QscaleError(
                    f"{name} must be one of {', '.join(allowed)}. Got {value!r} instead."
                )

    @property
    def symmetric(self) -> bool:
        """Whether zero is the middle of the grid."""
        return self.scale_rule != MINMAX

    def columns(self) -> dict[str, object]:
        """Return the setting under the measurement table's column names."""
        return {
            "method": self.method,
            "fmt": self.fmt,
            "bits": float(self.bits),
            "group_size": None if self.group_size is None else float(self.group_size),
            "symmetric": self.symmetric,
            "scale_rule": self.scale_rule,
        }

    def stored_bits(self, rows: int, columns: int) -> int:
        """Bits that one matrix takes: elements, 16-bit scales and, if asymmetric, zero points.

        Examples
        --------
        >>> Setting(4, 128).stored_bits(1, 256)  # 256 elements, 2 scales
        1056
        """
        groups = rows * (1 if self.group_size is None else -(-columns // self.group_size))
        zero_point = 0 if self.symmetric else self.bits
        return rows * columns * self.bits + groups * (SCALE_BITS + zero_point)

    def bits_per_weight(self, shapes: Iterable[tuple[int, int]]) -> float:
        """Return the stored bits per weight over matrices of the given (rows, columns).

        Examples
        --------
        >>> Setting(4, 128).bits_per_weight([(1, 256), (8, 128)])
        4.125
        """
        stored = [(self.stored_bits(*shape), shape[0] * shape[1]) for shape in shapes]
        return sum(bits for bits, _ in stored) / sum(size for _, size in stored)
