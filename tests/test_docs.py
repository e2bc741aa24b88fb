"""The documentation: its pages' commands are accepted and print what is shown, and it builds."""

import contextlib
import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from cyclopts import CycloptsError, MissingArgumentError

from qscale.cli import app
from qscale.columns import COLUMNS

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
EXAMPLES = {path.name for path in (ROOT / "examples").glob("*.py")}


def load(name: str):
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


pages = load("pages")
PAGES = {str(page.relative_to(DOCS)): page for page in pages.pages()}


def commands(text: str) -> list[str]:
    """Commands of a page's console blocks."""
    found = [b.body for b in pages.blocks(text) if b.info == "console"]
    return in_lines([step.command for body in found for step in pages.steps(body)])


def mentions(text: str) -> list[str]:
    """Commands with options that running text names, some without what they require."""
    return in_lines(re.findall(r"`(qscale [a-z][^`]* -[^`]*)`", pages.FENCE.sub("", text)))


def in_lines(lines: list[str]) -> list[str]:
    joined = [line.replace("\\\n", " ") for line in lines]
    return [found for line in joined for found in re.findall(r"\bqscale [^;>|]*", line)]


def accept(command: str) -> None:
    app.parse_args(shlex.split(command)[1:], exit_on_error=False, print_error=False)


@pytest.mark.parametrize("name", PAGES)
def test_the_command_line_accepts_every_command_of_a_page(name) -> None:
    text = PAGES[name].read_text(encoding="utf-8")
    for command in commands(text):
        accept(command)
    for command in mentions(text):
        with contextlib.suppress(MissingArgumentError):
            accept(command)


def test_commands_are_found_and_a_wrong_one_is_refused() -> None:
    text = "```console\n$ qscale fit a.csv \\\n    --law kumar\nout\n$ qscale laws --no-such\n```\n"
    good, bad = commands(text)
    accept(good)
    with pytest.raises(CycloptsError):
        accept(bad)


@pytest.mark.parametrize("name", PAGES)
def test_files_and_options_that_a_page_names_exist(name) -> None:
    text = PAGES[name].read_text(encoding="utf-8")
    for path in re.findall(r"(?<![\w/])(?:examples|qscale|data|fits|docs)/[\w./-]*\w", text):
        assert list(ROOT.glob(path.rstrip("."))), f"{name} names {path}"
    known = {name for _, command in every_command() for name in options(command)}
    for option in re.findall(r"`(--[a-z][a-z-]*)", pages.FENCE.sub("", text)):
        assert option in known, f"{name} names {option}"


def every_command(parent=app, path=()):
    """Each command with its words."""
    for name in parent:
        if not name.startswith("-"):
            found = parent[name]
            yield (*path, name), found
            yield from every_command(found, (*path, name))


def options(command) -> set[str]:
    found = command.assemble_argument_collection() if command.default_command else ()
    return {name for argument in found for name in argument.names if name.startswith("--")}


def test_every_column_that_the_glossary_names_is_in_the_table() -> None:
    text = (DOCS / "reference" / "glossary.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert len(named) > 40
    assert named <= set(COLUMNS)


def test_examples_of_the_gallery_exist() -> None:
    text = (DOCS / "gallery.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"```\{example\} (\w+\.py)", text))
    assert len(shown) > 10
    assert shown <= EXAMPLES


def test_pages_that_only_hold_python_run(tmp_path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```{code-block} python\n:caption: two.py\nTWO = 2\n```\n"
        "```pycon\n>>> from pathlib import Path\n>>> Path('two.py').read_text()\n'TWO = 2\\n'\n\n```\n"
        "```pycon\n>>> 1 + 1\n3\n\n```\n"
        "```console\n$ echo one; false\nsomething else\n$ printf 'a\\nb\\n'\na\n...\n```\n"
    )
    (tmp_path / "run").mkdir()
    python, shell = pages.run_page(page, tmp_path / "run")
    assert "Expected:\n    3\nGot:\n    2\n" in python
    assert shell == "$ echo one; false\nshown:\nsomething else\n\nnow:\none\n"
    (tmp_path / "again").mkdir()
    pages.run_page(page, tmp_path / "again", update=True)
    assert "$ echo one; false\none\n$ printf 'a\\nb\\n'\na\n...\n" in page.read_text()


def test_completion_scripts_offer_every_command(tmp_path) -> None:
    for shell in ("bash", "zsh", "fish"):
        script = app.generate_completion(shell=shell)
        assert all(words[-1] in script for words, _ in every_command())
    path = tmp_path / "qscale.bash"
    path.write_text(app.generate_completion(shell="bash"))
    function = re.search(r"^complete .*-F (\w+) qscale", path.read_text(), re.MULTILINE)[1]
    ask = f"COMP_WORDS=(qscale plan b); COMP_CWORD=2; {function}; echo ${{COMPREPLY[*]}}"
    asked = ["bash", "--norc", "-c", f". {path}; {ask}"]
    made = subprocess.run(asked, capture_output=True, text=True, check=True)
    assert made.stdout.split() == ["bits"]


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_a_page_shows_what_its_commands_print(name, tmp_path) -> None:
    assert not pages.run_page(PAGES[name], tmp_path)


@pytest.mark.slow
def test_figures_are_drawn_and_print_what_the_pages_show(tmp_path, capsys) -> None:
    figures = load("figures")
    figures.main([], tmp_path)
    shown = "".join(page.read_text(encoding="utf-8") for page in PAGES.values())
    for line in filter(None, capsys.readouterr().out.splitlines()):
        assert line in shown
    # What studies in examples/ draw is not drawn again.
    of_studies = {"controlled_sweep.png", "plan_next.svg"}
    there = {path.name for path in figures.FOLDER.iterdir()}
    assert {path.name for path in tmp_path.iterdir()} == there - of_studies
    assert of_studies < there


@pytest.mark.slow
def test_the_site_builds_without_warnings(tmp_path) -> None:
    pytest.importorskip("sphinx", reason="needs the docs extra")
    pytest.importorskip("myst_parser", reason="needs the docs extra")
    pytest.importorskip("furo", reason="needs the docs extra")
    build = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    made = subprocess.run(
        [*build, "-d", tmp_path / "trees", DOCS, tmp_path / "site"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    table = (tmp_path / "site" / "reference" / "table.html").read_text(encoding="utf-8")
    assert all(f">{name}<" in table for name in COLUMNS)
    cli = (tmp_path / "site" / "reference" / "cli.html").read_text(encoding="utf-8")
    assert all(f"qscale-{'-'.join(words)}" in cli for words, _ in every_command())
    gallery = (tmp_path / "site" / "gallery.html").read_text(encoding="utf-8")
    assert all(f">{name}<" in gallery for name in EXAMPLES)
