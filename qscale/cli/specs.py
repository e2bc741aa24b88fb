"""``qscale specs``: what a quantizer setting can say."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qscale.cli.console import console, table
from qscale.errors import QscaleError
from qscale.quantize.format import RULE_WORDS, Format
from qscale.quantize.mix import Mix, parse_setting
from qscale.quantize.setting import CALIBRATED, LIBRARIES

if TYPE_CHECKING:
    from qscale.quantize.mix import Quantizer


def specs(spec: str | None = None, /) -> None:
    """List formats, methods and libraries that a spec can name, or explain one spec.

    ```sh
    qscale specs
    qscale specs "gptq int4 g128 asym"
    qscale specs "rtn nvfp4 acts=nvfp4"
    ```

    Next: qscale measure, sensitivity and quantize take a spec as --spec.

    Parameters
    ----------
    spec
        A spec to explain, such as "gptq int4 g128 asym".
    """
    if spec is not None:
        _explain(parse_setting(spec))
        return
    console.print(
        "A spec is a method, a format and options: gptq int4 g128 asym acts=int8/row", markup=False
    )
    console.print(
        table(
            "Formats",
            ("format", "what shares a scale", "scale rules", "bits per weight"),
            _formats(),
        )
    )
    console.print(
        table(
            "Methods",
            ("library", "methods", "calibrated"),
            [
                (name, ", ".join(methods), ", ".join(m for m in methods if m in CALIBRATED) or "-")
                for name, methods in LIBRARIES.items()
            ],
        )
    )
    console.print(
        "Options: acts=FORMAT rounds what matrices read, with / for spaces; act_order=no takes "
        "columns in their order under gptq; library=NAME has an outside library quantize; "
        "library=FILE.py:FUNCTION a function of yours, from weight and format to the matrix "
        "rounded, by a method of any name. A .toml file in place of a spec gives each pattern of "
        "matrix names its own format.",
        markup=False,
    )


def _explain(quantizer: Quantizer) -> None:
    """Print the columns of a setting, or the patterns of a mix."""
    if isinstance(quantizer, Mix):
        lines = [
            (pattern, "none" if fmt is None else str(fmt)) for pattern, fmt in quantizer.formats
        ]
        console.print(table(str(quantizer), ("matrices", "format"), lines))
        return
    lines = [(name, _text(value)) for name, value in quantizer.columns({}).items()]
    console.print(table(str(quantizer), ("column", "value"), lines))


def _formats() -> list[tuple[str, ...]]:
    """Describe each format by what it accepts."""
    lines: list[tuple[str, ...]] = []
    for word in ("int4", "mxint4", "mxfp4", "mxfp8", "nvfp4", "fp8", "nf4", "fp4"):
        fmt = Format.parse(word)
        several = word in ("int4", "mxint4")
        groups = [g for g in ("g16", "g128", "row", "tensor") if _possible(f"{word} {g}")]
        if "g128" in groups:
            groups = ["gN", *groups[2:]]
        default = "row" if fmt.group_size is None else f"g{fmt.group_size}"
        rules = [r for r in RULE_WORDS if _possible(f"{word} {r}")]
        lines.append(
            (
                word.replace("4", "2 to " + word.replace("4", "8")) if several else word,
                f"{', '.join(groups)} (default {default})",
                f"{', '.join([*rules, 'mse'])}",
                f"{fmt.bits_per_weight([(4096, 4096)]):.3f}",
            )
        )
    return lines


def _possible(text: str) -> bool:
    """Whether a format can be had."""
    try:
        Format.parse(text)
    except QscaleError:
        return False
    return True


def _text(value: object) -> str:
    """Print a column's value; a null as a dash."""
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
