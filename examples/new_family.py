"""Predict quantization of model families that were left out, with and without one measured row.

Each of OPT, BLOOM, LLaMA-1 and LLaMA-2 is predicted from the published GPTQ, RTN, AWQ and
OmniQuant tables of the other three (shipped as ``published_ptq``). The law has size, bit width,
group size and the full-precision loss of the model on WikiText-2, which stands for all that data
and training did; models and quantizer settings deviate at random. Then one measured row of each
held-out model, a 4-bit one, is given, and its other rows are predicted again::

    python examples/new_family.py
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pandas as pd

from qscale import datasets
from qscale.fit import Fit, fit
from qscale.laws import Law
from qscale.laws.factors import constant, power
from qscale.validate import Split, leave_one_out, log_errors

FAMILIES = ("OPT", "BLOOM", "LLaMA-1", "LLaMA-2")
METHODS = ("gptq", "rtn", "awq", "omniquant")
SETTING = "method:bits:scales"
WHOLE_ROW = 4096.0  # elements that share a scale where one serves a row: a typical row's length

LAW = Law(
    name="loss_size",
    target="delta_loss",
    factors=(
        constant("k"),
        power("n_params", "alpha", sign=-1),
        power("model_loss", "lambda"),
        power("bits", "gamma", sign=-1),
        power("group_size", "rho"),
    ),
)


def measurements() -> pd.DataFrame:
    """Return the rows of the four families and methods, reprinted values left out.

    ``model_loss`` is the model's own loss on WikiText-2, ``scales`` how scales are shared, and
    ``text`` what the loss is taken on.
    """
    table = datasets.load("published_ptq")
    table = table.query("family in @FAMILIES and method in @METHODS and not reprinted.eq(True)")
    table = table[table["delta_loss"] > 0].reset_index(drop=True)
    table["scales"] = (
        table["group_size"].map("{:.0f}".format).where(table["group_size"].notna(), "row")
    )
    table["group_size"] = table["group_size"].fillna(WHOLE_ROW)
    table["text"] = table["protocol"].str.split("/").str[0]
    own = table[table["text"] == "wikitext2"].groupby("run")["loss_fp"].median()
    table["model_loss"] = table["run"].map(own)
    return table


def refit(rows: pd.DataFrame) -> Fit:
    """Fit the law with random deviations of models and of quantizer settings."""
    return fit(rows, LAW, offset=["text"], random=["run", SETTING], name="other families")


def first_measured(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the row one would measure first: plain rounding to 4 bits, or the nearest to it."""
    order = pd.DataFrame(
        {
            "bits": (rows["bits"] - 4).abs(),
            "method": rows["method"] != "rtn",
            "scales": rows["scales"] != "row",
        }
    )
    return rows.loc[order.sort_values(list(order), kind="stable").index[:1]]


def predict_one(fitted: Fit, rows: pd.DataFrame, given: bool) -> pd.DataFrame:
    """Predict the rows of one model, all but the first measured one if that is given."""
    if not given:
        return log_errors(fitted, rows, LAW.target).set_axis(rows.index)
    known = first_measured(rows)
    rest = rows.drop(known.index)
    if rest.empty:
        return pd.DataFrame()
    return log_errors(fitted.given(known), rest, LAW.target).set_axis(rest.index)


def held_out(table: pd.DataFrame, split: Split, given: bool) -> pd.DataFrame:
    """Predict a family from the others, model by model."""
    fitted = refit(table[split.training])
    usable = table[split.test & (table["status"] == "ok").to_numpy()]
    errors = pd.concat([predict_one(fitted, rows, given) for _, rows in usable.groupby("run")])
    return usable.loc[errors.index, ["family", "run", "method", "bits"]].join(errors)


def naive(table: pd.DataFrame, split: Split) -> pd.Series:
    """Shift each setting's mean over the other families by a model's one measured row.

    Returns log of predicted over observed.
    """
    table = table[(table["status"] == "ok") | ~split.test]
    logs = np.log(table["delta_loss"])
    test = split.test[table.index]
    keys = ["method", "bits", "scales"]
    means = logs[~test].groupby([table[key] for key in keys]).mean().rename("mean")
    means = table[test].join(means, on=keys)["mean"].fillna(logs[~test].mean())
    found = []
    for _, rows in table[test].groupby("run"):
        known = first_measured(rows).index
        shift = (logs[known] - means[known]).mean()
        found.append((means[rows.index] + shift - logs[rows.index]).drop(known))
    return pd.concat(found)


def describe(errors: pd.DataFrame) -> str:
    """Put the scores of held-out rows into words."""
    size = errors["log_error"].abs()
    factor = np.exp(errors["width_90"].median() / 2)
    held = errors["inside_90"].mean()
    return (f"median |log error| {size.median():.3f}, mean {size.mean():.3f}, 90 % interval holds "
            f"{held:.1%} and spans a factor of {factor:.2f} either way")  # fmt: skip


def main() -> None:
    """Print the scores of each family and of all."""
    table = measurements()
    splits = leave_one_out(table, "family")
    for given, title in ((False, "Nothing measured"), (True, "One 4-bit row per model given")):
        found = [held_out(table, split, given) for split in splits]
        print(f"\n{title}:")
        for split, errors in zip(splits, found, strict=True):
            print(f"  {split.name} ({len(errors)} rows): {describe(errors)}")
        errors = pd.concat(found)
        print(f"  all ({len(errors)} rows): {describe(errors)}")
        by = errors["log_error"].groupby([errors["family"], errors["method"], errors["bits"]])
        worst = by.agg(["median", "count"]).query("count >= 4")
        worst = worst.loc[worst["median"].abs().sort_values(ascending=False).index[:4]]
        print("  worst settings, median log of predicted over measured:")
        for (family, method, bits), row in worst.iterrows():
            print(
                f"    {family} {method} {bits:.0f} bits: {row['median']:+.2f} ({row['count']:.0f})"
            )
    shifted = pd.concat(list(map(partial(naive, table), splits)))
    print(f"\nA naive shift by that row: median |log error| {shifted.abs().median():.3f}")


if __name__ == "__main__":
    main()
