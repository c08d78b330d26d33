"""The versioned TOML form of a machine, and its file: read within limits, written aside and then renamed."""

from __future__ import annotations

import json
import os
import tomllib
import uuid
from collections.abc import Mapping
from pathlib import Path
from stat import S_ISREG
from typing import Any

from conjoin.errors import UsageError
from conjoin.machine.limits import shown, suggestion

FORMAT = "conjoin.machine"
VERSION = 1
NEEDED = ("name", "num_nodes", "devices_per_node", "device")
OPTIONAL = ("description",)
MAX_BYTES = 2**20
MAX_LINES_OR_DOTS = 1_000
"""`tomllib` takes time with the square of the dots in a key, and again for each line below such a heading."""


def write_toml(facts: Mapping[str, str | int]) -> str:
    """The text of a machine file. Printable text and line ends are quoted alike in JSON and in TOML.

    >>> print(write_toml({"name": "two", "num_nodes": 2}))
    format = "conjoin.machine"
    version = 1
    name = "two"
    num_nodes = 2
    <BLANKLINE>
    """
    entries = {"format": FORMAT, "version": VERSION, **facts}
    return "".join(f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in entries.items())


def read_toml(text: str) -> dict[str, Any]:
    """The entries of a machine file by key: all that are needed and none unknown, their values not yet checked."""
    _check_lengths(text)
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"The text is not TOML: {str(error)[:200]}. A machine is described by lines such as num_nodes = 4. "
            f"Correct the text there."
        ) from None
    _check_format(data)
    return _check_keys({key: value for key, value in data.items() if key not in ("format", "version")})


def _check_lengths(text: str) -> None:
    for what, count in (("lines", text.count("\n")), ("dots", text.count("."))):
        if count > MAX_LINES_OR_DOTS:
            raise UsageError(
                f"The text has {count:,} {what}, the limit is {MAX_LINES_OR_DOTS:,}. No machine needs that many. "
                f"Check that it describes a machine."
            )


def _check_format(data: Mapping[str, Any]) -> None:
    if data.get("format") != FORMAT:
        raise UsageError(
            f"The text does not describe a machine: its format is {_shown_entry(data, 'format')}. "
            f"A machine file says so in its first lines. "
            f'Write format = "{FORMAT}" and version = {VERSION} there, or check that it is the right file.'
        )
    version = data.get("version")
    if type(version) is not int or version != VERSION:
        raise UsageError(
            f"The machine's format version is {_shown_entry(data, 'version')}. "
            f"This release of conjoin reads version {VERSION}. "
            f"Write version = {VERSION} if the file was made by hand, else use the release that wrote it."
        )


def _shown_entry(data: Mapping[str, Any], key: str) -> str:
    return shown(data[key]) if key in data else "missing"


def _check_keys(entries: dict[str, Any]) -> dict[str, Any]:
    known = (*NEEDED, *OPTIONAL)
    unknown = [key for key in entries if key not in known]
    if unknown:
        raise UsageError(
            f"The machine has an unknown key {shown(unknown[0])}. A machine of version {VERSION} has the keys "
            f"{', '.join(known)}. {suggestion(unknown[0], known)}"
        )
    missing = [key for key in NEEDED if key not in entries]
    if missing:
        raise UsageError(
            f"The machine lacks {', '.join(missing)}. Every machine says {', '.join(NEEDED)}. "
            f"Add a line such as {missing[0]} = {_EXAMPLES[missing[0]]}."
        )
    return entries


_EXAMPLES = {"name": '"my-cluster"', "num_nodes": "4", "devices_per_node": "8", "device": '"cuda"'}


def read_file(path: Path) -> str:
    """The text of a machine file; one that is too large is refused unread, a pipe or device is not waited for."""
    try:
        return _read_limited(path).decode()
    except UnicodeDecodeError as error:
        raise UsageError(
            f"The file is not text: byte {error.start:,} is not UTF-8. "
            f"It was damaged or is another kind of file. Check the path."
        ) from None
    except (OSError, ValueError) as error:
        raise UsageError(
            f"The machine file could not be read: {_reason(error)}. Nothing was loaded. Check the path."
        ) from None


def _read_limited(path: Path) -> bytes:
    found = path.stat()
    if not S_ISREG(found.st_mode):
        raise OSError("it is not a file")
    _check_size(found.st_size)
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    _check_size(len(content))
    return content


def _check_size(num_bytes: int) -> None:
    if num_bytes > MAX_BYTES:
        raise UsageError(
            f"The machine file holds {num_bytes:,} bytes, the limit is {MAX_BYTES:,}. No machine needs that many. "
            f"Check the path."
        )


def write_file(path: Path, text: str) -> None:
    """Write a machine file, aside first and then renamed, so that a half-written file never stands there."""
    try:
        _write_aside(path, text)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"The machine could not be written to {str(path)!r}: {_reason(error)}. Nothing was changed. "
            f"Choose another path."
        ) from None


def _write_aside(target: Path, text: str) -> None:
    aside = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        with aside.open("x", encoding="utf-8", newline="\n") as file:
            file.write(text)
        os.replace(aside, target)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
