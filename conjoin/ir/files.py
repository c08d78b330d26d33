"""Files of data: written aside and then renamed, read within limits, and every failure told in three sentences."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

from conjoin.errors import ConjoinError
from conjoin.ir.limits import read_limited


def write_file(path: str | Path, text: str, kind: str, error_type: type[ConjoinError]) -> None:
    """Write a text file, aside first, so that a half-written one never stands there."""
    target = Path(path)
    try:
        _write_aside(target, text)
    except (OSError, ValueError) as error:
        raise error_type(
            f"The {kind} could not be written to {target}: {_reason(error)}. Nothing was changed. Choose another path."
        ) from None


def _write_aside(target: Path, text: str) -> None:
    aside = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        with aside.open("x", encoding="utf-8") as file:
            file.write(text)
        aside.replace(target)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def read_json(path: str | Path, kind: str, error_type: type[ConjoinError]) -> Any:
    """Plain data from a JSON file."""
    target = Path(path)
    try:
        content = read_limited(target)
    except (OSError, ValueError) as error:
        raise error_type(
            f"The {kind} file {target} could not be read: {_reason(error)}. Nothing was loaded. Check the path."
        ) from None
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise error_type(
            f"The file {target} is not JSON: {str(error)[:200]}. It was damaged or is another kind of file. "
            f"Check the path."
        ) from None
