"""How what lies on the host comes and goes: how far ahead copies are started, and what is updated at once."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

_AHEAD = 2
"""Tensors that are on their way at least: one is used, or made, while another is copied and the next waits for it."""
AHEAD_BYTES = 2**28
"""And as many as have so many bytes: at 25 GB/s some 10 ms of a copy, a thousand times its start, in which a GPU
computes several layers; little beside its memory. As much optimizer state is brought and updated at once."""


def num_ahead(sizes: Iterable[int]) -> int:
    """How many of some tensors, from the nearest on, are on their way at once: those that have just been made and need
    not have left the device yet, or those that the backward pass will ask for next.

    >>> num_ahead([2**27] * 5), num_ahead([2**30] * 5), num_ahead([1])
    (2, 2, 1)
    >>> num_ahead([2**26] * 9)
    4
    """
    found = held = 0
    for num_bytes in sizes:
        if found >= _AHEAD and held + num_bytes > AHEAD_BYTES:
            break
        found, held = found + 1, held + num_bytes
    return found


def updated_together(sizes: Sequence[int], limit: int = AHEAD_BYTES) -> list[range]:
    """Parameters one after the other, by the bytes of what an optimizer remembers of each, as they are updated.

    >>> updated_together([3, 3, 9, 1], limit=6)
    [range(0, 2), range(2, 3), range(3, 4)]
    """
    found: list[range] = []
    start = held = 0
    for i, num_bytes in enumerate(sizes):
        if i > start and held + num_bytes > limit:
            found.append(range(start, i))
            start, held = i, 0
        held += num_bytes
    return [*found, range(start, len(sizes))] if len(sizes) > start else found


BLOCK_BYTES = 2**26
"""Of inputs that lie on the host one such block is computed with while the next is copied: at 25 GB/s 2.7 ms each."""
EDGE_BYTES, FIRST_BYTES = 4, 8
"""An edge in a block is the number of the vertex at its other end; for every vertex there is where its edges begin."""
_SCORES = 6
"""Numbers for each head of an edge that attention makes at once in its backward pass: scores, shares, gradients."""


def score_bytes(heads: int, itemsize: int) -> int:
    """What attention makes of an edge in a block: numbers for each head, and the row that it belongs to."""
    return _SCORES * heads * itemsize + 8


def num_blocks(num_bytes: int) -> int:
    """In how many blocks something on the host is copied.

    >>> num_blocks(0), num_blocks(2**26), num_blocks(2**26 + 1)
    (1, 1, 2)
    """
    return max(-(-num_bytes // BLOCK_BYTES), 1)


def held_in_blocks(num_bytes: int) -> int:
    """How much of it is on the device at once: a block, and the next one."""
    return min(2 * BLOCK_BYTES, num_bytes)


def cut_blocks(bytes_before: Sequence[int]) -> list[tuple[int, int]]:
    """Rows in blocks, by the bytes before each row and before the end: as many as fit, but at least one.

    >>> cut_blocks([0, 2**25, 2**26, 2**26 + 1, 2**28])
    [(0, 2), (2, 3), (3, 4)]
    """
    found, start, last = list[tuple[int, int]](), 0, len(bytes_before) - 1
    while start < last:
        stop = bisect_right(bytes_before, bytes_before[start] + BLOCK_BYTES, start + 1) - 1
        stop = min(max(stop, start + 1), last)
        found.append((start, stop))
        start = stop
    return found
