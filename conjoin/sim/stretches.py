"""Stretches of a row of numbers: equal parts one after the other, as layers of a model and what a step does in them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_LENGTHS = 16
"""Lengths of parts that are looked at in long rows: those at which most numbers come again."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Equal parts one after the other."""

    start: int
    length: int
    """Of a part."""
    count: int
    """Parts."""

    @property
    def end(self) -> int:
        return self.start + self.length * self.count


def find_stretches(codes: NDArray[np.int64], least: int) -> list[Stretch]:
    """Stretches of at least so many parts, without overlaps, in ascending order: those that leave out the most.

    >>> find_stretches(np.array([7, *[1, 2, 2] * 6, 3]), 5)
    [Stretch(start=1, length=3, count=6)]
    """
    chosen: list[Stretch] = []
    for stretch in rank_stretches(codes, least, _common_distances(codes)):
        if all(stretch.end <= other.start or other.end <= stretch.start for other in chosen):
            chosen.append(stretch)
    return sorted(chosen, key=lambda stretch: stretch.start)


def rank_stretches(codes: NDArray[np.int64], least: int, lengths: Iterable[int]) -> list[Stretch]:
    """All stretches of at least so many parts of some lengths; first those with the most in parts beyond these, of
    shorter parts."""
    found = []
    for length in lengths:
        for start, end in true_runs(codes[:-length] == codes[length:]):
            count = (end - start) // length + 1
            found += [Stretch(start, length, count)] if count >= least else []
    return sorted(found, key=lambda one: (-one.length * (one.count - least + 1), one.length))


def true_runs(same: NDArray[np.bool_]) -> Iterable[tuple[int, int]]:
    """Where all in a row is true: from where, and to where."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], same, [False])).astype(np.int8)))
    return ((int(start), int(end)) for start, end in edges.reshape(-1, 2))


def _common_distances(codes: NDArray[np.int64]) -> list[int]:
    """The distances at which most numbers come again."""
    order = np.argsort(codes, kind="stable")
    again = codes[order[1:]] == codes[order[:-1]]
    distances, counts = np.unique((order[1:] - order[:-1])[again], return_counts=True)
    common = distances[np.argsort(-counts, kind="stable")[:_LENGTHS]]
    return sorted(int(length) for length in common)
