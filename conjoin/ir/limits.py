"""How large a graph from a file may be: a stranger's file must not exhaust the reader."""

from __future__ import annotations

from pathlib import Path
from stat import S_ISREG

from conjoin.errors import GraphError
from conjoin.ops import TensorType

MAX_BYTES = 256 * 2**20
"""A 175-billion-parameter GPT of 96 layers takes about 2 MiB; constants up to their own limit come on top."""
MAX_ITEMS = 1_000_000
MAX_CONSTANT_BYTES = 16 * 2**20
MAX_RANK = 16
MAX_NESTING = 8
"""Of lists inside an argument; torch's own have two levels."""
MAX_NUMBER = 2**31
"""Of lines in a source file, and of equal calls in one graph."""
MAX_ELEMENTS = 2**62
MAX_PIECES = 65_536
"""Tensors that one call may make: a short line could ask for more than memory holds."""


def check_size(num_bytes: int) -> None:
    """Refuse a file larger than any graph."""
    if num_bytes > MAX_BYTES:
        raise GraphError(
            f"The graph file holds {num_bytes:,} bytes, the limit is {MAX_BYTES:,}. No graph needs that many. "
            f"Check that it is the right file; large constants belong into buffers."
        )


def read_limited(path: Path) -> bytes:
    """The bytes of a file; one that is too large is refused unread, a pipe or device is not waited for."""
    found = path.stat()
    if not S_ISREG(found.st_mode):
        raise OSError("it is not a file")
    check_size(found.st_size)
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    check_size(len(content))
    return content


def check_count(count: int) -> None:
    """Refuse more lines or nodes than any graph has."""
    if count > MAX_ITEMS:
        raise GraphError(
            f"The graph has {count:,} lines, the limit is {MAX_ITEMS:,}. No model needs that many. Check the file."
        )


def check_constant(data: bytes, type: TensorType) -> bytes:
    """Refuse constant data that is too large or does not fill its type."""
    if len(data) != type.bytes or len(data) > MAX_CONSTANT_BYTES:
        raise ValueError(
            f"a constant {type} takes {type.bytes:,} bytes (at most {MAX_CONSTANT_BYTES:,}), {len(data):,} are given"
        )
    return data
