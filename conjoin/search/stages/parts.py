"""Parts of a machine that stages may have: rows of devices, and the ways to go through the machine from part to part.

A *division* cuts the devices of a machine, in their order, into granules; a stage has one of them, or several in a
row. Parts of the same shape and the same device types are of one class, for which figures are worked out once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from conjoin.errors import UsageError
from conjoin.machine import Machine, devices_of

MANY = 8
"""Granules up to which stages may have different numbers of them; above it all have one."""


@dataclass(frozen=True, slots=True)
class Part:
    """A class of parts of a machine."""

    key: tuple[int, int, tuple[str, ...]]
    """The devices: how many, in how many nodes, of which types."""

    @property
    def num_devices(self) -> int:
        return self.key[0]


@dataclass(frozen=True)
class Division:
    """A machine in granules of some devices each."""

    granule: int
    count: int
    moves: tuple[tuple[tuple[int, Part], ...], ...]
    """From every granule on, the stages that may begin there: how many granules they have, and their parts."""
    machines: dict[Part, Machine]

    @property
    def parts(self) -> tuple[Part, ...]:
        """The classes of parts that stages can have."""
        return tuple(dict.fromkeys(part for move in self.moves for _, part in move))

    @property
    def is_even(self) -> bool:
        """Whether all stages have one granule."""
        return all(size == 1 for move in self.moves for size, _ in move)


def divisions(machine: Machine, most: int) -> Iterator[Division]:
    """Equal stages, at most so many, the fewest first; then unequal ones, where the machine is small enough to try."""
    machines: dict[Part, Machine] = {}
    count, smallest = machine.num_devices, None
    for granule in range(count // 2, 0, -1):
        if count % granule:
            continue
        made = _divide(machine, granule, (1,), machines)
        if made is None:
            continue
        if made.count <= most:
            yield made
        if made.count <= MANY:
            smallest = granule
    if smallest is not None and count // smallest > 2:
        found = _divide(machine, smallest, tuple(range(1, count // smallest)), machines)
        if found is not None and not found.is_even:
            yield found


def _divide(machine: Machine, granule: int, sizes: tuple[int, ...], machines: dict[Part, Machine]) -> Division | None:
    """The division into granules; None where these are no parts of the machine."""
    count = machine.num_devices // granule
    moves: list[tuple[tuple[int, Part], ...]] = []
    for begin in range(count):
        found = []
        for size in sizes:
            part = _part(machine, begin * granule, size * granule, machines) if begin + size <= count else None
            if part is not None:
                found.append((size, part))
        moves.append(tuple(found))
    return Division(granule, count, tuple(moves), machines) if all(moves) else None


def _part(machine: Machine, begin: int, size: int, machines: dict[Part, Machine]) -> Part | None:
    ranks = range(begin, begin + size)
    nodes = len({machine.location(rank)[0] for rank in ranks})
    unlike = len(machine.device_types) > 1
    types = tuple(machine.device_type(rank).name for rank in ranks) if unlike else ()
    part = Part((size, nodes, types))
    if part not in machines:
        try:
            machines[part] = devices_of(machine, ranks)
        except UsageError:
            return None
    return part
