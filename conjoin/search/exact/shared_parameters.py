"""Parameters that several operators read, such as those of an unrolled recurrent layer, which every step reads.

A parameter comes to a layout once, and its gradient goes back once, for all who read it in that layout. So a parameter
that several read is not only stored in some layout but *brought* to one as well:

    seconds(s, u)  =  storing(s) + reading(s, u) + sum over readers r of (0 if r uses u else reading(s, what r uses))

Layouts of use other than u are counted once for each reader, which is too much where several read in the same one:
what elimination finds is never slower than its sum says. For every u the storage is tried that suits it best. Where
few read, also the one that is most like u, and a parameter may be brought nowhere; where many do, that would count too
much to be of use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from conjoin.search.exact.layout_codes import WHOLE, Codes, P, all_digits
from conjoin.search.exact.reshard_seconds import Array
from conjoin.search.exact.storage import Storages

Rows = NDArray[np.intp]
"""For every layout of use a storage."""
MANY = 4
"""Readers beyond which a parameter is always brought to one of the layouts they use."""


@dataclass(frozen=True, slots=True, eq=False)
class Shared:
    """The ways to store a parameter and to bring it to a layout, in parallel arrays."""

    storages: Storages
    """Seconds count the way there."""
    rows: NDArray[np.intp]
    """Where they are among all ways to store it."""
    brought: Codes
    """The layout it is brought to; -1 where it is brought nowhere."""

    def read(self, reading: Array, codes: Codes) -> Array:
        """[way, choice]: seconds until a reader has it in some layouts, from what reading takes of all storages."""
        seconds: Array = np.where(self.brought[:, None] == codes[None, :], 0.0, reading[self.rows][:, codes])
        return seconds


def share(storages: Storages, reading: Array, used: Codes, sources: Sequence[Rows], *, plain: bool) -> Shared:
    """All ways to bring a parameter to one of the layouts in which it is used, from the storages of some sources.

    `plain` keeps those that bring it nowhere.
    """
    pairs = [(source[used], used) for source in sources]
    rows, brought = (np.concatenate(part) for part in zip(*pairs, strict=True))
    seconds = storages.seconds[rows] + reading[rows, brought]
    if plain:
        every = np.arange(len(storages.seconds))
        rows, brought = np.concatenate([every, rows]), np.concatenate([np.full(len(every), -1), brought])
        seconds = np.concatenate([storages.seconds, seconds])
    ways = Storages(storages.codes[rows], storages.regathered[rows], seconds)
    return Shared(ways, rows, brought)


def best_sources(storages: Storages, reading: Array) -> Rows:
    """For every layout of use the storage that suits it best."""
    found: Rows = (storages.seconds[:, None] + reading).argmin(axis=0)
    return found


def sources_as_used(storages: Storages, rank: int, num_units: int) -> Rows:
    """For every layout of use the storage that differs only where copies or sums are used: it is whole there."""
    digits = all_digits(rank, num_units)
    wanted = np.where(digits <= P, WHOLE, digits)
    found: Rows = (digits[storages.codes][:, None] == wanted[None]).all(axis=-1).argmax(axis=0)
    return found


def shared_excess(excess: Array, reading: Array, sources: Sequence[Rows]) -> Array:
    """[a, b]: how much more it can cost to use b than a: where it is brought to a, all of the way to b."""
    found: Array = np.maximum.reduce([excess, *(reading[source] for source in sources)])
    np.fill_diagonal(found, 0.0)
    return found
