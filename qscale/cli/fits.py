"""``qscale fits``: list the shipped fits, or show one."""

from __future__ import annotations

from qscale.cli.console import console, table


def fits(name: str | None = None, /) -> None:
    """List the shipped fits, which stand wherever a fit is asked for, or show one in full.

    ```sh
    qscale fits
    qscale fits published_gptq_kumar
    ```

    Next: qscale predict published_gptq_kumar --n-params 13e9 --tokens 2e12 --bits 4; without a
    fit it takes the one that covers the checkpoint best.

    Parameters
    ----------
    name
        A fit, shipped or a file, to show in full.
    """
    from qscale.fit.shipped import load_all  # noqa: PLC0415
    from qscale.load import load_fitted  # noqa: PLC0415

    if name is not None:
        console.print(str(load_fitted(name)), markup=False, soft_wrap=True)
        return
    rows = [
        (
            name,
            f"{fit.target} from {', '.join(fit.columns)}",
            f"{fit.data.rows} of {fit.data.name}",
            ", ".join(fit.data.levels.get("method", ())),
        )
        for name, fit in load_all().items()
    ]
    heading = ("fit", "predicts", "rows", "methods")
    drawn = table("Fits (use a name wherever a fit is asked for)", heading, rows)
    drawn.columns[0].no_wrap = True
    for column in drawn.columns[1:]:
        column.justify = "left"
    console.print(drawn)
