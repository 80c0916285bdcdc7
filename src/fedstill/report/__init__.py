"""Tables and pictures of finished runs; reads the logbook only."""

from fedstill.report.tables import Comparison, compare, comparison

__all__ = ["Comparison", "compare", "comparison"]
