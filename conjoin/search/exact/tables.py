"""Tables over variables, each made once: what problems have in common, and equal layers of one, share them.

Tables are numbered by what they were made from. What was worked out is remembered up to a number of bytes; then all of
it is forgotten at once, which costs time and nothing else: a table keeps its number as long as somebody holds it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Argmin = NDArray[np.integer[Any]]
MAX_REMEMBERED_BYTES = 1 << 27
"""Of all sums, turned tables and minima that are remembered on some units."""
_REMEMBERED = 1 << 18
"""Entries of the largest table that is remembered: larger ones are seldom made twice."""


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


@dataclass
class Tables:
    """Makes tables, each only once; kept over several problems, it remembers what they have in common."""

    max_bytes: int = MAX_REMEMBERED_BYTES
    _known: dict[Hashable, Table] = field(default_factory=dict)
    """By the name that somebody gave."""
    _made: dict[Hashable, Table] = field(default_factory=dict)
    """By what they were made from; bounded, as are the minima."""
    _minima: dict[Hashable, tuple[Table, Argmin]] = field(default_factory=dict)
    _numbers: count[int] = field(default_factory=count)
    _bytes: int = 0

    @property
    def remembered_bytes(self) -> int:
        """Of what was made from other tables."""
        return self._bytes

    def named(self, name: Hashable, values: Array) -> Table:
        """The table of a name; the values are those given first."""
        found = self._known.get(name)
        if found is None:
            found = self._known[name] = self.new(values)
        return found

    def find(self, name: Hashable) -> Table | None:
        """The table of a name, where there is one."""
        return self._known.get(name)

    def new(self, values: Array) -> Table:
        """A table that is like no other."""
        return Table(next(self._numbers), values)

    def equal(self, table: Table) -> Table:
        """The first table that had the same values, however it was made."""
        key = "equal", table.number
        if key not in self._made and table.values.size <= _REMEMBERED:
            first = self._remember((table.values.shape, table.values.tobytes()), table.values, table)
            self._made[key] = first
        return self._made.get(key, table)

    def add(self, one: Table, other: Table) -> Table:
        """The sum of two tables of the same variables."""
        key = ("sum", *sorted((one.number, other.number)))
        return self._made.get(key) or self._remember(key, one.values + other.values)

    def turned(self, table: Table, order: tuple[int, ...]) -> Table:
        """The table with its dims in another order."""
        if order == tuple(range(len(order))):
            return table
        if table.values.size > _REMEMBERED:
            return self.new(table.values.transpose(order))
        key = "turned", table.number, order
        return self._made.get(key) or self._remember(key, np.ascontiguousarray(table.values.transpose(order)))

    def cut(self, table: Table, dim: int, kept: NDArray[np.integer[Any]]) -> Table:
        """The table with some of the values of one of its variables."""
        key = "cut", table.number, dim, kept.tobytes()
        return self._made.get(key) or self._remember(key, table.values.take(kept, axis=dim))

    def without(self, table: Table, dim: int) -> Table:
        """The table without a variable that has one value only."""
        assert table.values.shape[dim] == 1
        key = "without", table.number, dim
        return self._made.get(key) or self._remember(key, np.asarray(table.values.take(0, axis=dim)))

    def minimum(self, parts: Sequence[tuple[tuple[int, ...], Table]], sizes: tuple[int, ...]) -> tuple[Table, Argmin]:
        """The minimum over dim 0 of the sum of tables, each over some of the dims; and where it is."""
        key = tuple((dims, table.number) for dims, table in parts), sizes
        found = self._minima.get(key)
        if found is not None:
            return found
        values, best = _minimum([(dims, table.values) for dims, table in parts], sizes)
        found = self.new(values), best
        if values.size <= _REMEMBERED:
            self._make_room(values.nbytes + best.nbytes)
            self._minima[key] = found
        return found

    def _remember(self, key: Hashable, values: Array, table: Table | None = None) -> Table:
        known = self._made.get(key)
        if known is not None:
            return known
        made = table or self.new(values)
        if values.size <= _REMEMBERED:
            self._make_room(values.nbytes)
            self._made[key] = made
        return made

    def _make_room(self, num_bytes: int) -> None:
        """Count what is about to be remembered; where it is too much, forget all before it."""
        if self._bytes + num_bytes > self.max_bytes:
            self._made.clear()
            self._minima.clear()
            self._bytes = 0
        self._bytes += num_bytes


def _minimum(parts: Sequence[tuple[tuple[int, ...], Array]], sizes: tuple[int, ...]) -> tuple[Array, Argmin]:
    """Value by value of the variable at dim 0: never more than two tables of the result's size at a time."""
    whole, small = prod(sizes), np.min_scalar_type(sizes[0])
    spread = [_spread(values, dims, len(sizes)) for dims, values in parts]
    if whole <= 1 << 18:
        total = sum(spread[1:], start=spread[0]) + np.zeros(sizes)
        best = total.argmin(axis=0)
        return np.take_along_axis(total, best[None], 0)[0], np.asarray(best).astype(small)
    least, places = np.full(sizes[1:], np.inf), np.zeros(sizes[1:], small)
    here = np.empty(sizes[1:])
    for value in range(sizes[0]):
        _add_up([part[value if part.shape[0] > 1 else 0] for part in spread], here)
        places[here < least] = value
        np.minimum(least, here, out=least)
    return least, places


def _add_up(parts: Sequence[Array], total: Array) -> None:
    """The sum of parts: small ones are added up before they are spread over all that the large ones have."""
    *first, last = sorted(parts, key=lambda part: part.size)
    np.add(sum(first, start=np.zeros((1,) * last.ndim)), last, out=total)


def _spread(values: Array, dims: tuple[int, ...], num_dims: int) -> Array:
    """The table with a dim of size 1 for every variable it does not have."""
    shape = [1] * num_dims
    for dim, size in zip(dims, values.shape, strict=True):
        shape[dim] = size
    return values.reshape(shape)
