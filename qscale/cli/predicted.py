"""What ``qscale predict`` prints: predictions, a verdict, what drives them, curvature beside."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from qscale.cli.console import console, number, table
from qscale.errors import QscaleError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import numpy as np
    import pandas as pd

    from qscale.fit import Fit
    from qscale.predict import Candidate
    from qscale.quantize.setting import Setting
    from qscale.regress import Regression

_ABOUT_ORIGIN = ("family", "run", "checkpoint", "source", "protocol")
_APART = 2.0  # joint standard deviations


def in_nats(fitted: Fit | Regression, result: pd.DataFrame) -> pd.DataFrame:
    """Add delta_loss to predictions of relative_delta where the loss before is known.

    Parameters
    ----------
    fitted
        What predicted.
    result
        Its predictions.
    """
    known = "loss_fp" in result.columns and result["loss_fp"].notna().all()
    if fitted.target != "relative_delta" or not known:
        return result
    return result.assign(delta_loss=result["relative_delta"] * result["loss_fp"])


def predictions(
    fitted: Fit | Regression,
    known: dict[str, Any],
    result: pd.DataFrame,
    ranked: Sequence[Candidate],
) -> None:
    """Print the predictions, what lies outside the fitted rows and what the fit itself notes."""
    from qscale.fit import Fit  # noqa: PLC0415
    from qscale.predict import outside, reasons  # noqa: PLC0415

    used = {*fitted.columns, *fitted.categories}
    labels = [c for c in ("method", "fmt") if c in result.columns]
    several = [c for c in labels if len(set(result[c])) > 1]
    settings = [*(c for c in ("bits", "group_size") if c in used), *several]
    facts = known | {c: result[c].iloc[0] for c in labels if c not in several}
    nats = "delta_loss" in result.columns
    also = nats and fitted.target != "delta_loss"
    rows = [
        (
            *(text(row[c]) for c in settings),
            number(row[fitted.target], 3),
            *([number(row["delta_loss"], 3)] if also else []),
            *([ratio(row["delta_loss"])] if nats else []),
            *(f"{number(row[f'low_{i}'], 3)} to {number(row[f'high_{i}'], 3)}" for i in (50, 90)),
        )
        for _, row in result.iterrows()
    ]
    data, word = fitted.data, "Law" if isinstance(fitted, Fit) else "Regression"
    print_plain(f"\n{word} {fitted.name} fitted on {data.rows} rows of {data.name}.")
    if ranked:
        print_plain(f"Chosen: {reasons(ranked)[0]}")
    said = [f"{name} {text(value)}" for name, value in facts.items()]
    print_plain(f"Checkpoint: {', '.join(said) or 'nothing is said of it'}.")
    extra = [*(["delta_loss"] if also else []), *(["ppl ratio"] if nats else [])]
    heading = [fitted.target, *extra, "50 % interval", "90 % interval"]
    console.print(table("", (*settings, *heading), rows))
    if result["low_90"].isna().any():
        why = "its bootstrap has fewer than twenty refits, or its parameters are not determined"
        console.print(f"Note: a dash means that the fit has no interval there: {why}.")
    if fitted.target == "relative_delta" and not nats:
        console.print(
            "Note: relative_delta is delta_loss / loss_fp; --loss-fp gives nats per token."
        )
    for sentence in (*outside(fitted, result), *_averaged(fitted, result), *fitted.notes):
        print_plain(f"Note: {sentence}")


def _averaged(fitted: Fit | Regression, result: pd.DataFrame) -> list[str]:
    """Say which settings were left open; that a new checkpoint is of a new source goes unsaid."""
    return [
        f"{column} is not given: the average of {', '.join(levels)} is predicted, their spread "
        "added."
        for column, levels in fitted.categories.items()
        if column not in _ABOUT_ORIGIN and (column not in result or result[column].isna().any())
    ]


def verdict(fitted: Fit | Regression, frame: pd.DataFrame, observed: float) -> None:
    """Print where a measured loss increase, in nats per token, lies in what is predicted."""
    from qscale.predict import judge  # noqa: PLC0415

    scale = 1.0
    if fitted.target == "relative_delta":
        if "loss_fp" not in frame.columns or frame["loss_fp"].isna().any():
            raise QscaleError(
                "--observed is in nats per token, the fit predicts relative_delta: add --loss-fp."
            )
        scale = float(frame["loss_fp"].iloc[0])
        print_plain(f"{number(observed)} nats per token are {number(observed / scale)} of loss_fp.")
    elif fitted.target != "delta_loss":
        raise QscaleError(f"--observed is a delta_loss. Got a fit of {fitted.target} instead.")
    found = judge(fitted, frame, observed / scale)
    print_plain(f"Observed: {' '.join(found.sentences)}")


def drivers(fitted: Fit | Regression, frame: pd.DataFrame, ranked: Sequence[Candidate]) -> None:
    """Print what each factor contributes, what the fit has not seen, and the other fits."""
    from qscale.fit import Fit  # noqa: PLC0415
    from qscale.predict import contributions, outside, reasons, unread  # noqa: PLC0415

    parts = [contributions(fitted, frame.iloc[[i]]) for i in range(len(frame))]
    names = ("bits", "group_size", "method", "fmt")
    varying = [c for c in names if c in frame and len(frame[c].drop_duplicates()) > 1]
    heads = [", ".join(f"{c} {text(row[c])}" for c in varying) for _, row in frame.iterrows()]
    kind = "factor" if isinstance(fitted, Fit) else "column on its own"
    print_plain(f"\nWhat drives it, against the median of the fitted rows, by {kind}:")
    errors = ["log ± SE"] if len(parts) == 1 else []
    heading = ("", "here", "median", *(head or "times" for head in heads), *errors)
    console.print(table("", heading, _lines(parts)))
    said = [*outside(fitted, frame), *unread(fitted, frame)]
    print_plain(f"Not seen: {' '.join(said) or 'nothing that is known lies outside the data.'}")
    for sentence in reasons(ranked)[1:] if ranked else []:
        print_plain(f"Not chosen: {sentence}.")


def _lines(parts: Sequence[pd.DataFrame]) -> list[tuple[str, ...]]:
    """One line for each contribution, of one setting with its error, of several side by side."""
    lines = []
    for i in range(len(parts[0])):
        same = [part.iloc[i] for part in parts]
        here = same[0]["here"] if len({row["here"] for row in same}) == 1 else ""
        if "average" in here and not any(row["log_ratio"] for row in same):
            continue
        times = [f"x {number(row['ratio'], 3)}" for row in same]
        log = f"{same[0]['log_ratio']:+.3f} ± {number(same[0]['log_ratio_se'], 2)}"
        errors = [log] if len(parts) == 1 else []
        lines.append((same[0]["term"], here, same[0]["median"], *times, *errors))
    return lines


def unusable(ranked: Sequence[Candidate]) -> None:
    """Say that no shipped fit can be used, and what the nearest needs."""
    from qscale.predict import reasons  # noqa: PLC0415

    print_plain(f"\nNo shipped fit can be used: {reasons(ranked)[0]}")


def curvature(
    checkpoint: str, path: Path, settings: Sequence[Setting], context: int | None, probes: int
) -> pd.DataFrame:
    """Predict from curvature times quantization noise, nothing fitted; see `zero_fit`."""
    from qscale.measure.zerofit import zero_fit  # noqa: PLC0415

    found = zero_fit(checkpoint, path, settings=settings, context=context, num_probes=probes)
    console.print(
        "\nWithout any fit: curvature times quantization noise of round-to-nearest "
        f"({settings[0].weights.scale_rule}), from {found['backward_passes'][0]:g} backward "
        f"passes on {path.name}, probe error ± 1 SE."
    )
    return found.assign(method="rtn", fmt="int")


def joined(
    fitted: Fit | Regression | None,
    known: Mapping[str, Any],
    settings: Mapping[str, Sequence[Any]],
    rows: pd.DataFrame,
) -> pd.DataFrame:
    """Print predictions from curvature, from the fit, and both together; return them by setting.

    Parameters
    ----------
    fitted
        What predicts beside it; None if nothing can.
    known, settings
        As for `qscale.cli.described.settings_of`.
    rows
        What `curvature` returned.
    """
    import numpy as np  # noqa: PLC0415
    import pandas as pd  # noqa: PLC0415

    from qscale.predict import combine, zero_fit_prediction  # noqa: PLC0415

    own = zero_fit_prediction(rows)
    why, (law, law_sd) = _by_law(fitted, known, settings, rows)
    both = combine((own["log_mean"].to_numpy(), own["log_sd"].to_numpy()), (law, law_sd))
    found = pd.concat([rows.reset_index(drop=True), both], axis=1)
    found = found.assign(
        corrected=np.exp(own["log_mean"]), by_law=np.exp(law), why_not=own["why_not"]
    )
    lines = [
        (
            number(row["bits"]),
            "row" if pd.isna(row["group_size"]) else number(row["group_size"]),
            f"{row['bits_per_weight']:.3f}",
            f"{number(row['quadratic_delta'], 3)} ± {number(row['quadratic_delta_se'], 2)}",
            number(row["by_law"], 3),
            number(row["delta_loss"], 3),
            f"{number(row['low_90'], 3)} to {number(row['high_90'], 3)}",
            f"{100 * row['weight']:.0f} %" if row["weight"] > 0 else "-",
        )
        for _, row in found.iterrows()
    ]
    by = fitted.name if fitted else "law"
    heading = ("bits", "group_size", "bits_per_weight", "curvature", by, "joined", "90 % interval",
               "weight of curvature")  # fmt: skip
    console.print(table("", heading, lines))
    for sentence in (*why, *_unused(found), *_disagreeing(found)):
        print_plain(f"Note: {sentence}")
    return found


def _by_law(
    fitted: Fit | Regression | None,
    known: Mapping[str, Any],
    settings: Mapping[str, Sequence[Any]],
    rows: pd.DataFrame,
) -> tuple[list[str], tuple[np.ndarray, np.ndarray]]:
    """Predict the rows by the fit on the log scale, or say why it is not of the same increase."""
    import numpy as np  # noqa: PLC0415

    from qscale import table as tables  # noqa: PLC0415
    from qscale.predict import normal_log  # noqa: PLC0415

    nothing = (np.full(len(rows), np.nan),) * 2
    if fitted is None:
        return [], nothing
    seen = fitted.data.levels.get("method", fitted.categories.get("method"))
    asked = settings["method"] or list(seen or ())
    if "rtn" not in asked or (seen is not None and "rtn" not in seen):
        of = ", ".join(seen or asked) or "an unknown method"
        return [
            f"the fit is of {of} and curvature of round-to-nearest: they are not joined."
        ], nothing
    wide = rows[["bits", "group_size", "method", "fmt"]].assign(
        **{column: value for column, value in known.items() if column not in rows.columns}
    )
    wide = tables.check(wide, "prediction")
    mean, sd = normal_log(fitted, wide)
    if fitted.target == "relative_delta":
        if known.get("loss_fp") is None:
            return ["the fit is of relative_delta: give --loss-fp to join it."], nothing
        mean = mean + np.log(float(known["loss_fp"]))
    elif fitted.target != "delta_loss":
        return [f"the fit is of {fitted.target}: they are not joined."], nothing
    return [], (mean, sd)


def _unused(found: pd.DataFrame) -> list[str]:
    """Say for which settings the prediction from curvature is not used, and why."""
    without = found[found["why_not"] != ""]
    return [
        f"curvature is not used at {', '.join(f'{bits:g}' for bits in part['bits'].unique())} "
        f"bits: {why}."
        for why, part in without.groupby("why_not", sort=False)
    ]


def _disagreeing(found: pd.DataFrame) -> list[str]:
    """Say where curvature and law are further apart than their errors allow."""
    apart = found[found["disagreement"].abs() > _APART]
    if apart.empty:
        return []
    widths = ", ".join(f"{bits:g}" for bits in apart["bits"].unique())
    most = apart["disagreement"].abs().max()
    sentence = (
        f"at {widths} bits the two are up to {most:.1f} joint standard deviations apart: the "
        "interval is widened by as much, and one of them does not hold."
    )
    return [sentence]


def print_plain(sentence: str) -> None:
    """Print a sentence as it is, whatever brackets are in it."""
    console.print(sentence, markup=False)


def text(value: Any) -> str:
    """Format a number, text or flag; a null prints as a dash."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return number(value, 6)


def ratio(delta_loss: float) -> str:
    """Format the perplexity ratio exp(delta_loss)."""
    return number(math.exp(delta_loss)) if delta_loss < math.log(1e6) else "> 1e+06"
