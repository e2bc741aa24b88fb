"""``qscale plan mix``: a format for each matrix under a size budget."""

from __future__ import annotations

import glob
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from qscale.cli.console import console, number, refuse_existing, table
from qscale.cli.described import Count
from qscale.errors import QscaleError
from qscale.quantize.mix import NONE, Mix
from qscale.quantize.setting import Setting

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

    from qscale.plan.mix import Allocation

Cost = Literal["gauss_newton_delta", "quadratic_delta", "kl", "delta_loss"]
SHOWN = 40


def mix(
    *matrices: Path,
    bits_per_weight: float | None = None,
    memory: Count | None = None,
    cost: Cost = "gauss_newton_delta",
    or_none: bool = False,
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
    force: bool = False,
) -> None:
    """Choose a format for each matrix that least raises the predicted loss within a budget.

    The mix is the exact optimum of the costs added up, next to which a lower bound is printed. It
    is written as TOML for qscale measure --spec and qscale quantize --spec, so that the prediction
    can be checked.

    ```sh
    # From tables of qscale sensitivity for 3 and 4 bits
    qscale plan mix int3.csv int4.csv --bits-per-weight 3.75 -o mix.toml
    # Within 2 GB for the matrices, each of which may also be left as it is
    qscale plan mix int3.csv int4.csv --memory 2e9 --or-none
    ```

    Next: qscale measure CHECKPOINT --spec mix.toml, and qscale quantize with the same spec.

    Parameters
    ----------
    matrices
        Tables that qscale sensitivity wrote for one checkpoint, one for each setting to choose
        from, such as int2.csv int3.csv int4.csv.
    bits_per_weight
        Largest stored bits per weight over all matrices.
    memory
        The same as bytes of all matrices, such as 2e9.
    cost
        Column to add up: predicted along the error, predicted without direction, or measured.
    or_none
        Let a matrix also be left as it is, at 16 bits.
    output
        Write the mix to this .toml file.
    force
        Replace the output if it exists.
    """
    import pandas as pd  # noqa: PLC0415

    from qscale import table as tables  # noqa: PLC0415
    from qscale.plan.mix import allocate  # noqa: PLC0415

    refuse_existing(output, force, ".toml")
    if not matrices:
        raise QscaleError("give the tables that qscale sensitivity wrote, one for each setting.")
    parts = [tables.read(path) for path in matrices]
    for path, part in zip(matrices, parts, strict=True):
        if not {"matrix", "spec"} <= {*part.columns}:
            raise QscaleError(f"{path} is not a table that qscale sensitivity wrote.")
    frame = pd.concat(parts, ignore_index=True)
    settings = {
        spec: _setting(spec) for spec in frame.get("spec", pd.Series(dtype=object)).unique()
    }
    budget = _budget(frame, bits_per_weight, memory)
    _require_measured(frame, cost, matrices)
    found = allocate(frame, budget, cost=cost, or_none=or_none)
    if (found.choices["spec"] == NONE).all():
        raise QscaleError("every matrix fits the budget as it is: nothing needs to be quantized.")
    made = as_mix(found.choices, settings)
    _show(found, cost)
    if output is not None:
        made.write(output)
        console.print(f"Written to {output}.", markup=False)


def _budget(frame: pd.DataFrame, bits_per_weight: float | None, memory: float | None) -> float:
    """Return the budget in bits per weight, of which one form must be given."""
    from qscale.table import require_numbers  # noqa: PLC0415

    if memory is None and bits_per_weight is not None:
        return bits_per_weight
    if memory is None or bits_per_weight is not None:
        raise QscaleError("give a budget: either --bits-per-weight or --memory.")
    if not (math.isfinite(memory) and memory > 0):
        raise QscaleError(f"--memory must be a number above zero. Got {memory:g} instead.")
    require_numbers(frame, ["n"], "the tables of qscale sensitivity")
    return 8 * memory / float(frame.drop_duplicates("matrix")["n"].sum())


def _require_measured(frame: pd.DataFrame, cost: Cost, paths: Sequence[Path]) -> None:
    """Raise if the tables hold predictions alone, and a measured cost is asked for."""
    if cost in ("kl", "delta_loss") and (cost not in frame or frame[cost].isna().all()):
        raise QscaleError(
            f"{', '.join(map(str, paths))}: no {cost}, which qscale sensitivity measures without "
            "--predicted-only; measure it, or choose another --cost."
        )


def as_mix(choices: pd.DataFrame, settings: dict[str, Setting]) -> Mix:
    """Return chosen settings as a mix.

    Raises
    ------
    QscaleError
        If settings differ in more than the format of the weights.
    """
    common = {(s.method, s.activations, s.act_order, s.library) for s in settings.values()}
    if len(common) > 1:
        raise QscaleError(
            "settings of a mix must differ in the format alone. Got "
            f"{' and '.join(sorted(map(str, settings.values())))}."
        )
    method, activations, act_order, library = common.pop()
    formats = tuple(
        (glob.escape(name), None if spec == NONE else settings[spec].weights)
        for name, spec in zip(choices["matrix"], choices["spec"], strict=True)
    )
    return Mix(formats, method, activations, act_order, library)


def _setting(spec: str) -> Setting:
    """Parse the setting of a table; that of a mix does not say which format a matrix has."""
    if "mix:" in str(spec):
        raise QscaleError(f"{spec}: a table of a mix cannot be chosen from; give one of a setting.")
    return Setting.parse(str(spec))


def _show(found: Allocation, cost: str) -> None:
    """Print the choice, its cost beside uniform settings, and what is known of better ones."""
    rows = [
        (re.sub(r"^\D*\.(?=\d+\.)", "", row["matrix"].removesuffix(".weight")), f"{row['n']:,.0f}",
         row["spec"], f"{row['bits_per_weight']:.3f}", _thousandths(row["cost"]))
        for _, row in found.choices.iloc[:SHOWN].iterrows()
    ]  # fmt: skip
    heading = ("matrix", "weights", "setting", "bits_per_weight", f"{cost}, 0.001 nats")
    console.print(table("", heading, rows))
    if len(found.choices) > SHOWN:
        console.print(f"{len(found.choices) - SHOWN} more matrices are in the mix.")
    uniform = [
        (row["spec"], f"{row['bits_per_weight']:.3f}", _thousandths(row["cost"]))
        for _, row in found.uniform.iterrows()
    ]
    mixed = ("this mix", f"{found.bits_per_weight:.3f}", _thousandths(found.cost))
    sums = ("all matrices", "bits_per_weight", f"sum of {cost}, 0.001 nats")
    console.print(table("", sums, [*uniform, mixed]))
    proof = "no mix within the budget is better" if found.exact else "not proven best"
    console.print(
        f"Predicted: {number(found.cost, 3)} nats per token ± < {number(found.cost_se, 2)} "
        f"({proof}: none can be under {number(found.proven, 6)}; matrices divided between formats "
        f"would reach {number(found.bound, 6)}).",
        markup=False,
    )


def _thousandths(value: float) -> str:
    """Print nats as thousandths."""
    return number(1000 * value, 3)
