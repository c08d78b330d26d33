"""Who holds which piece when axes split dims one inside the other, counted without visiting every rank.

`Splits` are the axes that split each dim, outermost first: all that a layout says about regions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from math import prod

import numpy as np

from conjoin.comm.per_rank import PerRank
from conjoin.ir import (
    Range,
    Region,
    cut,
    cut_for_all,
    holds,
    is_cut_evenly,
    nothing,
    num_elements,
    places_of_all,
    region_of,
)
from conjoin.machine import Mesh
from conjoin.ops import At, Layout, TensorType, split_axes

Splits = tuple[tuple[str, ...], ...]


def splits_of(layout: Layout, num_dims: int) -> Splits:
    """The axes that split each dim."""
    return tuple(split_axes(layout, dim) for dim in range(num_dims))


def num_devices(axes: Iterable[str], mesh: Mesh) -> int:
    """How many devices there are along some axes together."""
    return prod([mesh.sizes[axis] for axis in axes])


def is_even(shape: tuple[int, ...], splits: Splits, mesh: Mesh) -> bool:
    """Whether all pieces have the same shape."""
    return all(is_cut_evenly(size, axes, mesh) for size, axes in zip(shape, splits, strict=True))


def splits_evenly(shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> bool:
    """Whether all ranks hold pieces of one shape in a layout."""
    if any(isinstance(placement, At) for _, placement in layout):
        return False
    return is_even(shape, splits_of(layout, len(shape)), mesh)


def common_outer(one: tuple[str, ...], other: tuple[str, ...]) -> int:
    """How many of the outermost axes two splits of a dim share.

    >>> common_outer(("x", "y", "z"), ("x", "z"))
    1
    """
    shared = 0
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            break
        shared += 1
    return shared


def tails(one: Splits, other: Splits) -> tuple[Splits, Splits]:
    """What is left of two splits without the outermost axes they share in each dim."""
    shared = [common_outer(*axes) for axes in zip(one, other, strict=True)]
    return (
        tuple(axes[n:] for axes, n in zip(one, shared, strict=True)),
        tuple(axes[n:] for axes, n in zip(other, shared, strict=True)),
    )


@lru_cache(maxsize=4096)
def pieces(size: int, parts: tuple[int, ...]) -> tuple[Range, ...]:
    """All pieces of a dim that is cut into parts and each of these into parts again, innermost running fastest.

    >>> pieces(5, (2, 2))
    ((0, 2), (2, 3), (3, 4), (4, 5))
    """
    ranges: tuple[Range, ...] = ((0, size),)
    for n in parts:
        ranges = tuple(cut(whole, n, part) for whole in ranges for part in range(n))
    return ranges


def pieces_along(size: int, split: tuple[str, ...], mesh: Mesh) -> tuple[Range, ...]:
    """All pieces of a dim that axes split, the last running fastest."""
    bounds = mesh.bounds_of(size, split) if mesh.cuts else None
    return pieces(size, tuple(mesh.sizes[axis] for axis in split)) if bounds is None else tuple(pairwise(bounds))


def piece_numbers(split: Sequence[str], axes: Sequence[str], mesh: Mesh) -> list[int]:
    """Which piece of a split dim is held at each place along the given axes, the last axis given running fastest."""
    weights = {axis: num_devices(split[i + 1 :], mesh) for i, axis in enumerate(split)}
    numbers = [0]
    for axis in axes:
        steps = [weights.get(axis, 0) * place for place in range(mesh.sizes[axis])]
        numbers = [number + step for number in numbers for step in steps]
    return numbers


def ranges_along(size: int, split: tuple[str, ...], axes: Sequence[str], mesh: Mesh) -> list[Range]:
    """The range of a dim held at each place along the given axes; axes of the split that are not given stand at 0."""
    ranges = pieces_along(size, split, mesh)
    return [ranges[number] for number in piece_numbers(split, axes, mesh)]


@lru_cache(maxsize=256)
def all_regions(shape: tuple[int, ...], splits: Splits, mesh: Mesh) -> tuple[Region, ...]:
    """The region each rank holds."""
    by_dim = [ranges_along(size, axes, mesh.names, mesh) for size, axes in zip(shape, splits, strict=True)]
    return tuple(zip(*by_dim, strict=True)) if shape else ((),) * mesh.size


@lru_cache(maxsize=256)
def held_regions(shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> tuple[Region, ...]:
    """The region each rank holds in a layout; nothing where others hold it."""
    regions = all_regions(shape, splits_of(layout, len(shape)), mesh)
    if not any(isinstance(placement, At) for _, placement in layout):
        return regions
    empty = nothing(len(shape))
    return tuple(region if holds(layout, mesh, rank) else empty for rank, region in enumerate(regions))


@lru_cache(maxsize=1 << 15)
def kept_elements(shape: tuple[int, ...], have: Splits, want: Splits, mesh: Mesh) -> int:
    """How many elements, over all ranks together, of what a rank is to have it has already.

    >>> kept_elements((4, 4), (("d0",), ()), ((), ("d0",)), Mesh.of_nodes(1, 2))
    8
    """
    total, coupled = 1, []
    for size, had, wanted in zip(shape, have, want, strict=True):
        finer = max(had, wanted, key=len)
        nested = common_outer(had, wanted) == min(len(had), len(wanted))
        if nested and is_cut_evenly(size, finer, mesh):
            total *= size // num_devices(finer, mesh)
        else:
            coupled.append((size, had, wanted))
    axes = tuple(dict.fromkeys(axis for _, had, wanted in coupled for axis in (*had, *wanted)))
    products = [1] * num_devices(axes, mesh)
    for size, had, wanted in coupled:
        lengths = _shared_lengths(ranges_along(size, had, axes, mesh), ranges_along(size, wanted, axes, mesh))
        products = [product * length for product, length in zip(products, lengths, strict=True)]
    return total * sum(products) * (mesh.size // len(products))


def _shared_lengths(some: list[Range], others: list[Range]) -> list[int]:
    return [max(0, min(b, d) - max(a, c)) for (a, b), (c, d) in zip(some, others, strict=True)]


@lru_cache(maxsize=1 << 14)
def held_bytes(type: TensorType, mesh: Mesh) -> PerRank:
    """What every rank holds of a tensor in its layout."""
    itemsize = type.dtype.itemsize
    if splits_evenly(type.shape, type.layout, mesh):
        return PerRank((num_elements(region_of(type.shape, type.layout, mesh, 0)) * itemsize,), mesh.size)
    sizes = np.full(mesh.size, itemsize)
    for dim, size in enumerate(type.shape):
        starts, stops = cut_for_all(size, split_axes(type.layout, dim), mesh).T
        sizes *= stops - starts
    for axis, placement in type.layout:
        if isinstance(placement, At):
            sizes *= places_of_all(mesh)[axis] == placement.place
    return PerRank(tuple(sizes.tolist()), mesh.size)
