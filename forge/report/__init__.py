"""Runs side by side as one HTML page that needs nothing else, from what they have written. Imports no torch."""

from forge.report.curve import Curve
from forge.report.page import write_report
from forge.report.read import Sample, WrittenRun, read_run

__all__ = ["Curve", "Sample", "WrittenRun", "read_run", "write_report"]
