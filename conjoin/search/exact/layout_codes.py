"""Layouts on units as small numbers, so that tables can be indexed by them.

A placement is 0 for I, 1 for B, 2 for P and 3 + d for S(d); a layout of a tensor of some rank on units is the number
with these as its digits, the first unit's the most significant, in base 3 + rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from conjoin.ops import Copies, Greatest, Invariant, Layout, Partial, Placement, Split, make_layout
from conjoin.search.exact.units import Units

WHOLE, B, P, S = range(4)
_PLACEMENTS: tuple[Placement, ...] = (Invariant(), Copies(), Partial())
Codes = NDArray[np.int64]


def code_of(placement: Placement) -> int:
    """The number of a placement.

    >>> [code_of(p) for p in (Invariant(), Copies(), Partial(), Split(1))]
    [0, 1, 2, 4]
    """
    if placement is Greatest():
        return P  # reduced to I at the same price, and read by nobody as it is
    return S + placement.dim if isinstance(placement, Split) else _PLACEMENTS.index(placement)


def placement_of(code: int) -> Placement:
    """The placement of a number."""
    return Split(code - S) if code >= S else _PLACEMENTS[code]


def base(rank: int) -> int:
    """How many placements a tensor of some rank has on one unit."""
    return S + rank


def join(digits: NDArray[np.int64], rank: int) -> Codes:
    """Layouts from their placements: the last dim of the array runs over units."""
    found = np.zeros(digits.shape[:-1], np.int64)
    for unit in range(digits.shape[-1]):
        found = found * base(rank) + digits[..., unit]
    return found


@lru_cache(maxsize=256)
def all_digits(rank: int, num_units: int) -> NDArray[np.int64]:
    """The placements of every layout: one row for each, in the order of their numbers."""
    grid = np.indices((base(rank),) * num_units).reshape(num_units, -1).T
    return np.ascontiguousarray(grid, np.int64).reshape(-1, num_units)


@lru_cache(maxsize=256)
def duals(rank: int, num_units: int) -> Codes:
    """For every layout that of the gradient."""
    swap = np.arange(base(rank))
    swap[[B, P]] = P, B
    return join(swap[all_digits(rank, num_units)], rank)


def code_on(layout: Layout, rank: int, units: Units) -> int | None:
    """The number of a layout; None where it treats axes of one unit differently, or axes of none.

    >>> from conjoin.search.exact.units import Unit
    >>> code_on((("d0", Split(1)),), 2, (Unit(("d0",), 2), Unit(("d1",), 2)))
    20
    """
    placements = dict(layout)
    found = 0
    for unit in units:
        codes = {code_of(placements.pop(axis, Invariant())) for axis in unit.axes}
        if len(codes) > 1:
            return None
        found = found * base(rank) + codes.pop()
    return None if placements else found


def layout_of(code: int, rank: int, units: Units, first: Sequence[str] = ()) -> Layout:
    """The layout that a number stands for; axes named in `first` split a dim before the others."""
    digits = all_digits(rank, len(units))[code]
    entries = [
        (axis, placement_of(int(digit))) for unit, digit in zip(units, digits, strict=True) for axis in unit.axes
    ]
    return make_layout(sorted(entries, key=lambda entry: entry[0] not in first))
