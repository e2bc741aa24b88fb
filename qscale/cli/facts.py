"""Options that predict and the commands of plan share: facts, settings, curvature."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from qscale.cli.console import group_sizes, numbers
from qscale.cli.described import FLAGS, Count, assigned, parted
from qscale.cli.settings import quantizer_settings
from qscale.errors import QscaleError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from qscale.fit import Fitted
    from qscale.quantize.setting import Setting


@Parameter(name="*")
@dataclass(frozen=True)
class Facts:
    """Facts of a checkpoint; each takes precedence over what its folder says.

    Parameters
    ----------
    n_params
        Non-embedding parameters, such as 13e9.
    tokens
        Training tokens, such as 2e12.
    lr_peak
        Peak learning rate, such as 3e-4.
    lr
        Learning rate at the checkpoint (0 at the end of a decay to zero).
    loss_fp
        Loss before quantization, nats per token.
    family
        Level of an offset in the fit; left out, the average level and its spread are used.
    source
        Source of the rows, as a level of an offset in the fit; left out, as for family.
    set_
        NAME=VALUE of any other column that the fit needs, such as sqnr_db=21. May be repeated.
    """

    n_params: Count | None = None
    tokens: Count | None = None
    lr_peak: float | None = None
    lr: float | None = None
    loss_fp: float | None = None
    family: str | None = None
    source: str | None = None
    set_: Annotated[list[str] | None, Parameter(name="--set")] = None

    def flags(self, fitted: Fitted | None) -> dict[str, Any]:
        """Facts that were given, by column.

        Raises
        ------
        QscaleError
            If a number is not finite, or a column is given twice.
        """
        flags = {name: getattr(self, name) for name in FLAGS if getattr(self, name) is not None}
        for name, value in flags.items():
            require_finite(name, value)
        others = assigned(self.set_ or [], fitted)
        if twice := flags.keys() & others.keys():
            raise QscaleError(f"--set {min(twice)}: it has a flag too; give one of them.")
        return flags | others


def require_finite(name: str, value: Any) -> None:
    """Raise naming an option whose value is a number, but not a finite one."""
    if isinstance(value, float) and not math.isfinite(value):
        flag = name.replace("_", "-")
        raise QscaleError(f"--{flag} must be a finite number. Got {value:g} instead.")


NOTHING = Facts()


@Parameter(name="*")
@dataclass(frozen=True)
class Settings:
    """Quantizer settings that are crossed.

    Parameters
    ----------
    bits
        Bit widths, separated by commas.
    group_size
        Weights sharing a scale, separated by commas; row is one scale per row.
    method
        Quantization methods, separated by commas, checked against those the fit has seen.
    fmt
        Number formats, separated by commas, checked against those the fit has seen.
    """

    bits: str = "2,3,4,5,6,8"
    group_size: str = "128"
    method: str | None = None
    fmt: str | None = None

    def values(self) -> dict[str, list[Any]]:
        """Values of each column.

        Raises
        ------
        QscaleError
            If a number cannot be read.
        """
        return {
            "bits": numbers(self.bits, "--bits"),
            "group_size": group_sizes(self.group_size),
            "method": _listed(self.method),
            "fmt": _listed(self.fmt),
        }


COMMON = Settings()


PROBES = 6


@Parameter(name="*")
@dataclass(frozen=True)
class Curvature:
    """How to take a checkpoint's own curvature; nothing is taken without a text.

    Parameters
    ----------
    text
        UTF-8 text file for the curvature of the checkpoint (needs the measure extra).
    context
        Tokens per window of the text; by default the model's longest input, but at most 512.
    probes
        Backward passes over the probe windows.
    """

    text: Path | None = None
    context: int | None = None
    probes: int = PROBES

    def quantizers(self, named: Sequence[str | None], settings: Settings) -> list[Setting]:
        """Check and return the settings of rounding to nearest; none without a text.

        Parameters
        ----------
        named
            Fit and checkpoint as they were named.
        settings
            Whose bits and group sizes are crossed.

        Raises
        ------
        QscaleError
            If there is no checkpoint or no text, or an option is wrong.
        """
        if self.text is None:
            if self.context is not None or self.probes != PROBES:
                raise QscaleError("--context and --probes are about --text; give a text too.")
            return []
        if parted(*named)[1] is None:
            raise QscaleError("--text needs a checkpoint folder whose curvature to take.")
        if not self.text.is_file():
            raise QscaleError(f"--text {self.text}: no such text file.")
        return quantizer_settings(settings.bits, settings.group_size)


NO_CURVATURE = Curvature()


def _listed(text: str | None) -> list[str]:
    """Split ``rtn,gptq`` at its commas."""
    return [name.strip() for name in (text or "").split(",") if name.strip()]
