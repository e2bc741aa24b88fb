"""The command line: parse, call, print. Each command is a module of this package."""

from __future__ import annotations

import sys

from cyclopts import App, CycloptsError, Parameter

from qscale import __version__
from qscale.errors import QscaleError

app = App(
    name="qscale",
    help="Measure, fit and predict how much quantization raises a language model's loss.",
    version=__version__,
    default_parameter=Parameter(negative=()),
    result_action="return_value",
)
for _name in (
    "datasets", "laws", "fit", "regress", "predict", "plan", "measure", "quantize", "sensitivity",
    "specs", "plot", "report", "compare", "select", "sweep",
):  # fmt: skip
    app.command(f"qscale.cli.{_name}:{_name}", name=_name)


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
