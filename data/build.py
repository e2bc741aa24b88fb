"""Turn the published measurements in ``data/raw`` into measurement tables.

``python data/build.py`` rewrites every ``data/<dataset>/table.csv``; ``--check`` writes nothing and
exits with status 1 if one differs. What each column means and what to beware of is in the
dataset's ``datasheet.md``.
"""

from __future__ import annotations

import argparse
import gzip
import sys
from typing import TYPE_CHECKING

from joins import DATA
from losses import chinchilla_points, lr_schedule_curves, overtrained_runs
from quantized import gguf_kld, ptq_vs_learning_rate, published_ptq, quest_qat
from training import training_metadata

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pandas as pd

COMPRESS_ABOVE = 300_000  # bytes

DATASETS: dict[str, Callable[[], pd.DataFrame]] = {
    build.__name__: build
    for build in (
        chinchilla_points,
        gguf_kld,
        lr_schedule_curves,
        overtrained_runs,
        ptq_vs_learning_rate,
        published_ptq,
        quest_qat,
        training_metadata,
    )
}


def text_of(name: str) -> bytes:
    """Build one dataset and return its table as CSV text."""
    return DATASETS[name]().to_csv(index=False, lineterminator="\n").encode()


def path_of(name: str, text: bytes) -> Path:
    """Place a table; large ones are compressed."""
    return DATA / name / ("table.csv.gz" if len(text) > COMPRESS_ABOVE else "table.csv")


def is_current(name: str, text: bytes) -> bool:
    """Whether the table on disk holds this text, whichever zlib compressed it."""
    path = path_of(name, text)
    if not path.is_file():
        return False
    stored = path.read_bytes()
    return (gzip.decompress(stored) if path.suffix == ".gz" else stored) == text


def write(name: str, text: bytes) -> Path:
    """Write a table atomically; a compressed one carries neither a time nor a file name.

    ``qscale.table.write`` would let pandas put both into the gzip header.
    """
    path = path_of(name, text)
    path.parent.mkdir(exist_ok=True)
    partial = path.with_name(f".{path.name}")
    partial.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)
    partial.replace(path)
    return path


def main() -> int:
    """Rebuild or check every table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, report differences")
    check = parser.parse_args().check
    stale = []
    for name in DATASETS:
        text = text_of(name)
        if not check:
            print(f"{write(name, text).relative_to(DATA.parent)}: {len(text):,} bytes of text")
        elif not is_current(name, text):
            stale.append(name)
    if stale:
        print(f"out of date, run python data/build.py: {', '.join(stale)}", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
