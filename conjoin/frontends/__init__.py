"""From the user's program to the graph: capture by torch.export, and the report of what is not understood."""

from conjoin.frontends.capture import capture
from conjoin.frontends.exporting import Batch
from conjoin.frontends.plain import run_plainly
from conjoin.frontends.report import OpaqueOperator, Report, not_understood

__all__ = ["Batch", "OpaqueOperator", "Report", "capture", "not_understood", "run_plainly"]
