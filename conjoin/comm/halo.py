"""Rows of neighbours that lie with other ranks: where vertices are split, each rank gets those that its edges read.

A row goes to a rank once, however many edges of that rank read it. Which rows those are only the edges say; how many
there are is said of a call in its `halos`, for some numbers of parts: the number, the rows that each part sends and
those that it gets, and, if edges are cut into as many even pieces, the edges of each piece that go to other parts and
those that come to each part from other pieces. Without that, edges are taken to come from anywhere, and to lie with
their targets.

Edges may be split with the vertices: each rank then has a piece of them. Those that lie elsewhere than their targets go
there when the graph is first seen; what is sent in every step of them is their weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import exp, log1p, prod

from conjoin.comm.node_on_mesh import NodeOnMesh
from conjoin.comm.per_rank import PerRank
from conjoin.ir import Node, Placed, Range, plain_call, region_of, region_shape
from conjoin.machine import Mesh
from conjoin.ops import AGGREGATE, GRAPH_ATTENTION, Call, Split, TensorType

OVER_EDGES = (AGGREGATE, GRAPH_ATTENTION)
_VERTICES, _OF_EDGES = "v", ("source", "target", "weight")


@dataclass(frozen=True, slots=True)
class Halo:
    """Which rows the ranks of a group have, and which they make, in the order of their ranks."""

    axes: tuple[str, ...]
    read: tuple[Range, ...]
    made: tuple[Range, ...]
    own: int
    """This rank among them."""
    owned: tuple[int, ...]
    """The operands whose rows are sent."""
    is_dealt: bool = False
    """Whether each has a piece of the edges, too; else each has all of them."""


def halo_of(node: Node, placed: Placed, mesh: Mesh, rank: int = 0) -> Halo | None:
    """Where the rows come from that a rank reads; None where it has all of them, or they are gathered."""
    if node.op not in OVER_EDGES or placed.at:
        return None
    split = set(dict(placed.splits).get(_VERTICES, ()))
    owned = owned_operands(node)
    owners = [_split_axes(node.inputs[i].type) for i in owned]
    if not owners[0] or any(axes != owners[0] or not axes <= split for axes in owners):
        return None
    dealt = [_split_axes(value.type) for name, value in zip(plain_call(node).operand_names, node.inputs, strict=True)
             if name in _OF_EDGES]  # fmt: skip
    if any(axes not in (set(), owners[0]) or axes != dealt[0] for axes in dealt):
        return None
    axes = mesh.in_order(owners[0])
    members = sorted(mesh.group(rank, axes))
    x, made = node.inputs[0].type, node.types[0]
    read, targets = (
        tuple(region_of(type.shape, type.layout, mesh, member)[0] for member in members) for type in (x, made)
    )
    return Halo(axes, read, targets, members.index(rank), owned, bool(dealt[0]))


def owned_operands(node: Node) -> tuple[int, ...]:
    """The operands that have a row for every source."""
    return (0, 1) if node.op == GRAPH_ATTENTION else (0,)


def _split_axes(type: TensorType) -> set[str]:
    return {axis for axis, placement in type.layout if placement == Split(0)}


@dataclass(frozen=True, slots=True)
class HaloRows:
    """How many rows a rank sends to the others of its group, and gets from them."""

    sent: int
    received: int


def halo_rows(node: Node, halo: Halo) -> HaloRows:
    """As counted where the edges were known, or as if they came from anywhere."""
    call, parts = plain_call(node), len(halo.read)
    counted = _counted(call["halos"] or (), parts)
    if counted is not None:
        return HaloRows(counted[halo.own], counted[parts + halo.own])
    rows, edges = call["x"].shape[0], call["source"].shape[0] / parts
    read = rows * (1 - exp(edges * log1p(-1 / rows))) if rows > 1 else 1.0
    start, stop = halo.read[halo.own]
    others = rows - (stop - start)
    return HaloRows(round(read * (parts - 1) * (stop - start) / rows), round(read * others / rows))


def moved_edges(halos: tuple[int, ...], parts: int, own: int) -> HaloRows:
    """How many edges of a rank's piece go to other ranks, and come from them; none where nothing was counted."""
    counted = _counted(halos, parts)
    return HaloRows(0, 0) if counted is None else HaloRows(counted[2 * parts + own], counted[3 * parts + own])


def _counted(halos: tuple[int, ...], parts: int) -> tuple[int, ...] | None:
    at = 0
    while at < len(halos):
        if halos[at] == parts:
            return halos[at + 1 : at + 1 + 4 * parts]
        at += 1 + 4 * halos[at]
    return None


@dataclass(frozen=True, slots=True)
class HaloBytes:
    """What every rank sends of an operand: its rows, and the gradients of the rows that it got."""

    operand: int
    rows: PerRank
    gradients: PerRank


def halo_bytes(node: Node, placed: Placed, mesh: Mesh) -> tuple[HaloBytes, ...]:
    """The bytes of a step, for each of the operands whose rows are sent."""
    return _bytes_of(NodeOnMesh.of(node, placed, mesh))


@lru_cache(maxsize=1 << 8)
def _bytes_of(case: NodeOnMesh) -> tuple[HaloBytes, ...]:
    found: dict[int, tuple[list[int], list[int]]] = {}
    for rank in range(case.mesh.size):
        halo = halo_of(case.node, case.placed, case.mesh, rank)
        assert halo is not None
        for operand, rows in _sent_operands(case.node, halo):
            type = case.types[operand]
            bytes = prod(_local(type, case.mesh, rank)[1:]) * type.dtype.itemsize
            there, back = found.setdefault(operand, ([], []))
            there.append(rows.sent * bytes)
            back.append(rows.received * bytes)
    size = case.mesh.size
    return tuple(HaloBytes(i, PerRank(tuple(a), size), PerRank(tuple(b), size)) for i, (a, b) in found.items())


def _sent_operands(node: Node, halo: Halo) -> list[tuple[int, HaloRows]]:
    """Rows of vertices for all operands that have them, and weights where edges lie elsewhere than their targets."""
    call = plain_call(node)
    found, parts = [(operand, halo_rows(node, halo)) for operand in halo.owned], len(halo.read)
    moved = [moved_edges(call["halos"] or (), parts, rank) for rank in range(parts)]
    if halo.is_dealt and "weight" in call.operand_names and any(each.sent for each in moved):
        found.append((call.operand_names.index("weight"), moved[halo.own]))
    return found


def _local(type: TensorType, mesh: Mesh, rank: int) -> tuple[int, ...]:
    return region_shape(region_of(type.shape, type.layout, mesh, rank))


def halo_call(node: Node, placed: Placed, mesh: Mesh, rank: int) -> Call:
    """What a rank computes if all vertices have as many edges: with its rows and those that it got."""
    halo = halo_of(node, placed, mesh, rank)
    assert halo is not None
    local = [list(_local(value.type, mesh, rank)) for value in node.inputs]
    whole, received = plain_call(node), halo_rows(node, halo).received
    vertices = _local(node.types[0], mesh, rank)[0]
    for i, name in enumerate(whole.operand_names):
        if i in halo.owned:
            local[i][0] += received
        elif name in _OF_EDGES:
            local[i][0] = round(whole.tensors[i].shape[0] * vertices / node.types[0].shape[0])
    types = iter(TensorType(tuple(shape), v.type.dtype) for shape, v in zip(local, node.inputs, strict=True))
    args = [next(types) if isinstance(arg, TensorType) else arg for arg in whole.args]
    for name, value in (("vertices", vertices), ("window", ()), ("halos", ())):
        args[whole.signature.position(name)] = value
    return Call(node.op, tuple(args))
