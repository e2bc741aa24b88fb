"""Helpers that ``build.py`` shares between datasets: raw files, sizes, labels, status, layout."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd

from qscale import table

DATA = Path(__file__).resolve().parent
DIGITS = 12  # more than any source prints; hides last-bit differences between math libraries

# A tenth of the right token's probability in the geometric mean (delta_loss), or of the
# full-precision model's tokens (kl). Beyond it papers round to two digits and laws of small gaps
# say nothing.
COLLAPSE = math.log(10.0)
COLLAPSE_REASON = "collapsed: tokens keep less than a tenth of their probability (>= ln 10 nats)"
REFERENCE_NOTE = "reference row: nothing is quantized"

# Decoder shapes (layers, width, key/value width, feed-forward width): OLMo-2 from
# allenai/OLMo configs/official-0425 and official-1124 (no grouped heads; SwiGLU halves
# mlp_hidden_size), SmolLM3-3B from the defaults of transformers' SmolLM3Config.
SHAPES = {
    "OLMo-2-1B": (16, 2048, 2048, 8192),
    "OLMo-2-7B": (32, 4096, 4096, 11008),
    "OLMo-2-13B": (40, 5120, 5120, 13824),
    "SmolLM3-3B": (36, 2048, 512, 11008),
}


def raw(name: str, *, as_text: tuple[str, ...] = ()) -> pd.DataFrame:
    """Read a raw table; ``raw_row`` counts its rows from 1, header not counted."""
    frame = pd.read_csv(DATA / "raw" / f"{name}.csv", dtype=dict.fromkeys(as_text, "str"))
    return frame.assign(raw_row=np.arange(1, len(frame) + 1))


def label(index: pd.Index, default: object, *choices: tuple[object, pd.Series]) -> pd.Series:
    """Give rows a value by mask; a later choice wins over an earlier one."""
    values = pd.Series(default, index=index, dtype=object)
    for value, mask in choices:
        values[mask.fillna(False).to_numpy(dtype=bool)] = value
    return values


def matrix_params(layers: int, width: int, kv_width: int, ff_width: int) -> int:
    """Count the weights in a gated decoder's attention and feed-forward matrices."""
    return layers * (2 * width**2 + 2 * width * kv_width + 3 * width * ff_width)


def sizes(model: pd.Series, nonembedding: pd.Series, total: pd.Series) -> pd.DataFrame:
    """Return n_params, its basis and n_params_total; nominal totals stand in from 7e9 upwards."""
    derived = model.map({name: matrix_params(*shape) for name, shape in SHAPES.items()})
    known = nonembedding.fillna(derived)
    nominal = total.where(known.isna() & (total >= 7e9))
    basis = label(
        model.index, None, ("nonembedding", known.notna()), ("nominal_total", nominal.notna())
    )
    return pd.DataFrame(
        {"n_params": known.fillna(nominal), "n_params_basis": basis, "n_params_total": total}
    )


def nats(perplexity: pd.Series) -> pd.Series:
    """Return the mean negative log likelihood of a perplexity."""
    return perplexity.map(math.log)


def gaps(loss_fp: pd.Series, loss_q: pd.Series) -> dict[str, pd.Series]:
    """Return both losses and what quantization added, absolute and relative."""
    delta = loss_q - loss_fp
    return {
        "loss_fp": loss_fp,
        "loss_q": loss_q,
        "delta_loss": delta,
        "relative_delta": delta / loss_fp,
    }


def rounding(printed: pd.Series) -> pd.Series:
    """Return half a unit of the last digit that the source printed, from the collected text.

    Papers print two decimals (collection lost trailing zeros), collapsed cells two digits.
    """
    value, decimals = printed.astype(float), printed.str.extract(r"\.(\d+)", expand=False).str.len()
    two_digits = (value >= 1000) & (value % 100 == 0)
    half = label(
        printed.index, 0.005, (0.5, decimals.isna()), (5e-7, decimals > 2), (50.0, two_digits)
    )
    return half.astype(float).where(value.notna())


def notes(*columns: pd.Series) -> pd.Series:
    """Join the notes of a row, null where there are none."""
    frame = pd.concat(columns, axis=1)
    return frame.apply(lambda row: "; ".join(row.dropna()) or None, axis=1)


def status_of(index: pd.Index, *rules: tuple[str, pd.Series, str]) -> dict[str, pd.Series]:
    """Give each row the status and reason of the first rule that holds, else ``ok``."""
    ordered = rules[::-1]
    return {
        "status": label(index, "ok", *((name, mask) for name, mask, _ in ordered)),
        "status_reason": label(index, None, *((why, mask) for _, mask, why in ordered)),
    }


def finish(frame: pd.DataFrame, sort: list[str], name: str) -> pd.DataFrame:
    """Sort, round and check a table; known columns first, in the schema's order."""
    known = [column for column in table.COLUMNS if column in frame.columns]
    frame = frame[known + [column for column in frame.columns if column not in known]]
    frame = frame.sort_values([*sort, "raw_row"], kind="stable", ignore_index=True)
    for column in frame.select_dtypes("float"):
        frame[column] = frame[column].map(lambda value: float(f"{value:.{DIGITS}g}"))
    return table.check(frame, name)
