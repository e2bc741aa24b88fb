"""A law as an expression tree of nested lists, for programs other than this one to evaluate.

A node is ``[kind, *rest]``. Leaves are ``["number", x]``, ``["column", name]``,
``["parameter", position]``, ``["equals", column, value]`` and ``["at_least", column, value]`` (one
or zero); inner nodes are ``sum``, ``product``, ``ratio``, ``log``, ``exp``, ``expm1`` and
``logsum``, the logarithm of a sum given the logarithms of its terms. Parameters are on the solver's
scale, see `qscale.laws.factors`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from qscale.errors import FitError
from qscale.laws import compose

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from qscale.laws.factors import Factor

    Node = list[Any]
    Options = Mapping[str, Any]


def trees(factors: Sequence[Factor]) -> list[Node]:
    """Return the tree of each factor's value on the link's scale.

    Parameters
    ----------
    factors
        Of a law. Parameters of one name are one parameter, numbered as in `Law.parameters`.

    Raises
    ------
    FitError
        If a factor is a function of the user's own, which has no tree.
    """
    names = [p.name for p in compose.product(factors).parameters]
    return [_tree(factor, [names.index(p.name) for p in factor.parameters]) for factor in factors]


def _tree(factor: Factor, slots: Sequence[int]) -> Node:
    """Return the tree of one factor whose parameters have these positions in the law."""
    if factor.kind == "total":
        terms = [_product(term, factor, slots) for term in factor.options["terms"]]
        return ["logsum", *terms]
    if factor.kind == "natural":
        return ["exp", _product(factor.options["factors"], factor, slots)]
    if factor.kind not in _BUILDERS:
        raise FitError(f"a factor of kind {factor.kind!r} has no expression tree.")
    return _BUILDERS[factor.kind](factor.options, [["parameter", slot] for slot in slots])


def _product(entries: Sequence[Options], whole: Factor, slots: Sequence[int]) -> Node:
    """Return the tree of the log of a product inside a factor, from its specs."""
    position = {p.name: slot for p, slot in zip(whole.parameters, slots, strict=True)}
    inner = [compose.from_spec(entry) for entry in entries]
    return ["sum", *(_tree(f, [position[p.name] for p in f.parameters]) for f in inner)]


def _number(value: float) -> Node:
    return ["number", float(value)]


def _times(*nodes: Node | float) -> Node:
    return ["product", *(node if isinstance(node, list) else _number(node) for node in nodes)]


def _log(column: str) -> Node:
    return ["log", ["column", column]]


def _log_log2(column: str) -> Node:
    return ["log", _times(1.0 / math.log(2.0), _log(column))]


def _fallen() -> Node:
    """Fall of the learning rate as a share of its peak."""
    ratio = ["ratio", ["column", "lr"], ["column", "lr_peak"]]
    return ["sum", _number(1.0), _times(-1.0, ratio)]


def _offset(options: Options, theta: list[Node]) -> Node:
    *first, last = [["equals", options["column"], level] for level in options["levels"]]
    each = [
        _times(slope, ["sum", hit, _times(-1.0, last)])
        for slope, hit in zip(theta, first, strict=True)
    ]
    return ["sum", *each]


def _shifted_power(options: Options, theta: list[Node]) -> Node:
    shift = options.get("shift")
    added = ["exp", theta[1]] if shift is None else _number(shift)
    base = ["log", ["sum", ["column", options["column"]], added]]
    return _times(options["sign"], theta[0], base)


def _saturating(options: Options, theta: list[Node]) -> Node:
    left = ["expm1", _times(-1.0, theta[1], ["column", options["column"]])]
    return _times(-1.0, theta[0], ["log", _times(-1.0, left)])


def _effective(options: Options, theta: list[Node]) -> Node:
    column = options["column"]
    hits = [["equals", column, level] for level in options["levels"]]
    known = list(hits)
    if options.get("lossless") is not None:
        known.append(["at_least", column, options["lossless"]])
    chosen = [_times(slope, hit) for slope, hit in zip(theta[1:], hits, strict=True)]
    # Zero times the log of zero: a level that the law does not know has no value.
    guard = _times(0.0, ["log", ["sum", *known]])
    return ["sum", _times(-1.0, theta[0], ["sum", *chosen]), guard]


def _stable_power(_: Options, theta: list[Node]) -> Node:
    stable = ["sum", _number(1.0), _times(-1.0, ["column", "decay_share"])]
    return _times(theta[0], ["log", _times(["column", "tokens"], stable)])


def _kaplan(_: Options, theta: list[Node]) -> Node:
    size, tokens, by_size, by_tokens = theta
    ratio = ["exp", ["sum", by_size, _times(-1.0, by_tokens)]]
    limited = _times(ratio, ["sum", size, _times(-1.0, _log("n_params"))])
    seen = ["sum", tokens, _times(-1.0, _log("tokens"))]
    return _times(["exp", by_tokens], ["logsum", limited, seen])


_BUILDERS: dict[str, Callable[[Options, list[Node]], Node]] = {
    "constant": lambda o, theta: _times(o["sign"], theta[0]),
    "power": lambda o, theta: _times(o["sign"], theta[0], _log(o["column"])),
    "exponential": lambda o, theta: _times(-1.0, theta[0], ["column", o["column"]]),
    "growth": lambda o, theta: _times(theta[0], ["column", o["column"]]),
    "log_power": lambda o, theta: _times(theta[0], _log_log2(o["column"])),
    "anneal": lambda _, theta: _times(theta[0], _fallen()),
    "offset": _offset,
    "binary_log": lambda o, _: _log_log2(o["column"]),
    "drop": lambda _, __: ["log", _fallen()],
    "shifted_power": _shifted_power,
    "saturating": _saturating,
    "effective": _effective,
    "stable_power": _stable_power,
    "kaplan": _kaplan,
}
