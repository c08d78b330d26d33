"""The command line."""

from conjoin.cli.main import app, main

__all__ = ["app", "main"]
