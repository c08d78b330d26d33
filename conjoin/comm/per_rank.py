"""Numbers of bytes, one for every rank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from operator import add


def ring_bytes(num_bytes: int, num_members: int) -> int:
    """What each member of a ring sends to reduce so many bytes everywhere.

    >>> ring_bytes(24, 3)
    32
    """
    return round(2 * (num_members - 1) * num_bytes / num_members)


@dataclass(frozen=True, slots=True)
class PerRank:
    """A number of bytes for every rank; one entry stands for all where they are alike.

    >>> PerRank((3,), 4) + PerRank((1, 2, 3, 4), 4)
    PerRank(values=(4, 5, 6, 7), num_ranks=4)
    """

    values: tuple[int, ...]
    num_ranks: int

    def __getitem__(self, rank: int) -> int:
        return self.values[rank if len(self.values) > 1 else 0]

    def __add__(self, other: PerRank) -> PerRank:
        if len(self.values) == len(other.values) == 1:
            return PerRank((self.values[0] + other.values[0],), self.num_ranks)
        return PerRank(tuple(map(add, self.all, other.all)), self.num_ranks)

    def __mul__(self, times: int) -> PerRank:
        return PerRank(tuple(times * value for value in self.values), self.num_ranks)

    @property
    def largest(self) -> int:
        return max(self.values)

    @property
    def total(self) -> int:
        return sum(self.values) * (self.num_ranks // len(self.values))

    @property
    def all(self) -> tuple[int, ...]:
        """One number for each rank."""
        return self.values if len(self.values) > 1 else self.values * self.num_ranks


def sum_per_rank(parts: Iterable[PerRank], num_ranks: int) -> PerRank:
    """The sum of some numbers for every rank."""
    total = PerRank((0,), num_ranks)
    for part in parts:
        total += part
    return total
