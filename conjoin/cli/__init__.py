"""The command line."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from conjoin.cli.main import app, main

if TYPE_CHECKING:
    from conjoin.cli.host_speed import HostSpeed
    from conjoin.cli.models import load_workload

__all__ = ["HostSpeed", "app", "load_workload", "main"]

_LATER = {"HostSpeed": "host_speed", "load_workload": "models"}
"""What needs torch, and where it is."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"conjoin.cli.{_LATER[name]}"), name)
