"""What people look at: summaries of graphs and plans as text and data."""

from conjoin.report.explanation import Explanation, explain, main_dtype
from conjoin.report.explanation_text import explanation_summary, explanation_text
from conjoin.report.inspection import Inspection, OperatorSummary, inspect, split_outcomes
from conjoin.report.pipelines import (
    PipelineExplanation,
    explain_pipeline,
    pipeline_events,
    pipeline_prediction_text,
    pipeline_prediction_to_json,
    pipeline_summary,
    pipeline_text,
    schedule_picture,
)
from conjoin.report.plan_diff import Change, PlanDiff, diff_plans
from conjoin.report.prediction_notes import busy_notes, notes_to_json, price_notes
from conjoin.report.prediction_text import format_seconds, prediction_text, prediction_to_json
from conjoin.report.text import format_bytes, format_count, inspection_summary, inspection_table
from conjoin.report.trace import Event, save_trace, simulated_events, trace_json

__all__ = [
    "Change", "Event", "Explanation", "Inspection", "OperatorSummary", "PipelineExplanation", "PlanDiff", "busy_notes",
    "diff_plans", "explain", "explain_pipeline", "explanation_summary", "explanation_text", "format_bytes",
    "format_count", "format_seconds", "inspect", "inspection_summary", "inspection_table", "main_dtype",
    "notes_to_json", "pipeline_events", "pipeline_prediction_text", "pipeline_prediction_to_json", "pipeline_summary",
    "pipeline_text", "prediction_text", "prediction_to_json", "price_notes", "save_trace", "schedule_picture",
    "simulated_events", "split_outcomes", "trace_json",
]  # fmt: skip
