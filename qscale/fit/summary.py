"""A fit in one table, as text or HTML: what was fitted, how it ended, parameters with intervals."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

    from qscale.fit.result import Fit

_WIDTH = 84


@dataclass(frozen=True, slots=True, eq=False)
class Summary:
    """What a fit or a regression says, ready to be printed; notebooks show it as HTML.

    Parameters
    ----------
    title
        The law or the kind of regression.
    facts
        Pairs of a name and a value in words: data, search, scatter.
    parameters
        ``estimate``, ``se``, ``low`` and ``high`` by parameter, on the natural scale; empty where
        there are none.
    level
        Probability of the intervals.
    notes
        What a user should know, in sentences.
    undetermined
        Parameters that the rows do not determine, whose numbers mean nothing.
    """

    title: str
    facts: tuple[tuple[str, str], ...]
    parameters: pd.DataFrame
    level: float
    notes: tuple[str, ...]
    undetermined: tuple[str, ...] = ()

    @property
    def heading(self) -> tuple[str, ...]:
        """Names of the columns of parameters."""
        edges = (0.5 - self.level / 2, 0.5 + self.level / 2)
        return ("estimate", "std err", *(f"[{edge:.3g}]" for edge in edges))

    def __str__(self) -> str:
        """Return the table as text."""
        half = -(-len(self.facts) // 2)
        left, right = self.facts[:half], (*self.facts[half:], ("", ""))
        rule, thin = "=" * _WIDTH, "-" * _WIDTH
        lines = [self.title.center(_WIDTH).rstrip(), rule]
        for (name, value), (other, its) in zip(left, right, strict=False):
            pair = f"{name + ':':<16}{value:<26}" + (f"{other + ':':<24}{its}" if other else "")
            lines.append(pair.rstrip())
        names = [str(name) for name in self.parameters.index]
        width = max([22, *map(len, names)]) + 2
        if names:
            lines += [rule, " " * width + "".join(f"{text:>14}" for text in self.heading), thin]
        for name, row in zip(names, self._cells(), strict=True):
            estimate, se, *ends = row
            interval = "".join(f"{cell:>14}" for cell in ends)
            lines.append(f"{name:<{width}}{estimate:>14}{se:>14}{interval:>28}")
        lines.append(rule)
        return "\n".join([*lines, *(f"Note: {note}" for note in self.notes)])

    def _cells(self) -> list[list[str]]:
        """Parameters as text, ends of intervals last; what is not known is a dash."""
        values = self.parameters[["estimate", "se", "low", "high"]].to_numpy(dtype=float)
        cells = [["-" if np.isnan(x) else f"{x:.4g}" for x in row] for row in values]
        return [
            [row[0], "-", "not determined"] if name in self.undetermined else row
            for name, row in zip(self.parameters.index, cells, strict=True)
        ]

    def _repr_html_(self) -> str:
        """Return the table for a notebook."""
        facts = "".join(
            f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>"
            for name, value in self.facts
        )
        head = "".join(f"<th>{text}</th>" for text in ("", *self.heading))
        body = "".join(
            f"<tr><th>{escape(str(name))}</th>{''.join(f'<td>{cell}</td>' for cell in row[:-1])}"
            f"<td colspan={5 - len(row)}>{row[-1]}</td></tr>"
            for name, row in zip(self.parameters.index, self._cells(), strict=True)
        )
        notes = "".join(f"<li>{escape(note)}</li>" for note in self.notes)
        return (
            f"<table><caption>{escape(self.title)}</caption>{facts}</table>"
            + f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" * bool(body)
            + f"<ul>{notes}</ul>"
        )


def summarize(fit: Fit, level: float = 0.9) -> Summary:
    """Collect what a fit says.

    Parameters
    ----------
    fit
        A fitted law.
    level
        Probability of the parameters' intervals.

    Returns
    -------
    Summary
        Print it, or leave it as the last value of a notebook's cell.
    """
    data, search = fit.data, fit.search
    spreads = [(f"sd of {what}", f"{sd:.4g}") for what, sd in fit.effects.spreads]
    facts = (
        ("target", fit.target),
        ("data", data.name),
        ("rows", str(data.rows)),
        (f"{data.cluster}s", str(data.clusters)),
        ("set aside", str(sum(part.rows for part in data.set_aside))),
        ("status", search.status),
        ("starts agreeing", f"{search.agreeing} of {search.starts}"),
        ("condition", f"{search.condition_number:.3g}"),
        ("intervals", fit.interval),
        *spreads,
    )
    title = f"{fit.name}: {fit.law.formula}"
    return Summary(title, facts, fit.parameters(level), level, fit.notes, search.undetermined)
