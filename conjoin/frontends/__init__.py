"""From the user's program to the graph and back: capture by torch.export, run by generated code."""

from conjoin.frontends.capture import capture
from conjoin.frontends.exporting import Batch
from conjoin.frontends.module import CapturedModule, to_module
from conjoin.frontends.report import OpaqueOperator, Report, not_understood

__all__ = ["Batch", "CapturedModule", "OpaqueOperator", "Report", "capture", "not_understood", "to_module"]
