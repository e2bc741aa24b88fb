"""``qscale plot``: figures of measured checkpoints from a table and its side tables."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from qscale.cli.console import console
from qscale.errors import QscaleError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pandas as pd
    from matplotlib.axes import Axes


def plot(
    table: Path,
    /,
    *,
    output: Annotated[Path, Parameter(name=["--output", "-o"])],
    format_: Annotated[Literal["png", "svg", "pdf"], Parameter(name="--format")] = "png",
) -> None:
    r"""Draw what qscale measure found: whatever of these its features hold.

    Spectral density of the Hessian, loss along the quantization error and on a plane around it,
    growth of the hidden-state error, curvature of each matrix, and measured against unfitted
    predictions.

    ```sh
    qscale measure examples/checkpoints/tiny-wsd-stable --features all \
        --text examples/texts/austen-wilde-darwin.txt --bits 3,4 -o tiny.csv
    qscale plot tiny.csv -o figures
    qscale plot tiny.csv -o figures --format pdf
    ```

    Next: qscale report draws what a fit says of such rows.

    Parameters
    ----------
    table
        Table written by qscale measure; its side tables lie beside it.
    output
        Folder for the figures; those of the same name are replaced.
    format_
        File format.
    """
    from qscale import table as tables  # noqa: PLC0415
    from qscale.atomic import replacing  # noqa: PLC0415

    rows = tables.read(table)
    tables.require(rows, ("checkpoint",), str(table))
    written = 0
    for name, ax in _figures(rows, table):
        with replacing(output / f"{name}.{format_}") as partial:
            figure = ax.get_figure(root=True)
            assert figure is not None  # every axes here has one
            figure.savefig(partial, format=format_, dpi=160, facecolor="white")
        console.print(f"{output / name}.{format_}", markup=False, soft_wrap=True)
        written += 1
    if not written:
        raise QscaleError(f"{table}: holds no features to draw. Measure some with --features.")


def _figures(rows: pd.DataFrame, path: Path) -> Iterator[tuple[str, Axes]]:
    """Yield the name and axes of every figure that there is data for."""
    from qscale.report import landscape  # noqa: PLC0415

    if {"delta_loss", "quadratic_delta"} <= set(rows.columns):
        usable = rows[rows["status"] == "ok"] if "status" in rows else rows
        if (usable["delta_loss"] > 2 * usable["delta_loss_se"]).any():
            yield "zero-fit", landscape.zero_fit(usable)
    whole = (
        ("density", "spectral-density", landscape.spectral_density),
        ("blocks", "error-growth", landscape.error_growth),
        ("matrices", "sensitivity", landscape.sensitivity),
    )
    by_setting = (
        ("radial", "radial-loss", landscape.radial_loss),
        ("slice", "loss-slice", landscape.loss_slice),
    )
    for checkpoint in rows["checkpoint"].dropna().unique():
        for side, name, draw_whole in whole:
            for frame in _side(path, side, checkpoint):
                yield f"{checkpoint}-{name}", draw_whole(frame)
        for side, name, draw in by_setting:
            for frame in _side(path, side, checkpoint):
                keys: Any = ["method", "bits", "group_size", "symmetric", "scale_rule"]
                for _, part in frame.groupby(keys, dropna=False, sort=False):
                    setting = landscape.setting_name(part.iloc[0]).replace(",", "")
                    yield f"{checkpoint}-{name}-{setting.replace(' ', '-')}", draw(part)


def _side(path: Path, kind: str, checkpoint: str) -> Iterator[pd.DataFrame]:
    """Yield a checkpoint's part of a side table for each protocol, if there is any."""
    import pandas as pd  # noqa: PLC0415

    from qscale import table as tables  # noqa: PLC0415

    side = tables.side_path(path, kind)
    if not side.is_file():
        return
    try:
        frame = pd.read_parquet(side)
        frame = frame[frame["checkpoint"] == checkpoint]
    except (ValueError, OSError, KeyError) as error:
        raise QscaleError(f"{side}: not a side table of qscale measure; measure again.") from error
    if len(frame):
        yield frame[frame["protocol"] == frame["protocol"].iloc[0]]
