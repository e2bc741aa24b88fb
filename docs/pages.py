"""Run the blocks of the documentation's pages in order, and compare or renew what they print.

A ``console`` block holds commands after ``$`` and their output, a ``pycon`` block a Python session,
and a ``code-block`` with a caption a file of that name. Each page runs in a folder of its own that
has the repository's ``examples`` and ``docs`` in it. Three dots stand for any text::

    python docs/pages.py                           # say where pages and commands differ
    python docs/pages.py --update docs/tutorial.md # and put what is printed now into the page
"""

from __future__ import annotations

import argparse
import contextlib
import doctest
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).resolve().parent
FENCE = re.compile(r"^(`{3,})(?P<info>[^\n]*)\n(?P<body>.*?)^\1 *$\n?", re.DOTALL | re.MULTILINE)
CAPTION = re.compile(r"\A(?::[\w-]+:[^\n]*\n)*?:caption: *`?(?P<name>[^\n`]+)`?\n(?::[^\n]*\n)*\n?")
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
WIDTH = "100"


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block: what follows the fence, its text, and where the text lies in the page."""

    info: str
    body: str
    start: int

    @property
    def file(self) -> tuple[str, str] | None:
        """Name and text of the file that the block holds, if it does."""
        found = CAPTION.match(self.body) if self.info.startswith("{code-block}") else None
        return (found["name"], self.body[found.end() :]) if found else None


@dataclass(frozen=True, slots=True)
class Step:
    """A command and the output that the page shows."""

    command: str
    shown: str


def pages() -> list[Path]:
    """Pages of the site."""
    return sorted(DOCS.rglob("*.md"))


def blocks(text: str) -> list[Block]:
    """Fenced blocks of a page, in order."""
    return [Block(m["info"].strip(), m["body"], m.start("body")) for m in FENCE.finditer(text)]


def steps(body: str) -> list[Step]:
    """Commands of a console block, each with what follows it up to the next."""
    found = []
    for part in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
        lines = part.splitlines(keepends=True)
        length = next(i for i, line in enumerate(lines, 1) if not line.rstrip().endswith("\\"))
        found.append(Step("".join(lines[:length]).rstrip("\n"), "".join(lines[length:])))
    return found


def run_command(command: str, folder: Path) -> str:
    """Run a shell command: its output, with errors if it fails, less spaces at line ends."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    settings = {"PATH": path, "COLUMNS": WIDTH, "NO_COLOR": "1", "MPLBACKEND": "Agg"}
    made = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    text = made.stdout if made.returncode == 0 else made.stdout + made.stderr
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())


def same(shown: str, printed: str) -> bool:
    """Whether a page shows what was printed, up to white space and what it leaves out."""
    return doctest.OutputChecker().check_output(shown, printed, OPTIONS)


def run_session(body: str, names: dict, where: str) -> str:
    """Run a Python session; what differs, in words, or nothing."""
    test = doctest.DocTestParser().get_doctest(body, names, where, where, 0)
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=OPTIONS, verbose=False)
    runner.run(test, out=said.append, clear_globs=False)
    names.update(test.globs)
    return "".join(said)


def run_page(page: Path, folder: Path, update: bool = False) -> list[str]:
    """Run a page's blocks in a folder; say what differs, or with ``update`` renew the page."""
    for name in ("examples", "docs"):
        (folder / name).symlink_to(DOCS.parent / name)
    text, names, differences = page.read_text(encoding="utf-8"), {"__name__": "page"}, []
    renewed = text
    for block in blocks(text):
        if block.file:
            name, content = block.file
            (folder / name).write_text(content, encoding="utf-8")
        elif block.info == "pycon":
            with contextlib.chdir(folder):
                differences += filter(None, [run_session(block.body, names, page.name)])
        elif block.info == "console":
            body = ""
            for step in steps(block.body):
                printed = run_command(step.command, folder)
                if not same(step.shown, printed):
                    differences.append(f"$ {step.command}\nshown:\n{step.shown}\nnow:\n{printed}")
                body += f"$ {step.command}\n{step.shown if same(step.shown, printed) else printed}"
            renewed = renewed.replace(block.body, body, 1)
    if update and renewed != text:
        page.write_text(renewed, encoding="utf-8")
    return differences


def main() -> None:
    """Run the pages that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", nargs="*", type=Path)
    parser.add_argument("--update", action="store_true", help="renew what differs")
    options = parser.parse_args()
    count = 0
    for page in options.pages or pages():
        with tempfile.TemporaryDirectory() as folder:
            differences = run_page(page.resolve(), Path(folder), options.update)
        count += len(differences)
        sys.stdout.write("".join(f"{page}: {text}\n" for text in differences))
    sys.exit(bool(count) and not options.update)


if __name__ == "__main__":
    main()
