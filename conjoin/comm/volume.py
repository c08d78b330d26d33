"""How many bytes a step or a route puts on the wire: for one rank, for the busiest, and for all together.

The figures are those of the movement tables (and of a ring for all-reduce), but in closed form: in a target layout an
axis splits one dim only, so what a rank sends to all members of its group is a product over dims.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np
from numpy.typing import NDArray

from conjoin.comm.per_rank import ring_bytes
from conjoin.comm.pieces import Splits, all_regions, held_regions, is_even, num_devices, pieces_along, splits_of, tails
from conjoin.comm.places import changes_places, has_places
from conjoin.comm.steps import Route, Step, StepKind
from conjoin.ir import Region, holds, num_elements, overlap
from conjoin.machine import Mesh


@dataclass(frozen=True, slots=True)
class _Holdings:
    """What all ranks hold and want in a step."""

    step: Step
    shape: tuple[int, ...]
    mesh: Mesh
    want: Splits
    leaving: Splits
    arriving: Splits
    """What source and target split besides the outermost axes they share."""
    held: tuple[Region, ...]
    wanted: tuple[Region, ...]


@lru_cache(maxsize=64)
def _holdings(step: Step, shape: tuple[int, ...], mesh: Mesh) -> _Holdings:
    have, want = (splits_of(layout, len(shape)) for layout in (step.source, step.target))
    held, wanted = (all_regions(shape, splits, mesh) for splits in (have, want))
    return _Holdings(step, shape, mesh, want, *tails(have, want), held, wanted)


def bytes_sent(step: Step, shape: tuple[int, ...], itemsize: int, mesh: Mesh, rank: int) -> int:
    """The bytes one rank sends to others in a step.

    >>> from conjoin.ops import Partial
    >>> all_reduce = Step(StepKind.ALL_REDUCE, ("d0",), (("d0", Partial()),), ())
    >>> bytes_sent(all_reduce, (6,), 4, Mesh.of_nodes(1, 3), 0)
    32
    """
    return 0 if step.kind.is_local else _bytes_sent(_holdings(step, shape, mesh), itemsize, rank)


def _bytes_sent(holdings: _Holdings, itemsize: int, rank: int) -> int:
    step = holdings.step
    if changes_places(step):
        return _moved(step, holdings.shape, holdings.mesh)[0][rank] * itemsize
    if not holds(step.source, holdings.mesh, rank):
        return 0
    num_ranks = num_devices(holdings.step.axes, holdings.mesh)
    held = holdings.held[rank]
    match holdings.step.kind:
        case StepKind.ALL_REDUCE:
            return ring_bytes(num_elements(held) * itemsize, num_ranks)
        case StepKind.ALL_GATHER:
            return (num_ranks - 1) * num_elements(held) * itemsize
        case _:
            kept = overlap(held, holdings.wanted[rank])
            sent = _elements_wanted_by_group(holdings, rank) - (num_elements(kept) if kept is not None else 0)
            return sent * itemsize


def _elements_wanted_by_group(holdings: _Holdings, rank: int) -> int:
    """Of what the rank holds, how many elements the members of its group want, counted once for each."""
    mesh, group_axes = holdings.mesh, holdings.step.axes
    by_dim = []
    for dim, (first, last) in enumerate(holdings.held[rank]):
        if all(axis in group_axes for axis in holdings.arriving[dim]):
            by_dim.append(last - first)
        else:
            starts, stops = _wanted_ranges(dim, holdings, rank)
            by_dim.append(int(np.maximum(np.minimum(last, stops) - np.maximum(first, starts), 0).sum()))
    splitting = num_devices((axis for axes in holdings.want for axis in axes if axis in group_axes), mesh)
    return prod(by_dim) * (num_devices(group_axes, mesh) // splitting)


def _wanted_ranges(dim: int, holdings: _Holdings, rank: int) -> NDArray[np.int64]:
    """The pieces of a dim that members of the rank's group want, each once: where they start, and where they stop."""
    mesh, along, split = holdings.mesh, holdings.step.axes, holdings.want[dim]
    here = mesh.coordinates(rank)
    places = tuple(slice(None) if axis in along else here[axis] for axis in split)
    return _piece_table(holdings.shape[dim], split, mesh)[(slice(None), *places)].reshape(2, -1)


@lru_cache(maxsize=256)
def _piece_table(size: int, split: tuple[str, ...], mesh: Mesh) -> NDArray[np.int64]:
    """Where the pieces of a dim start and stop, by the places of the axes that split it."""
    pieces = np.array(pieces_along(size, split, mesh), np.int64).T
    return pieces.reshape(2, *(mesh.sizes[axis] for axis in split))


def bytes_received(step: Step, shape: tuple[int, ...], itemsize: int, mesh: Mesh, rank: int) -> int:
    """The bytes one rank gets from others in a step that changes places, where they are not as many as it sends."""
    return _moved(step, shape, mesh)[1][rank] * itemsize


@lru_cache(maxsize=1 << 10)
def _moved(step: Step, shape: tuple[int, ...], mesh: Mesh) -> tuple[list[int], list[int]]:
    """The elements every rank sends to others, and those it gets: what its movement table says, for all at once."""
    held, wanted = (held_regions(shape, layout, mesh) for layout in (step.source, step.target))
    moved = np.zeros((2, mesh.size), np.int64)
    for group in mesh.groups(step.axes):
        have, want = [held[rank] for rank in group], [wanted[rank] for rank in group]
        if step.kind in (StepKind.REDUCE, StepKind.REDUCE_SCATTER):
            members = range(len(group))
            roots = [i for i in members if step.kind is StepKind.REDUCE_SCATTER or holds(step.target, mesh, group[i])]
            sizes = {root: num_elements(want[root]) for root in roots}
            moved[0, group] += [sum(sizes.values()) - sizes.get(i, 0) for i in members]
            moved[1, group] += [(len(group) - 1) * sizes.get(i, 0) for i in members]
        else:
            moved[:, group] += _moved_in(have, want)
    sent, received = moved.tolist()
    return sent, received


def _moved_in(have: Sequence[Region], want: Sequence[Region]) -> NDArray[np.int64]:
    """The same in one group, where each member has a region and wants another, see `move_regions`."""
    holders: dict[Region, list[int]] = {}
    for position, region in enumerate(have):
        holders.setdefault(region, []).append(position)
    shared = _overlaps(list(holders), want)
    moved = np.zeros((2, len(have)), np.int64)
    for members, sizes in zip(holders.values(), shared, strict=True):
        sizes[members] = 0  # what a member has it keeps
        others = np.flatnonzero(sizes)
        senders = np.array(members)[np.arange(len(others)) % len(members)]
        np.add.at(moved[0], senders, sizes[others])
        moved[1] += sizes
    return moved


def _overlaps(some: Sequence[Region], others: Sequence[Region]) -> NDArray[np.int64]:
    """How many elements each of some regions shares with each of the others.

    >>> _overlaps([((0, 4), (0, 6))], [((2, 9), (0, 6)), ((4, 9), (0, 6))])
    array([[12,  0]])
    """
    one, other = (np.array([region or ((0, 1),) for region in regions], np.int64) for regions in (some, others))
    shared = np.ones((len(some), len(others)), np.int64)
    for ours, theirs in zip(one.swapaxes(0, 1), other.swapaxes(0, 1), strict=True):
        if (ours == theirs[0]).all() and (theirs == theirs[0]).all():  # nobody splits this dim
            shared *= theirs[0, 1] - theirs[0, 0]
            continue
        low, high = np.maximum.outer(ours[:, 0], theirs[:, 0]), np.minimum.outer(ours[:, 1], theirs[:, 1])
        shared *= np.maximum(high - low, 0)
    return shared


@lru_cache(maxsize=1 << 14)
def route_bytes(route: Route, itemsize: int, mesh: Mesh) -> int:
    """The bytes the busiest rank sends."""
    return max(_bytes_by_rank(route, itemsize, mesh))


@lru_cache(maxsize=1 << 14)
def total_bytes(route: Route, itemsize: int, mesh: Mesh) -> int:
    """The bytes all ranks send together."""
    sent = _bytes_by_rank(route, itemsize, mesh)
    return sum(sent) * (mesh.size // len(sent))


@lru_cache(maxsize=1 << 10)
def _bytes_by_rank(route: Route, itemsize: int, mesh: Mesh) -> tuple[int, ...]:
    """What is sent by each of the ranks along the axes that make a difference; the others are like these."""
    moving = [_holdings(step, route.shape, mesh) for step in route.steps if not step.kind.is_local]
    ranks = mesh.group(0, mesh.in_order(axis for holdings in moving for axis in _unlike_axes(holdings)))
    return tuple(sum(_bytes_sent(holdings, itemsize, rank) for holdings in moving) for rank in ranks)


def _unlike_axes(holdings: _Holdings) -> frozenset[str]:
    """The axes along which ranks may send different amounts."""
    if has_places(holdings.step.source) or has_places(holdings.step.target):
        return frozenset(holdings.mesh.names)
    shape, mesh, want = holdings.shape, holdings.mesh, holdings.want
    have = splits_of(holdings.step.source, len(shape))
    if not (is_even(shape, have, mesh) and is_even(shape, want, mesh)):
        return _axes_of(have) | _axes_of(want)
    if holdings.step.kind is StepKind.ALL_TO_ALL:
        return _axes_of(holdings.leaving) | _axes_of(holdings.arriving)
    return frozenset()


def _axes_of(splits: Splits) -> frozenset[str]:
    return frozenset(axis for axes in splits for axis in axes)
