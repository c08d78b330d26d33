"""Rings that lie side by side where devices are joined by links of their own, as in a cube of NVLinks.

NCCL looks for as many rings as the links carry and sends a part of the data around each, in both directions
(`src/graph/search.cc`). A ring passes every member once; what it takes of a link the others no longer have. So the rate
at which a member sends is twice the rings times what each carries, and at most what all its links carry together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

Pair = tuple[int, int]
"""Two devices that a link joins, the lower number first."""
Cycle = tuple[Pair, ...]

MOST_MEMBERS = 8
"""Rings among more are not looked for: there are too many, and nobody wires so many directly."""
_MOST_STEPS = 20_000


def rings_rate(members: Sequence[int], rates: Mapping[Pair, float]) -> float:
    """Bytes per second that every member sends on over all rings at once; 0 where direct links make no ring.

    Two rings fit into four devices of which every pair has two links: they leave a link of each device unused, which
    half as fast rings do not.

    >>> square = {(0, 1): 50.0, (1, 2): 50.0, (2, 3): 50.0, (0, 3): 50.0}
    >>> rings_rate(range(4), square), rings_rate(range(4), {**square, (0, 2): 50.0, (1, 3): 50.0})
    (100.0, 150.0)
    """
    if not 2 < len(members) <= MOST_MEMBERS or not rates:
        return 0.0
    least = min(rates.values())
    most = min(sum(rate for pair, rate in rates.items() if member in pair) for member in members)
    found = 0.0
    for unit in (least, least / 2):
        if found < most:
            found = max(found, 2 * unit * _most_rings(members, {pair: int(r / unit) for pair, r in rates.items()}))
    return found


def _most_rings(members: Sequence[int], room: Mapping[Pair, int]) -> int:
    """As many rings as there is room for, the same one counted as often as it fits."""
    cycles = list(_cycles(members, room))
    most = min(sum(count for pair, count in room.items() if member in pair) for member in members) // 2
    left, best, steps = dict(room), 0, 0

    def lay(first: int, count: int) -> None:
        nonlocal best, steps
        best, steps = max(best, count), steps + 1
        for i in range(first, len(cycles)):
            if best == most or steps > _MOST_STEPS:
                return
            if all(left[pair] for pair in cycles[i]):
                for pair in cycles[i]:
                    left[pair] -= 1
                lay(i, count + 1)
                for pair in cycles[i]:
                    left[pair] += 1

    lay(0, 0)
    return best


def _cycles(members: Sequence[int], room: Mapping[Pair, int]) -> Iterator[Cycle]:
    """Every way around all members over links, each in one of its two directions."""

    def walk(path: tuple[int, ...]) -> Iterator[Cycle]:
        if len(path) == len(members):
            if path[1] < path[-1] and room.get(joined(path[-1], path[0])):
                yield tuple(joined(a, b) for a, b in pairwise((*path, path[0])))
            return
        for member in members:
            if member not in path and room.get(joined(path[-1], member)):
                yield from walk((*path, member))

    yield from walk((members[0],))


def joined(one: int, other: int) -> Pair:
    """The pair of two devices."""
    return (one, other) if one < other else (other, one)
