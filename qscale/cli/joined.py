"""What ``qscale predict --text`` prints: curvature, the fit, and both joined."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from qscale.cli.console import console, number, span, table
from qscale.cli.predicted import guessing, print_plain, widths
from qscale.errors import QscaleError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    import pandas as pd

    from qscale.cli.facts import Curvature
    from qscale.cli.subject import Subject
    from qscale.fit import Fit
    from qscale.quantize.setting import Setting
    from qscale.regress import Regression

_APART = 2.0  # joint standard deviations


def curvature_of(subject: Subject, how: Curvature, settings: Sequence[Setting]) -> pd.DataFrame:
    """Predict round-to-nearest from curvature times noise, nothing fitted; see `zero_fit`."""
    if how.text is None or subject.checkpoint is None:
        raise QscaleError("curvature is taken of a checkpoint on a text: give --text.")
    from qscale.measure.zerofit import zero_fit  # noqa: PLC0415

    found = zero_fit(
        subject.checkpoint, how.text, settings=settings, context=how.context, num_probes=how.probes
    )
    return found.assign(method="rtn", fmt="int")


def of_rounding(fitted: Fit | Regression | None, settings: Mapping[str, Sequence[Any]]) -> bool:
    """Whether round-to-nearest, whose cost curvature predicts, is among what is asked for."""
    seen = _methods(fitted)
    asked = settings["method"] or list(seen or ("rtn",))
    return "rtn" in asked and (seen is None or "rtn" in seen)


def _methods(fitted: Fit | Regression | None) -> Sequence[str] | None:
    """Methods among the rows of a fit, if it says."""
    if fitted is None:
        return None
    return fitted.data.levels.get("method", fitted.categories.get("method"))


def joined(
    fitted: Fit | Regression | None, subject: Subject, rows: pd.DataFrame
) -> tuple[pd.DataFrame, list[str]]:
    """Predict from curvature, from the fit, and by both together.

    Parameters
    ----------
    fitted
        What predicts beside it; None if nothing can.
    subject
        What is known, and what was asked for.
    rows
        What `curvature_of` returned.

    Returns
    -------
    pandas.DataFrame, list of str
        One line for each setting, and what is to be said of them. A fit that is far outside its
        data is in, but not joined.
    """
    import numpy as np  # noqa: PLC0415
    import pandas as pd  # noqa: PLC0415

    from qscale.predict import combine, zero_fit_prediction  # noqa: PLC0415

    own = zero_fit_prediction(rows)
    why, (law, law_sd) = _by_law(fitted, subject.known, subject.settings, rows)
    both = combine((own["log_mean"].to_numpy(), own["log_sd"].to_numpy()), (law, law_sd))
    found = pd.concat([rows.reset_index(drop=True), both], axis=1)
    found = found.assign(
        corrected=np.exp(own["log_mean"]), by_law=np.exp(law), why_not=own["why_not"]
    )
    loss = subject.known.get("loss_fp")
    guessed = guessing(found["bits"], found["delta_loss"], loss, subject.symbols)
    said = [*_meaning(found), *_unused(found), *_disagreeing(found)]
    return found, [*why, *said, *_beyond_tested(subject, found), *guessed]


def show(found: pd.DataFrame, notes: Sequence[str], by: str) -> None:
    """Print what `joined` returned; ``by`` names the law."""
    import pandas as pd  # noqa: PLC0415

    lines = [
        (
            number(row["bits"]),
            "row" if pd.isna(row["group_size"]) else number(row["group_size"]),
            f"{row['bits_per_weight']:.3f}",
            number(row["delta_loss"], 3),
            span(row["low_90"], row["high_90"]),
            f"{number(row['quadratic_delta'], 3)} ± {number(row['quadratic_delta_se'], 2)}",
            number(row["by_law"], 3),
            f"{100 * row['weight']:.0f} %" if row["weight"] > 0 else "-",
        )
        for _, row in found.iterrows()
    ]
    heading = ("bits", "group_size", "bits_per_weight", "joined", "90 % interval", "curvature", by,
               "weight of curvature")  # fmt: skip
    print_plain(
        "\nLoss increase by round-to-nearest, nats per token, from the checkpoint's curvature "
        f"({found['backward_passes'].iloc[0]:g} backward passes, ± 1 SE) and the law."
    )
    console.print(table("", heading, lines))
    for sentence in notes:
        print_plain(f"Note: {sentence}")


def _by_law(
    fitted: Fit | Regression | None,
    known: Mapping[str, Any],
    settings: Mapping[str, Sequence[Any]],
    rows: pd.DataFrame,
) -> tuple[list[str], tuple[np.ndarray, np.ndarray]]:
    """Predict the rows by the fit on the log scale, or say why it is not of the same increase.

    The standard deviation is null where the fit is too far outside its data to be joined.
    """
    import numpy as np  # noqa: PLC0415

    from qscale import table as tables  # noqa: PLC0415
    from qscale.predict import FAR, furthest, normal_log  # noqa: PLC0415

    nothing = (np.full(len(rows), np.nan),) * 2
    if fitted is None:
        return [], nothing
    if not of_rounding(fitted, settings):
        of = ", ".join(_methods(fitted) or settings["method"])
        return [f"the fit is of {of} and curvature of round-to-nearest: they differ."], nothing
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
        return [f"the fit is of {fitted.target}, not of delta_loss."], nothing
    distances = furthest(fitted, wide)
    column, factor = max(distances, key=lambda item: item[1])
    far = np.array([times >= FAR for _, times in distances])
    if not far.any():
        return [], (mean, sd)
    why = (
        f"{fitted.name} is {factor:.3g} times outside its fitted range in {column}: at "
        f"{widths(rows['bits'][far])} bits it is shown, but not joined."
    )
    return [why], (mean, np.where(far, np.nan, sd))


def _meaning(found: pd.DataFrame) -> list[str]:
    """Say what joined is where it is not made of both, and where there is none."""
    sentences = []
    if not ((found["weight"] < 1) & found["weight"].notna()).any():
        sentences.append(
            "joined is curvature alone, times the factor and with the error that it was tested to "
            "have."
        )
    blank = found.loc[found["delta_loss"].isna(), "bits"]
    if len(blank):
        sentences.append(
            f"at {widths(blank)} bits joined is left blank: neither curvature nor a law is tested "
            "there. qscale measure says what it costs."
        )
    return sentences


def _unused(found: pd.DataFrame) -> list[str]:
    """Say for which settings the prediction from curvature is not used, and why."""
    without = found[found["why_not"] != ""]
    return [
        f"curvature is not used at {widths(part['bits'])} bits: {why}."
        for why, part in without.groupby("why_not", sort=False)
    ]


def _beyond_tested(subject: Subject, found: pd.DataFrame) -> list[str]:
    """Say that curvature counts for a model of a size on which its error was not tested."""
    from qscale.predict import sizes_tested  # noqa: PLC0415

    sizes, size = sizes_tested(), subject.known.get("n_params")
    if sizes is None or size is None or not (found["weight"] > 0).any():
        return []
    low, high = sizes
    if low <= size <= high:
        return []
    sentence = (
        f"the error of curvature was tested on models of {number(low, 3)} to {number(high, 3)} "
        f"parameters; at {number(size, 3)} it is taken to be the same: measure one setting."
    )
    return [sentence]


def _disagreeing(found: pd.DataFrame) -> list[str]:
    """Say where curvature and law are further apart than their errors allow."""
    apart = found[found["disagreement"].abs() > _APART]
    if apart.empty:
        return []
    most = apart["disagreement"].abs().max()
    sentence = (
        f"at {widths(apart['bits'])} bits the two are up to {most:.1f} joint standard deviations "
        "apart: the interval is widened by as much, and one of them does not hold."
    )
    return [sentence]


def verdict_of_joined(row: pd.Series, observed: float, *, extrapolated: bool) -> None:
    """Print where a measured loss increase, in nats per token, lies in the joined prediction."""
    from qscale.predict import judge_interval  # noqa: PLC0415

    if math.isnan(row["low_90"]):
        print_plain("Observed: nothing is joined at this setting, so that there is no band for it.")
        return
    found = judge_interval(
        float(row["low_90"]), float(row["high_90"]), observed, extrapolated=extrapolated
    )
    print_plain(f"Observed, against joined: {' '.join(found.sentences)}")
