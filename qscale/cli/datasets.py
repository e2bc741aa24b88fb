"""``qscale datasets``: list the shipped measurement tables, or show one's datasheet."""

from __future__ import annotations

from qscale.cli.console import console, table


def datasets(name: str | None = None, /) -> None:
    """List the shipped datasets, or print the datasheet of one.

    ```sh
    qscale datasets
    qscale datasets published_ptq
    ```

    Next: qscale fit takes such a name in place of a table.

    Parameters
    ----------
    name
        A dataset whose datasheet to print.
    """
    from qscale import datasets as shipped  # noqa: PLC0415

    if name is not None:
        console.print(shipped.datasheet(name), markup=False)
        return
    found = [shipped.describe(dataset) for dataset in shipped.names()]
    drawn = table(
        "Datasets (use a name wherever a table is asked for)",
        ("dataset", "rows", "how read", "what", "licence"),
        [(d.name, str(d.rows), d.kind, d.title, d.licence) for d in found],
    )
    for column in drawn.columns[2:]:
        column.justify = "left"
    console.print(drawn)
