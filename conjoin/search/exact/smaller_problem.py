"""A problem made smaller before it is solved, and no solution lost that could be the only best one.

*Twins* are variables with the same tables to the same neighbours, such as the two weights of a recurrent layer: given
the neighbours, what is best for one is best for the other, so one variable with doubled tables stands for both.
Values that others *dominate* whatever the neighbours' values are (`dominance.py`) are left out; fewer values of one
variable can leave fewer of its neighbours, so this is repeated until nothing changes.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from conjoin.search.exact.dominance import looked_up, undominated
from conjoin.search.exact.reshard_seconds import Array, excess
from conjoin.search.exact.tables import Factor, Table, Tables

MAX_VALUES = 128
"""Of a variable whose values are compared with each other."""


@dataclass(frozen=True, slots=True)
class Reduced:
    """A smaller problem: the same variables, twins with one value and no table."""

    sizes: tuple[int, ...]
    factors: tuple[Factor, ...]
    kept: tuple[NDArray[np.int64], ...]
    """For every variable the values that are left."""
    twin_of: tuple[int, ...]
    """For every variable the one that stands for it: itself, unless it is a twin."""

    def restore(self, values: Sequence[int]) -> tuple[int, ...]:
        """Values of all variables, as the problem had them before."""
        return tuple(int(self.kept[twin][values[twin]]) for twin in self.twin_of)


def reduce(sizes: Sequence[int], factors: Iterable[Factor], tables: Tables) -> Reduced:
    """The problem with twins put together and dominated values left out.

    >>> tables, edge = Tables(), np.array([[0.0, 2.0], [2.0, 0.0]])
    >>> reduce([2, 2], [Factor((0, 1), tables.new(edge)), Factor((0,), tables.new(np.array([0.0, 9.0])))], tables).sizes
    (1, 1)
    """
    return _Reduction(sizes, factors, tables).run()


class _Reduction:
    """A problem under way: every table is kept from the view of both its variables."""

    def __init__(self, sizes: Sequence[int], factors: Iterable[Factor], tables: Tables) -> None:
        self.tables = tables
        self.kept = [np.arange(size) for size in sizes]
        self.own = [tables.equal(tables.new(np.zeros(size))) for size in sizes]
        self.links: list[dict[int, Table]] = [{} for _ in sizes]
        """For every variable its neighbours, each with a table [own value, its value]."""
        self.twin_of = list(range(len(sizes)))
        self._excess: dict[int, Array] = {}
        self._undominated: dict[Hashable, NDArray[np.int64]] = {}
        for factor in factors:
            self._put(factor.variables, tables.equal(factor.table))

    def run(self) -> Reduced:
        self._join_twins()
        self._leave_out()
        factors = [Factor((variable,), table) for variable, table in enumerate(self.own)]
        for variable, links in enumerate(self.links):
            factors += [Factor((variable, other), table) for other, table in links.items() if variable < other]
        sizes = tuple(map(len, self.kept))
        kept = [factor for factor in factors if self.twin_of[factor.variables[0]] == factor.variables[0]]
        return Reduced(
            tuple(size if self.twin_of[v] == v else 1 for v, size in enumerate(sizes)),
            tuple(kept),
            tuple(self.kept),
            tuple(self.twin_of),
        )

    def _put(self, variables: tuple[int, ...], table: Table) -> None:
        if len(variables) == 1:
            self.own[variables[0]] = self._sum(self.own[variables[0]], table)
            return
        one, other = variables
        before = self.links[one].get(other)
        made = table if before is None else self._sum(before, table)
        self.links[one][other], self.links[other][one] = made, self._turned(made)

    def _sum(self, one: Table, other: Table) -> Table:
        return self.tables.equal(self.tables.add(one, other))

    def _turned(self, table: Table) -> Table:
        return self.tables.equal(self.tables.turned(table, (1, 0)))

    def _join_twins(self) -> None:
        """Of variables with the same tables to the same neighbours the first stands for all."""
        alike: dict[Hashable, list[int]] = {}
        for variable, links in enumerate(self.links):
            key = self.own[variable].number, frozenset((other, table.number) for other, table in links.items())
            alike.setdefault(key, []).append(variable)
        for first, *others in alike.values():
            for variable in others if self.links[first] else ():
                self.twin_of[variable] = first
                self._put((first,), self.own[variable])
                for other, table in self.links[variable].items():
                    self._put((first, other), table)
                    del self.links[other][variable]
                self.links[variable] = {}

    def _leave_out(self) -> None:
        """Dominated values, until there are none."""
        waiting = dict.fromkeys(v for v, twin in enumerate(self.twin_of) if v == twin)
        while waiting:
            variable = next(iter(waiting))
            del waiting[variable]
            if 1 < len(self.kept[variable]) <= MAX_VALUES:
                left = self._left(variable)
                if len(left) < len(self.kept[variable]):
                    self._keep(variable, left)
                    waiting.update(dict.fromkeys((variable, *self.links[variable])))

    def _left(self, variable: int) -> NDArray[np.int64]:
        """The values of a variable that no other one dominates; found once for all that have the same tables."""
        tables = sorted(self.links[variable].values(), key=lambda table: table.number)
        key = self.own[variable].number, tuple(table.number for table in tables)
        if key not in self._undominated:
            every = np.arange(len(self.kept[variable]))
            changes = [(every, looked_up(self._more(table))) for table in tables]
            self._undominated[key] = undominated(self.own[variable].values, changes)
        return self._undominated[key]

    def _more(self, table: Table) -> Array:
        """[a, b]: how much more a variable's value b can cost than a, by one of its tables."""
        if table.number not in self._excess:
            with np.errstate(invalid="ignore"):  # what is impossible beside the same is compared with nothing
                self._excess[table.number] = np.nan_to_num(excess(table.values.T), nan=np.inf, posinf=np.inf)
        return self._excess[table.number]

    def _keep(self, variable: int, left: NDArray[np.int64]) -> None:
        self.kept[variable] = self.kept[variable][left]
        self.own[variable] = self.tables.equal(self.tables.cut(self.own[variable], 0, left))
        for other, table in list(self.links[variable].items()):
            cut = self.tables.equal(self.tables.cut(table, 0, left))
            self.links[variable][other], self.links[other][variable] = cut, self._turned(cut)
