"""Help that teaches: every command and option is described, and every example can be called."""

import inspect
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from cyclopts import CycloptsError

from qscale import datasets, table
from qscale.cli import app, docstring
from tests.cli.test_cli import mistake, run

ROOT = Path(__file__).resolve().parent.parent.parent
INSTALL = "--install-completion"
WIDTH = 78
"""Columns of a block of code in a terminal of 80."""


def walk(parent=app, words=()):
    """Each command with its words, groups of commands included."""
    yield words, parent
    for name in parent:
        if not name.startswith("-") or name == INSTALL:
            yield from walk(parent[name], (*words, name))


COMMANDS = {" ".join(words) or "qscale": command for words, command in walk()}


def description(command) -> str:
    return inspect.cleandoc(command.help or "")


def blocks(command) -> list[str]:
    return re.findall(r"^```sh\n(.*?)^```$", description(command), re.DOTALL | re.MULTILINE)


def examples(command) -> list[str]:
    """Commands of the examples, one to a line."""
    lines = "".join(blocks(command)).replace("\\\n", " ").splitlines()
    return [line for line in lines if not line.startswith("#")]


def arguments(command) -> list:
    """Arguments and options of a command, without those that are hidden."""
    if command.default_command is None:
        return []
    found = command.assemble_argument_collection(parse_docstring=True)
    return [argument for argument in found if argument.show]


def options(command) -> list[str]:
    """Long names of a command's options."""
    names = [n for found in arguments(command) for n in {*found.names} - {*found.negatives}]
    return [name for name in names if name.startswith("--")]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_described_and_has_examples(name) -> None:
    summary = description(COMMANDS[name]).partition("\n\n")[0]
    assert summary.endswith(".")
    assert len(summary) < 100
    shown = examples(COMMANDS[name])
    assert len(shown) >= 2
    words = "qscale" if name == "qscale" else f"qscale {name}"
    assert any(line.startswith(words) for line in shown)
    assert (
        max(len(line) for block in blocks(COMMANDS[name]) for line in block.splitlines()) <= WIDTH
    )


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in ("qscale", INSTALL)])
def test_help_says_where_to_go_next(name) -> None:
    last = description(COMMANDS[name]).partition("\n\nParameters\n")[0].rpartition("```\n\n")[2]
    assert last.startswith("Next: ")
    named = re.findall(r"qscale ([a-z]+)", last)
    assert named
    assert set(named) <= set(COMMANDS)


def test_every_option_of_every_command_is_described() -> None:
    found = {
        f"{name} {argument.name}": argument.parameter.help
        for name, command in COMMANDS.items()
        for argument in arguments(command)
    }
    assert len(found) > 250
    assert not [name for name, text in found.items() if not (text or "").strip()]


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_line_accepts_every_example(name) -> None:
    for line in examples(COMMANDS[name]):
        program, *words = shlex.split(line)
        assert program == "qscale"
        app.parse_args(words, exit_on_error=False, print_error=False)


def test_an_example_with_a_wrong_option_would_be_refused() -> None:
    with pytest.raises(CycloptsError):
        app.parse_args(["fit", "t", "--laws", "kumar"], exit_on_error=False, print_error=False)


@pytest.mark.parametrize("name", [name for name in app if not name.startswith("-")])
def test_the_list_of_commands_says_what_their_docstrings_say(name, capsys) -> None:
    """The list is made without importing them, from the same words."""
    module = sys.modules[f"qscale.cli.{name}"]
    command = getattr(module, name)
    whole = inspect.getdoc(command if inspect.isfunction(command) else module)
    assert docstring(name, name) == whole
    listed = " ".join(re.sub("[│─╮╯╰╭]", " ", run(capsys, "--help")).split())
    summary = " ".join(whole.partition("\n\n")[0].split())
    assert f" {name} {summary}" in listed


def test_listing_the_commands_imports_none_of_them() -> None:
    code = (
        "import sys\nfrom qscale.cli import main\n"
        "main(['--help'])\n"
        "loaded = [m for m in sys.modules if m.startswith('qscale.cli.') or m in "
        "('numpy', 'pandas', 'torch', 'subprocess')]\n"
        "assert not loaded, loaded"
    )
    made = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "Fit a law to a measurement table" in made.stdout


def test_a_command_without_source_is_listed_without_words() -> None:
    assert docstring("no_such_module", "no_such_function") is None


# --- completion ---------------------------------------------------------------------------------

SCRIPTS = {
    "bash": ".local/share/bash-completion/completions/qscale",
    "zsh": ".zsh/completions/_cyclopts_qscale",
    "fish": ".config/fish/completions/qscale.fish",
}


@pytest.fixture
def home(tmp_path, monkeypatch):
    for name in ("ZSH", "ZSH_CUSTOM", "ZSH_VERSION", "BASH_VERSION", "FISH_VERSION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("shell", SCRIPTS)
def test_completion_is_installed_and_parses(home, capsys, shell) -> None:
    said = run(capsys, INSTALL, "--shell", shell)
    script = home / SCRIPTS[shell]
    assert str(script) in said
    text = script.read_text()
    for name in set(COMMANDS) - {"qscale", INSTALL}:
        assert name.split()[-1] in text
        command = COMMANDS[name]
        for option in options(command):
            assert (f"-l {option[2:]}" if shell == "fish" else option) in text, (name, option)
    if shutil.which(shell):
        subprocess.run([shell, "-n", str(script)], check=True)


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("sel",), {"select"}),
        (("plan", "b"), {"bits"}),
        (("sweep", "st"), {"status"}),
        (("measure", "--hess"), {"--hessian-rtol"}),
        (("plan", "bits", "--ppl"), {"--ppl-ratio"}),
        (("quantize", "--dtype", "b"), {"bfloat16"}),
        (("--inst",), {INSTALL}),
    ],
)
def test_a_session_that_loads_the_start_up_file_completes(home, capsys, words, offered) -> None:
    run(capsys, INSTALL, "--shell", "bash")
    rc = (home / ".bashrc").read_text()
    run(capsys, INSTALL, "--shell", "bash")
    assert (home / ".bashrc").read_text() == rc, "the line is added once"
    script = (home / SCRIPTS["bash"]).read_text()
    function = re.search(r"^complete .*-F (\w+) qscale", script, re.MULTILINE)[1]
    line = shlex.join(["qscale", *words])
    ask = (
        f"COMP_WORDS=({line}); COMP_CWORD={len(words)}; COMP_LINE={line!r}; "
        f'COMP_POINT={len(line)}; {function}; printf "%s\\n" "${{COMPREPLY[@]}}"'
    )
    asked = ["bash", "--norc", "-c", f". {home / '.bashrc'}; {ask}"]
    made = subprocess.run(asked, capture_output=True, text=True, check=True)
    assert set(made.stdout.split()) == offered


@pytest.mark.skipif(not shutil.which("fish"), reason="fish is not installed")
def test_fish_completes(home, capsys) -> None:
    run(capsys, INSTALL, "--shell", "fish")
    asked = ["fish", "-c", f"source {home / SCRIPTS['fish']}; complete -C 'qscale plan b'"]
    made = subprocess.run(asked, capture_output=True, text=True, check=True)
    assert "bits" in {line.partition("\t")[0] for line in made.stdout.splitlines()}


def test_a_shell_that_is_not_known_or_a_home_that_cannot_be_written(
    home, capsys, monkeypatch
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("SHELL", "")
    assert "name it, as in --shell bash" in mistake(capsys, INSTALL)
    assert "Choose from" in mistake(capsys, INSTALL, "--shell", "tcsh")
    (home / ".local").write_text("a file where a folder is needed")
    assert "cannot be written" in mistake(capsys, INSTALL, "--shell", "bash")


# --- the examples, called ------------------------------------------------------------------------


@pytest.fixture(scope="session")
def place(tmp_path_factory) -> Path:
    """Folder with what the examples name: the repository's examples, texts, a table, a law, a plan."""
    folder = tmp_path_factory.mktemp("examples")
    (folder / "examples").symlink_to(ROOT / "examples")
    text = (ROOT / "examples/texts/austen-wilde-darwin.txt").read_text(encoding="utf-8")
    (folder / "train.txt").write_text(text[: len(text) // 2], encoding="utf-8")
    rows = table.read(datasets.find("published_ptq")).query("method == 'gptq'")
    rows.dropna(subset=["tokens", "n_params"]).to_csv(folder / "could_measure.csv", index=False)
    rows.rename(columns={"tokens": "D"}).to_csv(folder / "mine.csv", index=False)
    for page, name in (("law", "mine.toml"), ("sweep", "plan.toml")):
        shown = (ROOT / f"docs/howto/{page}.md").read_text(encoding="utf-8")
        found = re.search(rf":caption: {name}\n(.*?)```", shown, re.DOTALL)
        (folder / name).write_text(found[1], encoding="utf-8")
    return folder


# In an order in which each finds the files that those before it wrote.
CALLED = sorted(
    set(COMMANDS) - {"qscale", "measure", INSTALL},
    key=lambda name: (name.startswith("plan"), name != "sweep", name),
)


@pytest.mark.slow
def test_the_examples_do_what_they_say(place) -> None:
    path = Path(sys.executable).parent / "qscale"
    for name in CALLED:
        for line in examples(COMMANDS[name]):
            if "slurm" in line:
                continue
            called = [path, *shlex.split(line)[1:]]
            if "--features" in called:  # minutes on the whole text
                called += ["--max-windows", "24", "--max-hessian-probes", "4"]
            made = subprocess.run(called, cwd=place, capture_output=True, text=True, check=False)
            assert made.returncode == 0, f"{line}\n{made.stderr}"
    assert len(pd.read_csv(place / "critical.csv")) == 1
