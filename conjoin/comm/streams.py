"""All messages of a transfer as a few arrays, for those who ask how long they take: a million are a few thousand rows.

What one device sends to another comes again in every chunk, so a row stands for all chunks of a part of a slice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conjoin.comm.cross_mesh import Cells, InRounds, TransferPlan

Numbers = NDArray[np.int64]
Digests = NDArray[np.uint64]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class Streams:
    """Rows of messages: who sends to whom, and by which pattern; not what a device keeps."""

    sender: Numbers
    receiver: Numbers
    pattern: Numbers
    rounds: Numbers
    """By pattern, the rounds of its messages."""
    after: Numbers
    """By pattern, up to which round each waits; -1 for at once."""
    num_bytes: Numbers
    """By pattern, the bytes of each; 0 where there is none."""
    in_frames: bool = False
    """Whether ranks go on together: all wait for the same few rounds."""

    @property
    def is_at_once(self) -> bool:
        """Whether nothing waits for anything."""
        return not bool(((self.after >= 0) & (self.num_bytes > 0)).any())

    @classmethod
    def of_messages(cls, messages: Iterable[tuple[int, int, int, int, int]]) -> Streams:
        """Of messages one by one: sender, receiver, bytes, round, and up to which round each waits."""
        table = np.array([each for each in messages if each[0] != each[1]], dtype=np.int64).reshape(-1, 5)
        columns = [np.ascontiguousarray(column) for column in table.T]
        sizes, rounds, after = (column[:, None] for column in columns[2:])
        return cls(columns[0], columns[1], np.arange(len(table)), rounds, after, sizes)

    @classmethod
    def at_once(cls, messages: Iterable[tuple[int, int, int]]) -> Streams:
        """Of messages that wait for nothing: sender, receiver, bytes."""
        return cls.of_messages((*each, 0, -1) for each in messages)


def streams_of(plan: InRounds, itemsize: int) -> Streams:
    """The messages of a transfer.

    >>> from conjoin.comm import Grid, plan_transfer
    >>> plan = plan_transfer((64,), 4, ((), Grid.of_hosts(1, 1)), ((), Grid.of_hosts(2, 1, 1, 1)), chunks=4)
    >>> streams = streams_of(plan, 4)
    >>> streams.sender, streams.receiver, streams.num_bytes[streams.pattern].sum(axis=1)
    (array([0, 1]), array([1, 2]), array([256, 256]))
    """
    if isinstance(plan, TransferPlan):
        return _of_cells(plan, itemsize)
    return Streams.of_messages(
        (m.sender, m.receiver, (m.end - m.begin) * itemsize, number, m.after)
        for number, messages in enumerate(plan.rounds())
        for m in messages
    )


def _of_cells(plan: TransferPlan, itemsize: int) -> Streams:
    tables = [_moving(table) for table in (plan.cells, plan.spread, plan.kept)]
    between, spread, kept = (_columns(table) for table in tables)
    last = plan.rounds_per_frame - 1
    waits = np.where(between[-1] > 0, 0, -1)  # up to the frame before; what came inside a frame, up to its last but one
    rows = np.concatenate([
        np.stack([*between, waits, np.zeros_like(waits)]),
        np.stack([*spread, np.ones_like(spread[0]), np.zeros_like(spread[0])]),
        np.stack([np.full_like(kept[0], last), *kept[1:], np.full_like(kept[0], -1), np.ones_like(kept[0])]),
    ], axis=1)  # fmt: skip
    _, first, pattern = np.unique(digests(*rows), return_index=True, return_inverse=True)
    turn, size, x, y, depth, waits, is_whole = (column[:, None] for column in rows[:, first])
    chunk = np.arange(plan.chunks)
    begins, ends = (np.where(is_whole, edge * (chunk == 0), (size * chunk + edge) // plan.chunks) for edge in (x, y))
    frame = (chunk + depth) * plan.rounds_per_frame
    after = np.where(waits < 0, -1, frame - 1 + waits * last)
    sender, receiver = (np.concatenate([getattr(table, end) for table in tables]) for end in ("sender", "receiver"))
    return Streams(sender, receiver, pattern, frame + turn, after, (ends - begins) * itemsize, in_frames=True)


def _moving(cells: Cells) -> Cells:
    return cells.chosen(cells.sender != cells.receiver)


def _columns(cells: Cells) -> list[Numbers]:
    return [cells.round, cells.size, cells.x, cells.y, cells.depth]


def digests(*columns: NDArray[Any]) -> Digests:
    """A number for each row of some columns, which is another for other rows.

    >>> rows = digests(np.array([1, 1, 2]), np.array([2, 2, 1]))
    >>> bool(rows[0] == rows[1] != rows[2])
    True
    """
    found = np.zeros(np.broadcast_shapes(*(column.shape for column in columns)), dtype=np.uint64)
    for column in columns:
        values = column.view(np.uint64) if column.dtype.itemsize == 8 else column.astype(np.uint64)
        found = _mixed(found * _GOLDEN + values)
    return found


def _mixed(values: Digests) -> Digests:
    """Every bit of a number depends on all of it (the finalizer of SplitMix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
