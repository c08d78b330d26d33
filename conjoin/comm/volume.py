"""How many bytes a step or a route puts on the wire: for one rank, for the busiest, and for all together.

The figures are those of the movement tables (and of a ring for all-reduce), but in closed form: in a target layout an axis
splits one dim only, so what a rank sends to all members of a group is a product over dims.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from math import prod

from conjoin.comm.pieces import Splits, all_regions, is_even, num_devices, pieces, splits_of, tails
from conjoin.comm.route import Route, Step, StepKind
from conjoin.ir import Range, num_elements, overlap
from conjoin.machine import Mesh


def bytes_sent(step: Step, shape: tuple[int, ...], itemsize: int, mesh: Mesh, rank: int) -> int:
    """The bytes one rank sends to others in a step.

    >>> from conjoin.ops import Partial
    >>> all_reduce = Step(StepKind.ALL_REDUCE, ("d0",), (("d0", Partial()),), ())
    >>> bytes_sent(all_reduce, (6,), 4, Mesh.of_nodes(1, 3), 0)
    32
    """
    if step.kind.is_local:
        return 0
    have, want = (splits_of(layout, len(shape)) for layout in (step.source, step.target))
    num_ranks = num_devices(step.axes, mesh)
    held = all_regions(shape, have, mesh)[rank]
    match step.kind:
        case StepKind.ALL_REDUCE:
            return round(2 * (num_ranks - 1) * num_elements(held) * itemsize / num_ranks)
        case StepKind.ALL_GATHER:
            return (num_ranks - 1) * num_elements(held) * itemsize
        case _:
            wanted = all_regions(shape, want, mesh)[rank]
            kept = overlap(held, wanted)
            sent = _elements_wanted_by_group(step, shape, mesh, rank) - (num_elements(kept) if kept is not None else 0)
            return sent * itemsize


def _elements_wanted_by_group(step: Step, shape: tuple[int, ...], mesh: Mesh, rank: int) -> int:
    """Of what the rank holds, how many elements the members of its group want, counted once for each."""
    have, want = (splits_of(layout, len(shape)) for layout in (step.source, step.target))
    held = all_regions(shape, have, mesh)[rank]
    along = [tuple(axis for axis in axes if axis in step.axes) for axes in want]
    by_dim = (
        sum(max(0, min(stop, b) - max(start, a)) for a, b in _wanted_ranges(size, axes, step.axes, mesh, rank))
        for size, axes, (start, stop) in zip(shape, want, held, strict=True)
    )
    return prod(by_dim) * (num_devices(step.axes, mesh) // num_devices((axis for axes in along for axis in axes), mesh))


def _wanted_ranges(
    size: int, split: tuple[str, ...], group_axes: tuple[str, ...], mesh: Mesh, rank: int
) -> list[Range]:
    """The pieces of a dim that members of the rank's group want, each once."""
    here = mesh.coordinates(rank)
    places = [range(mesh.sizes[axis]) if axis in group_axes else (here[axis],) for axis in split]
    ranges = pieces(size, tuple(mesh.sizes[axis] for axis in split))
    weights = [num_devices(split[i + 1 :], mesh) for i in range(len(split))]
    return [ranges[sum(w * p for w, p in zip(weights, place, strict=True))] for place in product(*places)]


@lru_cache(maxsize=1 << 14)
def route_bytes(route: Route, itemsize: int, mesh: Mesh) -> int:
    """The bytes the busiest rank sends."""
    return max(_bytes_by_rank(route, itemsize, mesh))


@lru_cache(maxsize=1 << 14)
def total_bytes(route: Route, itemsize: int, mesh: Mesh) -> int:
    """The bytes all ranks send together."""
    sent = _bytes_by_rank(route, itemsize, mesh)
    return sum(sent) * (mesh.size // len(sent))


def _bytes_by_rank(route: Route, itemsize: int, mesh: Mesh) -> list[int]:
    """What is sent by each of the ranks along the axes that make a difference; the others are like these."""
    shape = route.shape
    ranks = mesh.group(0, mesh.in_order(axis for step in route.steps for axis in _unlike_axes(step, shape, mesh)))
    return [sum(bytes_sent(step, shape, itemsize, mesh, rank) for step in route.steps) for rank in ranks]


def _unlike_axes(step: Step, shape: tuple[int, ...], mesh: Mesh) -> set[str]:
    """The axes along which ranks may send different amounts."""
    have, want = (splits_of(layout, len(shape)) for layout in (step.source, step.target))
    if step.kind.is_local:
        return set()
    if not (is_even(shape, have, mesh) and is_even(shape, want, mesh)):
        return _axes_of(have) | _axes_of(want)
    if step.kind is StepKind.ALL_TO_ALL:
        leaving, arriving = tails(have, want)
        return _axes_of(leaving) | _axes_of(arriving)
    return set()


def _axes_of(splits: Splits) -> set[str]:
    return {axis for axes in splits for axis in axes}
