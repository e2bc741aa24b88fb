"""Reports: what a fit says and how sure it is, as one HTML file, Markdown and SVG figures."""

from qscale.report.write import Written, write

__all__ = ["Written", "write"]
