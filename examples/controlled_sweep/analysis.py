"""What the controlled sweep shows: why tokens, learning rate and decay change what bits cost.

Everything is fitted to the shipped table ``controlled_sweep``; nothing is trained or measured::

    python examples/controlled_sweep/analysis.py

prints the tables and, with ``--figure out/controlled_sweep.png``, draws a figure.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import comparisons
import numpy as np
import pandas as pd
from drawing import draw

from qscale import datasets, table
from qscale.fit import fit
from qscale.laws import get
from qscale.laws.factors import anneal, constant, power
from qscale.laws.law import Law
from qscale.regress import regress
from qscale.validate import held_out, leave_one_out, paired
from qscale.validate.scores import scorable
from qscale.validate.splits import Split

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from qscale.fit import Fitted

FOLDS = 6
"""Parts that runs are left out in; both seeds of a run are in the same."""
BITS = (3, 4, 5)
"""Bit widths at which losses are told from noise, and short of the collapse at 2 bits."""
TRAINED = (
    power("tokens", "beta"),
    power("n_params", "alpha", sign=-1),
    power("lr_peak", "s", sign=-1),
    anneal("c"),
)
"""How a checkpoint was trained: tokens, size, peak learning rate and its decay."""
BESIDE = Law(
    "q beside training",
    "delta_loss",
    (constant("k"), power("quadratic_delta", "gamma", starts=(1.0,)), *TRAINED),
)
UNFITTED = "q, nothing fitted"
PLANNED = ("kumar", "ouyang", "lr_power", "lr_anneal")
"""Laws of what is known before training."""
COMPOSED = (
    "ggn_trace", "hessian_top", "weight_rms", "noise_per_weight", "quadratic_delta",
    "delta_loss", "kl",
)  # fmt: skip
"""Curvature, size of weights, noise, the product of trace and noise, and what that predicts."""
DIRECTED = ("quadratic_delta", "gauss_newton_delta", "kronecker_delta", "hessian_delta")
"""Trace times noise, and products of curvature with the quantizer's own error."""
NESTED = {
    "loss": "log(loss_fp)",
    "+ noise and norm": "log(loss_fp) + sqnr_db + log(weight_norm)",
    "+ top eigenvalue": "log(loss_fp) + sqnr_db + log(weight_norm) + log(hessian_top)",
    "+ trace instead": "log(loss_fp) + sqnr_db + log(weight_norm) + log(ggn_trace)",
    "+ q": "log(loss_fp) + sqnr_db + log(weight_norm) + log(ggn_trace) + log(quadratic_delta)",
    "q alone": "log(quadratic_delta)",
}


def read(path: Path | None = None) -> pd.DataFrame:
    """Return the sweep's table, with the labels that rows are grouped by."""
    frame = datasets.load("controlled_sweep") if path is None else table.read(path)
    frame["evaluation"] = frame["protocol"].str.extract(r"^(.*)-[0-9a-f]{8}/", expand=False)
    frame["seed"] = frame["run"].str.extract(r"seed(\d+)$", expand=False)
    frame["cell"] = frame["run"].str.replace(r"-seed\d+$", "", regex=True)
    frame["group"] = frame["group_size"].map("g{:.0f}".format, na_action="ignore").fillna("row")
    return frame


def usable(frame: pd.DataFrame, method: str = "rtn", bits: tuple[int, ...] = BITS) -> pd.DataFrame:
    """Return one method's rows on held-out books at group sizes that all models share."""
    keep = (
        (frame["evaluation"] == "books")
        & (frame["method"] == method)
        & frame["group"].isin(["g32", "row"])
        & frame["bits"].isin(bits)
    )
    return frame[keep].reset_index(drop=True)


def models(target: str) -> dict[str, Callable[[pd.DataFrame], Fitted]]:
    """Return the models that are fitted in held-out tests: laws of the plan, laws of curvature."""
    laws = {name: get(name) for name in PLANNED} | {"q": get("curvature"), BESIDE.name: BESIDE}
    found: dict[str, Callable[[pd.DataFrame], Fitted]] = {
        name: partial(fit, law=replace(law, target=target),
                      offset=["group"] if name in PLANNED else [])
        for name, law in laws.items()
    }  # fmt: skip
    formula = NESTED["+ noise and norm"]
    found["loss, noise, norm"] = partial(regress, kind="ols", formula=formula, target=target)
    return found


def splits(frame: pd.DataFrame) -> dict[str, list[Split]]:
    """Return the held-out tests, each asking for another kind of generalisation."""
    late = frame["tokens"] > 0.4 * frame.groupby("n_params")["tokens"].transform("max")
    size = frame["n_params"] == frame["n_params"].max()
    cells, codes = np.unique(frame["cell"], return_inverse=True)
    folds = [Split(f"runs {i + 1}", codes % FOLDS == i) for i in range(min(FOLDS, len(cells)))]
    found = {
        "other runs": folds,
        "a peak rate": leave_one_out(frame, "lr_peak"),
        "late tokens": [Split("late", late.to_numpy())],
        "the largest size": [Split("largest", size.to_numpy())],
        "3 bits": [Split("3 bits", (frame["bits"] == 3).to_numpy())],
    }
    if frame.loc[~size, "n_params"].nunique() < 2:  # an exponent of size takes two sizes
        del found["the largest size"]
    return found


def scores(frame: pd.DataFrame, method: str, target: str) -> pd.DataFrame:
    """Return each model's log errors on each held-out test, one row for each row left out."""
    found = []
    for test, parts in splits(frame).items():
        for name, refit in models(target).items():
            errors = pd.concat([held_out(frame, refit, part, target=target) for part in parts])
            found.append(errors.assign(test=test, model=name))
        if method == "rtn":  # GPTQ's error has a direction: q without one is off by a factor
            rows = np.flatnonzero(np.any([part.test for part in parts], axis=0))
            found.append(_unfitted(frame, rows, target).assign(test=test, model=UNFITTED))
    return pd.concat(found, ignore_index=True)


def _unfitted(frame: pd.DataFrame, rows: np.ndarray, target: str) -> pd.DataFrame:
    """Return the log errors of q itself, which takes no training rows."""
    test = frame.iloc[rows[scorable(frame.iloc[rows], target)]]
    error = np.log(test["quadratic_delta"] / test[target])
    return pd.DataFrame({"row": test.index, "cluster": test["run"], "log_error": error})


def medians(errors: pd.DataFrame) -> pd.DataFrame:
    """Return the median |log error| of each model (columns) in each test (rows)."""
    size = errors.assign(size=errors["log_error"].abs())
    return size.pivot_table(
        index="test", columns="model", values="size", aggfunc="median", sort=False
    )


def versus(errors: pd.DataFrame, one: str, other: str) -> pd.DataFrame:
    """Test by how much the |log error| of one model exceeds another's, by run."""
    size = errors.assign(size=errors["log_error"].abs())
    wide = size.pivot_table(index=["test", "cluster", "row"], columns="model", values="size")
    found = {}
    for test, part in wide.groupby(level="test", sort=False):
        clusters = part.index.get_level_values("cluster").to_numpy()
        found[test] = asdict(paired((part[one] - part[other]).to_numpy(), clusters))
    return pd.DataFrame(found).T


def law_of_training(target: str, rows: pd.DataFrame) -> Law:
    """Return a product of powers of how a checkpoint was trained, of what varies in the rows."""
    varied = [f for f in TRAINED if rows[list(f.columns)].nunique().gt(1).all()]
    return Law(target, target, (constant("k"), *varied))


def exponents(frame: pd.DataFrame, targets: Sequence[str]) -> pd.DataFrame:
    """Fit how a checkpoint was trained to several quantities, at one setting: exponents and SE."""
    one = frame[(frame["bits"] == 4) & (frame["group"] == "g32")]
    one = one.assign(noise_per_weight=one["quantization_noise"] / one["n_params"])
    found = {}
    for target in targets:
        rows = one.dropna(subset=[target])
        parameters = fit(rows, law_of_training(target, rows)).parameters().drop(index="k")
        found[target] = {
            name: f"{row['estimate']:+.3f} ± {row['se']:.3f}" for name, row in parameters.iterrows()
        }
    return pd.DataFrame(found).T.reindex(columns=["beta", "alpha", "s", "c"]).fillna("")


def planned(frame: pd.DataFrame) -> pd.DataFrame:
    """Predict what Delta is made of from training alone: median |log error| of held-out rows.

    Round-to-nearest at 4 bits in groups of 32: quantities (rows) by held-out test (columns).
    """
    one = frame[(frame["bits"] == 4) & (frame["group"] == "g32")]
    one = one.assign(noise_per_weight=one["quantization_noise"] / one["n_params"])
    found: dict[str, dict[str, float]] = {}
    for target in COMPOSED:
        own = one.dropna(subset=[target]).reset_index(drop=True)
        refit = partial(fit, law=law_of_training(target, own))
        for test, parts in splits(own).items():
            if test == "3 bits":
                continue
            errors = pd.concat([held_out(own, refit, part, target=target) for part in parts])
            found.setdefault(target, {})[test] = errors["log_error"].abs().median()
    return pd.DataFrame(found).T


def directions(frame: pd.DataFrame) -> pd.DataFrame:
    """Compare predictions of KL from curvature alone, by method and whether they know a direction.

    Rows at 3 and 4 bits in groups of 32 that have all of them. Nothing is fitted in ``mean log
    ratio`` and ``median |log error|``; ``one exponent`` is the latter once an amplitude and an
    exponent are fitted to the other runs.
    """
    found = {}
    for method in ("rtn", "gptq"):
        rows = usable(frame, method, bits=(3, 4)).query("group == 'g32'")
        rows = rows.dropna(subset=list(DIRECTED)).reset_index(drop=True)
        for name in DIRECTED:
            one = rows[rows[name] > 0].reset_index(drop=True)
            error = np.log(one[name] / one["kl"])
            law = Law(name, "kl", (constant("k"), power(name, "gamma", starts=(1.0,))))
            parts = splits(one)["other runs"]
            errors = pd.concat(
                [held_out(one, partial(fit, law=law), p, target="kl") for p in parts]
            )
            found[method, name] = {
                "rows": len(one),
                "mean log ratio": error.mean(),
                "median |log error|": error.abs().median(),
                "one exponent": errors["log_error"].abs().median(),
            }
    return pd.DataFrame(found).T


def cells(frame: pd.DataFrame) -> pd.DataFrame:
    """Count checkpoints and rows by size, schedule, peak rate, weight decay, averaging and seed."""
    by = ["n_params", "lr_schedule", "averaging", "weight_decay", "lr_peak", "seed"]
    counted = frame.groupby(by).agg(
        runs=("run", "nunique"), checkpoints=("checkpoint", "nunique"), rows=("spec", "size")
    )
    return counted.reset_index()


def _show(title: str, found: pd.DataFrame, digits: int = 3) -> None:
    """Print a table under its title."""
    print(f"\n{title}\n{found.round(digits).to_string()}")


def main() -> None:
    """Print every table and draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--table", type=Path, help="another table than the shipped one")
    parser.add_argument("--figure", type=Path, help="draw to this .png or .svg file")
    parser.add_argument("--cells", action="store_true", help="only count rows by cell")
    args = parser.parse_args()
    frame = read(args.table)
    print(f"{frame['checkpoint'].nunique()} checkpoints of {frame['run'].nunique()} runs, "
          f"{len(frame)} rows")  # fmt: skip
    if args.cells:
        _show("Rows by cell", cells(frame), digits=6)
        return
    rtn = usable(frame)
    _show_exponents(rtn)
    _show_nested(rtn)
    _show("Predictions of KL without a fit, with and without the error's direction",
          directions(frame))  # fmt: skip
    shown = {method: _show_tests(usable(frame, method), method) for method in ("rtn", "gptq")}
    _show_pairs(frame)
    if args.figure is not None:
        floor, _ = comparisons.noise_floor(rtn, "delta_loss")
        args.figure.parent.mkdir(parents=True, exist_ok=True)
        draw(rtn, shown["rtn"], floor).savefig(args.figure, dpi=110)
        print(f"\nDrawn to {args.figure}.")


def _show_exponents(rtn: pd.DataFrame) -> None:
    """Print whether the tokens exponent survives, and what the exponents are made of."""
    rows = []
    for name in (*PLANNED, "q beside training"):
        law = BESIDE if name == "q beside training" else get(name)
        offset = [] if name == "q beside training" else ["group"]
        made = fit(rtn, law, offset=offset)
        found = made.parameters()
        tokens = found.loc["gamma_D" if name == "kumar" else "beta"]
        rows.append({"law": name, "tokens exponent": tokens["estimate"], "se": tokens["se"],
                     "status": made.search.status})  # fmt: skip
        if name in ("lr_anneal", "q beside training"):
            _show(f"{name}, round-to-nearest at {BITS} bits", found)
    _show("Exponent of tokens by law", pd.DataFrame(rows))
    _show("RTN 4 bits g32: exponents of tokens, 1/size, 1/rate, decay", exponents(rtn, COMPOSED))
    _show("The same laws: median |log error| of held-out rows", planned(rtn))


def _show_nested(rtn: pd.DataFrame) -> None:
    """Print what curvature adds once loss, noise and norm are held fixed, by runs left out."""
    rtn = rtn.dropna(subset=["hessian_top"]).reset_index(drop=True)
    rows = {}
    for name, formula in NESTED.items():
        refit = partial(regress, kind="ols", formula=formula)
        errors = [held_out(rtn, refit, s, target="delta_loss") for s in leave_one_out(rtn, "run")]
        size = pd.concat(errors)["log_error"].abs()
        rows[name] = {"median |log error|": size.median(), "mean": size.mean()}
    _show(f"Nested regressions, each of {rtn['run'].nunique()} runs predicted from the others",
          pd.DataFrame(rows).T)  # fmt: skip


def _show_tests(rows: pd.DataFrame, method: str) -> pd.DataFrame:
    """Print the held-out tests on both targets, and return the medians on delta_loss."""
    found = {}
    for target in ("delta_loss", "kl"):
        errors = scores(rows, method, target)
        found[target] = medians(errors)
        floor, pairs = comparisons.noise_floor(rows, target)
        _show(f"{method}, {target}: median |log error| of held-out rows; seeds' floor "
              f"{floor:.3f} ({pairs} pairs)", found[target].T)  # fmt: skip
        _show("lr_anneal beyond q, by run", versus(errors, "lr_anneal", "q"))
    return found["delta_loss"]


def _show_pairs(frame: pd.DataFrame) -> None:
    """Print what decay, averaging and weight decay change, all else equal."""
    rows = usable(frame, bits=(3, 4))
    hidden = ["hidden_cancelled", "hidden_cancelled_inter", "hidden_relative_error"]
    for name, pair in (
        ("Decay to zero against where it began", comparisons.decays),
        ("Average of the last fifth against its last checkpoint", comparisons.averages),
        ("Weight decay 0.01 against 0.1", comparisons.weight_decays),
    ):
        pairs = pair(rows)
        _show(f"{name}: mean log ratio", comparisons.changes(pairs))
        _show(f"{name}: mean difference", comparisons.differences(pairs, hidden))


if __name__ == "__main__":
    main()
