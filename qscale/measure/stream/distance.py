"""Distances between checkpoints, streamed side by side."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch

from qscale.errors import CheckpointError, QscaleError
from qscale.matrices import BLOCK, Matrix, matrices
from qscale.measure.stream.blocks import BLOCK_ELEMENTS, float_blocks, refuse_nonfinite
from qscale.measure.stream.features import open_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    Progress = Callable[[int, int], None]

BLOCKS = "all blocks"
"""Name of the row for all matrices in the blocks together."""


def weight_distance(
    checkpoint: str | Path,
    origin: str | Path,
    *,
    on_progress: Progress | None = None,
    block_elements: int = BLOCK_ELEMENTS,
) -> pd.DataFrame:
    """Distance of each matrix W of a checkpoint from W0 of another: its initialisation, say.

    Parameters
    ----------
    checkpoint, origin
        Hugging Face folders, or hub ids such as ``org/name@revision``, of two checkpoints of one
        model. Their files and storage formats may be different.
    on_progress
        Called with the bytes of `checkpoint` done and their total after each matrix.
    block_elements
        Elements of each checkpoint to hold at a time.

    Returns
    -------
    pandas.DataFrame
        One row for each matrix and a last one for all matrices in the blocks: ``matrix``,
        ``kind``, ``n``, ``distance`` (``||W - W0||_F``), ``relative_distance``
        (``||W - W0||_F / ||W0||_F``), ``cosine`` (of the angle between W and W0). Null where
        either norm is zero.

    Raises
    ------
    CheckpointError
        If the checkpoints have matrices of different names or shapes, a file is missing or
        damaged, or a weight is not finite.
    """
    rows: list[dict[str, Any]] = []
    for pair in _side_by_side((checkpoint, origin), on_progress):
        new, old, across, moved = 0.0, 0.0, 0.0, 0.0
        for first, (w, w0) in _joint_blocks(pair, block_elements):
            new += _checked_squares(w, first, pair[0])
            old += _checked_squares(w0, first, pair[1])
            across += float(torch.dot(w.view(-1), w0.view(-1)))
            moved += float(w.sub_(w0).square().sum())
        sums = {"new": new, "old": old, "across": across, "moved": moved}
        rows.append({"matrix": pair[0].name, **_identity(pair[0]), **sums})
    frame = _with_blocks(pd.DataFrame(rows), ["new", "old", "across", "moved"])
    old_norm, both = frame["old"] ** 0.5, (frame["old"] * frame["new"]) ** 0.5
    distance = frame["moved"] ** 0.5
    return frame[["matrix", "kind", "n"]].assign(
        distance=distance,
        relative_distance=(distance / old_norm).where(old_norm > 0),
        cosine=(frame["across"] / both).where(both > 0),
    )


def mean_distance(
    checkpoints: Sequence[str | Path],
    *,
    on_progress: Progress | None = None,
    block_elements: int = BLOCK_ELEMENTS,
) -> pd.DataFrame:
    """Distance of each checkpoint from the mean of all: how far averaging moves the weights.

    Parameters
    ----------
    checkpoints
        Hugging Face folders, or hub ids such as ``org/name@revision``, of at least two
        checkpoints of one model.
    on_progress
        Called with the bytes of the first checkpoint done and their total after each matrix.
    block_elements
        Elements of each checkpoint to hold at a time.

    Returns
    -------
    pandas.DataFrame
        For each checkpoint, one row for each matrix and a last one for all matrices in the
        blocks: ``checkpoint`` (as given), ``matrix``, ``kind``, ``n``, ``distance``
        (``||W - mean||_F``), ``relative_distance`` (over ``||mean||_F``, null if that is zero).

    Raises
    ------
    QscaleError
        If fewer than two are given, or one of them twice.
    CheckpointError
        As for `weight_distance`.
    """
    if len(set(map(str, checkpoints))) < max(2, len(checkpoints)):
        raise QscaleError(
            "A mean of checkpoints needs at least 2 different ones. "
            f"Got {', '.join(map(str, checkpoints)) or 'none'} instead."
        )
    rows: list[dict[str, Any]] = []
    for group in _side_by_side(checkpoints, on_progress):
        moved, centre = [0.0] * len(group), 0.0
        for first, blocks in _joint_blocks(group, block_elements):
            for block, matrix in zip(blocks, group, strict=True):
                _checked_squares(block, first, matrix)
            mean = torch.stack(blocks).mean(0)
            centre += float(mean.square().sum())
            for index, block in enumerate(blocks):
                moved[index] += float(block.sub_(mean).square().sum())
        shared = {"matrix": group[0].name, **_identity(group[0]), "centre": centre}
        rows += [
            {"checkpoint": str(name), **shared, "moved": value}
            for name, value in zip(checkpoints, moved, strict=True)
        ]
    every = pd.DataFrame(rows)
    frame = pd.concat(
        [
            _with_blocks(every[every["checkpoint"] == str(name)], ["centre", "moved"])
            for name in map(str, checkpoints)
        ],
        ignore_index=True,
    )
    distance, norm = frame["moved"] ** 0.5, frame["centre"] ** 0.5
    return frame[["checkpoint", "matrix", "kind", "n"]].assign(
        distance=distance, relative_distance=(distance / norm).where(norm > 0)
    )


def _side_by_side(
    checkpoints: Sequence[str | Path], on_progress: Progress | None
) -> Iterator[tuple[Matrix, ...]]:
    """Pair the matrices of several checkpoints, in the first one's order."""
    found = []
    for checkpoint in checkpoints:
        config, tensors = open_weights(checkpoint)
        found.append({m.name: m for m in matrices(tensors, config["model_type"])})
    first = found[0]
    for checkpoint, others in zip(checkpoints[1:], found[1:], strict=True):
        _check_same(first, others, checkpoints[0], checkpoint)
    total = sum(m.stored.stop - m.stored.start for m in first.values())
    done = 0
    for name, matrix in first.items():
        yield tuple(others[name] for others in found)
        done += matrix.stored.stop - matrix.stored.start
        if on_progress is not None:
            on_progress(done, total)


def _check_same(
    one: dict[str, Matrix], two: dict[str, Matrix], here: str | Path, there: str | Path
) -> None:
    """Refuse checkpoints of different models."""
    for name in sorted(one.keys() ^ two.keys()):
        has, lacks = (here, there) if name in one else (there, here)
        raise CheckpointError(
            f"{lacks}: lacks matrix {name!r}, which {has} holds. "
            "Give checkpoints of one and the same model."
        )
    for name, matrix in one.items():
        if matrix.shape != two[name].shape:
            raise CheckpointError(
                f"{there}: {name!r} has shape {two[name].shape}, in {here} it has {matrix.shape}. "
                "Give checkpoints of one and the same model."
            )


def _joint_blocks(
    group: Sequence[Matrix], elements: int
) -> Iterator[tuple[int, list[torch.Tensor]]]:
    """Stream the same blocks of several matrices; the next ones overwrite them."""
    for blocks in zip(*(float_blocks(m, elements) for m in group), strict=True):
        yield blocks[0][0], [block for _, block in blocks]


def _checked_squares(block: torch.Tensor, first: int, matrix: Matrix) -> float:
    """Sum of squares of a block, which must be finite."""
    squares = float(torch.dot(block.view(-1), block.view(-1)))
    if not math.isfinite(squares):
        refuse_nonfinite(block, first, matrix)
    return squares


def _identity(matrix: Matrix) -> dict[str, Any]:
    """Kind and size of a matrix."""
    return {"kind": matrix.kind, "n": math.prod(matrix.shape)}


def _with_blocks(frame: pd.DataFrame, sums: list[str]) -> pd.DataFrame:
    """Append a row that adds up the matrices in the blocks."""
    blocks = frame[frame["kind"] == BLOCK]
    total = {
        **{c: [frame[c].iloc[0]] for c in frame.columns if c == "checkpoint"},
        "matrix": [BLOCKS],
        "kind": [BLOCK],
        **{c: [blocks[c].sum()] for c in ("n", *sums)},
    }
    return pd.concat([frame, pd.DataFrame(total)], ignore_index=True)
