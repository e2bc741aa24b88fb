"""What flags say of a checkpoint, shared by the commands of ``qscale plan``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from qscale.cli.console import group_sizes, numbers
from qscale.cli.described import FLAGS, Count, assigned, described
from qscale.errors import QscaleError

if TYPE_CHECKING:
    from qscale.fit import Fitted


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

    def known(self, fitted: Fitted, checkpoint: str | None = None) -> dict[str, Any]:
        """Join flags and what a checkpoint says of itself to values by column.

        Raises
        ------
        QscaleError
            If a number is not finite, or a column is given twice.
        """
        flags = {name: getattr(self, name) for name in FLAGS if getattr(self, name) is not None}
        for name, value in flags.items():
            if isinstance(value, float) and not math.isfinite(value):
                flag = name.replace("_", "-")
                raise QscaleError(f"--{flag} must be a finite number. Got {value:g} instead.")
        others = assigned(self.set_ or [], fitted)
        if twice := flags.keys() & others.keys():
            raise QscaleError(f"--set {min(twice)}: it has a flag too; give one of them.")
        return described(checkpoint, flags | others)


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


def _listed(text: str | None) -> list[str]:
    """Split ``rtn,gptq`` at its commas."""
    return [name.strip() for name in (text or "").split(",") if name.strip()]
