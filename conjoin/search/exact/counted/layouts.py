"""Layouts on axes that are all alike, by how many axes have each placement.

Where every axis of a mesh has the same size and the same links, which of them splits a dim makes no difference; how
many do, does. A layout of a tensor on n axes is then the number whose digits in base n + 1 are these counts, those of
I, B, P, S(0), S(1) … from the least significant on.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain, combinations_with_replacement
from math import comb

import numpy as np
from numpy.typing import NDArray

from conjoin.search.exact.layout_codes import Codes, base

Digits = NDArray[np.int64]


def counted(digits: Digits) -> Codes:
    """Layouts from their placements: the last dim of the array runs over axes, in any order.

    >>> counted(np.array([[0, 3], [3, 0], [1, 1]]))
    array([28, 28,  6])
    """
    found: Codes = ((digits.shape[-1] + 1) ** digits).sum(axis=-1)
    return found


def counts_of(codes: Codes, rank: int, num_axes: int) -> Digits:
    """[layout, placement]: how many axes have it.

    >>> counts_of(np.array([28]), 1, 2)
    array([[1, 0, 0, 1]])
    """
    powers = (num_axes + 1) ** np.arange(base(rank), dtype=np.int64)
    return codes[:, None] // powers % (num_axes + 1)


def placements_of(code: int, rank: int, num_axes: int) -> Digits:
    """The placements of a layout, in ascending order: one for each axis."""
    counts = counts_of(np.array([code]), rank, num_axes)[0]
    return np.repeat(np.arange(base(rank)), counts)


@lru_cache(maxsize=256)
def ascending(values: tuple[int, ...], num_axes: int) -> Digits:
    """[row, axis]: every way to give each axis one of the values, the order of axes aside.

    >>> ascending((0, 3), 2).tolist()
    [[0, 0], [0, 3], [3, 3]]
    """
    flat = chain.from_iterable(combinations_with_replacement(values, num_axes))
    return np.fromiter(flat, np.int64).reshape(-1, num_axes)


def num_ascending(num_values: int, num_axes: int) -> int:
    """How many rows that has."""
    return comb(num_values + num_axes - 1, num_axes)


def codes_in(tensors: Sequence[Codes]) -> Codes:
    """All layouts that occur, each once."""
    found: Codes = np.unique(np.concatenate(tensors))
    return found
