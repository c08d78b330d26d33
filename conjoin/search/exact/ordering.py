"""In which order variables are eliminated: tried out on the scopes of tables alone, before any table is added up.

By degree, and in rounds, equal layers of a stack stay equal and are worked out once. On an unrolled recurrent network
that order ends in large tables: every parameter is read at every step, so that a variable with few neighbours may have
large ones. There the variable whose table is the smallest comes first, which walks from step to step and keeps the
parameters for the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import prod

WIDE = 1 << 17
"""Entries of a sum of tables up to which an order is good enough."""


@dataclass(frozen=True, slots=True)
class Order:
    """An order of variables, and the entries of the sums of tables on the way."""

    variables: tuple[int, ...]
    entries: tuple[int, ...]

    @property
    def num_wide(self) -> int:
        """How many sums are so large that another order, or a smaller problem, is worth looking for."""
        return sum(entries > WIDE for entries in self.entries)


def find_order(sizes: Sequence[int], scopes: Iterable[tuple[int, ...]]) -> Order:
    """An order for tables of some variables each.

    >>> find_order([2, 3, 2], [(0, 1), (1, 2)])
    Order(variables=(0, 2, 1), entries=(6, 6, 3))
    """
    kept = list(scopes)
    found = _Trial(sizes, kept, _by_degree).run()
    if not found.num_wide:
        return found
    others = (_Trial(sizes, kept, turn).run() for turn in (_by_entries, _by_growth))
    return min((found, *others), key=lambda order: sum(order.entries))


_Turn = Callable[["_Trial", int], tuple[float, ...]]


class _Trial:
    """An elimination without tables."""

    def __init__(self, sizes: Sequence[int], scopes: Iterable[tuple[int, ...]], turn: _Turn) -> None:
        self.sizes, self.turn = sizes, turn
        self.rounds = [0] * len(sizes)
        self.around: list[set[int]] = [set() for _ in sizes]
        for scope in scopes:
            for variable in scope:
                self.around[variable].update(other for other in scope if other != variable)

    def run(self) -> Order:
        waiting = [(self.turn(self, variable), variable) for variable in range(len(self.sizes))]
        heapify(waiting)
        left, order, entries = set(range(len(self.sizes))), list[int](), list[int]()
        while left:
            turn, variable = heappop(waiting)
            if variable not in left or turn != self.turn(self, variable):
                continue
            left.discard(variable)
            order.append(variable)
            entries.append(self.entries(variable))
            for other in self._take_out(variable):
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


def _by_growth(trial: _Trial, variable: int) -> tuple[float, ...]:
    """First where the table that is made is small beside those it is made from: one of each neighbour at most."""
    size = trial.sizes[variable]
    before = sum(trial.sizes[other] * size for other in trial.around[variable])
    return trial.entries(variable) / size - before, trial.entries(variable)
