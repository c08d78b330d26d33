"""What neighbours send each other so that a node can run on its pieces: halos, and pieces that do not line up."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

from conjoin.comm.movement import move_regions
from conjoin.comm.per_rank import PerRank
from conjoin.ir import (
    Node,
    Placed,
    Region,
    RegionMove,
    exchange_axes,
    num_elements,
    operand_move,
    output_move,
    unlike_axes,
)
from conjoin.machine import Mesh
from conjoin.ops import TensorType


@dataclass(frozen=True, slots=True)
class Exchange:
    """The bytes that every rank sends to neighbours, each way."""

    axes: tuple[str, ...]
    forward: PerRank
    backward: PerRank


@dataclass(frozen=True, slots=True)
class NodeExchanges:
    """What is exchanged before a node reads each operand, and after it made each output; None where nothing is."""

    operands: tuple[Exchange | None, ...]
    outputs: tuple[Exchange | None, ...]


@lru_cache(maxsize=1 << 12)
def node_exchanges(node: Node, placed: Placed, mesh: Mesh) -> NodeExchanges:
    """All exchanges of a node; there are none where all its pieces are alike."""
    if not unlike_axes(node, placed, mesh):
        return NodeExchanges((None,) * len(node.inputs), (None,) * len(node.types))
    return NodeExchanges(
        tuple(_count(operand_move, node, i, placed, value.type, mesh) for i, value in enumerate(node.inputs)),
        tuple(_count(output_move, node, i, placed, type, mesh) for i, type in enumerate(node.types)),
    )


FindMove = Callable[[Node, int, Placed, Mesh, int], RegionMove | None]


def _count(find: FindMove, node: Node, i: int, placed: Placed, type: TensorType, mesh: Mesh) -> Exchange | None:
    """What is sent each way over all groups; None where nobody lacks anything."""
    axes = exchange_axes(node, placed, type, mesh)
    if not axes:
        return None
    forward, backward = [0] * mesh.size, [0] * mesh.size
    for move in (find(node, i, placed, mesh, group[0]) for group in mesh.groups(axes)):
        for rank in move.group if move is not None else ():
            assert move is not None
            table = move_regions(move.have, move.want, move.group, rank)
            forward[rank] = _sent_to_others(table.sends, table.group, rank)
            backward[rank] = _sent_to_others(table.receives, table.group, rank)
    if not any(forward) and not any(backward):
        return None
    size = type.dtype.itemsize
    return Exchange(axes, *(PerRank(tuple(size * n for n in counts), mesh.size) for counts in (forward, backward)))


def _sent_to_others(parts: Iterable[tuple[int, Region]], group: tuple[int, ...], rank: int) -> int:
    return sum(num_elements(part) for place, part in parts if group[place] != rank)
