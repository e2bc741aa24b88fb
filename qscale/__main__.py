"""Run the command line with ``python -m qscale``."""

from qscale.cli import main

main()
