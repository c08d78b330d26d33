"""How what lies on the host comes and goes: how far ahead copies are started, and what is updated at once."""

from __future__ import annotations

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
