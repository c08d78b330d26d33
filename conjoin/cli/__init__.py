"""The command line."""

from conjoin.cli.main import app, main
from conjoin.cli.models import load_workload

__all__ = ["app", "load_workload", "main"]
