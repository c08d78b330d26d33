"""The fewest elements on the wire between any two layouts, by trying all compositions of elementary steps.

Written apart from `conjoin.comm`: states are layouts (I standing for I and B), edges are
    C → S(d) innermost, C → P, S(d) innermost → P              nothing
    P → C on any set of axes                                   all-reduce: 2(n-1)/n of what a rank holds
    P → S on any set of axes, innermost, any dims and order    reduce-scatter: all but the rank's own part
    any change of splits                                       a rank receives what it wants and does not hold
and shortest paths are taken over all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations, product
from math import prod

import numpy
from numpy.typing import NDArray

from conjoin.ir import num_elements, region_of
from conjoin.machine import Mesh
from conjoin.ops import Layout, Partial, Split, make_layout, placement_on, split_axes
from tests.comm.layouts import INVARIANT, PARTIAL, all_layouts, is_legal

Distances = NDArray[numpy.float64]


def cheapest_elements(shape: tuple[int, ...], mesh: Mesh) -> tuple[list[Layout], Distances]:
    """All layouts without B, and the elements on the wire over all ranks from each to each."""
    layouts = all_layouts(shape, mesh, (INVARIANT, PARTIAL))
    number = {layout: i for i, layout in enumerate(layouts)}
    held = numpy.array([[region_of(shape, layout, mesh, rank) for rank in range(mesh.size)] for layout in layouts])
    distances = numpy.full((len(layouts), len(layouts)), numpy.inf)
    for i, layout in enumerate(layouts):
        for reached, elements in (*_local(shape, layout, mesh), *_sums(shape, layout, mesh)):
            if reached in number:
                distances[i, number[reached]] = min(distances[i, number[reached]], elements)
        alike = [_partial(layout) == _partial(reached) for reached in layouts]
        distances[i, alike] = numpy.minimum(distances[i, alike], _moved(held[i], held[alike]))
    for k in range(len(layouts)):
        numpy.minimum(distances, distances[:, k, None] + distances[None, k], out=distances)
    return layouts, distances


def _partial(layout: Layout) -> frozenset[str]:
    return frozenset(axis for axis, placement in layout if isinstance(placement, Partial))


def _held(shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> int:
    return sum(num_elements(region_of(shape, layout, mesh, rank)) for rank in range(mesh.size))


def _without(layout: Layout, *axes: str) -> list[tuple[str, object]]:
    return [entry for entry in layout if entry[0] not in axes]


def _local(shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> Iterator[tuple[Layout, float]]:
    for axis in mesh.names:
        placement = placement_on(layout, axis)
        rest = _without(layout, axis)
        if placement == INVARIANT:
            yield make_layout([*rest, (axis, PARTIAL)]), 0
            yield from ((make_layout([*rest, (axis, Split(dim))]), 0) for dim in range(len(shape)))
        if isinstance(placement, Split) and split_axes(layout, placement.dim)[-1] == axis:
            yield make_layout([*rest, (axis, PARTIAL)]), 0


def _sums(shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> Iterator[tuple[Layout, float]]:
    summed = sorted(_partial(layout))
    held = _held(shape, layout, mesh)
    for length in range(1, len(summed) + 1):
        for axes in permutations(summed, length):
            n = prod(mesh.sizes[axis] for axis in axes)
            rest = _without(layout, *axes)
            yield make_layout(rest), 2 * (n - 1) / n * held
            for dims in product(range(len(shape)), repeat=length):
                reached = make_layout([*rest, *((axis, Split(dim)) for axis, dim in zip(axes, dims, strict=True))])
                if is_legal(shape, reached, mesh):
                    yield reached, (n - 1) * _held(shape, reached, mesh)


def _moved(have: NDArray[numpy.int64], want: NDArray[numpy.int64]) -> NDArray[numpy.int64]:
    """What ranks want of each of many layouts and do not hold: spans by rank and dim, and by layout before them."""
    kept = numpy.minimum(have[..., 1], want[..., 1]) - numpy.maximum(have[..., 0], want[..., 0])
    wanted = want[..., 1] - want[..., 0]
    missing = wanted.prod(axis=-1) - kept.clip(min=0).prod(axis=-1)
    return numpy.asarray(missing.sum(axis=-1))
