"""How commands answer: as text for people, or with `--json` as data for programs."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def print_json(data: Any) -> None:
    """Print plain data."""
    typer.echo(json.dumps(data, indent=2))
