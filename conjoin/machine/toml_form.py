"""The versioned TOML form of a machine, and its file: read within limits, written aside and then renamed."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from pathlib import Path
from stat import S_ISREG
from typing import Any

from conjoin.errors import UsageError
from conjoin.machine.files import reason_of, write_aside
from conjoin.machine.limits import shown
from conjoin.machine.toml_reading import KEYS_OF_VERSION, MachineReader
from conjoin.machine.toml_writing import FORMAT, VERSION

MAX_BYTES = 2**20
MAX_LINES = 5_000
MAX_DOTS = 1_000
"""`tomllib` takes time with the square of the dots in a key, and again for each line below such a heading."""
_DECIMAL = re.compile(r"(?<=[=\[,])\s*[-+]?[0-9_]+\.[0-9_]+(?:[eE][-+]?[0-9]+)?(?=\s*(?:[,\]}#\n]|$))")
"""A number with a decimal point, whose dot is none of a key."""


def read_toml(text: str) -> dict[str, Any]:
    """What a machine is made of, from the text of its file; the first problem is raised, the others are counted."""
    facts, problems = _read(text)
    if problems:
        error, more = problems[0], len(problems) - 1
        also = f"\n  and {more} more, which `conjoin machine check` lists" if more else ""
        raise UsageError(f"{error}{also}")
    return facts


def machine_file_problems(path: str | Path) -> tuple[str, ...]:
    """Everything that is wrong with a machine file, each in three sentences; nothing where it describes a machine."""
    try:
        return tuple(_read(read_file(Path(path)))[1])
    except UsageError as error:
        return (str(error),)


def _read(text: str) -> tuple[dict[str, Any], list[str]]:
    _check_lengths(text)
    try:
        data = tomllib.loads(text, parse_float=_decimal)
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"The text is not TOML: {str(error)[:200]}. A machine is described by lines such as num_nodes = 4. "
            f"Correct the text there."
        ) from None
    version = _check_format(data)
    reader = MachineReader()
    facts = reader.facts({key: value for key, value in data.items() if key not in ("format", "version")}, version)
    return facts, reader.problems


def _decimal(text: str) -> Decimal:
    """A number as it is written, so that moving its decimal point is exact; one beyond all bounds is infinite."""
    try:
        return Decimal(text)
    except InvalidOperation:
        return Decimal("Infinity")


def _check_lengths(text: str) -> None:
    found = (("lines", text.count("\n"), MAX_LINES), ("dots", _DECIMAL.sub("", text).count("."), MAX_DOTS))
    for what, count, limit in found:
        if count > limit:
            raise UsageError(
                f"The text has {count:,} {what}, the limit is {limit:,}. No machine needs that many. "
                f"Check that it describes a machine."
            )


def _check_format(data: Mapping[str, Any]) -> int:
    if data.get("format") != FORMAT:
        raise UsageError(
            f"The text does not describe a machine: its format is {_shown_entry(data, 'format')}. "
            f"A machine file says so in its first lines. "
            f'Write format = "{FORMAT}" and version = {VERSION} there, or check that it is the right file.'
        )
    version = data.get("version")
    if type(version) is not int or version not in KEYS_OF_VERSION:
        raise UsageError(
            f"The machine's format version is {_shown_entry(data, 'version')}. "
            f"This release of conjoin reads versions {' and '.join(map(str, KEYS_OF_VERSION))}. "
            f"Write version = {VERSION} if the file was made by hand, else use the release that wrote it."
        )
    return version


def _shown_entry(data: Mapping[str, Any], key: str) -> str:
    return shown(data[key]) if key in data else "missing"


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
            f"The machine file could not be read: {reason_of(error)}. Nothing was loaded. Check the path."
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
        write_aside(path, text.encode())
    except (OSError, ValueError) as error:
        raise UsageError(
            f"The machine could not be written to {str(path)!r}: {reason_of(error)}. Nothing was changed. "
            f"Choose another path."
        ) from None
