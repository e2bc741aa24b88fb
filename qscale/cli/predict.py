"""``qscale predict``: what quantization will cost a described checkpoint or a checkpoint folder."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from qscale.cli import joined as both
from qscale.cli import predicted as show
from qscale.cli.console import console, group_sizes, numbers, refuse_existing
from qscale.cli.described import (
    FLAGS,
    Count,
    assigned,
    completed,
    described,
    measured,
    parted,
    settings_of,
)
from qscale.cli.settings import quantizer_settings
from qscale.errors import QscaleError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pandas as pd

    from qscale.fit import Fit
    from qscale.predict import Candidate
    from qscale.quantize.setting import Setting
    from qscale.regress import Regression


def predict(
    fit: str | None = None,
    checkpoint: str | None = None,
    /,
    *,
    bits: str = "2,3,4",
    group_size: str = "128",
    method: str | None = None,
    fmt: str | None = None,
    n_params: Count | None = None,
    tokens: Count | None = None,
    lr_peak: float | None = None,
    lr: float | None = None,
    loss_fp: float | None = None,
    family: str | None = None,
    source: str | None = None,
    set_: Annotated[list[str] | None, Parameter(name="--set")] = None,
    given: Path | None = None,
    observed: float | None = None,
    explain: bool = False,
    text: Path | None = None,
    context: int | None = None,
    probes: int = 6,
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
    force: bool = False,
) -> None:
    r"""Predict the loss increase of an unseen checkpoint, with intervals and plain warnings.

    Describe the checkpoint with flags, or give it: parameters are counted and training facts read
    from its qscale.toml, flags taking precedence. Without a fit, the shipped one that covers the
    checkpoint best is taken, and why is said. With --text the checkpoint's own curvature predicts
    what round-to-nearest costs; where that is tested, it is joined with the fit's, unless the
    fit is more than ten times outside its data, and the two together are the answer.

    ```sh
    # A described model
    qscale predict --n-params 13e9 --tokens 2e12 --bits 3,4 --method gptq
    # From a fit of your choice: is a measured increase of 0.31 normal?
    qscale predict published_gptq_kumar --n-params 13e9 --tokens 2e12 \
        --bits 3 --method gptq --observed 0.31
    # A checkpoint, with its own curvature on a text
    qscale predict examples/checkpoints/tiny-wsd-stable --bits 3,4 \
        --text examples/texts/austen-wilde-darwin.txt
    ```

    Next: qscale plan bits finds the fewest bits that keep a tolerance; qscale measure says whether
    the prediction holds, and --given takes in what it measured.

    Parameters
    ----------
    fit
        A fit written by qscale fit or qscale regress, or the name of a shipped fit. May be left
        out.
    checkpoint
        Hugging Face folder with safetensors, .gguf file or hub id.
    bits
        Bit widths, separated by commas.
    group_size
        Weights sharing a scale, separated by commas; row is one scale per row.
    method
        Quantization methods, separated by commas, checked against those the fit has seen.
    fmt
        Number formats, separated by commas, checked against those the fit has seen.
    n_params
        Non-embedding parameters, such as 13e9.
    tokens
        Training tokens, such as 2e12.
    lr_peak
        Peak learning rate, such as 3e-4.
    lr
        Learning rate at the checkpoint (0 at the end of a decay to zero).
    loss_fp
        Loss before quantization, nats per token.
    family
        Level of an offset in the fit; left out, the average level and its spread are used.
    source
        Source of the rows, as a level of an offset in the fit; left out, as for family.
    set_
        NAME=VALUE of any other column that the fit needs, such as sqnr_db=21. May be repeated.
    given
        Table of one or a few measured rows of this checkpoint (bits, method, delta_loss and the
        like; what it lacks is taken from the flags, and what they lack from it). They update what
        is known of it, so that the other settings are predicted more narrowly.
    observed
        A measured loss increase of one setting, nats per token: where it lies in what is
        predicted, and whether that is normal.
    explain
        Also show what each factor contributes against the median checkpoint of the fit's data,
        what the fit has not seen, and how the shipped fits compare.
    text
        UTF-8 text file for the curvature of the checkpoint (needs the measure extra).
    context
        Tokens per window of the text; by default the model's longest input, but at most 512.
    probes
        Backward passes over the probe windows.
    output
        Write the predictions to this .csv or .parquet file; with --text those that were joined,
        if round-to-nearest is predicted.
    force
        Replace the output if it exists.
    """
    refuse_existing(output, force, ".csv", ".parquet")
    named, checkpoint = parted(fit, checkpoint)
    settings: dict[str, Any] = {
        "bits": numbers(bits, "--bits"),
        "group_size": group_sizes(group_size),
        "method": _listed(method),
        "fmt": _listed(fmt),
    }
    # Checked before any work.
    quantizers = _quantizers(text, checkpoint, bits, group_size)
    if observed is not None and len(quantizers) > 1:
        raise QscaleError(_ONE_SETTING)
    values = (n_params, tokens, lr_peak, lr, loss_fp, family, source)
    flags = _finite(dict(zip(FLAGS, values, strict=True)), observed)
    subject = _subject(named, checkpoint, flags, set_ or [], settings, given, text is not None)
    law = None if text is not None and not subject.usable else _law(subject, given)
    by_both = text is not None and both.of_rounding(
        None if law is None else law.fitted, subject.settings
    )
    if observed is not None:
        _check_observed(law, subject, by_both)
    rows = None
    if checkpoint is not None and text is not None:
        rows = both.curvature(checkpoint, text, quantizers, context, probes)
    # The answer comes first, its parts after it.
    answers = []
    if rows is not None and by_both:
        answers.append(_show_joined(law, subject, rows, observed))
    if law is not None:
        _show_law(law, subject, given, None if by_both else observed, explain)
        answers.append(law.result)
    if rows is not None and not by_both:
        answers.append(_show_joined(law, subject, rows, None))
    if output is not None:
        from qscale import table as tables  # noqa: PLC0415

        tables.write(answers[0], output)
        console.print(f"Written to {output}.")


_ONE_SETTING = "--observed belongs to one setting: give one value of --bits and others."


@dataclass(frozen=True, slots=True, eq=False)
class _Subject:
    """What is to be predicted, and by what.

    Parameters
    ----------
    fitted
        What predicts.
    flags
        Facts that were given as options.
    known
        All facts.
    settings
        Values of each column of the quantizer settings.
    symbols
        Size of the checkpoint's vocabulary, if known.
    ranked
        The shipped fits it was chosen from; empty if it was named.
    """

    fitted: Fit | Regression
    flags: dict[str, Any]
    known: dict[str, Any]
    settings: dict[str, Any]
    symbols: int | None
    ranked: tuple[Candidate, ...]

    @property
    def usable(self) -> bool:
        """Whether all that the fit needs is known, so far as that decided its choice."""
        return not self.ranked or self.ranked[0].usable


@dataclass(frozen=True, slots=True, eq=False)
class _Law:
    """Predictions of a fit.

    Parameters
    ----------
    fitted, informed
        The fit, and what it is after measured rows.
    frame
        The settings.
    rows
        The measured rows, if any.
    result
        What is predicted.
    """

    fitted: Fit | Regression
    informed: Fit | Regression
    frame: pd.DataFrame
    rows: pd.DataFrame | None
    result: pd.DataFrame


def _law(subject: _Subject, given: Path | None) -> _Law:
    """Predict by the fit."""
    from qscale.predict import predict as predict_rows  # noqa: PLC0415

    fitted = informed = subject.fitted
    frame, rows = settings_of(fitted, subject.known, subject.settings), None
    if given is not None:
        rows, frame = measured(fitted, subject.known, subject.settings, frame, given)
        informed = fitted.given(rows)
    result = show.in_nats(fitted, predict_rows(informed, frame))
    return _Law(fitted, informed, frame, rows, result)


def _show_law(
    law: _Law, subject: _Subject, given: Path | None, observed: float | None, explain: bool
) -> None:
    """Print what the fit predicts, and what was asked about it."""
    fitted, ranked = law.fitted, subject.ranked
    shown = {*subject.flags, *fitted.columns, *fitted.categories, "family"}
    facts = {column: value for column, value in subject.known.items() if column in shown}
    also = show.unused(fitted, subject.flags, ranked)
    if "bits" in law.result and "delta_loss" in law.result:
        loss = subject.known.get("loss_fp")
        also += show.guessing(law.result["bits"], law.result["delta_loss"], loss, subject.symbols)
    show.predictions(fitted, facts, law.result, ranked, also)
    if law.rows is not None:
        count = len(law.rows)
        console.print(f"Given: {count} measured row{'s' * (count > 1)} of {given}.")
        for sentence in show.of_another_kind(fitted, law.rows, law.frame):
            show.print_plain(f"Note: {sentence}")
    if observed is not None:
        show.verdict(law.informed, law.frame, observed)
    if explain:
        show.drivers(law.informed, law.frame, ranked)


def _show_joined(
    law: _Law | None, subject: _Subject, rows: pd.DataFrame, observed: float | None
) -> pd.DataFrame:
    """Print and return what curvature predicts together with the fit, if it can."""
    from qscale.predict import outside  # noqa: PLC0415

    if law is None:
        show.unusable(subject.ranked)
    informed = None if law is None else law.informed
    found = both.joined(informed, subject.known, subject.settings, rows, subject.symbols)
    if observed is not None:
        row = found.iloc[0]
        far = law is not None and row["weight"] < 0.5 and bool(outside(law.fitted, law.frame))
        both.verdict_of_joined(row, observed, extrapolated=far)
    return found


def _check_observed(law: _Law | None, subject: _Subject, by_both: bool) -> None:
    """Raise if no prediction can be held against a measured increase."""
    if law is None:
        if not by_both:
            raise QscaleError("--observed needs a fit of --method; curvature is of rtn.")
        return
    if len(law.frame) > 1:
        raise QscaleError(_ONE_SETTING)
    if not by_both:
        show.check_observed(law.fitted, subject.known)


def _quantizers(
    text: Path | None, checkpoint: str | None, bits: str, group_size: str
) -> list[Setting]:
    """Check and return the settings whose curvature is to be taken; none without a text."""
    if text is None:
        return []
    if checkpoint is None:
        raise QscaleError("--text needs a checkpoint folder whose curvature to take.")
    if not text.is_file():
        raise QscaleError(f"--text {text}: no such text file.")
    return quantizer_settings(bits, group_size)


def _subject(
    named: str | None,
    checkpoint: str | None,
    flags: dict[str, Any],
    others: Sequence[str],
    settings: dict[str, Any],
    given: Path | None,
    of_rounding: bool,
) -> _Subject:
    """Join what is known of the checkpoint, and take the fit that was named or the best shipped.

    Where the fit is to be chosen for a prediction that is joined with that of rounding to nearest,
    and no method is asked for or measured, it is one of that method.
    """
    fitted = None
    if named is not None:
        from qscale.load import load_fitted  # noqa: PLC0415

        fitted = load_fitted(named)
    also = assigned(others, fitted)
    if twice := flags.keys() & also.keys():
        raise QscaleError(f"--set {min(twice)}: it has a flag too; give one of them.")
    flags |= also
    description = None
    if checkpoint is not None:
        from qscale.checkpoint import describe  # noqa: PLC0415

        description = describe(checkpoint)
    symbols = None if description is None else description.vocab_size
    known = described(description, flags)
    if given is not None:
        known, settings = completed(known, settings, given)
    if fitted is not None:
        return _Subject(fitted, flags, known, settings, symbols, ())
    from qscale.predict import candidates  # noqa: PLC0415

    wanted = {**known, **settings}
    if of_rounding and not settings["method"]:
        wanted["method"] = ["rtn"]
    ranked = candidates(wanted)
    return _Subject(ranked[0].fit, flags, known, settings, symbols, ranked)


def _finite(flags: Mapping[str, Any], observed: float | None) -> dict[str, Any]:
    """Return the flags that were given, or raise naming one that is not a finite number."""
    found = {name: value for name, value in flags.items() if value is not None}
    for name, value in [*found.items(), ("observed", observed)]:
        if isinstance(value, float) and not math.isfinite(value):
            flag = name.replace("_", "-")
            raise QscaleError(f"--{flag} must be a finite number. Got {value:g} instead.")
    return found


def _listed(text: str | None) -> list[str]:
    """Split ``rtn,gptq`` at its commas."""
    return [name.strip() for name in (text or "").split(",") if name.strip()]
