"""How commands answer: as text for people, with `--json` as data for programs; and where their files can be written."""

from __future__ import annotations

import json
import os
from math import isfinite
from pathlib import Path
from typing import Any

import typer

from conjoin.cli import rooms
from conjoin.errors import UsageError


def print_json(data: Any) -> None:
    """Print plain data; a number that JSON has no word for is null."""
    typer.echo(json.dumps(_finite(data), indent=2, allow_nan=False))


def _finite(data: Any) -> Any:
    match data:
        case dict():
            return {key: _finite(value) for key, value in data.items()}
        case list() | tuple():
            return [_finite(value) for value in data]
        case float():
            return data if isfinite(data) else None
    return data


_MARKS = {
    "plan": b'"conjoin.plan"',
    "graph": b'"conjoin.graph"',
    "trace": b'"traceEvents"',
    "log": b'{"kind":',
    "machine": b"conjoin.machine",
    "library": b'operators = "',
}
"""What stands near the beginning of a file that a command has written, and of none that somebody else has."""
_BEGINNING = 4096


def check_output(path: Path | None, kind: str) -> None:
    """Refuse before any work what could not be saved after it, or only over a file of another kind."""
    reason = None if path is None else _obstacle(path) or _other_file(path, kind)
    if reason is not None:
        raise UsageError(
            f"The {kind} could not be written to {path}: {reason}. Nothing was started. Choose another path."
        )


def check_directory(path: Path | None, kind: str) -> None:
    """Refuse before any work a directory that could not be made, or not be written to."""
    reason = None if path is None else _directory_obstacle(path)
    if reason is not None:
        raise UsageError(
            f"The {kind} could not be kept in {path}: {reason}. Nothing was started. Choose another directory."
        )


def _directory_obstacle(path: Path) -> str | None:
    target = Path(os.path.realpath(path))
    try:
        there = next(found for found in (target, *target.parents) if found.exists())
    except (OSError, ValueError) as error:
        return rooms.machine.reason_of(error)
    if not there.is_dir():
        return f"{there} is not a directory"
    return _write_protection(there)


def _obstacle(path: Path) -> str | None:
    """Why no file can be put there: it is written beside and then renamed, so the directory counts, not the file."""
    try:
        directory = rooms.machine.place_of(path).parent
        if not directory.is_dir():
            return f"there is no directory {directory}"
    except (OSError, ValueError) as error:
        return rooms.machine.reason_of(error)
    return _write_protection(directory)


def _other_file(path: Path, kind: str) -> str | None:
    """What would be lost: a script that was named by mistake is no plan."""
    mark = _MARKS.get(kind)
    if mark is None or not path.exists():
        return None
    with path.open("rb") as file:
        beginning = file.read(_BEGINNING)
    return f"a file is there that is no {kind}, and would be lost" if beginning and mark not in beginning else None


def _write_protection(directory: Path) -> str | None:
    return None if os.access(directory, os.W_OK | os.X_OK) else f"the directory {directory} may not be written to"
