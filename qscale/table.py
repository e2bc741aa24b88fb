"""The measurement table: one row for one checkpoint under one quantizer setting and protocol.

It is all that the measuring and the modelling side share. This module states its columns with their
units and plausible ranges, reads and checks files, and writes them atomically.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd

from qscale.atomic import replacing
from qscale.errors import TableError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pandera.pandas as pa

Kind = Literal["number", "text", "flag"]


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the measurement table.

    Parameters
    ----------
    name
        Name of the column, the same in files, arguments, flags and plot labels.
    kind
        ``number``, ``text`` or ``flag`` (true/false). Every column may hold nulls.
    unit
        Unit of a number; empty for text.
    meaning
        One sentence.
    low, high
        Inclusive range outside which a value is taken for a mistake.
    allowed
        The values a text column may hold, if they are a closed list.
    hint
        What most often causes a value out of range.
    """

    name: str
    kind: Kind
    unit: str
    meaning: str
    low: float | None = None
    high: float | None = None
    allowed: tuple[str, ...] = ()
    hint: str = ""


STATUSES = ("ok", "nonfinite", "collapsed", "degraded", "failed")
_COUNT = "Counts are in units: write 125e6 for 125 million."
_ACCURACY = "An accuracy at or below chance has no value here: leave it empty."
_LOSS = "Losses are in nats per token; take the logarithm of a perplexity."

# fmt: off
COLUMNS: dict[str, Column] = {
    column.name: column
    for column in (
        # who was measured
        Column("family", "text", "", "Model family"),
        Column("run", "text", "", "One training run; rows of one run share its noise"),
        Column("checkpoint", "text", "", "One set of weights: content hash, or model name if unknown"),
        Column("source", "text", "", "Where the row came from"),
        Column("protocol", "text", "", "Evaluation protocol; losses compare only within one"),
        Column("status", "text", "", "Whether the row is usable", allowed=STATUSES),
        Column("status_reason", "text", "", "Why the status is not ok"),
        # size and training
        Column("n_params", "number", "parameters", "Non-embedding parameters", 1e3, 1e14, hint=_COUNT),
        Column("n_params_total", "number", "parameters", "All parameters", 1e3, 1e14, hint=_COUNT),
        Column("tokens", "number", "tokens", "Training tokens seen at this checkpoint", 1e4, 1e16, hint=_COUNT),
        Column("step", "number", "steps", "Optimizer steps at this checkpoint", 0),
        Column("lr_peak", "number", "", "Peak learning rate", 1e-8, 10),
        Column("lr", "number", "", "Learning rate at this checkpoint", 0, 10),
        Column("lr_schedule", "text", "", "Schedule: constant, cosine, wsd, linear"),
        Column("decay_fraction", "number", "", "Share of the learning-rate decay already done", 0, 1),
        Column("decay_share", "number", "", "Share of tokens seen while the learning rate decayed", 0, 1),
        Column("lr_sum", "number", "", "Sum of the learning rate over steps", 0),
        Column("weight_decay", "number", "", "Decoupled weight decay", 0, 10),
        Column("batch_tokens", "number", "tokens", "Tokens per optimizer step", 1),
        Column("optimizer", "text", "", "Optimizer"),
        Column("averaging", "text", "", "Weight averaging: none, ema, lawa, soup"),
        # quantizer setting
        Column("spec", "text", "", "Quantizer setting in short: gptq int4 g128 asym"),
        Column("implementation", "text", "", "Library that quantized, and its version"),
        Column("method", "text", "", "Quantization method: rtn, gptq, awq, ..."),
        Column("method_kind", "text", "", "Training used by the method", allowed=("ptq", "ptq+ft", "qat")),
        Column("fmt", "text", "", "Number format: int, mxint, nvfp4, nf4, vector, gguf, ..."),
        Column("bits", "number", "bits", "Nominal bits per weight element", 0.5, 32),
        Column("bits_activation", "number", "bits", "Nominal bits per activation element", 0.5, 32),
        Column("exponent_bits", "number", "bits", "Exponent bits of a floating-point format: 2 in E2M1", 0, 11),
        Column("mantissa_bits", "number", "bits", "Mantissa bits of a floating-point format: 1 in E2M1", 0, 52),
        Column("group_size", "number", "elements", "Elements sharing a scale; null means one per row", 1),
        Column("symmetric", "flag", "", "Whether zero is the middle of the grid"),
        Column("scale_rule", "text", "", "How the scale follows from the group's values"),
        Column("bits_per_weight", "number", "bits", "What is stored, scales and zeros included", 0.1, 40),
        Column("n_quantized", "number", "matrices", "Number of quantized matrices", 0),
        Column("quantized_share", "number", "", "Share of the parameters in low precision", 0, 1),
        Column("calibration", "text", "", "Text a method was calibrated on; null for none"),
        Column("damping", "number", "", "Share of the mean diagonal added to GPTQ's Gram matrices, the largest used", 0),
        Column("calibration_samples", "number", "sequences", "Sequences the method was calibrated on", 0),
        # outcome
        Column("loss_fp", "number", "nats/token", "Loss before quantization", 0, 50, hint=_LOSS),
        Column("loss_fp_se", "number", "nats/token", "Standard error of loss_fp", 0),
        Column("bits_per_byte", "number", "bits/byte", "loss_fp per UTF-8 byte of text", 0, 64),
        Column("loss_q", "number", "nats/token", "Loss after quantization", 0, 1e4, hint=_LOSS),
        Column("delta_loss", "number", "nats/token", "loss_q - loss_fp on the same tokens", -50, 1e4),
        Column("delta_loss_se", "number", "nats/token", "Paired standard error of delta_loss", 0),
        Column("relative_delta", "number", "", "delta_loss / loss_fp", -1, 1e4),
        Column("kl", "number", "nats/token", "Mean KL(p_fp || p_q)", -1e-3),
        Column("kl_se", "number", "nats/token", "Standard error of kl", 0),
        Column("top1_agreement", "number", "", "Share of positions with the same top token", 0, 1),
        Column("neg_log_accuracy", "number", "", "-ln((accuracy - chance) / (1 - chance))", 0, hint=_ACCURACY),
        Column("scored_tokens", "number", "tokens", "Tokens the losses are means over", 1),
        # features of the checkpoint and of the quantization error
        Column("grad_norm", "number", "", "Norm of the mean loss's gradient", 0),
        Column("hessian_trace", "number", "", "Trace of the mean loss's Hessian over block matrices"),
        Column("hessian_trace_se", "number", "", "Standard error of hessian_trace over probes", 0),
        Column("ggn_trace", "number", "", "Trace of the Gauss-Newton matrix over block matrices", 0),
        Column("ggn_trace_se", "number", "", "Standard error of ggn_trace over probes", 0),
        Column("curvature_tokens", "number", "tokens", "Tokens the curvature was estimated on", 1),
        Column("backward_passes", "number", "passes", "Backward passes spent on ggn_trace", 0),
        Column("features", "text", "", "Features that the row holds, separated by commas"),
        Column("quadratic_delta", "number", "nats/token", "Zero-fit prediction of delta_loss", 0),
        Column("quadratic_delta_se", "number", "nats/token", "Standard error of quadratic_delta over probes", 0),
        Column("first_order_delta", "number", "nats/token", "Gradient times the quantization error"),
        Column("first_order_delta_se", "number", "nats/token", "Standard error of first_order_delta over windows", 0),
        Column("gauss_newton_delta", "number", "nats/token", "Half the Gauss-Newton form of the quantization error", 0),
        Column("gauss_newton_delta_se", "number", "nats/token", "Standard error of gauss_newton_delta over windows", 0),
        Column("hessian_delta", "number", "nats/token", "Half the Hessian form of the quantization error"),
        Column("hessian_delta_se", "number", "nats/token", "Standard error of hessian_delta over windows", 0),
        Column("kronecker_delta", "number", "nats/token", "Half the sum of tr(E A E^T B) over matrices", 0),
        Column("hessian_top", "number", "", "Largest eigenvalue of the Hessian over block matrices"),
        Column("hessian_top_residual", "number", "", "Norm of its eigenvector's residual", 0),
        Column("hessian_bottom", "number", "", "Smallest eigenvalue of the Hessian over block matrices"),
        Column("sharpness_sam", "number", "nats/token", "Largest rise of the loss found within a distance of 0.05", 0),
        Column("sharpness_sam_se", "number", "nats/token", "Standard error of sharpness_sam over windows", 0),
        Column("sharpness_adaptive", "number", "nats/token", "Largest rise found within 0.5 in units of |w| + 0.01", 0),
        Column("sharpness_adaptive_se", "number", "nats/token", "Standard error of sharpness_adaptive over windows", 0),
        Column("sharpness_keskar", "number", "nats/token", "Largest rise found where no weight moves by over 0.001 (|w| + 1)", 0),
        Column("sharpness_keskar_se", "number", "nats/token", "Standard error of sharpness_keskar over windows", 0),
        Column("fisher_rao_norm", "number", "", "Root of the weights' Fisher form", 0),
        Column("fisher_rao_norm_se", "number", "", "Standard error of fisher_rao_norm over windows", 0),
        Column("relative_flatness", "number", "nats/token", "Hessian trace weighted by rows, over block matrices"),
        Column("relative_flatness_se", "number", "nats/token", "Standard error of relative_flatness over probes", 0),
        Column("radial_slope", "number", "", "Local exponent of the loss rise along the quantization error"),
        Column("radial_slope_se", "number", "", "Standard error of radial_slope over windows", 0),
        Column("radial_step", "number", "", "Multiple of the error at which half the way to a uniform guess is lost", 0),
        Column("radial_step_se", "number", "", "Standard error of radial_step over windows", 0),
        Column("hidden_relative_error", "number", "", "Error of the last hidden state over its norm", 0),
        Column("hidden_relative_error_se", "number", "", "Standard error of hidden_relative_error over windows", 0),
        Column("hidden_cancelled_inter", "number", "", "Share of added hidden error that interaction takes back"),
        Column("hidden_cancelled_inter_se", "number", "", "Standard error of hidden_cancelled_inter over windows", 0),
        Column("hidden_cancelled", "number", "", "The same with the growth of the stream itself"),
        Column("hidden_cancelled_se", "number", "", "Standard error of hidden_cancelled over windows", 0),
        Column("hidden_cancelled_abs", "number", "", "Share of added hidden error taken back, absolute norms"),
        Column("hidden_cancelled_abs_se", "number", "", "Standard error of hidden_cancelled_abs over windows", 0),
        Column("hidden_error_cosine", "number", "", "Cosine of incoming and new hidden error, mean over blocks", -1, 1),
        Column("hidden_error_cosine_se", "number", "", "Standard error of hidden_error_cosine over windows", 0),
        Column("hidden_kept", "number", "", "Share of positions in the hidden-state statistics", 0, 1),
        Column("head_rotation", "number", "degrees", "Angle by which the LM head's input turned", 0, 180),
        Column("head_norm_change", "number", "", "Relative change of the norm of the LM head's input", 0),
        Column("head_relative_error_sq", "number", "", "Squared relative error of the LM head's input", 0),
        Column("head_angular_share", "number", "", "Share of it that the rotation makes up"),
        Column("head_angle_change", "number", "degrees", "Change of the angle to a token's row, mean over the vocabulary", 0, 180),
        Column("head_attenuation", "number", "", "head_rotation over head_angle_change", 0),
        Column("head_attenuation_predicted", "number", "", "Attenuation of a rotation in a random direction", 0),
        Column("head_flip_1", "number", "", "Share of positions whose most likely token changes", 0, 1),
        Column("head_retained_5", "number", "", "Share of the 5 most likely tokens that still are", 0, 1),
        Column("head_retained_10", "number", "", "Share of the 10 most likely tokens that still are", 0, 1),
        Column("head_retained_20", "number", "", "Share of the 20 most likely tokens that still are", 0, 1),
        Column("n_ragged", "number", "matrices", "Matrices whose rows the group size does not divide", 0),
        Column("weight_norm", "number", "", "Frobenius norm of the quantized matrices together", 0),
        Column("weight_rms", "number", "", "Root mean square of the quantized weights", 0),
        Column("quantization_noise", "number", "", "Sum of ||W - Q(W)||^2 over quantized matrices", 0),
        Column("weight_spectral_max", "number", "", "Largest spectral norm of a block matrix", 0),
        Column("weight_stable_rank", "number", "", "Median of ||W||_F^2 / ||W||_2^2 over block matrices", 0),
        Column("weight_kurtosis", "number", "", "Mean kurtosis of block matrices, 3 for a Gaussian", 0),
        Column("weight_outliers_6", "number", "", "Share of weights beyond six standard deviations of their matrix", 0, 1),
        Column("weight_absmax", "number", "", "Largest weight of the block matrices", 0),
        Column("weight_grid_bits", "number", "bits", "Bits of the quantization grid that the weights sit on already", 1, 16),
        Column("sqnr_db", "number", "dB", "Signal-to-quantization-noise ratio of the weights"),
    )
}
# fmt: on

_SUFFIXES = (".csv", ".csv.gz", ".csv.xz", ".parquet")


def read(path: str | Path, mapping: Mapping[str, str] | None = None) -> pd.DataFrame:
    """Read a measurement table from CSV or parquet, rename columns and check every value.

    Parameters
    ----------
    path
        ``.csv`` (also ``.gz``, ``.xz``) or ``.parquet``.
    mapping
        ``{"tokens": "D"}`` reads the file's column ``D`` as ``tokens``.

    Returns
    -------
    pandas.DataFrame
        The rows in file order. Known columns have the dtype their kind asks for; unknown columns
        are kept as they are.

    Raises
    ------
    TableError
        If the file cannot be read, is empty, lacks a mapped column or holds an implausible value.
    """
    path = Path(path)
    if not path.is_file():
        raise TableError(
            f"{path}: no such file. Give a .csv or .parquet table or a dataset's name."
        )
    check_path(path)
    try:
        if path.suffix == ".parquet":
            frame = pd.read_parquet(path)
        else:
            frame = _read_csv(path, mapping or {})
    except (ValueError, OSError, EOFError) as error:
        reason = str(error).splitlines()[0]
        raise TableError(f"{path}: cannot be read as a table ({reason}).") from error
    return check(rename(frame, mapping or {}, str(path)), str(path))


def _read_csv(path: Path, mapping: Mapping[str, str]) -> pd.DataFrame:
    """Read a CSV, refusing what pandas would quietly turn into a frame of one text column."""
    written = pd.read_csv(path, header=None, nrows=1, dtype=str).iloc[0]
    header = written.str.strip()
    if header.dropna().duplicated().any():  # pandas would rename the second
        raise ValueError(f"column {header[header.duplicated()].iloc[0]!r} appears twice")
    # A hash such as 0050950e7685 would be read as the number that it also is.
    texts = {mapping.get(c.name, c.name) for c in COLUMNS.values() if c.kind == "text"}
    dtypes = dict.fromkeys(written[header.isin(texts)], str)
    frame = pd.read_csv(path, low_memory=False, dtype=dtypes).rename(columns=str.strip)
    if len(frame.columns) < 2:
        raise ValueError(f"only one column, {str(frame.columns[0])[:40]!r}; is this a CSV table?")
    return frame


def rename(frame: pd.DataFrame, mapping: Mapping[str, str], where: str) -> pd.DataFrame:
    """Rename the user's columns to the table's; ``{"tokens": "D"}`` reads ``D`` as ``tokens``.

    Raises
    ------
    TableError
        If a mapped column is missing or its new name is already taken.
    """
    taken: dict[str, str] = {}
    for name, theirs in mapping.items():
        if taken.setdefault(theirs, name) != name:
            raise TableError(
                f"{where}: column {theirs!r} is read as {taken[theirs]!r} and {name!r}."
            )
        if theirs not in frame.columns:
            raise TableError(
                f"{where}: no column {theirs!r} to read {name!r} from. "
                f"Columns are: {', '.join(map(str, frame.columns))}."
            )
        if name in frame.columns and name != theirs:
            raise TableError(
                f"{where}: cannot read {theirs!r} as {name!r}, the table has a column {name!r} too."
            )
    return frame.rename(columns={theirs: name for name, theirs in mapping.items()})


def check(frame: pd.DataFrame, where: str = "table") -> pd.DataFrame:
    """Give known columns their dtype and check their values.

    Parameters
    ----------
    frame
        A candidate measurement table; not modified.
    where
        Name of the table for messages.

    Returns
    -------
    pandas.DataFrame
        A copy with numbers as float64, flags as nullable booleans and text as strings.

    Raises
    ------
    TableError
        If the table has no rows, a value is of the wrong kind, infinite or out of its range. The
        message names the table, the row (counted from 1, header not counted) and the column.
    """
    if frame.empty:
        raise TableError(f"{where}: the table has no rows.")
    duplicated = frame.columns[frame.columns.duplicated()]
    if len(duplicated):
        raise TableError(f"{where}: column {duplicated[0]!r} appears twice.")
    checked = pd.DataFrame(
        {
            name: _as_kind(values, COLUMNS[name], where) if name in COLUMNS else values
            for name, values in frame.items()
        },
        index=frame.index,
    )
    if suspects := _suspects(checked):
        _check_ranges(checked[suspects], where)
    return checked


def _as_kind(values: pd.Series, column: Column, where: str) -> pd.Series:
    """Convert one column to the dtype of its kind or raise naming the first bad row."""
    if column.kind == "text":
        strings = pd.api.types.infer_dtype(values, skipna=True) == "string"
        texts = values if strings else values.astype("string")
        return texts.astype(object).where(values.notna(), None)
    converted: pd.Series
    if column.kind == "flag":
        flags = {"true": True, "false": False, "1": True, "0": False, "1.0": True, "0.0": False}
        converted = values.astype("string").str.strip().str.lower().map(flags).astype("boolean")
    else:
        plain = values.dtype == np.dtype("float64")
        converted = values if plain else pd.to_numeric(values, errors="coerce").astype("float64")
        infinite = np.isinf(converted.to_numpy())
        if infinite.any():
            row = int(np.flatnonzero(infinite)[0])
            raise TableError(
                f"{where}: row {row + 1}, column {column.name!r} is infinite. "
                "Leave it empty and set status to nonfinite."
            )
        if plain:
            return converted
    bad = (converted.isna() & values.notna()).to_numpy(dtype=bool)
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        expected = (
            "true or false" if column.kind == "flag" else f"a number ({column.unit or 'no unit'})"
        )
        raise TableError(
            f"{where}: row {row + 1}, column {column.name!r} must be {expected}. "
            f"Got {values.iloc[row]!r} instead."
        )
    return converted


def _suspects(frame: pd.DataFrame) -> list[str]:
    """Name the columns that hold a value out of range, quickly; the schema says what is wrong."""
    known = [COLUMNS[name] for name in frame.columns if name in COLUMNS]
    numbers = [column for column in known if column.kind == "number"]
    values = frame[[column.name for column in numbers]].to_numpy(float)
    low = [-np.inf if column.low is None else column.low for column in numbers]
    high = [np.inf if column.high is None else column.high for column in numbers]
    outside = np.any((values < low) | (values > high), axis=0)
    closed = [column for column in known if column.allowed]
    return [
        column.name for column, bad in zip(numbers, np.atleast_1d(outside), strict=True) if bad
    ] + [c.name for c in closed if not frame[c.name].dropna().isin(c.allowed).all()]


def _check_ranges(frame: pd.DataFrame, where: str) -> None:
    """Check values against the schema and report the first failure in one sentence."""
    import pandera.errors  # noqa: PLC0415 - half a second, needed only when a table is read

    try:
        schema().validate(frame, lazy=True)
    except pandera.errors.SchemaErrors as error:
        first = error.failure_cases.iloc[0]
        column = COLUMNS[str(first["column"])]
        row = list(frame.index).index(first["index"]) + 1
        expected = _expected(column)
        raise TableError(
            f"{where}: row {row}, column {column.name!r} must be {expected}. "
            f"Got {first['failure_case']} instead"
            + (
                f" (and {len(error.failure_cases) - 1} more)."
                if len(error.failure_cases) > 1
                else "."
            )
            + (f" {column.hint}" if column.hint else "")
        ) from None


def _expected(column: Column) -> str:
    """Say in words what a column may hold."""
    if column.allowed:
        return f"one of {', '.join(column.allowed)}"
    unit = f" {column.unit}" if column.unit else ""
    if column.low is not None and column.high is not None:
        return f"between {column.low:g} and {column.high:g}{unit}"
    return f"at least {column.low:g}{unit}"


def schema() -> pa.DataFrameSchema:
    """Return the table's pandera schema: every column optional and nullable, values in range."""
    import pandera.pandas as pa  # noqa: PLC0415 - half a second, needed only when a table is read

    def checks(column: Column) -> list[pa.Check]:
        found = []
        if column.low is not None:
            found.append(pa.Check.ge(column.low))
        if column.high is not None:
            found.append(pa.Check.le(column.high))
        if column.allowed:
            found.append(pa.Check.isin(column.allowed))
        return found

    return pa.DataFrameSchema(
        {
            name: pa.Column(
                None, checks(column), nullable=True, required=False, description=column.meaning
            )
            for name, column in COLUMNS.items()
        }
    )


def side_path(path: str | Path, kind: str) -> Path:
    """Return where a side table lies: ``rows.csv.gz`` has ``rows.matrices.parquet``.

    Parameters
    ----------
    path
        A measurement table.
    kind
        What the side table is about: ``matrices``, ``blocks``, ``density``, ...
    """
    path = Path(path)
    stem = next((path.name.removesuffix(s) for s in _SUFFIXES if path.name.endswith(s)), path.name)
    return path.with_name(f"{stem}.{kind}.parquet")


def require(frame: pd.DataFrame, columns: Sequence[str], where: str) -> None:
    """Raise unless every column is present and holds at least one value.

    Raises
    ------
    TableError
        Naming the first column that is missing or empty, and how to map another to it.
    """
    for name in columns:
        meaning = COLUMNS[name].meaning if name in COLUMNS else "named by the law"
        if name not in frame.columns:
            raise TableError(
                f"{where}: no column {name!r} ({meaning}). Columns are: "
                f"{', '.join(map(str, frame.columns))}. "
                f"Use --map {name}=THEIR_NAME if it has another name."
            )
        if frame[name].isna().all():
            raise TableError(f"{where}: column {name!r} ({meaning}) is empty in every row.")


def require_numbers(frame: pd.DataFrame, columns: Sequence[str], where: str) -> None:
    """Raise unless every column is present, not empty and holds numbers.

    Raises
    ------
    TableError
        Naming the first column that does not.
    """
    require(frame, columns, where)
    for name in columns:
        kind = frame[name].dtype
        if not pd.api.types.is_numeric_dtype(kind) or pd.api.types.is_bool_dtype(kind):
            raise TableError(
                f"{where}: column {name!r} must hold numbers, but holds text or flags."
            )


def check_path(path: Path) -> None:
    """Raise unless a file's name ends as a table's.

    Raises
    ------
    TableError
        Naming the endings.
    """
    if not path.name.endswith(_SUFFIXES):
        raise TableError(f"{path}: a table must end in one of {', '.join(_SUFFIXES)}.")


def write(frame: pd.DataFrame, path: str | Path) -> None:
    """Write a table to ``.csv`` or ``.parquet``; readers see the old file or the new, never a part.

    Raises
    ------
    TableError
        If the suffix is neither.
    """
    path = Path(path)
    check_path(path)
    with replacing(path) as partial:
        if path.suffix == ".parquet":
            frame.to_parquet(partial, index=False)
        else:
            frame.to_csv(partial, index=False)


def from_rows(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Build a table from row mappings, known columns first and in the schema's order."""
    return in_order(pd.DataFrame(list(rows)))


def in_order(frame: pd.DataFrame) -> pd.DataFrame:
    """Put known columns first and in the schema's order."""
    known = [name for name in COLUMNS if name in frame.columns]
    return frame[known + [name for name in frame.columns if name not in COLUMNS]]
