"""What people look at: summaries of graphs as text and data."""

from conjoin.report.inspection import Inspection, OperatorSummary, inspect, split_outcomes
from conjoin.report.text import format_bytes, format_count, inspection_summary, inspection_table

__all__ = [
    "Inspection", "OperatorSummary", "format_bytes", "format_count", "inspect", "inspection_summary",
    "inspection_table", "split_outcomes",
]  # fmt: skip
