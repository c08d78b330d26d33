"""The least sum of tables by branch and bound: complete, and independent of elimination, which is checked against it.

Variables are given values one after the other, depth first. What variables without a value add at least is known from
*mini-buckets* (Dechter and Rish 2003): going backwards, the tables of a variable are put into buckets of at most
`width` other variables, and each bucket takes its minimum over the variable by itself. The sum of these minima is never
more than the minimum of the sum, so a branch whose bound is not below the best sum so far has no better solution.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import inf, prod

import numpy as np
from numpy.typing import NDArray

from conjoin.search.exact.elimination import Solution
from conjoin.search.exact.tables import Factor

Array = NDArray[np.float64]
MAX_VISITED = 2_000_000
WIDTH = 3
_MAX_ENTRIES = 1 << 22
"""Of the sum of a bucket."""
_ROUNDING = 1e-12

_Message = tuple[tuple[int, ...], Array]
"""The variables of a table, ascending, and its values."""


class TooMany(Exception):
    """More values were tried than may be."""

    def __init__(self, visited: int) -> None:
        super().__init__(f"{visited} values were tried")
        self.visited = visited


def branch_and_bound(
    sizes: Sequence[int], factors: Iterable[Factor], *, width: int = WIDTH, max_visited: int = MAX_VISITED
) -> Solution:
    """Values of the variables with the least sum of all tables, found by trying all that could have it.

    >>> from conjoin.search.exact.tables import Table
    >>> edge = np.array([[0.0, 2.0], [2.0, 0.0]])
    >>> wants = [Factor((0,), Table(-1, np.array([0.0, 3.0]))), Factor((1,), Table(-2, np.array([1.0, 0.0])))]
    >>> branch_and_bound([2, 2], [*wants, Factor((0, 1), Table(-3, edge))])
    Solution(values=(0, 0), total=1.0, is_exact=True)
    """
    tables = [(factor.variables, factor.table.values) for factor in factors]
    return _Branches(sizes, tables, width, max_visited).run()


class _Branches:
    """A problem under way, its variables numbered in the order in which they take values."""

    def __init__(self, sizes: Sequence[int], tables: Sequence[_Message], width: int, max_visited: int) -> None:
        self.order = _order(len(sizes), [variables for variables, _ in tables])
        self.sizes = [sizes[variable] for variable in self.order]
        self.width, self.max_visited, self.visited = width, max_visited, 0
        positions = {variable: position for position, variable in enumerate(self.order)}
        self.tables: list[list[_Message]] = [[] for _ in sizes]
        """Those whose last variable this is."""
        self.constant = 0.0
        for variables, values in tables:
            renamed = _ascending(tuple(positions[v] for v in variables), values)
            if variables:
                self.tables[renamed[0][-1]].append(renamed)
            else:
                self.constant += float(values)
        self.bounds: list[list[_Message]] = [[] for _ in sizes]
        """What variables after this one add at least, by those up to it."""
        self.floor = [0.0 for _ in sizes]
        """The same, where it depends on none."""
        self._bound()

    def run(self) -> Solution:
        """Depth first, the value with the lowest bound first."""
        best, found, values = inf, [0] * len(self.sizes), list[int]()
        waiting = [self._children(values, self.constant)] if self.sizes else []
        while waiting:
            bound, total, value = next(waiting[-1], (inf, inf, -1))
            if bound == inf or bound >= best * (1 - _ROUNDING):
                waiting.pop()
                continue
            del values[len(waiting) - 1 :]
            values.append(value)
            if len(values) == len(self.sizes):
                best, found = total, list(values)
            else:
                waiting.append(self._children(values, total))
        named = dict(zip(self.order, found, strict=True))
        total = best if self.sizes else self.constant
        return Solution(tuple(named[v] for v in range(len(found))), total, is_exact=True)

    def _children(self, values: list[int], total: float) -> Iterator[tuple[float, float, int]]:
        """Bound, sum and value for every value of the next variable, the lowest bound first."""
        self.visited += 1
        if self.visited > self.max_visited:
            raise TooMany(self.visited)
        position = len(values)
        here = np.full(self.sizes[position], total)
        for variables, table in self.tables[position]:
            here = here + table[tuple(values[v] for v in variables[:-1])]
        least = here + self.floor[position]
        for variables, table in self.bounds[position]:
            least = least + table[tuple(slice(None) if v == position else values[v] for v in variables)]
        order = np.argsort(least, kind="stable")
        return iter([(float(least[i]), float(here[i]), int(i)) for i in order])

    def _bound(self) -> None:
        """Backwards, every variable sends the minima of its buckets to the last variable they depend on."""
        waiting: list[list[_Message]] = [[] for _ in self.sizes]
        for position in reversed(range(len(self.sizes))):
            for bucket in self._buckets(position, [*self.tables[position], *waiting[position]]):
                scope = tuple(sorted({v for variables, _ in bucket for v in variables} - {position}))
                whole = (*scope, position)
                total = sum((_spread(part, whole) for part in bucket), np.zeros([self.sizes[v] for v in whole]))
                least: Array = total.min(axis=-1)
                last = scope[-1] if scope else -1
                if scope:
                    waiting[last].append((scope, least))
                for between in range(max(last, 0), position):
                    if scope:
                        self.bounds[between].append((scope, least))
                    else:
                        self.floor[between] += float(least)

    def _buckets(self, position: int, parts: Sequence[_Message]) -> list[list[_Message]]:
        found: list[tuple[set[int], list[_Message]]] = []
        for part in sorted(parts, key=lambda part: -len(part[0])):
            for scope, bucket in found:
                union = {*scope, *part[0]}
                if len(union) - 1 <= self.width and prod(self.sizes[v] for v in union) <= _MAX_ENTRIES:
                    scope |= union
                    bucket.append(part)
                    break
            else:
                found.append(({position, *part[0]}, [part]))
        return [bucket for _, bucket in found]


def _ascending(variables: tuple[int, ...], values: Array) -> _Message:
    order = sorted(range(len(variables)), key=variables.__getitem__)
    return tuple(variables[i] for i in order), values.transpose(order)


def _spread(part: _Message, variables: Sequence[int]) -> Array:
    """The table with a dim of size 1 for every variable it does not have."""
    own, values = part
    shape = [values.shape[own.index(v)] if v in own else 1 for v in variables]
    return values.reshape(shape)


def _order(num_variables: int, scopes: Iterable[tuple[int, ...]]) -> list[int]:
    """Last comes the variable with the fewest neighbours, then, these connected, the next: buckets stay small."""
    around: list[set[int]] = [set() for _ in range(num_variables)]
    for scope in scopes:
        for variable in scope:
            around[variable].update(v for v in scope if v != variable)
    left, found = set(range(num_variables)), list[int]()
    while left:
        variable = min(left, key=lambda v: (len(around[v]), v))
        left.discard(variable)
        found.append(variable)
        for other in around[variable]:
            around[other] |= around[variable] - {other}
            around[other].discard(variable)
    return found[::-1]
