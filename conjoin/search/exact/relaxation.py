"""A sum that no solution is below, in little memory: elimination with buckets taken apart.

A variable is eliminated as in `elimination.py`. Where the sum of its tables would be too large, the tables are put into
several buckets, and each takes its minimum over the variable by itself (mini-buckets: Dechter and Rish 2003):

    min over x of (a(x, .) + b(x, .))  >=  min over x of a(x, .)  +  min over x of b(x, .)      `_Relaxation.eliminate`

What is left at the end is never more than the least sum, and is the least sum where nothing was taken apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import prod

from conjoin.search.exact.tables import Factor, Table, Tables

MAX_ENTRIES = 1 << 22
"""Entries of the largest sum of tables."""
_DONE = (-1, -1, -1, -1)
"""The turn of what was eliminated."""


@dataclass(frozen=True, slots=True)
class Bound:
    """A number that no sum is below; exact where some sum is as low."""

    least: float
    is_exact: bool


def lower_bound(
    sizes: Sequence[int], factors: Iterable[Factor], tables: Tables | None = None, max_entries: int = MAX_ENTRIES
) -> Bound:
    """What all tables add up to at least.

    >>> import numpy as np
    >>> edge = np.array([[0.0, 2.0], [2.0, 0.0]])
    >>> wants = [Factor((0,), Table(-1, np.array([0.0, 3.0]))), Factor((1,), Table(-2, np.array([1.0, 0.0])))]
    >>> lower_bound([2, 2], [*wants, Factor((0, 1), Table(-3, edge))])
    Bound(least=1.0, is_exact=True)
    """
    return _Relaxation(sizes, factors, tables or Tables(), max_entries).run()


class _Relaxation:
    """A problem under way."""

    def __init__(self, sizes: Sequence[int], factors: Iterable[Factor], tables: Tables, max_entries: int) -> None:
        self.sizes, self.tables, self.max_entries = list(sizes), tables, max_entries
        self.of: list[dict[tuple[int, ...], Table]] = [{} for _ in sizes]
        """For every variable the tables that it is in, by their variables, which ascend."""
        self.rounds = [0] * len(sizes)
        self.constant, self.is_exact = 0.0, True
        for factor in factors:
            self.put(factor.variables, factor.table)

    def run(self) -> Bound:
        turns = [self._turn(variable) for variable in range(len(self.sizes))]
        queue = list(turns)
        heapify(queue)
        while queue:
            turn = heappop(queue)
            variable = turn[-1]
            if turns[variable] != turn:  # it was eliminated, or its turn has changed
                continue
            around = self._around(variable)
            self.eliminate(variable)
            turns[variable] = _DONE
            for other in around:
                turn = self._turn(other)
                if turn != turns[other]:
                    turns[other] = turn
                    heappush(queue, turn)
        return Bound(self.constant, self.is_exact)

    def _around(self, variable: int) -> set[int]:
        return {v for variables in self.of[variable] for v in variables} - {variable}

    def _turn(self, variable: int) -> tuple[int, int, int, int]:
        """First what has few neighbours or small tables, in rounds, so that equal layers stay equal."""
        around = self._around(variable)
        work = prod(self.sizes[v] for v in around) if len(around) > 2 else 0
        return len(around), work, self.rounds[variable], variable

    def put(self, variables: tuple[int, ...], table: Table) -> None:
        """Add a table; one of no variables is a number, and those with one value are left out."""
        for dim in reversed(range(len(variables))):
            if self.sizes[variables[dim]] == 1:
                variables, table = variables[:dim] + variables[dim + 1 :], self.tables.without(table, dim)
        if not variables:
            self.constant += float(table.values)
            return
        ordered = tuple(sorted(variables))
        table = self.tables.turned(table, tuple(variables.index(v) for v in ordered))
        before = self.of[ordered[0]].get(ordered)
        made = table if before is None else self.tables.add(before, table)
        for variable in ordered:
            self.of[variable][ordered] = made

    def eliminate(self, variable: int) -> None:
        """Take the minimum over a variable, bucket by bucket."""
        parts = sorted(self.of[variable].items())
        for variables, _ in parts:
            for other in variables:
                if other != variable:
                    del self.of[other][variables]
                    self.rounds[other] = max(self.rounds[other], self.rounds[variable] + 1)
        self.of[variable] = {}
        buckets = self._buckets(variable, parts)
        self.is_exact = self.is_exact and len(buckets) <= 1
        for bucket in buckets:
            scope = (variable, *sorted({v for variables, _ in bucket for v in variables} - {variable}))
            places = {v: dim for dim, v in enumerate(scope)}
            turned = [self._ascending(tuple(places[v] for v in variables), table) for variables, table in bucket]
            table, _ = self.tables.minimum(turned, tuple(self.sizes[v] for v in scope))
            self.put(scope[1:], table)

    def _ascending(self, dims: tuple[int, ...], table: Table) -> tuple[tuple[int, ...], Table]:
        order = tuple(sorted(range(len(dims)), key=dims.__getitem__))
        return tuple(dims[i] for i in order), self.tables.turned(table, order)

    def _buckets(
        self, variable: int, parts: Sequence[tuple[tuple[int, ...], Table]]
    ) -> list[list[tuple[tuple[int, ...], Table]]]:
        """The tables of a variable in as few buckets as stay small, the largest tables first."""
        found: list[tuple[set[int], list[tuple[tuple[int, ...], Table]]]] = []
        for part in sorted(parts, key=lambda part: (-part[1].values.size, part[0])):
            for scope, bucket in found:
                if prod(self.sizes[v] for v in scope.union(part[0])) <= self.max_entries:
                    scope.update(part[0])
                    bucket.append(part)
                    break
            else:
                found.append(({variable, *part[0]}, [part]))
        return [bucket for _, bucket in found]
