"""What neighbours send each other so that a node can run on its pieces: halos, and pieces that do not line up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np
from numpy.typing import NDArray

from conjoin.comm.halo import halo_of
from conjoin.comm.node_on_mesh import NodeOnMesh
from conjoin.comm.per_rank import PerRank
from conjoin.comm.ring import ring_of
from conjoin.comm.routing import routing_of
from conjoin.ir import (
    Node,
    Placed,
    RegionMove,
    exchange_axes,
    operand_move,
    output_move,
    unlike_axes,
)
from conjoin.machine import Mesh
from conjoin.ops import TensorType, call_cache


@dataclass(frozen=True, slots=True)
class ExchangedBytes:
    """The bytes that every rank sends to neighbours, each way."""

    axes: tuple[str, ...]
    forward: PerRank
    backward: PerRank
    forward_load: int
    """What the busiest of a row of neighbours would send with as much going from node to node; at least its own."""
    backward_load: int


@dataclass(frozen=True, slots=True)
class NodeExchanges:
    """What is exchanged before a node reads each operand, and after it made each output; None where nothing is."""

    operands: tuple[ExchangedBytes | None, ...]
    outputs: tuple[ExchangedBytes | None, ...]


def node_exchanges(node: Node, placed: Placed, mesh: Mesh) -> NodeExchanges:
    """All exchanges of a node; there are none where all its pieces are alike, or where they go another way."""
    around = any(find(node, placed, mesh) is not None for find in (ring_of, routing_of, halo_of))
    if around or not unlike_axes(node, placed, mesh):
        return NodeExchanges((None,) * len(node.inputs), (None,) * len(node.types))
    return _exchanges(NodeOnMesh.of(node, placed, mesh))


@call_cache(1 << 12)
def _exchanges(case: NodeOnMesh) -> NodeExchanges:
    node, placed, mesh = case.node, case.placed, case.mesh
    return NodeExchanges(
        tuple(_count(operand_move, node, i, placed, value.type, mesh) for i, value in enumerate(node.inputs)),
        tuple(_count(output_move, node, i, placed, type, mesh) for i, type in enumerate(node.types)),
    )


Counts = NDArray[np.int64]
FindMove = Callable[[Node, int, Placed, Mesh, int], RegionMove | None]


def _count(find: FindMove, node: Node, i: int, placed: Placed, type: TensorType, mesh: Mesh) -> ExchangedBytes | None:
    """What is sent each way over all groups; None where nobody lacks anything."""
    axes = exchange_axes(node, placed, type, mesh)
    if not axes:
        return None
    groups = mesh.groups(axes)
    move = find(node, i, placed, mesh, groups[0][0])
    if move is None:
        return None
    flow = _flow(move)
    if not len(flow.elements):
        return None
    counts = np.zeros((2, mesh.size), dtype=np.int64)
    leaving = np.zeros((2, mesh.size), dtype=np.int64)  # by the first rank of a node
    members = np.asarray(groups)  # along other axes pieces are of one size: all groups exchange as many
    nodes = _nodes(mesh)[members]
    crossing = nodes[:, flow.senders] != nodes[:, flow.receivers]
    elements = np.broadcast_to(flow.elements, crossing.shape)[crossing]
    for way, ends in enumerate((flow.senders, flow.receivers)):
        sent = np.zeros(members.shape[1], dtype=np.int64)
        np.add.at(sent, ends, flow.elements)
        counts[way, members] = sent
        np.add.at(leaving[way], nodes[:, ends][crossing], elements)
    size = type.dtype.itemsize
    there, back = (PerRank(tuple((size * found).tolist()), mesh.size) for found in counts)
    loads = (
        max(sent.largest, size * _as_row(int(found.max()), axes, mesh))
        for sent, found in zip((there, back), leaving, strict=True)
    )
    return ExchangedBytes(axes, there, back, *loads)


@dataclass(frozen=True, slots=True, eq=False)
class _Flow:
    """How many elements some members of a group send to others, by their positions."""

    senders: Counts
    receivers: Counts
    elements: Counts


_AT_ONCE = 1 << 18
"""Pairs of a region and a member that are looked at together: their arrays stay in a cache of two megabytes."""


def _flow(move: RegionMove) -> _Flow:
    """The tables of all members (`move_regions`) at once.

    What a member has it keeps; what several others have, they send in turn.
    """
    count = len(move.group)
    have, want = (np.asarray(regions, dtype=np.int64).reshape(count, -1, 2) for regions in (move.have, move.want))
    regions, held = np.unique(have.reshape(count, -1), axis=0, return_inverse=True)
    held, regions = held.reshape(-1), regions.reshape(len(regions), -1, 2)
    found = []
    for first in range(0, len(regions), max(1, _AT_ONCE // count)):
        shared = _shared(regions[first : first + max(1, _AT_ONCE // count)], want)
        rows, members = np.nonzero(shared)
        found.append(np.stack([rows + first, members, shared[rows, members]]))
    wanted, receivers, elements = np.concatenate(found, axis=1)
    lacking = held[receivers] != wanted
    wanted, receivers, elements = wanted[lacking], receivers[lacking], elements[lacking]
    holders, first_holder = np.argsort(held, kind="stable"), np.searchsorted(np.sort(held), np.arange(len(regions)))
    turn = np.arange(len(wanted)) - np.searchsorted(wanted, wanted)  # the regions are in order
    return _Flow(holders[first_holder[wanted] + turn % np.bincount(held)[wanted]], receivers, elements)


def _shared(regions: Counts, want: Counts) -> Counts:
    """How many elements each region (rows) has of what each member wants (columns)."""
    shared = np.ones((len(regions), len(want)), dtype=np.int64)
    for dim in range(want.shape[1]):
        (starts, stops), (firsts, lasts) = regions[:, dim].T, want[:, dim].T
        sizes = np.minimum(stops[:, None], lasts) - np.maximum(starts[:, None], firsts)
        shared *= np.maximum(sizes, 0, out=sizes)
    return shared


def _as_row(leaving: int, axes: tuple[str, ...], mesh: Mesh) -> int:
    """The elements that the busiest of a row along the axes sends when so many leave its node.

    Neighbours in a row, as a tensor split along one dim has them, send one side from node to node. On a grid, as halos
    of two dims have it, all ranks of a node may. In a row of two nodes with several ranks each, half of what an inner
    rank sends leaves; else all. As many rows share the node as it has ranks for.
    """
    sizes = mesh.sizes
    between = {axis.name for axis in mesh.axes if axis.between_nodes}
    num_nodes = prod(sizes[axis] for axis in axes if axis in between)
    members = prod(sizes[axis] for axis in axes if axis not in between)
    rows = prod(sizes[axis] for axis in sizes if axis not in between and axis not in axes)
    part = 2 if num_nodes == 2 and members > 1 else 1
    return part * leaving // rows


@lru_cache(maxsize=64)
def _nodes(mesh: Mesh) -> Counts:
    """For every rank the first rank of its node."""
    between = [axis.name for axis in mesh.axes if axis.between_nodes]
    first: dict[tuple[int, ...], int] = {}
    found = []
    for rank in range(mesh.size):
        places = mesh.coordinates(rank)
        found.append(first.setdefault(tuple(places[axis] for axis in between), rank))
    return np.asarray(found, dtype=np.int64)
