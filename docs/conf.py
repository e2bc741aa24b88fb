"""Configuration of the documentation site, and directives that list what the package holds.

Build it, warnings as errors, into ``build/docs``::

    python -m sphinx -W --keep-going -b html docs build/docs
"""

from __future__ import annotations

import ast
from pathlib import Path

from sphinx.util.docutils import SphinxDirective

from qscale import __version__
from qscale.cli import app as commands
from qscale.columns import COLUMNS

ROOT = Path(__file__).resolve().parent.parent

project = "qscale"
author = "The qscale authors"
project_copyright = "The qscale authors. Apache-2.0"
release = version = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"qscale {version}"
html_show_sphinx = False
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True

# The reference is built without what measuring needs: PyTorch alone is gigabytes.
autodoc_mock_imports = ["torch", "transformers", "compressed_tensors", "pyhessian", "gguf"]
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_default_options = {"members": True}
napoleon_google_docstring = False
napoleon_use_rtype = False


class ColumnsDirective(SphinxDirective):
    """List the columns of the measurement table: name, unit, range or values, and meaning."""

    def run(self) -> list:
        """Parse a Markdown table made from `qscale.columns.COLUMNS`."""
        lines = ["| column | unit | allowed | meaning |", "|---|---|---|---|"]
        for column in COLUMNS.values():
            unit = column.unit or {"text": "text", "flag": "true or false"}.get(column.kind, "")
            meaning = ". ".join(filter(None, (column.meaning, column.hint))).replace("|", "\\|")
            lines.append(f"| `{column.name}` | {unit} | {_allowed(column)} | {meaning} |")
        return self.parse_text_to_nodes("\n".join(lines))


def _allowed(column) -> str:
    if column.allowed:
        return ", ".join(f"`{value}`" for value in column.allowed)
    if column.low is None and column.high is None:
        return ""
    low = "" if column.low is None else f"{column.low:g}"
    high = "" if column.high is None else f"{column.high:g}"
    return f"{low} to {high}" if low and high else f"≥ {low}" if low else f"≤ {high}"


def _docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""


class ExamplesDirective(SphinxDirective):
    """List every script in ``examples/`` with the first line of its docstring."""

    def run(self) -> list:
        """Parse a Markdown table made from the scripts."""
        lines = ["| script | what it shows |", "|---|---|"]
        for path in sorted((ROOT / "examples").glob("*.py")):
            self.env.note_dependency(str(path))
            first = _docstring(path).partition("\n")[0].replace("``", "`")
            lines.append(f"| `{path.name}` | {first} |")
        return self.parse_text_to_nodes("\n".join(lines))


class ExampleDirective(SphinxDirective):
    """Say what a script in ``examples/`` is for: the first paragraphs of its docstring."""

    required_arguments = 1

    def run(self) -> list:
        """Parse the docstring of the script that is named."""
        path = ROOT / "examples" / self.arguments[0]
        self.env.note_dependency(str(path))
        prose = [p for p in _docstring(path).split("\n\n") if not p.startswith("    ")]
        return self.parse_text_to_nodes("\n\n".join(p.replace("``", "`") for p in prose))


def _append_commands(_app, docname: str, source: list[str]) -> None:
    """Add the help of every command to its page, from the first heading of a command on."""
    if docname == "reference/cli":
        text = commands.generate_docs(output_format="markdown", recursive=True)
        source[0] += "\n" + text[text.index("**Commands**") :]


def setup(app) -> dict[str, bool]:
    """Add what lists columns, examples and commands."""
    app.add_directive("columns", ColumnsDirective)
    app.add_directive("examples", ExamplesDirective)
    app.add_directive("example", ExampleDirective)
    app.connect("source-read", _append_commands)
    return {"parallel_read_safe": True}
