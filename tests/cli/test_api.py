"""What a Python program may import from the package."""

from __future__ import annotations

import conjoin
import conjoin.api


def test_the_surface_is_frozen() -> None:
    """Adding a name is a decision, not a habit."""
    assert conjoin.__all__ == conjoin.api.__all__
    assert all(getattr(conjoin, name) is getattr(conjoin.api, name) for name in conjoin.__all__)
    assert sorted(conjoin.__all__) == [
        "CaptureError", "CapturedModule", "ConjoinError", "Graph", "GraphError", "Inspection", "UsageError",
        "__version__", "capture", "fingerprint", "inspect", "load_graph", "not_understood", "parse_graph",
        "save_graph", "to_module", "verify",
    ]  # fmt: skip
