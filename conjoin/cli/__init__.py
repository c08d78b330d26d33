"""The command line."""

from typing import TYPE_CHECKING, Any

from conjoin.cli.main import app, main

if TYPE_CHECKING:
    from conjoin.cli.models import load_workload

__all__ = ["app", "load_workload", "main"]


def __getattr__(name: str) -> Any:
    """What needs torch, when it is first asked for."""
    if name != "load_workload":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from conjoin.cli.models import load_workload

    return load_workload
