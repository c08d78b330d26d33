"""In which order variables are eliminated: tried out on the scopes of tables alone, before any table is added up.

By degree, and in rounds, equal layers of a stack stay equal and are worked out once. On an unrolled recurrent network
that order ends in large tables, since every parameter is read at every step. There variables that many others are
connected with wait until those are gone, and the others are ordered as if these were not there: that walks through
the grid of layers and steps from one end to the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import prod

WIDE = 1 << 17
"""Entries of a sum of tables up to which an order is good enough."""
_MANY = 12
"""Neighbours beyond which a variable is a hub."""
_FEW = 6
"""Neighbours up to which one is eliminated before all others that are no hubs."""


@dataclass(frozen=True, slots=True)
class Order:
    """An order of variables, and the entries of the sums of tables on the way."""

    variables: tuple[int, ...]
    entries: tuple[int, ...]

    @property
    def num_wide(self) -> int:
        """How many sums are so large that another order, or a smaller problem, is worth looking for."""
        return sum(entries > WIDE for entries in self.entries)


def find_order(sizes: Sequence[int], scopes: Iterable[tuple[int, ...]], kept: Set[int] = frozenset()) -> Order:
    """An order for tables of some variables each, of all but those that are kept.

    >>> find_order([2, 3, 2], [(0, 1), (1, 2)])
    Order(variables=(0, 2, 1), entries=(6, 6, 3))
    """
    some = list(scopes)
    found = _Trial(sizes, some, _by_degree, kept).run()
    if not found.num_wide:
        return found
    others = (_Trial(sizes, some, turn, kept).run() for turn in (_by_entries, _hubs_last))
    return min((found, *others), key=lambda order: sum(order.entries))


_Turn = Callable[["_Trial", int], tuple[float, ...]]


class _Trial:
    """An elimination without tables."""

    def __init__(
        self, sizes: Sequence[int], scopes: Iterable[tuple[int, ...]], turn: _Turn, kept: Set[int] = frozenset()
    ) -> None:
        self.sizes, self.turn = sizes, turn
        self.rounds = [0] * len(sizes)
        self.left = set(range(len(sizes))) - kept
        self.around: list[set[int]] = [set() for _ in sizes]
        for scope in scopes:
            for variable in scope:
                self.around[variable].update(other for other in scope if other != variable)
        self.hubs = {variable for variable, around in enumerate(self.around) if len(around) > _MANY}
        self.spokes = {hub: self.around[hub] - self.hubs for hub in self.hubs}
        """What they were connected with at first."""

    def run(self) -> Order:
        waiting = [(self.turn(self, variable), variable) for variable in sorted(self.left)]
        heapify(waiting)
        order, entries = list[int](), list[int]()
        while self.left:
            turn, variable = heappop(waiting)
            if variable not in self.left or turn != self.turn(self, variable):
                continue
            self.left.discard(variable)
            order.append(variable)
            entries.append(self.entries(variable))
            for other in self._take_out(variable) & self.left:
                heappush(waiting, (self.turn(self, other), other))
        return Order(tuple(order), tuple(entries))

    def entries(self, variable: int) -> int:
        """Of the sum of the tables that a variable is in."""
        return prod(self.sizes[other] for other in self.around[variable]) * self.sizes[variable]

    def _take_out(self, variable: int) -> set[int]:
        neighbours = self.around[variable]
        for other in neighbours:
            self.around[other] |= neighbours
            self.around[other] -= {other, variable}
            self.rounds[other] = max(self.rounds[other], self.rounds[variable] + 1)
        return neighbours


def _by_degree(trial: _Trial, variable: int) -> tuple[float, ...]:
    """First those with few neighbours, or else a small table; and in rounds, so that what is equal in many layers is
    still equal in the next round."""
    degree = len(trial.around[variable])
    return degree, trial.entries(variable) if degree > 2 else 0, trial.rounds[variable]


def _by_entries(trial: _Trial, variable: int) -> tuple[float, ...]:
    """First the smallest table."""
    return (trial.entries(variable),)


def _hubs_last(trial: _Trial, variable: int) -> tuple[float, ...]:
    """Hubs as soon as all they were connected with are gone; of the others first the smallest table without hubs."""
    others = trial.around[variable] - trial.hubs
    if variable in trial.hubs:
        waits = len(others) > _FEW or not trial.spokes[variable].isdisjoint(trial.left)
        return 2 * waits - 1, trial.entries(variable)
    return 0, prod(trial.sizes[other] for other in others) * trial.sizes[variable]
