"""Weights-only features of a checkpoint, streamed matrix by matrix."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch

from qscale.checkpoint import is_buffer, read_config
from qscale.errors import CheckpointError, QscaleError
from qscale.hub import find
from qscale.matrices import BLOCK, EMBEDDING, HEAD, KINDS, Matrix, matrices
from qscale.measure.stream.blocks import BLOCK_ELEMENTS
from qscale.measure.stream.grid import find_grid
from qscale.measure.stream.moments import outliers, sums
from qscale.measure.stream.spectral import spectral_norm
from qscale.measure.weights import sqnr_db
from qscale.shards import StoredTensor, locate, sha256

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from qscale.measure.stream.moments import Sums
    from qscale.quantize.format import Format

    Progress = Callable[[int, int], None]

VECTOR = "vector"
"""Kind of the tensors of one axis: biases and gains of norms, which weight decay mostly spares."""


@dataclass(frozen=True, slots=True, eq=False)
class WeightFeatures:
    """What the weights of a checkpoint say by themselves.

    Parameters
    ----------
    matrices
        One row for each matrix, in the files' order: ``matrix`` (name), ``kind``, ``rows``,
        ``columns``, ``n``, ``frobenius_norm``, ``rms``, ``mean``, ``absmax``, ``kurtosis``
        (3 for a Gaussian), ``outliers_3`` and ``outliers_6`` (share of elements beyond so many
        standard deviations), ``group_absmax_mean`` and ``group_absmax_cv`` (spread over mean),
        ``group_kurtosis_median`` and ``group_kurtosis_p95`` (about zero), all over groups of 128
        along a row; ``grid_bits`` and ``grid_group_size`` of the grid that the weights sit on
        already, null for none, where a null group is the whole row; and, if asked for,
        ``spectral_norm``, ``stable_rank``, ``spectral_residual`` and ``spectral_products``.
    formats
        One row for each matrix in the blocks and each number format: ``matrix``, the
        format's columns, ``squared_norm``, ``squared_error``, ``sqnr_db`` and
        ``bits_per_weight``.
    totals
        One row for each kind of tensor and one for ``all``: ``kind``, ``tensors``, ``n``,
        ``squared_norm``, ``rms``. A head tied to the embedding counts once. Weight decay pulls
        on the squared norm of every kind but, mostly, vectors.
    """

    matrices: pd.DataFrame
    formats: pd.DataFrame
    totals: pd.DataFrame

    def by_format(self) -> pd.DataFrame:
        """Squared error, SQNR and bits per weight of each format, over all matrices in blocks."""
        keys = [c for c in self.formats.columns if c not in ("matrix", *_MEASURED)]
        frame = self.formats.assign(
            n=self.formats["matrix"].map(self.matrices.set_index("matrix")["n"])
        )
        frame["stored"] = frame["bits_per_weight"] * frame["n"]
        columns = ["n", "stored", "squared_norm", "squared_error"]
        total = frame.groupby(keys, sort=False, dropna=False)[columns].sum().reset_index()
        total["sqnr_db"] = list(map(sqnr_db, total["squared_norm"], total["squared_error"]))
        total["bits_per_weight"] = total["stored"] / total["n"]
        return total[[*keys, *_MEASURED]]

    def grid_note(self) -> str | None:
        """Say that weights in the blocks were quantized before, or None if they were not."""
        blocks = self.matrices[self.matrices["kind"] == BLOCK]
        found = blocks.dropna(subset="grid_bits")
        if found.empty:
            return None
        counts = found.value_counts(["grid_bits", "grid_group_size"], dropna=False).reset_index()
        bits, size, count = counts.iloc[0]
        where = "row" if math.isnan(size) else f"group of {size:g}"
        return (
            f"{len(found)} of {len(blocks)} matrices sit on a quantization grid already, "
            f"{count:g} of them on one of {bits:g} bits per {where}. Quantizing to that grid again "
            "costs nothing; any other format starts from weights that were rounded before."
        )


@dataclass(frozen=True, slots=True)
class _Part:
    """What one matrix adds to the features; no row if it is a vector."""

    row: dict[str, Any]
    tried: list[dict[str, Any]]
    norm: tuple[str, int, float]


_MEASURED = ("squared_norm", "squared_error", "sqnr_db", "bits_per_weight")


def weight_features(
    checkpoint: str | Path,
    formats: Sequence[Format] = (),
    *,
    spectral: bool = True,
    on_progress: Progress | None = None,
    block_elements: int = BLOCK_ELEMENTS,
) -> WeightFeatures:
    """Stream the weights of a checkpoint and describe each matrix.

    Every matrix is read once for its sums and rounding errors and once for its outliers; its
    spectral norm reads it some 10 to 60 times more. As many matrices are worked on at a time as
    torch has threads. For each, memory holds a few blocks and its group sums, which take about a
    tenth of its size in bfloat16.

    Parameters
    ----------
    checkpoint
        Hugging Face folder with ``config.json`` and safetensors weights, or a hub id,
        ``org/name`` or ``org/name@revision``.
    formats
        Number formats to try on the matrices in the blocks.
    spectral
        Whether to approach spectral norms, which take most of the time.
    on_progress
        Called with the bytes done and their total after each tensor.
    block_elements
        Elements to hold at a time; changes speed and the last digits only.

    Raises
    ------
    CheckpointError
        If a file is missing or damaged, or a weight is not finite.
    QscaleError
        If levels of a format depend on more than a row, which the stream does not see at once.
    """
    for fmt in formats:
        if not fmt.rowwise:
            raise QscaleError(f"Format {fmt} needs a whole matrix at once, not a stream of rows.")
    config, tensors = open_weights(checkpoint)
    found = matrices(tensors, config["model_type"])
    every = [*found, *_vectors(tensors, found)]
    total = sum(m.stored.stop - m.stored.start for m in every)

    def work(matrix: Matrix) -> _Part:
        return _part(matrix, formats, block_elements, spectral=spectral)

    done = 0
    parts = []
    for matrix, part in zip(every, _in_threads(work, every), strict=True):
        parts.append(part)
        done += matrix.stored.stop - matrix.stored.start
        if on_progress is not None:
            on_progress(done, total)
    tied = _tied(found, config.get("tie_word_embeddings"))
    return WeightFeatures(
        pd.DataFrame([part.row for part in parts if part.row]),
        pd.DataFrame([row for part in parts for row in part.tried]),
        _totals([part.norm for part in parts], tied=tied),
    )


def _in_threads(work: Callable[[Matrix], _Part], every: list[Matrix]) -> Iterator[_Part]:
    """Work on as many matrices at a time as torch has threads, and yield results in order.

    Blocks are too small for the threads of one operation; each thread takes a matrix instead.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    pool = ThreadPoolExecutor(threads)
    try:
        yield from pool.map(work, every)
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)


def open_weights(checkpoint: str | Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """Read the configuration of a checkpoint and locate its tensors, buffers left out.

    Raises
    ------
    CheckpointError
        If a file is missing or damaged, or the checkpoint is not of safetensors files.
    """
    folder = find(checkpoint).path
    if folder.is_file():
        raise CheckpointError(
            f"{folder}: weights are streamed from safetensors files only. Give the Hugging Face "
            "folder that the GGUF file was made from."
        )
    config, tensors = read_config(folder), locate(folder)
    return config, {n: t for n, t in tensors.items() if not is_buffer(n, ndim=len(t.shape))}


def _vectors(tensors: dict[str, StoredTensor], found: list[Matrix]) -> list[Matrix]:
    """Tensors that are no matrices, as one row each."""
    taken = {matrix.name.partition("[")[0] for matrix in found}
    return [
        Matrix(
            name,
            StoredTensor(t.file, t.dtype, (1, t.size), t.start, t.stop),
            transposed=False,
            kind=VECTOR,
        )
        for name, t in tensors.items()
        if name not in taken and t.size
    ]


def _part(matrix: Matrix, formats: Sequence[Format], elements: int, *, spectral: bool) -> _Part:
    """Stream one matrix and describe it."""
    wanted = formats if matrix.kind == BLOCK else ()
    part = sums(matrix, wanted, elements)
    row = {} if matrix.kind == VECTOR else _row(matrix, part, elements, spectral=spectral)
    return _Part(row, _tried(matrix, part, wanted), (matrix.kind, part.size, part.squares))


def _row(matrix: Matrix, part: Sums, elements: int, *, spectral: bool) -> dict[str, Any]:
    """Features of one matrix."""
    counts = outliers(matrix, part.sigma, elements)
    peaks, kurtosis = part.group_peaks, part.group_kurtosis
    grid = find_grid(matrix)
    row = {
        "matrix": matrix.name,
        "kind": matrix.kind,
        "rows": matrix.shape[0],
        "columns": matrix.shape[1],
        "n": part.size,
        "frobenius_norm": math.sqrt(part.squares),
        "rms": math.sqrt(part.squares / part.size),
        "mean": part.mean,
        "absmax": part.peak,
        "kurtosis": part.kurtosis,
        "outliers_3": counts[0] / part.size,
        "outliers_6": counts[1] / part.size,
        "group_absmax_mean": float(peaks.mean()),
        "group_absmax_cv": float(peaks.std() / peaks.mean()) if part.peak else math.nan,
        "group_kurtosis_median": float(np.median(kurtosis)) if kurtosis.size else math.nan,
        "group_kurtosis_p95": float(np.quantile(kurtosis, 0.95)) if kurtosis.size else math.nan,
        "grid_bits": math.nan if grid is None else grid.bits,
        "grid_group_size": math.nan if grid is None else grid.group_size or math.nan,
    }
    if spectral:
        top = spectral_norm(matrix, elements=elements)
        row |= {
            "spectral_norm": top.value,
            "stable_rank": part.squares / top.value**2 if top.value else math.nan,
            "spectral_residual": top.residual,
            "spectral_products": top.products,
        }
    return row


def _tried(matrix: Matrix, part: Sums, formats: Sequence[Format]) -> list[dict[str, Any]]:
    """Describe what each format does to one matrix."""
    return [
        {
            "matrix": matrix.name,
            **fmt.columns(),
            "squared_norm": part.squares,
            "squared_error": error,
            "sqnr_db": sqnr_db(part.squares, error),
            "bits_per_weight": fmt.bits_per_weight([matrix.shape]),
        }
        for fmt, error in zip(formats, part.errors, strict=True)
    ]


def _tied(found: list[Matrix], said: bool | None) -> bool:
    """Whether the head is the token embedding; by the bytes if the configuration does not say."""
    if said is not None:
        return said
    heads = {sha256(m.stored) for m in found if m.kind == HEAD}
    return bool(heads & {sha256(m.stored) for m in found if m.kind == EMBEDDING})


def _totals(norms: list[tuple[str, int, float]], *, tied: bool) -> pd.DataFrame:
    """Add up sizes and squared norms by kind, and over all tensors but a tied head."""
    frame = pd.DataFrame(norms, columns=["kind", "n", "squared_norm"])
    if tied and (frame["kind"] == EMBEDDING).any():
        frame = frame[frame["kind"] != HEAD]
    kinds = [(k, frame[frame["kind"] == k]) for k in (*KINDS, VECTOR)]
    rows = [
        {
            "kind": kind,
            "tensors": len(f),
            "n": f["n"].sum(),
            "squared_norm": f["squared_norm"].sum(),
        }
        for kind, f in (*kinds, ("all", frame))
        if len(f)
    ]
    totals = pd.DataFrame(rows)
    return totals.assign(rms=np.sqrt(totals["squared_norm"] / totals["n"]))
