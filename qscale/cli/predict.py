"""``qscale predict``: what quantization will cost a described checkpoint or a checkpoint folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from qscale.cli import joined as both
from qscale.cli import predicted as show
from qscale.cli.console import console, refuse_existing
from qscale.cli.facts import NO_CURVATURE, NOTHING, Curvature, Facts, Settings, require_finite
from qscale.cli.subject import predicted_by, subject_of
from qscale.errors import QscaleError

if TYPE_CHECKING:
    import pandas as pd

    from qscale.cli.subject import Law, Subject

_USUAL = Settings(bits="2,3,4")


def predict(
    fit: str | None = None,
    checkpoint: str | None = None,
    /,
    *,
    facts: Facts = NOTHING,
    settings: Settings = _USUAL,
    given: Path | None = None,
    observed: float | None = None,
    explain: bool = False,
    curvature: Curvature = NO_CURVATURE,
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
    output
        Write the predictions to this .csv or .parquet file; with --text those that were joined,
        if round-to-nearest is predicted.
    force
        Replace the output if it exists.
    """
    refuse_existing(output, force, ".csv", ".parquet")
    # Checked before any work.
    quantizers = curvature.quantizers((fit, checkpoint), settings)
    if observed is not None:
        require_finite("observed", observed)
        if len(quantizers) > 1:
            raise QscaleError(_ONE_SETTING)
    text = curvature.text
    subject = subject_of(
        fit, checkpoint, facts, settings, given=given, of_rounding=text is not None
    )
    if text is not None and subject.reads_curvature:
        if observed is not None:
            show.check_observed(subject.fitted, subject.known)
        own = predicted_by(subject, given, both.curvature_of(subject, curvature, quantizers))
        _show_law(own, subject, given, observed, explain)
        _write(own.result, output)
        return
    law = None if text is not None and not subject.usable else predicted_by(subject, given)
    by_both = text is not None and both.of_rounding(
        None if law is None else law.fitted, subject.settings
    )
    if observed is not None:
        _check_observed(law, subject, by_both)
    rows = None if text is None else both.curvature_of(subject, curvature, quantizers)
    # The answer comes first, its parts after it.
    answers = []
    if rows is not None and by_both:
        answers.append(_show_joined(law, subject, rows, observed))
    if law is not None:
        _show_law(law, subject, given, None if by_both else observed, explain)
        answers.append(law.result)
    if rows is not None and not by_both:
        answers.append(_show_joined(law, subject, rows, None))
    _write(answers[0], output)


def _write(result: pd.DataFrame, output: Path | None) -> None:
    """Write predictions; with nats, whose intervals they have, a share of the loss goes unsaid."""
    if output is None:
        return
    from qscale import table as tables  # noqa: PLC0415

    shares = ["relative_delta"] if {"relative_delta", "delta_loss"} <= {*result.columns} else []
    tables.write(result.drop(columns=shares), output)
    console.print(f"Written to {output}.")


_ONE_SETTING = "--observed belongs to one setting: give one value of --bits and others."


def _show_law(
    law: Law, subject: Subject, given: Path | None, observed: float | None, explain: bool
) -> None:
    """Print what the fit predicts, and what was asked about it."""
    fitted, ranked = law.fitted, subject.ranked
    shown = {*subject.flags, *fitted.columns, *fitted.categories, "family"}
    facts = {column: value for column, value in subject.known.items() if column in shown}
    also = show.unused(fitted, subject.flags, ranked)
    if not subject.reads_curvature:
        also += show.left_open(fitted, subject.settings)
        given_size = subject.settings["group_size"] != _USUAL.values()["group_size"]
        if given_size and "group_size" not in fitted.columns:
            also.append(f"group_size is given, but {fitted.name} does not use it.")
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
    law: Law | None, subject: Subject, rows: pd.DataFrame, observed: float | None
) -> pd.DataFrame:
    """Print and return what curvature predicts together with the fit, if it can."""
    from qscale.predict import outside  # noqa: PLC0415

    if law is None:
        show.unusable(subject.ranked)
    informed = None if law is None else law.informed
    found, notes = both.joined(informed, subject, rows)
    both.show(found, notes, "law" if informed is None else informed.name)
    if observed is not None:
        row = found.iloc[0]
        far = law is not None and row["weight"] < 0.5 and bool(outside(law.fitted, law.frame))
        both.verdict_of_joined(row, observed, extrapolated=far)
    return found


def _check_observed(law: Law | None, subject: Subject, by_both: bool) -> None:
    """Raise if no prediction can be held against a measured increase."""
    if law is None:
        if not by_both:
            raise QscaleError("--observed needs a fit of --method; curvature is of rtn.")
        return
    if len(law.frame) > 1:
        raise QscaleError(_ONE_SETTING)
    if not by_both:
        show.check_observed(law.fitted, subject.known)
