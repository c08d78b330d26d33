"""What neighbours send each other so that a node can run on its pieces: halos, and pieces that do not line up."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod

from conjoin.comm.movement import move_regions
from conjoin.comm.per_rank import PerRank
from conjoin.ir import (
    Node,
    Placed,
    RegionMove,
    exchange_axes,
    num_elements,
    operand_move,
    output_move,
    plain_call,
    unlike_axes,
)
from conjoin.machine import Mesh
from conjoin.ops import Call, TensorType


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


@dataclass(frozen=True, slots=True)
class _Case:
    """A node on a mesh; alike are all nodes that make the same call in the same layouts, as equal layers do."""

    call: Call
    placed: Placed
    types: tuple[TensorType, ...]
    mesh: Mesh
    node: Node = field(compare=False)


def node_exchanges(node: Node, placed: Placed, mesh: Mesh) -> NodeExchanges:
    """All exchanges of a node; there are none where all its pieces are alike."""
    if not unlike_axes(node, placed, mesh):
        return NodeExchanges((None,) * len(node.inputs), (None,) * len(node.types))
    types = (*(value.type for value in node.inputs), *node.types)
    return _exchanges(_Case(plain_call(node), placed, types, mesh, node))


@lru_cache(maxsize=1 << 12)
def _exchanges(case: _Case) -> NodeExchanges:
    node, placed, mesh = case.node, case.placed, case.mesh
    return NodeExchanges(
        tuple(_count(operand_move, node, i, placed, value.type, mesh) for i, value in enumerate(node.inputs)),
        tuple(_count(output_move, node, i, placed, type, mesh) for i, type in enumerate(node.types)),
    )


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
    forward, backward = [0] * mesh.size, [0] * mesh.size
    leaving = _Leaving(mesh), _Leaving(mesh)
    for member, rank in enumerate(move.group):
        table = move_regions(move.have, move.want, move.group, rank)
        for sends, counts, sent in zip((table.sends, table.receives), (forward, backward), leaving, strict=True):
            parts = [(place, num_elements(part)) for place, part in sends if place != member]
            for group in groups:  # along other axes pieces are of one size: all groups exchange as many
                counts[group[member]] = sum(number for _, number in parts)
                sent.add(parts, group, member)
    if not any(forward) and not any(backward):
        return None
    size = type.dtype.itemsize
    there, back = (PerRank(tuple(size * n for n in counts), mesh.size) for counts in (forward, backward))
    loads = (max(sent.largest, size * found.as_row(axes)) for sent, found in zip((there, back), leaving, strict=True))
    return ExchangedBytes(axes, there, back, *loads)


class _Leaving:
    """How many elements leave every node.

    Neighbours in a row, as a tensor split along one dim has them, send one side from node to node. On a grid, as halos
    of two dims have it, all ranks of a node may.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._between = [axis.name for axis in mesh.axes if axis.between_nodes]
        self._counts: dict[tuple[int, ...], int] = {}
        self._nodes: dict[int, tuple[int, ...]] = {}

    def add(self, parts: Iterable[tuple[int, int]], group: tuple[int, ...], member: int) -> None:
        """A member of a group sends some elements to each of some others."""
        node = self._node(group[member])
        sent = sum(number for place, number in parts if self._node(group[place]) != node)
        self._counts[node] = self._counts.get(node, 0) + sent

    def as_row(self, axes: tuple[str, ...]) -> int:
        """The elements that the busiest of a row along the axes sends when as many leave its node.

        In a row of two nodes with several ranks each, half of what an inner rank sends leaves; else all. As many rows
        share the node as it has ranks for.
        """
        sizes = self._mesh.sizes
        num_nodes = prod(sizes[axis] for axis in axes if axis in self._between)
        members = prod(sizes[axis] for axis in axes if axis not in self._between)
        rows = prod(sizes[axis] for axis in sizes if axis not in self._between and axis not in axes)
        part = 2 if num_nodes == 2 and members > 1 else 1
        return part * max(self._counts.values(), default=0) // rows

    def _node(self, rank: int) -> tuple[int, ...]:
        if rank not in self._nodes:
            places = self._mesh.coordinates(rank)
            self._nodes[rank] = tuple(places[axis] for axis in self._between)
        return self._nodes[rank]
