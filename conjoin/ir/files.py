"""Files of data: written aside and then renamed, read within limits, and every failure told in three sentences."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from conjoin.errors import ConjoinError
from conjoin.ir.limits import read_limited
from conjoin.machine import reason_of, write_aside


def write_file(path: str | Path, text: str, kind: str, error_type: type[ConjoinError]) -> None:
    """Write a text file, aside first, so that a half-written one never stands there."""
    target = Path(path)
    try:
        write_aside(target, text.encode())
    except (OSError, ValueError) as error:
        raise error_type(
            f"The {kind} could not be written to {target}: {reason_of(error)}. Nothing was changed. "
            f"Choose another path."
        ) from None


def read_json(path: str | Path, kind: str, error_type: type[ConjoinError]) -> Any:
    """Plain data from a JSON file."""
    target = Path(path)
    try:
        content = read_limited(target)
    except (OSError, ValueError) as error:
        raise error_type(
            f"The {kind} file {target} could not be read: {reason_of(error)}. Nothing was loaded. Check the path."
        ) from None
    try:
        return json.loads(content, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise error_type(
            f"The file {target} is not JSON: {str(error)[:200]}. It was damaged or is another kind of file. "
            f"Check the path."
        ) from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose keys all differ: of two alike one would be lost without a word."""
    found = dict(pairs)
    if len(found) < len(pairs):
        ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {twice[:60]!r} stands twice in one object")
    return found
