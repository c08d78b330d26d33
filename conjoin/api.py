"""The surface for Python programs: everything a user imports from `conjoin`."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from conjoin.errors import CaptureError, ConjoinError, GraphError, UsageError
from conjoin.frontends import capture, not_understood
from conjoin.ir import Graph, fingerprint, load_graph, parse_graph, save_graph, verify
from conjoin.report import Inspection, inspect
from conjoin.runtime import CapturedModule, to_module

__all__ = [
    "CaptureError", "CapturedModule", "ConjoinError", "Graph", "GraphError", "Inspection", "UsageError",
    "__version__", "capture", "fingerprint", "inspect", "load_graph", "not_understood", "parse_graph", "save_graph",
    "to_module", "verify",
]  # fmt: skip

try:
    __version__ = version("conjoin")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+unknown"
