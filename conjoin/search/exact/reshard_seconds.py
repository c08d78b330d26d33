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


@dataclass(frozen=True, slots=True)
class _Moves:
    """What happens between every two layouts: of each kind of collective the units, and bytes sent for each byte."""

    groups: NDArray[np.int64]
    """[kind, source, target]: a bit for every unit."""
    sent: Array


@lru_cache(maxsize=64)
def _moves(rank: int, degrees: tuple[int, ...], nested: bool) -> _Moves:
    digits = all_digits(rank, len(degrees))
    source, target = (np.moveaxis(np.broadcast_to(d, (len(digits), len(digits), len(degrees))), -1, 0) for d in (
        digits[:, None, :], digits[None, :, :]))  # fmt: skip
    ways = np.array(degrees, np.float64).reshape(-1, 1, 1)
    padded = (source >= S) & (target == P)
    wanted = np.where(padded, source, target)
    common, undone, done = _nesting(source, wanted, rank, nested)
    scattered = (source == P) & (wanted >= S)
    reduced = (source == P) & (target < P)
    moving: Bits = np.logical_or.reduce(undone, axis=1)
    sliced = _along_still(done, moving) & (source < P)
    held = 1.0 / np.where((source >= S) | sliced, ways, 1.0).prod(axis=0)
    left = held / np.where(scattered, ways, 1.0).prod(axis=0)
    leaving = undone.any(axis=0)
    gathers = ~(done & moving[:, None]).any(axis=(0, 1))
    kept = np.where(common, ways, 1.0).prod(axis=(0, 1)) * np.where(done, ways, 1.0).prod(axis=(0, 1))
    kept = kept * np.where(undone, ways, 1.0).prod(axis=(0, 1))
    arriving = (done & moving[:, None]).any(axis=0) & ~leaving
    crowded = np.minimum(np.where(leaving, ways, 1.0).prod(axis=0), np.where(arriving, ways, 1.0).prod(axis=0))
    lacking = crowded * (1.0 / np.where(wanted >= S, ways, 1.0).prod(axis=0) - 1.0 / kept)
    bits = (1 << np.arange(len(degrees))).reshape(-1, 1, 1)
    fates = scattered, reduced, leaving & ~gathers, leaving & gathers
    groups = np.stack([(fate * bits).sum(axis=0) for fate in fates])
    sizes = [np.where(fate, ways, 1.0).prod(axis=0) for fate in fates]
    sent = np.stack([
        held * (1 - 1 / sizes[_SCATTER]),
        2 * left * (1 - 1 / sizes[_REDUCE]),
        lacking,
        left * (sizes[_GATHER] - 1),
    ])  # fmt: skip
    return _Moves(groups, sent)


Bits = NDArray[np.bool_]


def _nesting(source: Codes, target: Codes, rank: int, nested: bool) -> tuple[Bits, Bits, Bits]:
    """[dim, unit, source, target]: the common beginning, and what is undone and done after it."""
    dims = (S + np.arange(rank)).reshape(-1, 1, 1, 1)
    before, after = source[None] == dims, target[None] == dims
    differ = before != after
    apart = np.logical_or.accumulate(differ, axis=1) if nested else differ
    return before & after & ~apart, before & apart, after & apart


def _along_still(done: Bits, moving: Bits) -> Bits:
    """[unit, source, target]: what is done along dims where nothing is undone."""
    found: Bits = np.logical_or.reduce(done & ~moving[:, None], axis=0)
    return found


@dataclass
class ReshardSeconds:
    """Tables of seconds between all layouts of tensors on some units."""

    units: Units
    mesh: Mesh
    prices: Prices
    _curves: Array | None = None
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
        moves = _moves(rank, tuple(unit.degree for unit in self.units), nested)
        total = np.zeros(moves.groups.shape[1:])
        for kind in range(len(KINDS)):
            where = np.nonzero(moves.groups[kind])
            total[where] += self._seconds(kind, moves.groups[kind][where], moves.sent[kind][where] * num_bytes, share)
        return total

    def _seconds(self, kind: int, groups: NDArray[np.int64], sent: Array, share: float) -> Array:
        """Interpolated between powers of two: exact wherever the price is a line."""
        curves = self._price_curves()
        power = np.log2(np.maximum(sent, 1.0))
        place = np.clip(power.astype(np.int64), _SMALLEST, _LARGEST - 1) - _SMALLEST
        low, high = curves[kind, groups, place], curves[kind, groups, place + 1]
        start = np.exp2(place + _SMALLEST)
        seconds: Array = low + (high - low) * (sent - start) / start
        if share < 1:
            seconds = seconds - (1 - share) * curves[kind, groups, 0]
        return np.maximum(seconds, 0.0)

    def _price_curves(self) -> Array:
        """[kind, group, power of two]: seconds of a collective in which the busiest device sends so many bytes."""
        if self._curves is None:
            num_groups = 1 << len(self.units)
            self._curves = np.zeros((len(KINDS), num_groups, _LARGEST - _SMALLEST + 1))
            for kind, name in enumerate(KINDS):
                for group in range(1, num_groups):
                    axes = axes_of(group, self.units, self.mesh)
                    for place in range(_LARGEST - _SMALLEST + 1):
                        price = self.prices.collective(name, axes, 1 << (place + _SMALLEST))
                        self._curves[kind, group, place] = price.value
        return self._curves


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


def held_share(rank: int, degrees: tuple[int, ...]) -> Array:
    """For every layout the part of a tensor that one device holds."""
    digits = all_digits(rank, len(degrees))
    found: Array = 1.0 / np.where(digits >= S, np.array(degrees, np.float64), 1.0).prod(axis=-1)
    return found
