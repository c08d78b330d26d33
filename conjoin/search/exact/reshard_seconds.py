"""Seconds of every reshard of a tensor at once, in closed form.

Units that split the same dim nest in their order: the first is the outermost. Between two layouts the units of a dim
have a common beginning in both; the rest of them in the source is what has to be *undone*, the rest in the target is
*done*.

    slice            where nothing is undone along a dim, copies (I, B) are cut: free
    reduce-scatter   P -> S over n devices: each sends (n-1)/n of what it holds, and holds 1/n
    all-reduce       P -> I, B: each sends 2 (n-1)/n of what it holds
    all-gather       something is undone, nothing done along those dims: each sends (n-1) times what it holds
    all-to-all       else: each gets what it wants, but for what it holds of that already

The last two go over the units that are undone. Where others are done, all members of such a group want the same part,
and those that hold it send it to all: min(number undone, number done) times what is sent on the average. These are
the steps and bytes of `conjoin.comm` for even pieces; each takes what the machine's prices say. Parameters may be
stored in any nesting, and are in the one that leaves least to undo (`nested=False`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from conjoin.machine import Mesh
from conjoin.search.exact.layout_codes import Codes, P, S, all_digits, duals
from conjoin.search.exact.units import Units
from conjoin.sim import Prices

Array = NDArray[np.float64]
KINDS = ("reduce-scatter", "all-reduce", "all-to-all", "all-gather")
_SCATTER, _REDUCE, _EXCHANGE, _GATHER = range(4)
_SMALLEST, _LARGEST = 6, 44
"""Powers of two between which prices of collectives are tabulated."""


Bits = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Moves:
    """What happens between two layouts: of each kind of collective the group, and bytes sent for each byte."""

    groups: NDArray[np.int64]
    """[kind, ...]: 0 where nothing of the kind happens."""
    sent: Array


@lru_cache(maxsize=64)
def _moves(rank: int, degrees: tuple[int, ...], nested: bool) -> Moves:
    """Between all layouts of a rank on units: groups are known by a bit for every unit."""
    digits = all_digits(rank, len(degrees))
    source, target = (np.moveaxis(np.broadcast_to(d, (len(digits), len(digits), len(degrees))), -1, 0) for d in (
        digits[:, None, :], digits[None, :, :]))  # fmt: skip
    ways = np.array(degrees, np.float64).reshape(-1, 1, 1)
    bits = (1 << np.arange(len(degrees))).reshape(-1, 1, 1)
    return find_moves((source, target), rank, ways, bits, _nested if nested else common_first)


Nesting = Callable[[Codes, Codes, int], Bits]
"""From placements before and after, [unit, ...], and the rank to the units that both have in common: those that split a
dim in both, and so do all around them."""


def _nested(source: Codes, target: Codes, rank: int) -> Bits:
    """Units nest in their order."""
    found = np.zeros(np.broadcast_shapes(source.shape, target.shape), bool)
    for dim in range(S, S + rank):
        before, after = source == dim, target == dim
        found |= before & after & ~np.logical_or.accumulate(before != after, axis=0)
    return found


def common_first(source: Codes, target: Codes, rank: int) -> Bits:
    """Units nest so that what both have comes first."""
    found: Bits = (source >= S) & (source == target)
    return found


def find_moves(
    layouts: tuple[Codes, Codes],
    rank: int,
    ways: Array,
    numbers: NDArray[np.int64],
    nesting: Nesting = common_first,
) -> Moves:
    """What happens between two layouts: placements of the source and the target, [unit, ...] each.

    `ways` are the degrees of the units, and a group is known by the sum of the `numbers` of its units.
    """
    source, target = layouts
    wanted = np.where((source >= S) & (target == P), source, target)
    before, after = source >= S, wanted >= S
    common = nesting(source, wanted, rank)
    undone, done = before & ~common, after & ~common
    scattered, reduced = (source == P) & after, (source == P) & (target < P)
    elsewhere = done & _along_moving(source, wanted, undone, rank)
    sliced = done & ~elsewhere & (source < P)
    held = 1.0 / _ways_of(before | sliced, ways)
    left = held / _ways_of(scattered, ways)
    gathers = ~np.logical_or.reduce(elsewhere | (undone & after), axis=0)
    kept = _ways_of(before, ways) * _ways_of(after, ways) / _ways_of(common, ways)
    crowded = np.minimum(_ways_of(undone, ways), _ways_of(elsewhere & ~undone, ways))
    lacking = crowded * (1.0 / _ways_of(after, ways) - 1.0 / kept)
    fates = scattered, reduced, undone & ~gathers, undone & gathers
    groups = np.stack([(fate * numbers).sum(axis=0) for fate in fates])
    sizes = [_ways_of(fate, ways) for fate in fates]
    sent = np.stack([
        held * (1 - 1 / sizes[_SCATTER]),
        2 * left * (1 - 1 / sizes[_REDUCE]),
        lacking,
        left * (sizes[_GATHER] - 1),
    ])  # fmt: skip
    return Moves(groups, sent)


def _ways_of(units: Bits, ways: Array) -> Array:
    """The product of the degrees of some units."""
    found: Array = np.where(units, ways, 1.0).prod(axis=0)
    return found


def _along_moving(source: Codes, wanted: Codes, undone: Bits, rank: int) -> Bits:
    """[unit, ...]: what splits dims along which something is undone."""
    found = np.zeros(wanted.shape, bool)
    for dim in range(S, S + rank):
        moving: Bits = np.logical_or.reduce(undone & (source == dim), axis=0)
        found |= (wanted == dim) & moving
    return found


@dataclass
class ReshardSeconds:
    """Tables of seconds between all layouts of tensors on some units."""

    units: Units
    mesh: Mesh
    prices: Prices
    _curves: Curves | None = None
    _tables: dict[tuple[int, int, bool, bool, float], Array] = field(default_factory=dict)

    def table(
        self, rank: int, num_bytes: int, with_gradient: bool, *, nested: bool = True, share: float = 1.0
    ) -> Array:
        """[source, target]: seconds of the reshard, and of that of the gradient where there is one.

        `share` is the part of a latency that counts: less than 1 where many tensors travel in one collective.
        """
        key = rank, num_bytes, with_gradient, nested, share
        if key not in self._tables:
            self._tables[key] = self._find(*key)
        return self._tables[key]

    def _find(self, rank: int, num_bytes: int, with_gradient: bool, nested: bool, share: float) -> Array:
        forward = self._one_way(rank, num_bytes, nested, share)
        if not with_gradient:
            return forward
        dual = duals(rank, len(self.units))
        return forward + forward[np.ix_(dual, dual)].T

    def _one_way(self, rank: int, num_bytes: int, nested: bool, share: float) -> Array:
        if self._curves is None:
            groups = range(1 << len(self.units))
            self._curves = Curves([axes_of(group, self.units, self.mesh) for group in groups], self.prices)
        return self._curves.seconds(_moves(rank, tuple(unit.degree for unit in self.units), nested), num_bytes, share)


@dataclass
class Curves:
    """Seconds of collectives of some groups of axes, by the bytes that the busiest device sends."""

    groups: Sequence[tuple[str, ...]]
    prices: Prices
    _values: Array | None = None

    def seconds(self, moves: Moves, num_bytes: int, share: float = 1.0) -> Array:
        """Of moves of a tensor of so many bytes."""
        total = np.zeros(moves.groups.shape[1:])
        for kind in range(len(KINDS)):
            where = np.nonzero(moves.groups[kind])
            total[where] += self._seconds(kind, moves.groups[kind][where], moves.sent[kind][where] * num_bytes, share)
        return total

    def _seconds(self, kind: int, groups: NDArray[np.int64], sent: Array, share: float) -> Array:
        """Interpolated between powers of two: exact wherever the price is a line."""
        curves = self._all()
        power = np.log2(np.maximum(sent, 1.0))
        position = np.clip(power.astype(np.int64), _SMALLEST, _LARGEST - 1) - _SMALLEST
        low, high = curves[kind, groups, position], curves[kind, groups, position + 1]
        start = np.exp2(position + _SMALLEST)
        seconds: Array = low + (high - low) * (sent - start) / start
        if share < 1:
            seconds = seconds - (1 - share) * curves[kind, groups, 0]
        return np.maximum(seconds, 0.0)

    def _all(self) -> Array:
        """[kind, group, power of two]."""
        if self._values is None:
            self._values = np.zeros((len(KINDS), len(self.groups), _LARGEST - _SMALLEST + 1))
            for kind, name in enumerate(KINDS):
                for group, axes in enumerate(self.groups):
                    for position in range(_LARGEST - _SMALLEST + 1) if axes else ():
                        price = self.prices.collective(name, axes, 1 << (position + _SMALLEST))
                        self._values[kind, group, position] = price.value
        return self._values


def axes_of(group: int, units: Units, mesh: Mesh) -> tuple[str, ...]:
    """The axes of the units whose bits are set."""
    return mesh.in_order(axis for i, unit in enumerate(units) if group >> i & 1 for axis in unit.axes)


def excess(table: Array) -> Array:
    """[a, b]: how much more it can cost to come to b than to a, from wherever one comes (the rows of the table).

    >>> excess(np.array([[0.0, 2.0], [1.0, 0.0]]))
    array([[0., 2.],
           [1., 0.]])
    """
    found = np.full((table.shape[1], table.shape[1]), -np.inf)
    for row in table:
        np.maximum(found, row[None, :] - row[:, None], out=found)
    return found


class Excess:
    """The same for a few pairs: the columns of b are worked out as they are asked for."""

    def __init__(self, table: Array) -> None:
        self._coming = np.ascontiguousarray(table.T)
        """[layout, from where]."""
        self._columns = np.empty((len(self._coming),) * 2)
        self._known = np.zeros(len(self._coming), bool)

    def __call__(self, some: Codes, others: Codes) -> Array:
        """[i, j]: how much more it can cost to come to the j-th of the others than to the i-th of some."""
        for b in np.unique(others[~self._known[others]]):
            np.max(self._coming[b] - self._coming, axis=1, out=self._columns[b])
        self._known[others] = True
        found: Array = self._columns[others[None, :], some[:, None]]
        return found


def held_share(rank: int, degrees: tuple[int, ...]) -> Array:
    """For every layout the part of a tensor that one device holds."""
    digits = all_digits(rank, len(degrees))
    found: Array = 1.0 / np.where(digits >= S, np.array(degrees, np.float64), 1.0).prod(axis=-1)
    return found
