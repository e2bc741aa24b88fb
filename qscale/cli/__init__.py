"""The command line: parse, call, print. Each command is a module of this package."""

from __future__ import annotations

import sys
from inspect import cleandoc
from linecache import getlines
from pathlib import Path

from cyclopts import App, CycloptsError, Parameter

from qscale import __version__
from qscale.errors import QscaleError


def docstring(module: str, function: str) -> str | None:
    """Docstring of a command, or of its module where the command is a group of others.

    It is cut out of the source, since the list of commands shows it and importing all of them
    takes longer than most of them run.
    """
    source = "".join(getlines(str(Path(__file__).with_name(f"{module}.py"))))
    _, _, own = source.partition(f"\ndef {function}(")
    _, _, text = (own or source).partition('"""')
    return cleandoc(text.partition('"""')[0]) or None


app = App(
    name="qscale",
    help=(
        "Measure, fit and predict how much quantization raises a language model's loss.\n\n"
        "What 3 and 4 bits cost a model that nobody has measured, from the shipped fits, the "
        "fewest bits that raise the perplexity by at most 10 %, and a law fitted to published "
        "results:\n\n"
        "```sh\n"
        "qscale predict --n-params 13e9 --tokens 2e12 --bits 3,4 --method gptq\n"
        "qscale plan bits published_gptq_kumar --n-params 13e9 --tokens 2e12 \\\n"
        "    --method gptq --ppl-ratio 1.1\n"
        "qscale fit published_ptq --law ouyang --offset source -o fit.json\n"
        "```\n\n"
        "qscale COMMAND --help says more of each, with examples."
    ),
    version=__version__,
    default_parameter=Parameter(negative=()),
    result_action="return_value",
)
for _name in (
    "datasets", "fits", "laws", "fit", "regress", "predict", "plan", "measure", "quantize",
    "sensitivity", "specs", "plot", "report", "compare", "select", "sweep",
):  # fmt: skip
    app.command(f"{__name__}.{_name}:{_name}", name=_name, help=docstring(_name, _name))
app.command(
    f"{__name__}.completion:install",
    name="--install-completion",
    help=docstring("completion", "install"),
)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; a user's mistake is one line on stderr and exit status 2."""
    try:
        app(arguments, exit_on_error=False, print_error=False)
    except (QscaleError, CycloptsError) as error:
        sys.stderr.write(f"qscale: {' '.join(str(error).split())}\n")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.stderr.write("qscale: interrupted\n")
        sys.exit(130)
