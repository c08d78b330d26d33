"""The least sum of tables over variables, exactly: elimination in the min-plus semiring.

A problem has variables with finite domains, a table of one or two variables for every factor, and asks for

    min over x of  sum over factors f of  table_f[x of f's variables]

A variable is eliminated by adding up the tables it is in and taking the minimum over it: what is left is a table over
its neighbours (`eliminate`). On a chain this is a product of min-plus matrices, on a series-parallel graph the
splits of Unity (section 5), in general bucket elimination, in an order found beforehand (`elimination_order.py`).
Tables are numbered by what they were made from, so that equal parts of a graph, such as the layers of a stack, are
worked out once (`tables.py`). Where tables would be large the problem is first made smaller, without losing its best
solution (`smaller_problem.py`).

Where a table would still be larger than the budget, variables of its bucket keep only the values that look best
by their own tables. What is found then is a solution, not the least one, and `Solution.is_exact` says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from math import prod

import numpy as np
from numpy.typing import NDArray

from conjoin.search.exact.elimination_order import Order, find_order
from conjoin.search.exact.smaller_problem import reduce
from conjoin.search.exact.tables import Argmin, Factor, Table, Tables

MAX_ENTRIES = 1 << 22
"""Entries of the largest sum of tables that is gone through, a value of one variable at a time."""
MAX_KEPT = 1 << 28
"""Entries of all large sums of a problem: what was best where is kept until the end."""


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
    best: Argmin


@dataclass(frozen=True, slots=True)
class _Narrowed:
    """A variable of which only some values were kept."""

    variable: int
    kept: NDArray[np.intp]


def solve(
    sizes: Sequence[int], factors: Iterable[Factor], tables: Tables | None = None, max_entries: int = MAX_ENTRIES
) -> Solution:
    """Values of the variables with the least sum of all tables.

    >>> edge = np.array([[0.0, 2.0], [2.0, 0.0]])
    >>> wants = [Factor((0,), Table(-1, np.array([0.0, 3.0]))), Factor((1,), Table(-2, np.array([1.0, 0.0])))]
    >>> solve([2, 2], [*wants, Factor((0, 1), Table(-3, edge))])
    Solution(values=(0, 0), total=1.0, is_exact=True)
    """
    made, kept = tables or Tables(), list(factors)
    order = find_order(sizes, [factor.variables for factor in kept])
    if not order.num_wide or any(len(factor.variables) > 2 for factor in kept):
        return _Elimination(sizes, kept, made, max_entries).run(order)
    reduced = reduce(sizes, kept, made)
    order = find_order(reduced.sizes, [factor.variables for factor in reduced.factors])
    budget = min(max_entries, MAX_KEPT // max(1, order.num_wide))
    found = _Elimination(reduced.sizes, reduced.factors, made, budget).run(order)
    return replace(found, values=reduced.restore(found.values))


@dataclass(frozen=True, slots=True)
class Contracted:
    """What is left of a problem when all but some variables are eliminated."""

    factors: tuple[Factor, ...]
    _done: tuple[_Eliminated | _Narrowed, ...]

    def restore(self, values: Mapping[int, int]) -> dict[int, int]:
        """The best values of the variables that were eliminated, for values of the others."""
        found = dict(values)
        _read_back(self._done, found)
        return found


def contract(sizes: Sequence[int], factors: Iterable[Factor], kept: Set[int], tables: Tables) -> Contracted | None:
    """Eliminate all variables of tables but those that are kept; None where a sum of tables would be too large.

    >>> edge = np.array([[0.0, 5.0], [5.0, 0.0]])
    >>> chain = [Factor((0, 1), Table(-1, edge)), Factor((1, 2), Table(-1, edge))]
    >>> found = contract([2, 2, 2], chain, {0, 2}, Tables())
    >>> [(factor.variables, factor.table.values.tolist()) for factor in found.factors]
    [((0, 2), [[0.0, 5.0], [5.0, 0.0]])]
    >>> found.restore({0: 1, 2: 1})
    {0: 1, 2: 1, 1: 1}
    """
    some = list(factors)
    inside = {variable for factor in some for variable in factor.variables}
    order = find_order(sizes, [factor.variables for factor in some], {*kept, *range(len(sizes))} - (inside - kept))
    if max(order.entries, default=0) > MAX_ENTRIES:
        return None
    work = _Elimination(sizes, some, tables, MAX_ENTRIES)
    for variable in order.variables:
        work.eliminate(variable)
    left = tuple(Factor(variables, table) for variables, table in sorted(work.factors.items()))
    return Contracted(left, tuple(work.done))


class _Elimination:
    """A problem under way."""

    def __init__(self, sizes: Sequence[int], factors: Iterable[Factor], tables: Tables, max_entries: int) -> None:
        self.sizes, self.tables, self.max_entries = list(sizes), tables, max_entries
        self.factors: dict[tuple[int, ...], Table] = {}
        self.around: list[set[int]] = [set() for _ in sizes]
        self.of: list[set[tuple[int, ...]]] = [set() for _ in sizes]
        self.done: list[_Eliminated | _Narrowed] = []
        self.is_exact = True
        for factor in factors:
            self._put(factor.variables, factor.table)

    def run(self, order: Order) -> Solution:
        for variable in order.variables:
            self.eliminate(variable)
        constant = self.factors.get(())
        places: dict[int, int] = {}
        _read_back(self.done, places)
        values = tuple(places[variable] for variable in range(len(self.sizes)))
        return Solution(values, float(constant.values) if constant is not None else 0.0, self.is_exact)

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

    def eliminate(self, variable: int) -> None:
        self._narrow((variable, *self.around[variable]))
        for other in [other for other in self.around[variable] if self.sizes[other] == 1]:
            self._leave(other)
        neighbours = tuple(sorted(self.around[variable]))
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

    def _leave(self, variable: int) -> None:
        """Take a variable with one value out of all its tables: arrays have 64 dims at most."""
        for variables in sorted(self.of[variable]):
            table = self.factors.pop(variables)
            for other in variables:
                self.of[other].discard(variables)
            dim = variables.index(variable)
            self._put(variables[:dim] + variables[dim + 1 :], self.tables.without(table, dim))
        for other in self.around[variable]:
            self.around[other].discard(variable)
        self.around[variable] = set()

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
                self.factors[variables] = self.tables.cut(self.factors[variables], variables.index(variable), best)
            self.done.append(_Narrowed(variable, best))
            self.sizes[variable] = len(best)


def _read_back(done: Sequence[_Eliminated | _Narrowed], places: dict[int, int]) -> None:
    """The best values of variables that were eliminated, the last first."""
    for step in reversed(done):
        match step:
            case _Eliminated(variable, neighbours, best):
                places[variable] = int(best[tuple(places[n] for n in neighbours)])
            case _Narrowed(variable, kept):
                places[variable] = int(kept[places[variable]])
