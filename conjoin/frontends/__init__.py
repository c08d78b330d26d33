"""From the user's program to the graph: capture by torch.export, and the report of what is not understood."""

from conjoin.frontends.capture import capture
from conjoin.frontends.dealt_batch import Batch
from conjoin.frontends.plain import run_plainly
from conjoin.frontends.precision import PRECISIONS, Precision
from conjoin.frontends.report import OpaqueOperator, Report, not_understood
from conjoin.frontends.resized import resize

__all__ = [
    "PRECISIONS", "Batch", "OpaqueOperator", "Precision", "Report", "capture", "not_understood", "resize",
    "run_plainly",
]  # fmt: skip
