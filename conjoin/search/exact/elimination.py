"""The least sum of tables over variables, exactly: elimination in the min-plus semiring.

A problem has variables with finite domains, a table of one or two variables for every factor, and asks for

    min over x of  sum over factors f of  table_f[x of f's variables]

A variable is eliminated by adding up the tables it is in and taking the minimum over it: what is left is a table over
its neighbours (`_eliminate`). On a chain this is a product of min-plus matrices, on a series-parallel graph the
splits of Unity (section 5), in general bucket elimination; the next variable is the one whose table is the smallest
(`_next`). Tables are numbered by what they were made from, so that equal parts of a graph, such as the layers of a
stack, are worked out once.

Where the smallest table would be larger than the budget, variables of its bucket keep only the values that look best
by their own tables. What is found then is a solution, not the least one, and `Solution.is_exact` says so.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Places = NDArray[np.integer[Any]]
MAX_ENTRIES = 1 << 22
"""Entries of the largest sum of tables that is gone through, a value of one variable at a time."""
_REMEMBERED = 1 << 20
"""Entries of the largest table that is remembered for equal parts of a graph: larger ones would fill the memory."""


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Numbers over the values of some variables; tables with the same number are the same."""

    number: int
    values: Array


@dataclass(frozen=True, slots=True)
class Factor:
    """A table and the variables of its dims."""

    variables: tuple[int, ...]
    table: Table


@dataclass(frozen=True, slots=True)
class Solution:
    """The value of every variable, and the sum of all tables there."""

    values: tuple[int, ...]
    total: float
    is_exact: bool


@dataclass(frozen=True, slots=True)
class _Eliminated:
    """A variable with the neighbours it was eliminated to, and its best value for each of theirs."""

    variable: int
    neighbours: tuple[int, ...]
    best: Places


@dataclass(frozen=True, slots=True)
class _Narrowed:
    """A variable of which only some values were kept."""

    variable: int
    kept: NDArray[np.intp]


@dataclass
class Tables:
    """Makes tables, each only once; kept over several problems, it remembers what they have in common."""

    _known: dict[Hashable, Table] = field(default_factory=dict)
    _minima: dict[Hashable, tuple[Table, Places]] = field(default_factory=dict)
    _numbers: count[int] = field(default_factory=count)

    def named(self, name: Hashable, values: Array) -> Table:
        """The table of a name; the values are those given first."""
        found = self._known.get(name)
        if found is None:
            found = self._known[name] = Table(next(self._numbers), values)
        return found

    def find(self, name: Hashable) -> Table | None:
        """The table of a name, where there is one."""
        return self._known.get(name)

    def add(self, one: Table, other: Table) -> Table:
        """The sum of two tables of the same variables."""
        if one.values.size > _REMEMBERED:
            return Table(next(self._numbers), one.values + other.values)
        numbers = sorted((one.number, other.number))
        return self._known.get(("sum", *numbers)) or self.named(("sum", *numbers), one.values + other.values)

    def turned(self, table: Table, order: tuple[int, ...]) -> Table:
        """The table with its dims in another order."""
        if order == tuple(range(len(order))):
            return table
        if table.values.size > _REMEMBERED:
            return Table(next(self._numbers), table.values.transpose(order))
        key = "turned", table.number, order
        return self._known.get(key) or self.named(key, np.ascontiguousarray(table.values.transpose(order)))

    def minimum(
        self, parts: Sequence[tuple[tuple[int, ...], Table]], sizes: tuple[int, ...]
    ) -> tuple[Table, Places]:
        """The minimum over dim 0 of the sum of tables, each over some of the dims; and where it is."""
        key = tuple((dims, table.number) for dims, table in parts), sizes
        if key not in self._minima:
            values, best = _minimum([(dims, table.values) for dims, table in parts], sizes)
            if values.size > _REMEMBERED:
                return Table(next(self._numbers), values), best
            self._minima[key] = self.named(("minimum", key), values), best
        return self._minima[key]


def _minimum(parts: Sequence[tuple[tuple[int, ...], Array]], sizes: tuple[int, ...]) -> tuple[Array, Places]:
    """Value by value of the variable at dim 0: never more than two tables of the result's size at a time."""
    whole = prod(sizes)
    spread = [_spread(values, dims, len(sizes)) for dims, values in parts]
    if whole <= 1 << 18:
        total = sum(spread[1:], start=spread[0]) + np.zeros(sizes)
        best = total.argmin(axis=0)
        return np.take_along_axis(total, best[None], 0)[0], best
    least, best = np.full(sizes[1:], np.inf), np.zeros(sizes[1:], np.uint16 if sizes[0] < 1 << 16 else np.intp)
    for value in range(sizes[0]):
        here = sum(
            (part[value if part.shape[0] > 1 else 0] for part in spread), start=np.zeros((1,) * (len(sizes) - 1))
        )
        better = here < least
        np.copyto(least, here, where=better)
        best[better] = value
    return least, best


def _spread(values: Array, dims: tuple[int, ...], num_dims: int) -> Array:
    """The table with a dim of size 1 for every variable it does not have."""
    shape = [1] * num_dims
    for dim, size in zip(dims, values.shape, strict=True):
        shape[dim] = size
    return values.reshape(shape)


def solve(
    sizes: Sequence[int], factors: Iterable[Factor], tables: Tables | None = None, max_entries: int = MAX_ENTRIES
) -> Solution:
    """Values of the variables with the least sum of all tables.

    >>> edge = np.array([[0.0, 2.0], [2.0, 0.0]])
    >>> wants = [Factor((0,), Table(-1, np.array([0.0, 3.0]))), Factor((1,), Table(-2, np.array([1.0, 0.0])))]
    >>> solve([2, 2], [*wants, Factor((0, 1), Table(-3, edge))])
    Solution(values=(0, 0), total=1.0, is_exact=True)
    """
    return _Elimination(sizes, factors, tables or Tables(), max_entries).run()


class _Elimination:
    """A problem under way."""

    def __init__(self, sizes: Sequence[int], factors: Iterable[Factor], tables: Tables, max_entries: int) -> None:
        self.sizes, self.tables, self.max_entries = list(sizes), tables, max_entries
        self.factors: dict[tuple[int, ...], Table] = {}
        self.around: list[set[int]] = [set() for _ in sizes]
        self.of: list[set[tuple[int, ...]]] = [set() for _ in sizes]
        self.rounds = [0] * len(sizes)
        self.done: list[_Eliminated | _Narrowed] = []
        self.is_exact = True
        for factor in factors:
            self._put(factor.variables, factor.table)

    def run(self) -> Solution:
        waiting = [self._turn(variable) for variable in range(len(self.sizes))]
        heapify(waiting)
        left = set(range(len(self.sizes)))
        while left:
            turn = heappop(waiting)
            variable = turn[-1]
            if variable not in left or turn != self._turn(variable):
                continue
            left.discard(variable)
            neighbours = tuple(sorted(self.around[variable]))
            self._eliminate(variable, neighbours)
            for other in neighbours:
                self.rounds[other] = max(self.rounds[other], self.rounds[variable] + 1)
                heappush(waiting, self._turn(other))
        constant = self.factors.get(())
        values = self._read_back()
        return Solution(values, float(constant.values) if constant is not None else 0.0, self.is_exact)

    def _turn(self, variable: int) -> tuple[int, int, int, int]:
        """When a variable is eliminated: first those with few neighbours, or else a small table; and in rounds, so that
        what is equal in many layers is still equal in the next round."""
        degree = len(self.around[variable])
        work = prod(self.sizes[n] for n in self.around[variable]) * self.sizes[variable] if degree > 2 else 0
        return degree, work, self.rounds[variable], variable

    def _put(self, variables: tuple[int, ...], table: Table) -> None:
        ordered = tuple(sorted(variables))
        table = self.tables.turned(table, tuple(variables.index(v) for v in ordered))
        if ordered in self.factors:
            self.factors[ordered] = self.tables.add(self.factors[ordered], table)
            return
        self.factors[ordered] = table
        for variable in ordered:
            self.of[variable].add(ordered)
            self.around[variable].update(other for other in ordered if other != variable)

    def _eliminate(self, variable: int, neighbours: tuple[int, ...]) -> None:
        self._narrow((variable, *neighbours))
        dims = {other: dim for dim, other in enumerate((variable, *neighbours))}
        parts = []
        for variables in sorted(self.of[variable]):
            parts.append((tuple(dims[v] for v in variables), self.factors.pop(variables)))
            for other in variables:
                self.of[other].discard(variables)
        sizes = tuple(self.sizes[other] for other in (variable, *neighbours))
        if not parts:
            self.done.append(_Eliminated(variable, (), np.zeros((), np.intp)))
            return
        turned = [self._ascending(part, table) for part, table in parts]
        table, best = self.tables.minimum(turned, sizes)
        for other in neighbours:
            self.around[other].discard(variable)
        self.done.append(_Eliminated(variable, neighbours, best))
        self._put(neighbours, table)

    def _ascending(self, dims: tuple[int, ...], table: Table) -> tuple[tuple[int, ...], Table]:
        order = tuple(sorted(range(len(dims)), key=dims.__getitem__))
        return tuple(dims[i] for i in order), self.tables.turned(table, order)

    def _narrow(self, bucket: tuple[int, ...]) -> None:
        """Keep the sum of a bucket within the budget: the largest domains lose the values that look worst."""
        while prod(self.sizes[v] for v in bucket) > self.max_entries:
            self.is_exact = False
            variable = max(bucket, key=lambda v: self.sizes[v])
            looks = np.zeros(self.sizes[variable])
            for variables in self.of[variable]:
                others = tuple(d for d, v in enumerate(variables) if v != variable)
                looks = looks + self.factors[variables].values.min(axis=others)
            best = np.sort(np.argsort(looks, kind="stable")[: max(1, self.sizes[variable] // 2)])
            for variables in self.of[variable]:
                table = self.factors[variables]
                cut = table.values.take(best, axis=variables.index(variable))
                self.factors[variables] = self.tables.named(
                    ("cut", table.number, variables.index(variable), best.tobytes()), cut
                )
            self.done.append(_Narrowed(variable, best))
            self.sizes[variable] = len(best)

    def _read_back(self) -> tuple[int, ...]:
        places = [0] * len(self.sizes)
        for step in reversed(self.done):
            match step:
                case _Eliminated(variable, neighbours, best):
                    places[variable] = int(best[tuple(places[n] for n in neighbours)])
                case _Narrowed(variable, kept):
                    places[variable] = int(kept[places[variable]])
        return tuple(places)
