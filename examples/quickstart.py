"""Fit a law to published measurements, predict two unseen checkpoints, write a report.

Each step is the command a user would type; it is printed before it runs. Results go to ``out/``.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

GPTQ = "--where \"method == 'gptq'\" --offset source --offset protocol"
TINY = "examples/checkpoints/tiny-wsd-decayed"
TEXT = "examples/texts/austen-wilde-darwin.txt"

STEPS = (
    # What the literature says about GPTQ at 2 to 4 bits, with effects of source and protocol.
    f"fit published_ptq --law ouyang {GPTQ} -o out/ouyang.json --force",
    f"fit published_ptq --law kumar {GPTQ} -o out/kumar.json --force",
    # A model described in words.
    "predict out/kumar.json --n-params 13e9 --tokens 2e12 --bits 3,4 --method gptq",
    # A folder far outside the published range: the law says so, and curvature times quantization
    # noise, which needs no fit, takes over.
    f"predict out/kumar.json {TINY} --method rtn --bits 3,4,5,6 --group-size 32,128 --text {TEXT}",
    "report out/ouyang.json out/kumar.json -o out/report.html --force",
)


def main() -> None:
    """Run the steps from the repository's root."""
    for step in STEPS:
        print(f"\n$ qscale {step}", flush=True)
        subprocess.run([sys.executable, "-m", "qscale", *shlex.split(step)], cwd=ROOT, check=True)
    print(f"\nOpen {ROOT / 'out' / 'report.html'} in a browser.")


if __name__ == "__main__":
    main()
