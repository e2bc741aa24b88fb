"""Cut the texts that the controlled sweep measures on, and the one it calibrates on.

They are books of held-out authors, Python's documentation, and training text::

    python examples/controlled_sweep/texts.py books-train.txt.xz books-heldout.txt.xz --out texts

A text is made of passages evenly spaced over its source, so that a few hundred windows see all of
its authors or topics.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from pydoc_data.topics import topics

from qscale.atomic import replacing

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from train_tiny_lm import read_bytes

PASSAGES = 64
PASSAGE_CHARACTERS = 1024


def excerpt(text: str) -> str:
    """Join evenly spaced passages that begin after a blank line and end with a word."""
    found = []
    for i in range(PASSAGES):
        start = text.find("\n\n", i * len(text) // PASSAGES)
        passage = text[start : start + PASSAGE_CHARACTERS].strip()
        found.append(passage.rpartition(" ")[0])
    return "\n\n".join(found) + "\n"


def main() -> None:
    """Write the three texts."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("train", type=Path, help="training text (.txt, .txt.xz or .txt.gz)")
    parser.add_argument("heldout", type=Path, help="text of authors that are not in it")
    parser.add_argument("--out", type=Path, default=Path("texts"), help="folder to write to")
    args = parser.parse_args()
    train, heldout = (
        bytes(read_bytes(path).numpy()).decode(errors="ignore")
        for path in (args.train, args.heldout)
    )
    documentation = "\n\n".join(topics[name].strip() for name in sorted(topics))
    args.out.mkdir(parents=True, exist_ok=True)
    texts = {"books": heldout, "python-docs": documentation, "calibration": train}
    for name, text in texts.items():
        with replacing(args.out / f"{name}.txt") as partial:
            partial.write_text(excerpt(text), encoding="utf-8")
        print(f"{args.out / name}.txt: {len(excerpt(text).encode())} bytes")


if __name__ == "__main__":
    main()
