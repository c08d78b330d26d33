"""Which part of a tensor a rank holds in a layout: half-open ranges, one for each dim."""

from __future__ import annotations

from functools import lru_cache
from math import prod

import numpy as np
from numpy.typing import NDArray

from conjoin.machine import Mesh
from conjoin.ops import At, Layout, Split, split_axes

Range = tuple[int, int]
Region = tuple[Range, ...]


def nothing(num_dims: int) -> Region:
    """The region of a rank that holds no part of a tensor; of one without dims it is that of an empty row."""
    return ((0, 0),) * max(num_dims, 1)


def holds(layout: Layout, mesh: Mesh, rank: int) -> bool:
    """Whether a rank holds anything of a tensor: it stands at the place of every axis where only one place does."""
    places = [(axis, placement.place) for axis, placement in layout if isinstance(placement, At)]
    return not places or all(mesh.coordinates(rank)[axis] == place for axis, place in places)


def cut(whole: Range, parts: int, part: int) -> Range:
    """One of the parts of a range: as equal as can be, the larger ones first.

    >>> [cut((0, 7), 3, i) for i in range(3)]
    [(0, 3), (3, 5), (5, 7)]
    """
    start, stop = whole
    size, larger = divmod(stop - start, parts)
    begin = start + part * size + min(part, larger)
    return begin, begin + size + (part < larger)


def cut_along(size: int, axes: tuple[str, ...], mesh: Mesh, rank: int) -> Range:
    """What a rank has of `size` positions that axes split one inside the other."""
    coordinates = mesh.coordinates(rank)
    bounds = mesh.bounds_of(size, axes) if mesh.cuts else None
    if bounds is not None:
        number = 0
        for axis in axes:
            number = number * mesh.sizes[axis] + coordinates[axis]
        return bounds[number], bounds[number + 1]
    piece = (0, size)
    for axis in axes:
        piece = cut(piece, mesh.sizes[axis], coordinates[axis])
    return piece


@lru_cache(maxsize=256)
def cut_for_all(size: int, axes: tuple[str, ...], mesh: Mesh) -> NDArray[np.int64]:
    """The same for every rank at once: where what each has starts and stops.

    >>> cut_for_all(7, ("d0",), Mesh.of_nodes(1, 3)).tolist()
    [[0, 3], [3, 5], [5, 7]]
    """
    places = places_of_all(mesh)
    bounds = mesh.bounds_of(size, axes) if mesh.cuts else None
    start, length = np.zeros(mesh.size, np.int64), np.full(mesh.size, size)
    if bounds is not None:
        number = np.zeros(mesh.size, np.int64)
        for axis in axes:
            number = number * mesh.sizes[axis] + places[axis]
        start, length = np.asarray(bounds)[number], np.diff(bounds)[number]
    else:
        for axis in axes:
            each, larger = np.divmod(length, mesh.sizes[axis])
            start = start + places[axis] * each + np.minimum(places[axis], larger)
            length = each + (places[axis] < larger)
    found = np.stack([start, start + length], axis=1)
    found.flags.writeable = False  # it is kept
    return found


@lru_cache(maxsize=64)
def places_of_all(mesh: Mesh) -> dict[str, NDArray[np.int64]]:
    """Where every rank stands on each axis."""
    places = np.indices([axis.size for axis in mesh.axes]).reshape(len(mesh.axes), mesh.size)
    return dict(zip(mesh.names, places, strict=True))


def is_cut_evenly(size: int, axes: tuple[str, ...], mesh: Mesh) -> bool:
    """Whether axes split a dim into pieces of one size."""
    return size % prod(mesh.sizes[axis] for axis in axes) == 0 and (not mesh.cuts or not mesh.bounds_of(size, axes))


@lru_cache(maxsize=1 << 16)
def region_of(shape: tuple[int, ...], layout: Layout, mesh: Mesh, rank: int) -> Region:
    """The part of a tensor that a rank holds; copies and partial sums have the whole range, other places nothing.

    >>> region_of((4, 6), (("d0", Split(1)),), Mesh.of_nodes(1, 2), 1)
    ((0, 4), (3, 6))
    """
    if not holds(layout, mesh, rank):
        return nothing(len(shape))
    if not any(isinstance(placement, Split) for _, placement in layout):
        return tuple((0, size) for size in shape)
    return tuple(cut_along(size, split_axes(layout, dim), mesh, rank) for dim, size in enumerate(shape))


def region_shape(region: Region) -> tuple[int, ...]:
    """The shape of a region."""
    return tuple(stop - start for start, stop in region)


def num_elements(region: Region) -> int:
    """How many elements a region has."""
    return prod(stop - start for start, stop in region)


def overlap(one: Region, other: Region) -> Region | None:
    """What two regions share; None when that is nothing."""
    if len(one) != len(other):
        return None  # one of them is the empty row of a tensor without dims
    shared = []
    for (a, b), (c, d) in zip(one, other, strict=True):
        start, stop = a if a > c else c, b if b < d else d
        if start >= stop:
            return None
        shared.append((start, stop))
    return tuple(shared)
