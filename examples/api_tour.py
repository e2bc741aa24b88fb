"""All that the command line does, from Python: one short function for each command.

The measuring steps take a checkpoint of half a million parameters and need the measure extra; the
whole tour takes about a minute. Files go to ``out/tour``::

    python examples/api_tour.py
"""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from qscale import datasets, table
from qscale.fit import fit
from qscale.laws import LAWS, get
from qscale.load import load_fitted
from qscale.predict import (
    candidates,
    combine,
    contributions,
    judge,
    normal_log,
    outside,
    predict,
    reasons,
    zero_fit_prediction,
)

HERE = Path(__file__).resolve().parent
TINY = HERE / "checkpoints" / "tiny-wsd-decayed"
TEXT = HERE / "texts" / "austen-wilde-darwin.txt"
NEW = pd.DataFrame({"n_params": 13e9, "tokens": 2e12, "bits": [3.0, 4.0]})


def data_and_laws() -> pd.DataFrame:
    """``qscale datasets``, ``qscale laws``: what there is to fit, and with what."""
    print(", ".join(sorted(LAWS)))
    print(get("kumar").formula)
    return datasets.load("published_ptq")


def fitting(rows: pd.DataFrame, out: Path) -> Path:
    """``qscale fit``: a law's fit, as statisticians print it."""
    gptq = get("kumar").fit(rows, where="method == 'gptq'", offset=["source", "protocol"])
    print(gptq.summary())
    print(gptq.conf_int(alpha=0.05).loc["gamma_D"].to_dict())
    drawn = [gptq.plot.fitted(), gptq.plot.profile("gamma_D"), gptq.plot.curves("bits")]
    for name, ax in zip(("fitted", "profile", "curves"), drawn, strict=True):
        ax.get_figure(root=True).savefig(out / f"{name}.png")
    gptq.save(out / "kumar.json")
    return out / "kumar.json"


def predicting(path: Path) -> pd.DataFrame:
    """``qscale predict``: with a fit of one's own, and by the shipped one that covers it best."""
    own = load_fitted(path)
    print(outside(own, NEW) or "inside the fitted ranges")
    ranked = candidates({"n_params": 13e9, "tokens": 2e12, "bits": [3, 4], "method": "gptq"})
    print(*reasons(ranked), sep="\n")
    print(contributions(ranked[0].fit, NEW.head(1))[["term", "ratio"]])
    verdict = judge(ranked[0].fit, NEW.head(1), 0.31)
    print(f"percentile {verdict.percentile:.0f}: {' '.join(verdict.sentences)}")
    measured = NEW.head(1).assign(delta_loss=0.31, run="mine")
    print(predict(own.given(measured), NEW.assign(run="mine"))[["bits", "delta_loss", "high_90"]])
    return predict(own, NEW)


def planning(path: Path) -> float:
    """``qscale plan``: the fewest bits within a tolerance, and what to measure next."""
    from qscale.plan import choose, fewest_bits  # noqa: PLC0415

    own = load_fitted(path)
    settings = pd.concat(
        [NEW.head(1).assign(bits=bits, bits_per_weight=bits) for bits in (2, 3, 4)]
    )
    choice = fewest_bits(own, settings, tolerance=0.25, confidence=0.9)
    print(choice.settings[["bits", "delta_loss", "bound", "probability", "kept"]])
    offered = settings.assign(run="mine")
    print(choose(own, offered.iloc[:2], offered.iloc[2:], count=1)[["bits", "sd"]])
    assert choice.chosen is not None
    return float(choice.chosen["bits"])


def regressing(rows: pd.DataFrame, out: Path) -> None:
    """``qscale regress``: a regression instead of a law, and a law inside scikit-learn."""
    from sklearn.model_selection import GroupKFold, cross_val_score  # noqa: PLC0415

    from qscale.estimator import LawRegressor  # noqa: PLC0415
    from qscale.regress import regress  # noqa: PLC0415

    linear = regress(rows, kind="ols", where="method in ['gptq', 'rtn']", name="published_ptq")
    print(linear.summary())
    linear.save(out / "ols.json")
    used = rows[rows["method"] == "gptq"].dropna(subset=["tokens", "n_params", "bits", "run"])
    used = used[used["delta_loss"] > 0]
    scores = cross_val_score(
        LawRegressor("kumar"), used, used["delta_loss"], groups=used["run"], cv=GroupKFold(4),
        scoring="neg_median_absolute_error",
    )  # fmt: skip
    print("median absolute error by fold:", -scores)


def comparing(rows: pd.DataFrame) -> pd.DataFrame:
    """``qscale compare``: which law predicts families that it has not seen."""
    from qscale.validate import compare, parse  # noqa: PLC0415

    rows = rows[rows["method"] == "rtn"].reset_index(drop=True)
    models = {name: partial(fit, law=get(name), interval="model") for name in ("kumar", "ouyang")}
    league = compare(rows, models, parse("family", rows), cluster="family")
    print(league.table[["model", "mean_abs_log_error", "coverage_90"]])
    return league.table


def selecting() -> tuple[str, ...]:
    """``qscale select``: which factors the public learning rates support."""
    from qscale.select import select_factors  # noqa: PLC0415

    rates = datasets.load("ptq_vs_learning_rate").query("averaging != 'lawa'")
    found = select_factors(rates, get("ouyang", "relative_delta"), ["lr_peak", "anneal"])
    print(f"supported: {', '.join(found.chosen)}")
    print(*found.confounding.warnings, sep="\n")
    return found.chosen


def measuring(out: Path) -> pd.DataFrame:
    """``qscale specs``, ``qscale measure``, ``qscale plot``: rows of one's own checkpoint."""
    from qscale.measure.run import measure  # noqa: PLC0415
    from qscale.quantize.mix import parse_setting  # noqa: PLC0415
    from qscale.report import landscape  # noqa: PLC0415

    specs = ("rtn int3 g64", "rtn int4 g64", "rtn mxfp4")
    settings = [parse_setting(spec) for spec in specs]
    rows = measure(
        TINY, TEXT, out / "rows.csv", settings=settings, context=128, max_windows=16,
        probe_windows=4,
    )  # fmt: skip
    print(rows[["spec", "bits_per_weight", "delta_loss", "delta_loss_se", "quadratic_delta"]])
    figure = landscape.zero_fit(rows, ("quadratic_delta",)).get_figure(root=True)
    figure.savefig(out / "zero_fit.png")
    return rows


def joining(rows: pd.DataFrame) -> pd.DataFrame:
    """``qscale predict --text``: curvature and the law, weighed by their tested errors."""
    law = load_fitted("published_rtn_kumar")
    own = zero_fit_prediction(rows)
    both = combine(
        (own["log_mean"].to_numpy(), own["log_sd"].to_numpy()),
        normal_log(law, rows.drop(columns="group_size")),
    )
    print(both[["delta_loss", "low_90", "high_90", "weight", "disagreement"]])
    return both


def quantizing(out: Path) -> None:
    """``qscale quantize``, ``qscale sensitivity``: a folder to evaluate, what matrices cost."""
    from qscale import model  # noqa: PLC0415
    from qscale.measure.sensitivity import sensitivity  # noqa: PLC0415
    from qscale.quantize import save  # noqa: PLC0415
    from qscale.quantize.apply import apply  # noqa: PLC0415
    from qscale.quantize.mix import parse_setting  # noqa: PLC0415

    setting = parse_setting("rtn int3 g64")
    opened = model.load(TINY)
    weights = model.quantizable(opened.model)
    applied = apply(opened.model, weights, setting)
    save.save(opened, applied.weights, out / "quantized", facts={"spec": str(setting)})
    found = sensitivity(
        TINY, TEXT, out / "matrices.csv", setting=setting, measured=False, context=128,
        probe_windows=4, num_probes=2,
    )  # fmt: skip
    print(found.matrices[["matrix", "quadratic_delta", "gauss_newton_delta"]].head(3))


def sweeping(out: Path) -> pd.DataFrame:
    """``qscale sweep``: a plan of tasks, done here by one worker, and their rows."""
    from qscale.sweep import plan, store  # noqa: PLC0415
    from qscale.sweep.collect import collect  # noqa: PLC0415
    from qscale.sweep.work import Job, work  # noqa: PLC0415

    path = out / "plan.toml"
    path.write_text(
        f'task = "measure"\n[fixed]\ncheckpoint = "{TINY}"\ntext = "{TEXT}"\nfeatures = ""\n'
        'context = 128\nmax_windows = 8\n[grid]\nspecs = ["rtn int3 g64", "rtn int4 g64"]\n'
    )
    read, folder = plan.read(path), out / "plan.sweep"
    store.prepare(folder)
    job = Job(folder, read.function, read.source, out, read.tasks, 0, time.time(), None, False)
    work(job)
    records, _ = store.records(folder, (task.hash for task in read.tasks))
    collect(folder, records, out / "swept.parquet")
    rows = table.read(out / "swept.parquet")
    print(rows[["spec", "delta_loss"]])
    return rows


def reporting(path: Path, rows: pd.DataFrame, out: Path) -> Path:
    """``qscale report``: one page; and single figures for a notebook."""
    from qscale.report import plots, write_report  # noqa: PLC0415

    shown = load_fitted(path)
    plots.predicted(shown, rows).get_figure(root=True).savefig(out / "predicted.png")
    plots.residuals(shown, rows, "bits").get_figure(root=True).savefig(out / "residuals.png")
    return write_report(
        {"kumar": shown}, out / "report.html", table="published_ptq", force=True
    ).html


def main(out: Path = Path("out/tour")) -> None:
    """Take the tour."""
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    for old in ("rows.csv", "matrices.csv"):
        (out / old).unlink(missing_ok=True)
    rows = data_and_laws()
    path = fitting(rows, out)
    table.write(predicting(path), out / "predicted.csv")
    planning(path)
    regressing(rows, out)
    comparing(rows)
    selecting()
    measured = measuring(out)
    joining(measured)
    quantizing(out)
    sweeping(out)
    print(f"Report: {reporting(path, rows, out)}")
    assert np.isfinite(measured["delta_loss"]).all()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
