"""Files in the safetensors format, read by parts and written one tensor after the other, so that none is ever whole.

A file is the length of its header in eight bytes, the header in JSON, and the data of the tensors without gaps:

    {"__metadata__": {"format": "pt"}, "NAME": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}

Headers are believed only where they describe the file exactly.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from math import prod
from pathlib import Path
from stat import S_ISREG
from typing import Any

import torch
from torch import Tensor

from conjoin.ir import Region, region_shape

DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "U16": torch.uint16, "I16": torch.int16,
    "U32": torch.uint32, "I32": torch.int32, "U64": torch.uint64, "I64": torch.int64,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER_BYTES = 100_000_000
"""As the library of the format has it."""
BLOCK_BYTES = 16 * 2**20
"""How much is read at once: disks and memory are at their full rate long before."""
_POINTER = b"version https://git-lfs"


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a file."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    """Where in the file its data begin."""

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of a file; ValueError or OSError where it is not such a file, or not all of it."""
    found = path.stat()
    if not S_ISREG(found.st_mode):
        raise OSError("it is not a file")
    with path.open("rb") as file:
        first = file.read(8)
        if _POINTER.startswith(first) and first:
            raise ValueError("it is the pointer that git leaves of a large file; fetch it with git lfs pull")
        length = int.from_bytes(first, "little")
        if len(first) < 8 or not 2 <= length <= min(_MAX_HEADER_BYTES, found.st_size - 8):
            raise ValueError(f"a header of {length:,} bytes is said to stand in {found.st_size:,}")
        header = json.loads(file.read(length), object_pairs_hook=_table)
    if not isinstance(header, dict):
        raise ValueError("its header is no table")
    header.pop("__metadata__", None)
    entries = {name: _entry(name, told, 8 + length) for name, told in header.items()}
    _check_filled(entries, 8 + length, found.st_size)
    return entries


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name stands twice in its header")
    return found


def _entry(name: str, told: Any, base: int) -> Entry:
    match told:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(begin), int(end)]} if dtype in DTYPES:
            if all(type(size) is int and 0 <= size < 2**62 for size in shape) and 0 <= begin <= end:
                made = Entry(tuple(shape), DTYPES[dtype], base + begin)
                if made.bytes == end - begin:
                    return made
                raise ValueError(f"{name[:60]} of shape {shape} takes {made.bytes:,} bytes, and {end - begin:,} are it")
    raise ValueError(f"{name[:60]} is described as {str(told)[:100]}")


def _check_filled(entries: Mapping[str, Entry], start: int, size: int) -> None:
    """The tensors follow each other without gaps to the end of the file."""
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].bytes)):
        if entry.start != start:
            raise ValueError(f"{name[:60]} begins at byte {entry.start:,} where the one before ends at {start:,}")
        start += entry.bytes
    if start != size:
        raise ValueError(f"it has {size:,} bytes where its tensors take {start:,}")


class Reader:
    """Reads parts of tensors of one open file."""

    def __init__(self, file: BufferedReader) -> None:
        self._file = file
        self._buffer = torch.empty(BLOCK_BYTES, dtype=torch.uint8)

    def read(self, entry: Entry, region: Region, into: Tensor) -> None:
        """Copy a region of a tensor into one of its shape, converted to its dtype."""
        if not into.numel():
            return
        shape, spans = (entry.shape, region) if entry.shape else ((1,), ((0, 1),))
        self._read(entry.dtype, entry.start, shape, spans, into.view(region_shape(spans)))

    def _read(self, dtype: torch.dtype, start: int, shape: tuple[int, ...], region: Region, into: Tensor) -> None:
        """Rows of the first dim, some at a time; one that is large by itself is read as a tensor of its own."""
        (first, last), row_bytes = region[0], prod(shape[1:]) * dtype.itemsize
        if row_bytes > BLOCK_BYTES:
            for i in range(first, last):
                self._read(dtype, start + i * row_bytes, shape[1:], region[1:], into[i - first])
            return
        inside = tuple(slice(*span) for span in region[1:])
        count = BLOCK_BYTES // row_bytes
        for i in range(first, last, count):
            target = into[i - first : min(i - first + count, last - first)]
            rows = len(target)
            if target.shape[1:] == shape[1:] and target.dtype == dtype and _is_plain(target):
                self._fill(target.view(-1).view(torch.uint8), start + i * row_bytes)
            else:
                part = self._buffer[: rows * row_bytes]
                self._fill(part, start + i * row_bytes)
                target.copy_(part.view(dtype).view(rows, *shape[1:])[(slice(None), *inside)])

    def _fill(self, part: Tensor, start: int) -> None:
        """Read bytes of the file."""
        self._file.seek(start)
        if self._file.readinto(part.numpy().data) != len(part):
            raise OSError("it ended before its tensors did")


def _is_plain(tensor: Tensor) -> bool:
    """Whether a file can be read straight into a tensor."""
    return tensor.device.type == "cpu" and tensor.is_contiguous()


def header_bytes(tensors: Mapping[str, tuple[Sequence[int], torch.dtype]]) -> bytes:
    """The header of a file with these tensors, to be followed by their data in this order."""
    told: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (shape, dtype) in tensors.items():
        begin, end = end, end + prod(shape) * dtype.itemsize
        told[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(told, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the data are aligned
    return len(text).to_bytes(8, "little") + text


def data_of(tensor: Tensor) -> Iterator[memoryview]:
    """The data of a tensor as they stand in a file, a block at a time."""
    flat = tensor.detach().contiguous().view(-1)
    count = BLOCK_BYTES // max(1, flat.itemsize)
    for i in range(0, flat.numel(), count):
        yield flat[i : i + count].view(torch.uint8).cpu().numpy().data
