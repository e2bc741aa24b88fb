"""Fit a regression to a measurement table and judge it by predicting clusters it has not seen."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np

from qscale.columns import COLUMNS
from qscale.errors import FitError
from qscale.fit import fit, mixed
from qscale.fit.effects import Effects
from qscale.fit.grouping import design, estimable, parse, with_levels
from qscale.fit.likelihood import Rows
from qscale.fit.options import check_frame
from qscale.fit.record import Data, hash_of
from qscale.fit.rows import Selection, select
from qscale.laws import Law, get
from qscale.laws.factors import constant
from qscale.regress import inputs
from qscale.regress.models import LEARNED, LINEAR, Base, Predictor, fit_learned, fit_linear
from qscale.regress.regression import Regression
from qscale.table import require

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd

    Array = np.ndarray

KINDS = (*LINEAR, *LEARNED)
_FOLDS = 20
_KEPT_FOLDS = 10  # of learned kinds, whose refits are kept in the file
_SETTING = ("bits", "n_params", "tokens", "loss_fp", "lr_peak", "group_size", "quadratic_delta")
_LANDSCAPE = ("sqnr_db", "hessian_trace", "ggn_trace", "quadratic_delta")
_FOREST = ("n_params", "loss_fp", "bits", "group_size", *_LANDSCAPE)
_NUMBERS = {"forest": _FOREST, "boosting": tuple(dict.fromkeys((*_SETTING, *_LANDSCAPE)))}
_TEXTS = {"forest": ("method", "fmt"), "boosting": ("method", "fmt")}


@dataclass(frozen=True, slots=True)
class _Task:
    """What is refitted without each part of the clusters."""

    kind: str
    target: str
    terms: tuple[str, ...]
    law: Law | None
    cluster: str
    seed: int
    name: str

    def fit(self, frame: pd.DataFrame, clusters: Array) -> tuple[Predictor, tuple[str, ...]]:
        """Fit to rows; return the model and sentences about it."""
        linear = self.kind in LINEAR
        learned, out = inputs.learn(self.terms, frame, independent=linear, name=self.name)
        notes = [f"{name} says nothing that the inputs before it do not; left out." for name in out]
        x, _ = learned.design(frame, self.name)
        y = np.log(frame[self.target].to_numpy(dtype=float))
        if linear:
            if len(x) <= x.shape[1]:
                raise FitError(
                    f"{self.name}: {len(x)} usable rows cannot determine the {x.shape[1]} "
                    f"coefficients of {self.kind}; give a shorter formula."
                )
            model, said = fit_linear(self.kind, x, y, clusters)
            return Predictor(learned, model), (*notes, *said)
        base = None
        if self.law is not None:
            under = fit(frame, self.law, random=(), floor=None, interval="model",
                        cluster=self.cluster, name=self.name)  # fmt: skip
            base = Base(self.law, under.theta)
            y = y - base.location(frame)
        return Predictor(learned, fit_learned(self.kind, x, y, self.seed), base), tuple(notes)


def check_kind(kind: str) -> None:
    """Raise a `FitError` unless a regression is known."""
    if kind not in KINDS:
        raise FitError(f"unknown regression {kind!r}; choose one of {', '.join(KINDS)}.")


def regress(
    frame: pd.DataFrame,
    *,
    kind: str,
    target: str = "delta_loss",
    formula: str | None = None,
    where: str | None = None,
    cluster: str = "run",
    law: Law | str | None = None,
    seed: int = 0,
    name: str = "table",
    mapping: Mapping[str, str] | None = None,
) -> Regression:
    """Fit a regression of the log target, with intervals from clusters it was not fitted to.

    The model is refitted without each cluster, or each of up to twenty parts of them (ten for
    learned kinds), and predicts the rows left out. How far those lie off, by cluster and by row
    (restricted maximum likelihood), is the scatter of a new checkpoint.

    Parameters
    ----------
    frame
        A measurement table, see `qscale.table`.
    kind
        ``ols``, ``rlm``, ``mixedlm`` or ``quantreg`` (`qscale.regress.models.fit_linear`);
        ``forest``, the random forest on parameters, loss before quantization, signal-to-noise
        ratio, format and landscape of Xu et al. (2024, arXiv:2410.12119); ``boosting``; or ``gp``,
        a Gaussian process on the residuals of a law.
    target
        Column to predict; rows where it is not above zero are set aside.
    formula
        Inputs, such as ``log(n_params) + log(tokens) * method`` (`qscale.regress.inputs.parse`).
        None takes all that the kind knows and that vary and are known in nine of ten usable rows:
        for linear kinds and ``gp`` the logs of bits, n_params, tokens, loss_fp, lr_peak,
        group_size and quadratic_delta, and the method; for ``forest`` n_params, loss_fp, bits,
        group_size, sqnr_db, hessian_trace, ggn_trace, quadratic_delta, method and fmt; for
        ``boosting`` all of these.
    where
        A pandas query that rows must satisfy.
    cluster
        Column whose values mark rows with shared noise.
    law
        Law under a ``gp``; None is ``ouyang``.
    seed
        Of forests, boosting and the restarts of a process.
    name
        Name of the table for messages and the record.
    mapping
        How the table's columns were renamed when it was read, for the record.

    Returns
    -------
    Regression
        Behind the same protocol as a fitted law, `qscale.fit.Fitted`.

    Raises
    ------
    FitError
        If the kind or the formula is not known, or there are too few rows or clusters.
    TableError
        If the table is no frame or a column is missing.
    """
    check_frame(frame, "table")
    check_kind(kind)
    if law is not None and kind != "gp":
        raise FitError(f"{kind} has no law under it; only gp takes one.")
    if kind == "gp":
        law = law if isinstance(law, Law) else get(law or "ouyang", target)
    under = law if isinstance(law, Law) else None
    options: dict[str, Any] = {"where": where, "cluster": cluster, "name": name}
    require(frame, [target], name)
    rows = under or Law(kind, target, (constant("k"),))
    usable = select(frame, rows, **options).frame
    terms = _terms(usable, kind, target, formula, name)
    out = () if formula else _unused(usable, kind, terms, target)
    selection = select(frame, rows, needed=inputs.columns_in(terms), **options)
    task = _Task(kind, target, terms, under, cluster, seed, name)
    groups = int(selection.clusters.max()) + 1
    if groups < 3:
        raise FitError(
            f"{name}: {groups} distinct value{'s' * (groups > 1)} of {cluster} cannot judge {kind} "
            "by leaving each out; at least 3 are needed."
        )
    main, notes = task.fit(selection.frame, selection.clusters)
    residuals, refits = _left_out(task, selection)
    effects, said = _scatter(residuals, selection.frame, cluster)
    record = {"kind": kind, "formula": " + ".join(terms), "where": where, "seed": seed,
              "law": under.name if under else None, "mapping": dict(mapping or {})}  # fmt: skip
    made = Regression(
        kind=kind,
        target=target,
        main=main,
        refits=() if kind in LINEAR else refits,
        effects=effects,
        typical=0.0,
        median_error=float(np.median(np.abs(residuals))),
        data=_data(selection, (*inputs.columns_in(terms), *rows.columns), target, task, record),
        notes=(*out, *notes, *said),
        versions={p: version(p) for p in ("qscale", "numpy", "scikit-learn", "statsmodels")},
    )
    if kind in LINEAR:
        made = replace(made, typical=float(made.own_variance(selection.frame).mean()))
    return made


def _terms(
    frame: pd.DataFrame, kind: str, target: str, formula: str | None, name: str
) -> tuple[str, ...]:
    """Terms of the formula, or the default ones."""
    if formula is not None:
        terms = inputs.parse(formula, target)
        require(frame, inputs.columns_in(terms), name)
        if target in inputs.columns_in(terms):
            raise FitError(f"formula {formula!r}: {target} cannot be predicted from itself.")
        return terms
    numbers = [c for c in _NUMBERS.get(kind, _SETTING) if c != target]
    found = inputs.default_terms(frame, numbers, _TEXTS.get(kind, ("method",)))
    if not found:
        raise FitError(
            f"{name}: none of {', '.join(numbers)} varies and is known in nine of ten usable rows; "
            "name the inputs in a formula."
        )
    return tuple(found)


def _unused(frame: pd.DataFrame, kind: str, terms: tuple[str, ...], target: str) -> tuple[str, ...]:
    """Say which columns that vary and that some kind takes are no inputs of this one, and why."""
    used = (*inputs.columns_in(terms), target)
    every = [c for c in dict.fromkeys((*_SETTING, *_LANDSCAPE, "method", "fmt")) if c not in used]
    rest = [c for c in every if c in frame.columns and len(frame[c].dropna().unique()) > 1]
    reasons = {c: inputs.why_not(frame[c]) or f"not among those of {kind}" for c in rest}
    listed = ", ".join(f"{column} ({reason})" for column, reason in reasons.items())
    text = f"left out of the default inputs: {listed}; a formula can name other inputs."
    return (text,) if rest else ()


def _left_out(task: _Task, selection: Selection) -> tuple[Array, tuple[Predictor, ...]]:
    """Residuals of rows whose cluster was left out, shape (n,), and the models that predicted."""
    frame, clusters = selection.frame, selection.clusters
    groups = int(clusters.max()) + 1
    folds = np.arange(groups) % min(groups, _FOLDS if task.kind in LINEAR else _KEPT_FOLDS)
    part = replace(task, name=f"{task.name} without a part of its clusters")
    residuals = np.full(len(frame), np.nan)
    refits = []
    for fold in range(int(folds.max()) + 1):
        out = folds[clusters] == fold
        rest = frame[~out].reset_index(drop=True)
        refit, _ = part.fit(rest, np.unique(clusters[~out], return_inverse=True)[1])
        observed = np.log(frame.loc[out, task.target].to_numpy(dtype=float))
        residuals[out] = observed - refit.locate(frame[out].reset_index(drop=True), part.name)[0]
        refits.append(refit)
    return residuals, tuple(refits)


def _scatter(
    residuals: Array, frame: pd.DataFrame, cluster: str
) -> tuple[Effects, tuple[str, ...]]:
    """Variance of clusters and of rows around predictions made without them, mean held at zero."""
    term = parse(cluster)
    why_not = estimable(term, frame)
    terms = () if why_not else (with_levels(term, frame),)
    one, zero = np.ones((len(residuals), 1)), np.zeros(1)
    model = mixed.Model(
        value=lambda theta: one @ theta,
        gradient=lambda _: one,
        low=zero,
        high=zero,
        effects=design(terms, frame),
        sizes=tuple(len(t.levels) for t in terms),
        rows=Rows(residuals, np.zeros(len(residuals), int), np.zeros(len(residuals)), "gaussian"),
    )
    scale = max(float(np.sqrt(np.mean(residuals**2))), 1e-6)
    found = mixed.estimate(model, zero, scale)
    effects = Effects(
        terms=tuple(replace(t, levels=()) for t in terms),
        values=np.zeros(0),
        variances=found.variances,
        residual=found.sigma**2,
        cov=np.zeros((1, 1)),
        scales_cov=found.scales_cov,
        cov_slopes=np.zeros((len(terms) + 1, 1, 1)),
    )
    return effects, (f"No spread of {cluster}: {why_not}.",) if why_not else ()


def _data(
    selection: Selection,
    columns: tuple[str, ...],
    target: str,
    task: _Task,
    options: dict[str, Any],
) -> Data:
    """Record what was fitted on."""
    frame = selection.frame
    used = frame[list(dict.fromkeys((*columns, target)))]
    texts = [c for c in used if c in COLUMNS and COLUMNS[c].kind == "text"]
    numbers = [c for c in used if c in COLUMNS and COLUMNS[c].kind == "number" and c != target]
    return Data(
        name=task.name,
        sha256=hash_of(used),
        rows=len(frame),
        clusters=int(selection.clusters.max()) + 1,
        cluster=task.cluster,
        set_aside=selection.set_aside,
        ranges={c: (float(frame[c].min()), float(frame[c].max())) for c in numbers},
        levels={c: tuple(sorted(map(str, frame[c].unique()))) for c in texts},
        options=options,
        medians={c: float(frame[c].median()) for c in numbers},
    )
