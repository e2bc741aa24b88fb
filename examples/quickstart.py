"""Fit a law to published measurements, predict two checkpoints it has not seen, write a report.

Each step is the command a user would type; it is printed before it runs. The results go to ``out/``.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

STEPS = (
    # What the literature says about 4-, 3- and 2-bit GPTQ, with an effect for each source.
    "fit published_ptq --law ouyang --where \"method == 'gptq'\" --offset source --offset protocol "
    "-o out/ouyang.json --force",
    "fit published_ptq --law kumar --where \"method == 'gptq'\" --offset source --offset protocol "
    "-o out/kumar.json --force",
    # A model described in words.
    "predict out/kumar.json --n-params 13e9 --tokens 2e12 --bits 3,4 --method gptq",
    # A checkpoint folder far outside the published range: the law says so, and curvature times
    # quantization noise, which needs no fit, takes over.
    "predict out/kumar.json examples/checkpoints/tiny-wsd-decayed --bits 3,4,5,6 --method rtn "
    "--group-size 32,128 --text examples/texts/austen-wilde-darwin.txt",
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
