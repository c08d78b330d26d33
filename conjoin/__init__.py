"""Conjoin: from a plain PyTorch model to the fastest way to train it on a given machine."""

from conjoin.api import (
    CapturedModule,
    CaptureError,
    ConjoinError,
    Graph,
    GraphError,
    Inspection,
    UsageError,
    __version__,
    capture,
    fingerprint,
    inspect,
    load_graph,
    not_understood,
    parse_graph,
    save_graph,
    to_module,
    verify,
)

__all__ = [
    "CaptureError", "CapturedModule", "ConjoinError", "Graph", "GraphError", "Inspection", "UsageError",
    "__version__", "capture", "fingerprint", "inspect", "load_graph", "not_understood", "parse_graph", "save_graph",
    "to_module", "verify",
]  # fmt: skip
