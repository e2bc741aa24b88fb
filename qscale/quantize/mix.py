"""Mixed precision: a format for each pattern of matrix names, read from TOML; no torch needed."""

from __future__ import annotations

import hashlib
import json
import tomllib
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from qscale.atomic import replacing
from qscale.errors import QscaleError, did_you_mean
from qscale.quantize.adapters.offers import require
from qscale.quantize.format import Format
from qscale.quantize.setting import OWN, RTN, ZERO_POINT_BITS, Setting

if TYPE_CHECKING:
    from collections.abc import Mapping

NONE = "none"
"""What a file calls the format of a matrix that is left as it is."""

FULL_BITS = 16
"""Bits counted for each weight of a matrix that is left as it is, as in half precision."""

_OPTIONS = ("method", "activations", "act_order", "library", "formats")


@dataclass(frozen=True, slots=True)
class Mix:
    """One way to quantize a model, with a format for each matrix.

    Parameters
    ----------
    formats
        Pattern of matrix names (as of a shell: ``*``, ``?``, ``[0-9]``) and format, None for a
        matrix that is left as it is. The first pattern that matches counts.
    method, activations, act_order, library
        The same for all matrices; see :class:`qscale.quantize.setting.Setting`.
    path
        File that the mix was read from, which errors name; it makes no difference.

    Raises
    ------
    QscaleError
        If a value is impossible, or nothing is quantized.
    """

    formats: tuple[tuple[str, Format | None], ...]
    method: str = RTN
    activations: Format | None = None
    act_order: bool = True
    library: str = OWN
    path: str = field(default="mix", compare=False)

    def __post_init__(self) -> None:
        """Refuse impossible mixes."""
        if not any(fmt for _, fmt in self.formats):
            raise QscaleError(f"{self.path}: formats must quantize something. Add a pattern.")
        for place, (pattern, fmt) in enumerate(self.formats):
            if any(pattern == earlier for earlier, _ in self.formats[:place]):
                raise QscaleError(f"{self.path}: pattern {pattern!r} is given twice. Remove one.")
            if fmt is None:
                continue
            try:
                Setting(fmt, self.method, self.activations, self.act_order, self.library)
            except QscaleError as error:
                raise QscaleError(f"{self.path}: pattern {pattern!r}: {error}") from None

    @classmethod
    def read(cls, path: str | Path) -> Mix:
        """Read a mix from a TOML file.

        The file has ``method``, ``activations``, ``act_order`` and ``library`` where they are not
        the default, then a table ``[formats]`` of patterns and formats in order, such as
        ``"*.down_proj.weight" = "int4 g128 asym"`` or ``"*" = "none"``.

        Raises
        ------
        QscaleError
            Naming the file and what in it is wrong.
        """
        try:
            content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise QscaleError(f"{path}: cannot be read ({error.strerror}).") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise QscaleError(f"{path}: is not TOML ({error}).") from None
        for name in content:
            if name not in _OPTIONS:
                raise QscaleError(
                    f"{path}: may hold {', '.join(_OPTIONS)}. Got {name!r} instead."
                    f"{did_you_mean(name, _OPTIONS)}"
                )
        table = content.pop("formats", None)
        if not isinstance(table, dict):
            raise QscaleError(f'{path}: needs a table [formats] with lines "pattern" = "format".')
        for name, kind, asked in (
            ("method", str, "a text"),
            ("library", str, "a text"),
            ("act_order", bool, "true or false"),
        ):
            value = content.get(name)
            if value is not None and not isinstance(value, kind):
                raise QscaleError(f"{path}: {name} must be {asked}. Got {value!r} instead.")
        acts = content.pop("activations", None)
        return cls(
            tuple((pattern, _format(path, repr(pattern), text)) for pattern, text in table.items()),
            activations=None if acts is None else _format(path, "activations", acts),
            path=str(path),
            **content,
        )

    def write(self, path: str | Path) -> None:
        """Write what :meth:`read` reads, in one step."""
        lines = [f"method = {json.dumps(self.method)}"]
        if self.activations is not None:
            lines.append(f"activations = {json.dumps(str(self.activations))}")
        if not self.act_order:
            lines.append("act_order = false")
        if self.library != OWN:
            lines.append(f"library = {json.dumps(self.library)}")
        lines += ["", "[formats]"]
        # Of JSON's escapes TOML lacks only the pairs that stand for one character.
        quoted = ((json.dumps(p, ensure_ascii=False), json.dumps(f)) for p, f in self._rules())
        lines += [f"{pattern} = {fmt}" for pattern, fmt in quoted]
        with replacing(Path(path)) as partial:
            partial.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def __str__(self) -> str:
        """Return the method, a hash of patterns and formats, and options as in a spec."""
        digest = hashlib.sha256(json.dumps(self._rules()).encode()).hexdigest()[:8]
        words = [self.method, f"mix:{digest}"]
        if self.activations is not None:
            words.append("acts=" + str(self.activations).replace(" ", "/"))
        words += [] if self.act_order else ["act_order=no"]
        return " ".join([*words, *([] if self.library == OWN else [f"library={self.library}"])])

    @property
    def calibrated(self) -> bool:
        """Whether the method needs a text to calibrate on."""
        return self._any.calibrated

    def format_of(self, name: str) -> Format | None:
        """Return the format of a matrix, None if it is left as it is.

        Raises
        ------
        QscaleError
            If no pattern matches.
        """
        return self.formats[self._rule(name)][1]

    def columns(self, shapes: Mapping[str, tuple[int, int]]) -> dict[str, object]:
        """Return the mix under the measurement table's column names.

        ``bits`` is the mean over all weights of their nominal bits, `FULL_BITS` where they are
        left as they are. What formats differ in is null; ``spec`` tells mixes apart.

        Parameters
        ----------
        shapes
            Rows and columns of each matrix, by parameter name.

        Raises
        ------
        QscaleError
            If no pattern matches a matrix, or a pattern is the first to match for none.
        """
        formats = self.resolve(shapes)
        sizes = {name: rows * columns for name, (rows, columns) in shapes.items()}
        bits = sum((fmt.bits if fmt else FULL_BITS) * sizes[n] for n, fmt in formats.items())
        none = ("exponent_bits", "mantissa_bits", "group_size", "symmetric", "scale_rule")
        return {
            "spec": str(self),
            "method": self.method,
            "fmt": "mix",
            "bits": bits / sum(sizes.values()),
            **dict.fromkeys(none),
            "bits_activation": None if self.activations is None else float(self.activations.bits),
        }

    def bits_per_weight(self, shapes: Mapping[str, tuple[int, int]]) -> float:
        """Return the stored bits per weight, `FULL_BITS` where weights are left as they are.

        Raises
        ------
        QscaleError
            As :meth:`columns`.
        """
        stored = 0
        for name, fmt in self.resolve(shapes).items():
            rows, columns = shapes[name]
            zero = ZERO_POINT_BITS.get(self.method)
            stored += fmt.stored_bits(rows, columns, zero) if fmt else FULL_BITS * rows * columns
        return stored / sum(rows * columns for rows, columns in shapes.values())

    def resolve(self, shapes: Mapping[str, object]) -> dict[str, Format | None]:
        """Return the format of each matrix.

        Raises
        ------
        QscaleError
            If no pattern matches a matrix, or a pattern is the first to match for none.
        """
        rules = {name: self._rule(name) for name in shapes}
        idle = set(range(len(self.formats))) - set(rules.values())
        if idle:
            pattern = self.formats[min(idle)][0]
            raise QscaleError(
                f"{self.path}: pattern {pattern!r} is not the first to match for any matrix. "
                f"Remove it, move it up or mend it; one matrix is called {next(iter(shapes))}."
            )
        return {name: self.formats[rule][1] for name, rule in rules.items()}

    @property
    def _any(self) -> Setting:
        """The setting of one of the formats."""
        fmt = next(fmt for _, fmt in self.formats if fmt)
        return Setting(fmt, self.method, self.activations, self.act_order, self.library)

    def _rules(self) -> list[tuple[str, str]]:
        """Patterns and formats as text."""
        return [(pattern, str(fmt) if fmt else NONE) for pattern, fmt in self.formats]

    def _rule(self, name: str) -> int:
        """Place of the first pattern that matches a name."""
        for place, (pattern, _) in enumerate(self.formats):
            if fnmatchcase(name, pattern):
                return place
        raise QscaleError(
            f'{self.path}: no pattern matches {name}. Add one; "*" = "{NONE}" at the end leaves '
            "every other matrix as it is."
        )


Quantizer: TypeAlias = Setting | Mix
"""How to quantize a model: one format for all matrices, or several."""


def parse_setting(text: str) -> Quantizer:
    """Parse a spec, or read the mix that a name ending in ``.toml`` stands for.

    Raises
    ------
    QscaleError
        If the spec or the file is wrong, or an outside library does not have the format.

    Examples
    --------
    >>> parse_setting("rtn int4 g128").format_of("model.layers.0.mlp.up_proj.weight").bits
    4
    """
    text = text.strip()
    found: Quantizer = Mix.read(text) if text.endswith(".toml") else Setting.parse(text)
    if found.library != OWN:
        formats = [found.weights] if isinstance(found, Setting) else dict(found.formats).values()
        for fmt in filter(None, formats):
            require(found.library, found.method, fmt)
    return found


def _format(path: str | Path, where: str, text: Any) -> Format | None:
    """Parse one format of a file."""
    if text == NONE and where != "activations":
        return None
    if not isinstance(text, str):
        raise QscaleError(f"{path}: {where} must be a format as text. Got {text!r} instead.")
    try:
        return Format.parse(text)
    except QscaleError as error:
        raise QscaleError(f"{path}: {where}: {error}") from None
