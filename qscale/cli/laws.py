"""``qscale laws``: list the laws, or show one with its published constants."""

from __future__ import annotations

from qscale.cli.console import console, number, table


def laws(name: str | None = None, /) -> None:
    """List the laws with formula and source, or show one in full.

    ```sh
    qscale laws
    qscale laws lr_anneal
    qscale laws mine.toml
    ```

    Next: qscale fit DATA --law lr_anneal estimates a law's parameters, qscale compare sets laws
    beside each other on held-out rows.

    Parameters
    ----------
    name
        A law to show with its parameters and published constants: a name, a .toml file of factors
        or FILE.py:FUNCTION.
    """
    from qscale.laws import LAWS  # noqa: PLC0415
    from qscale.laws.user import resolve  # noqa: PLC0415

    if name is None:
        rows = [(law.name, law.target, law.formula, law.source) for law in LAWS.values()]
        drawn = table("Laws", ("law", "predicts", "formula", "source"), rows)
        for column in drawn.columns:
            column.justify = "left"
        console.print(drawn)
        return
    law = resolve(name)
    console.print(f"[bold]{law.name}[/bold] predicts {law.target}\n  {law.formula}")
    about = [f"Source: {law.source}"] * bool(law.source) + [law.note] * bool(law.note)
    console.print("\n".join([*about, f"Columns: {', '.join(law.columns)}"]), markup=False)
    console.print(f"Parameters: {', '.join(p.name for p in law.parameters)}", markup=False)
    for published in law.published:
        values = ", ".join(f"{key} = {number(v, 6)}" for key, v in published.values.items())
        console.print(f"\nPublished for {published.setting}: {values}")
        console.print(f"  {published.source}; {published.verified}.")
