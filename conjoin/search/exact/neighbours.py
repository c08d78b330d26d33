"""What is next to an operator, as it is best once the operator is laid out otherwise and all the rest is as before.

One value of a variable alone is seldom better than what is there: a weight that lies in rows is to be brought to an
operator that now reads columns, and whoever reads what it makes still wants it as it was.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from conjoin.search.exact.problem import Problem
from conjoin.search.exact.tables import Factor


class Following:
    """The tables of a problem by variable."""

    def __init__(self, problem: Problem) -> None:
        self._factors: defaultdict[int, list[Factor]] = defaultdict(list)
        for factor in problem.factors:
            for variable in factor.variables:
                self._factors[variable].append(factor)
        self._hubs = {problem.variable[root] for root in problem.hubs}
        self._stored = {problem.variable[root] for root in problem.stored}
        self._modes = {*problem.modes.values()}

    def follow(self, values: tuple[int, ...], variable: int, value: int) -> Iterator[tuple[int, ...]]:
        """Values with another one for a variable, and with the best ones for what it reads that is stored; then also
        for operators next to it, one after the other."""
        found = [*values[:variable], value, *values[variable + 1 :]]
        for some in self._next_to(variable):
            for other in some:
                seconds = sum(factor.table.values[_line(factor, found, other)] for factor in self._factors[other])
                if np.min(seconds) < seconds[found[other]]:  # type: ignore[index]
                    found[other] = int(np.argmin(seconds))
            yield tuple(found)

    def _next_to(self, variable: int) -> tuple[list[int], list[int]]:
        """What is stored and shares a table with a variable, and the others, with those behind a hub; what is run again
        stays."""
        near = self._sharing(variable)
        behind = [other for hub in near if hub in self._hubs for other in self._sharing(hub)]
        others = [other for other in dict.fromkeys((*near, *behind)) if other != variable]
        return [v for v in others if v in self._stored], [v for v in others if v not in self._stored]

    def _sharing(self, variable: int) -> list[int]:
        shared = (other for factor in self._factors[variable] for other in factor.variables)
        return [other for other in shared if other not in self._modes]


def _line(factor: Factor, values: list[int], variable: int) -> tuple[int | slice, ...]:
    """The entries of a table for all values of a variable, and those given of the others."""
    return tuple(slice(None) if other == variable else values[other] for other in factor.variables)
