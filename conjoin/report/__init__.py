"""What people look at: summaries of graphs and plans as text and data."""

from conjoin.report.explanation import Explanation, explain
from conjoin.report.explanation_text import explanation_summary, explanation_text
from conjoin.report.inspection import Inspection, OperatorSummary, inspect, split_outcomes
from conjoin.report.plan_diff import Change, PlanDiff, diff_plans
from conjoin.report.text import format_bytes, format_count, inspection_summary, inspection_table

__all__ = [
    "Change", "Explanation", "Inspection", "OperatorSummary", "PlanDiff", "diff_plans", "explain",
    "explanation_summary", "explanation_text", "format_bytes", "format_count", "inspect", "inspection_summary",
    "inspection_table", "split_outcomes",
]  # fmt: skip
