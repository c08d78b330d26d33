"""Rounds in which every host sends to one host at most and receives from one: a Birkhoff-von Neumann decomposition.

A matrix of amounts, by sender and receiver, is filled up until all rows and columns sum to the largest one. Then it has
a perfect matching, and taking it away as often as its least entry allows leaves a matrix of the same kind with fewer
entries. So the rounds last together as long as the busiest host has to send or receive, which nothing can beat.
Senders and receivers that have nothing to do with each other are taken apart first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Rounds:
    """Who sends how much to whom in which round; hosts that have nothing to do with each other count rounds apart."""

    rounds: Numbers
    senders: Numbers
    receivers: Numbers
    amounts: Numbers
    longest: int
    """The sum of the rounds that last longest: the most that one host sends or receives."""


def decompose(amounts: Numbers) -> Rounds:
    """Rounds for a matrix of amounts by sender and receiver.

    >>> rounds = decompose(np.array([[2, 1], [1, 2]]))
    >>> rounds.longest, sorted(zip(rounds.rounds.tolist(), rounds.senders.tolist(), rounds.receivers.tolist()))
    (3, [(0, 0, 0), (0, 1, 1), (1, 0, 1), (1, 1, 0)])
    """
    parts = [_decompose(amounts, rows, columns) for rows, columns in _components(amounts)]
    empty = np.zeros((4, 0), dtype=np.int64)
    table = np.concatenate([empty, *parts], axis=1)
    longest = int(max(amounts.sum(axis=0).max(initial=0), amounts.sum(axis=1).max(initial=0)))
    return Rounds(table[0], table[1], table[2], table[3], longest)


def _components(amounts: Numbers) -> list[tuple[list[int], list[int]]]:
    """Rows and columns that are joined by entries."""
    todo, found = set(np.flatnonzero(amounts.any(axis=1)).tolist()), []
    by_row = {row: np.flatnonzero(amounts[row]).tolist() for row in todo}
    used = np.flatnonzero(amounts.any(axis=0)).tolist()
    by_column = {column: np.flatnonzero(amounts[:, column]).tolist() for column in used}
    while todo:
        rows, columns, open_rows = set(), set(), [min(todo)]
        while open_rows:
            row = open_rows.pop()
            if row in rows:
                continue
            rows.add(row)
            for column in by_row[row]:
                if column not in columns:
                    columns.add(column)
                    open_rows += by_column[column]
        todo -= rows
        found.append((sorted(rows), sorted(columns)))
    return found


def _decompose(amounts: Numbers, rows: Sequence[int], columns: Sequence[int]) -> Numbers:
    """Round, sender, receiver and amount of one component, as rows of a table."""
    real = amounts[np.ix_(rows, columns)]
    if (real == real[0, 0]).all():
        return _shifted(int(real[0, 0]), np.array(rows), np.array(columns))
    size = max(real.shape)
    real = np.pad(real, [(0, size - n) for n in real.shape])
    full = real + _slack(real)
    matching = _Matching(full)
    entries, number, places = [], 0, np.arange(size)
    while full.any():
        to = matching.perfect()
        amount = int(full[places, to].min())
        sent = np.minimum(real[places, to], amount)
        some = np.flatnonzero(sent)
        if len(some):
            entries.append(np.stack([np.full(len(some), number), some, to[some], sent[some]]))
        real[places, to] -= sent
        full[places, to] -= amount
        matching.drop([(int(i), int(to[i])) for i in np.flatnonzero(full[places, to] == 0)])
        number += 1
    table = np.concatenate(entries, axis=1)
    table[1], table[2] = np.array(rows)[table[1]], np.array(columns)[table[2]]
    return table


def _shifted(amount: int, rows: Numbers, columns: Numbers) -> Numbers:
    """All entries alike: in each round everyone sends to the next one but one more."""
    more = max(len(rows), len(columns))
    shift, place = np.divmod(np.arange(more * more), more)
    sender, receiver = place, (place + shift) % more
    real = (sender < len(rows)) & (receiver < len(columns))
    return np.stack([shift[real], rows[sender[real]], columns[receiver[real]], np.full(real.sum(), amount)])


def _slack(real: Numbers) -> Numbers:
    """What fills rows and columns up to the largest sum, from the upper left to the lower right."""
    most = max(real.sum(axis=0).max(), real.sum(axis=1).max())
    rows, columns = (most - real.sum(axis=1)).tolist(), (most - real.sum(axis=0)).tolist()
    slack = np.zeros_like(real)
    i = j = 0
    while i < len(rows) and j < len(columns):
        amount = min(rows[i], columns[j])
        slack[i, j] += amount
        rows[i] -= amount
        columns[j] -= amount
        i, j = (i + 1, j) if rows[i] == 0 else (i, j + 1)
    return slack


class _Matching:
    """A perfect matching of rows and columns that is mended when entries go; columns of a row are bits of a number."""

    def __init__(self, full: Numbers) -> None:
        self.size = len(full)
        self.columns = [sum(1 << int(j) for j in np.flatnonzero(row)) for row in full]
        self.of_row = [-1] * self.size
        self.of_column = [-1] * self.size
        self.free = (1 << self.size) - 1

    def perfect(self) -> Numbers:
        for row in range(self.size):
            if self.of_row[row] < 0:
                found = self._augment(row)
                assert found, "a matrix with equal sums has a perfect matching"
        return np.array(self.of_row)

    def drop(self, entries: Sequence[tuple[int, int]]) -> None:
        for row, column in entries:
            self.columns[row] &= ~(1 << column)
            self.of_row[row] = self.of_column[column] = -1
            self.free |= 1 << column

    def _augment(self, start: int) -> bool:
        """A shortest way from a row without a column to a column without a row."""
        came: dict[int, int] = {}
        todo, unseen = [start], (1 << self.size) - 1
        for row in todo:
            there = self.columns[row] & unseen
            ends = there & self.free
            if ends:
                column = (ends & -ends).bit_length() - 1
                came[column] = row
                self._switch(column, came)
                return True
            unseen &= ~there
            while there:
                bit = there & -there
                there ^= bit
                column = bit.bit_length() - 1
                came[column] = row
                todo.append(self.of_column[column])
        return False

    def _switch(self, column: int, came: dict[int, int]) -> None:
        self.free &= ~(1 << column)
        while True:
            row = came[column]
            before = self.of_row[row]
            self.of_row[row], self.of_column[column] = column, row
            if before < 0:
                return
            column = before
