"""Runs steps on all ranks of a mesh in one process, with the tables ranks would use, and reads what they then hold."""

from __future__ import annotations

from collections.abc import Callable

import numpy
from numpy.typing import NDArray

from conjoin.comm import Movement, Route, Step, StepKind, movement
from conjoin.ir import Region, overlap, region_of, region_shape
from conjoin.machine import Mesh
from conjoin.ops import Layout, Partial, Split, placement_on

Array = NDArray[numpy.int64]
Table = Callable[[Step, tuple[int, ...], Mesh, int], Movement]


def spread(value: Array, layout: Layout, mesh: Mesh, rng: numpy.random.Generator) -> list[Array]:
    """What the ranks hold of a value in a layout; partial sums are random numbers with the right total."""
    held = [value.copy() for _ in range(mesh.size)]
    for axis, placement in layout:
        if isinstance(placement, Partial):
            for group in mesh.groups((axis,)):
                shares = [rng.integers(-9, 9, value.shape) for _ in group[1:]]
                held[group[0]] = held[group[0]] - sum(shares)
                for rank, share in zip(group[1:], shares, strict=True):
                    held[rank] = share
            held = _same_along_copies(held, layout, mesh)
    return [part[_slices(region_of(value.shape, layout, mesh, rank))] for rank, part in enumerate(held)]


def _same_along_copies(held: list[Array], layout: Layout, mesh: Mesh) -> list[Array]:
    """Ranks that differ only along axes that hold no partial sums hold the same."""
    summed = [name for name in mesh.names if isinstance(placement_on(layout, name), Partial)]
    places = [mesh.coordinates(rank) for rank in range(mesh.size)]
    return [held[mesh.rank_at({name: place[name] for name in summed})] for place in places]


def read(held: list[Array], shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> Array:
    """The value that the ranks hold; an error where copies differ or a region has the wrong shape."""
    summed = [name for name in mesh.names if isinstance(placement_on(layout, name), Partial)]
    totals: dict[tuple[int, ...], Array] = {}
    for rank, part in enumerate(held):
        region = region_of(shape, layout, mesh, rank)
        assert part.shape == region_shape(region), f"rank {rank} holds the wrong shape"
        group = mesh.group(rank, summed)
        if group[0] == rank:
            total = numpy.zeros(shape, numpy.int64)
            total[_slices(region)] = sum(held[member] for member in group)
            totals[group] = total
    return _assembled(totals, shape, layout, mesh)


def _assembled(totals: dict[tuple[int, ...], Array], shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> Array:
    split = [axis for axis, placement in layout if isinstance(placement, Split)]
    values = []
    for group in mesh.groups(split):
        members = [total for ranks, total in totals.items() if ranks[0] in group]
        if members:
            values.append(sum(members, start=numpy.zeros(shape, numpy.int64)))
    assert all((value == values[0]).all() for value in values), "copies differ"
    return values[0]


def run_route(route: Route, held: list[Array], mesh: Mesh, table: Table = movement) -> list[Array]:
    """What the ranks hold after all steps."""
    for step in route.steps:
        held = run_step(step, route.shape, held, mesh, table)
    return held


def run_step(step: Step, shape: tuple[int, ...], held: list[Array], mesh: Mesh, table: Table = movement) -> list[Array]:
    """What the ranks hold after a step, from the axes and tables alone."""
    match step.kind:
        case StepKind.RELABEL:
            return held
        case StepKind.KEEP:
            kept = [all(mesh.coordinates(rank)[axis] == 0 for axis in step.axes) for rank in range(mesh.size)]
            return [part if keep else numpy.zeros_like(part) for part, keep in zip(held, kept, strict=True)]
        case StepKind.SLICE | StepKind.PAD:
            return [_recut(step, shape, part, mesh, rank) for rank, part in enumerate(held)]
        case StepKind.ALL_REDUCE:
            groups = [mesh.group(rank, step.axes) for rank in range(mesh.size)]
            return [numpy.sum([held[member] for member in group], axis=0) for group in groups]
        case _:
            return _exchange(step, shape, held, mesh, table)


def _recut(step: Step, shape: tuple[int, ...], part: Array, mesh: Mesh, rank: int) -> Array:
    source, target = (region_of(shape, layout, mesh, rank) for layout in (step.source, step.target))
    whole = numpy.zeros(shape, numpy.int64)
    whole[_slices(source)] = part
    if step.kind is StepKind.SLICE:
        assert overlap(source, target) == target, "slice of what is not there"
    return whole[_slices(target)]


def _exchange(step: Step, shape: tuple[int, ...], held: list[Array], mesh: Mesh, table: Table) -> list[Array]:
    """Send first, then receive: what was not sent does not arrive, what arrives twice is an error."""
    tables = [table(step, shape, mesh, rank) for rank in range(mesh.size)]
    sent: dict[tuple[int, int], tuple[Region, Array]] = {}
    for rank, own in enumerate(tables):
        for position, region in own.sends:
            sent[rank, own.group[position]] = region, held[rank][_slices(region, own.have)]
    results = []
    for rank, own in enumerate(tables):
        result, count = numpy.zeros((2, *region_shape(own.want)), numpy.int64)
        for position, region in own.receives:
            sent_region, data = sent.pop((own.group[position], rank))
            assert sent_region == region, "sender and receiver disagree"
            result[_slices(region, own.want)] += data
            count[_slices(region, own.want)] += 1
        times = len(own.group) if step.kind is StepKind.REDUCE_SCATTER else 1
        assert (count == times).all(), "a part is missing or arrives twice"
        results.append(result)
    assert not sent, "something is sent that nobody receives"
    return results


def _slices(region: Region, inside: Region | None = None) -> tuple[slice, ...]:
    base = inside or tuple((0, 0) for _ in region)
    return tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(region, base, strict=True))
