"""Reports: what a fit says and how sure it is, as one HTML file, Markdown and SVG figures."""

from qscale.report.write import Written, write_report

__all__ = ["Written", "write_report"]
