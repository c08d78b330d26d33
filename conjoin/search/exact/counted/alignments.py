"""How the axes of two counted layouts can be lined up.

Of the axes with placement p before, T[p, q] have placement q after: a table of whole numbers whose rows add up to the
counts of the one layout and whose columns to those of the other. All axes of a cell share one fate, so that a reshard
is priced as if the cells were units.

There are many such tables. On more than a few axes only those are gone through in which what splits a dim in both
layouts goes on doing so as far as possible, T[S(d), S(d)] = min(counts): most pairs of layouts then leave just one.
Of 1,225 pairs of layouts of a vector on four axes three then cost up to a third more, all of which become partial sums.
What is copied does not always do best to stay so: where I, I and B become B, B and S(0) it is better to split what was
B, for the gradient then needs no gathering.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from conjoin.search.exact.counted.layouts import Digits, counts_of
from conjoin.search.exact.layout_codes import WHOLE, B, Codes, P, S
from conjoin.search.exact.reshard_seconds import Moves, Nesting, common_first, find_moves

MAX_TABLES = 4_000_000
"""Entries of all tables between two sets of layouts, beyond which they are too many to go through."""


class TooMany(Exception):
    """There are more choices or alignments than can be gone through."""


@dataclass(frozen=True, eq=False)
class Alignments:
    """The tables of every pair of some layouts; those of one pair are neighbours.

    What keeps its placement takes part in nothing: it only makes pieces smaller. Tables that are alike but for that are
    gone through once.
    """

    rank: int
    size: int
    """Of an axis."""
    before: Codes
    after: Codes
    """[cell, table that differs]: placements before and after."""
    counts: Digits
    """[cell, table that differs]: how many axes there are."""
    which: NDArray[np.intp]
    """[table]: the number of its table among those that differ."""
    share: NDArray[np.float64]
    """[table]: the part of the tensor that is left by the axes that keep splitting it."""
    pairs: NDArray[np.intp]
    """[table]: the number of its pair, row by row."""
    shape: tuple[int, int]
    nestings: tuple[Nesting, Nesting] = (common_first, common_first)
    """Of the tensor and of its gradient."""

    @cached_property
    def forward(self) -> Moves:
        """What happens to the tensor."""
        return self._moves(self.before, self.after, self.nestings[0])

    @cached_property
    def backward(self) -> Moves:
        """What happens to its gradient, which goes back between the duals."""
        return self._moves(dual_placements(self.after), dual_placements(self.before), self.nestings[1])

    def _moves(self, before: Codes, after: Codes, nesting: Nesting) -> Moves:
        powers = np.power(float(self.size), np.arange(int(self.counts.max(initial=0)) + 1, dtype=np.float64))
        ways: NDArray[np.float64] = powers[self.counts]
        found = find_moves((before, after), self.rank, ways, self.counts, nesting)
        return Moves(found.groups[:, self.which], found.sent[:, self.which] * self.share)

    @property
    def rows(self) -> NDArray[np.intp]:
        """[table]: the row of its pair."""
        return self.pairs // self.shape[1]

    def least(self, seconds: NDArray[np.float64]) -> NDArray[np.float64]:
        """[row, column]: the least seconds of the tables of a pair."""
        if len(self.pairs) == self.shape[0] * self.shape[1]:
            return seconds.reshape(self.shape)
        return np.minimum.reduceat(seconds, np.flatnonzero(np.diff(self.pairs, prepend=-1))).reshape(self.shape)


def dual_placements(placements: Codes) -> Codes:
    """The placements of the gradient."""
    return np.where(placements == B, P, np.where(placements == P, B, placements))


def align(rows: Codes, columns: Codes, rank: int, num_axes: int, size: int, *, every: bool = False) -> Alignments:
    """The alignments of every row with every column, or those in which what splits a dim goes on as far as it can.

    >>> from conjoin.search.exact.counted.layouts import counted
    >>> one = counted(np.array([[0, 3]]))
    >>> len(align(one, one, 1, 2, 2).pairs), len(align(one, one, 1, 2, 2, every=True).pairs)
    (1, 2)
    """
    before, after = counts_of(rows, rank, num_axes), counts_of(columns, rank, num_axes)
    have, want = np.repeat(before, len(after), axis=0), np.tile(after, (len(before), 1))
    kept = np.zeros_like(have) if every else np.minimum(have, want) * (np.arange(have.shape[1]) >= S)
    have, want = have - kept, want - kept
    powers = (num_axes + 1) ** np.arange(have.shape[1], dtype=np.int64)
    _, first, rest = np.unique((have @ powers) + 1j * (want @ powers), return_index=True, return_inverse=True)
    tables = _Tables(have[first], want[first])
    number = np.array(tables.columns, np.int64).reshape(len(tables.cells), len(tables.pairs))
    ends = (np.array([cell[end] for cell in tables.cells], np.int64)[:, None] for end in range(2))
    source, target = (np.where(number > 0, placements, WHOLE) for placements in ends)  # no axes are as good as I
    several = np.bincount(tables.pairs, minlength=len(first))
    pairs = np.repeat(np.arange(len(have)), several[rest.reshape(-1)])
    start = (np.cumsum(several) - several)[rest.reshape(-1)]
    within = np.arange(len(pairs)) - np.searchsorted(pairs, pairs)
    share = 1.0 / float(size) ** kept[:, S:].sum(axis=1)
    return Alignments(
        rank, size, source, target, number, start[pairs] + within, share[pairs], pairs, (len(rows), len(columns))
    )


class _Tables:
    """All tables with given sums of rows and columns, cell by cell; several pairs of sums at a time."""

    def __init__(self, have: Digits, want: Digits) -> None:
        self.pairs = np.arange(len(have))
        self.cells: list[tuple[int, int]] = []
        self.columns: list[Digits] = []
        self.have, self.want = have, want
        targets = np.flatnonzero(want.any(axis=0)).tolist()
        for p in np.flatnonzero(have.any(axis=0)).tolist():
            for position, q in enumerate(targets):
                self._fill(p, q, targets[position + 1 :])

    def _fill(self, p: int, q: int, later: list[int]) -> None:
        """Every number of axes that may go from p to q, such that the others of p still find a place."""
        least = np.maximum(0, self.have[:, p] - self.want[:, later].sum(axis=1))
        most = np.minimum(self.have[:, p], self.want[:, q])
        ways = most - least + 1
        taken = least
        if (ways > 1).any():
            total = int(ways.sum())
            if total * (len(self.columns) + 1) > MAX_TABLES:
                raise TooMany
            which = np.repeat(np.arange(len(ways)), ways)
            taken = least[which] + np.arange(total) - np.repeat(np.cumsum(ways) - ways, ways)
            self.pairs, self.have, self.want = self.pairs[which], self.have[which], self.want[which]
            self.columns = [column[which] for column in self.columns]
        else:
            self.have, self.want = self.have.copy(), self.want.copy()
        self.have[:, p] -= taken
        self.want[:, q] -= taken
        if taken.any():
            self.cells.append((p, q))
            self.columns.append(taken)
