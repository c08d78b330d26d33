"""Rows that go to the device which has their expert, and back: counts first, then the rows, as many as there are.

How many go where is known in the step alone. What is told of it beforehand takes all experts to be chosen alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from conjoin.comm.node_on_mesh import NodeOnMesh
from conjoin.comm.per_rank import PerRank
from conjoin.ir import Node, Placed, plain_call, region_of, region_shape
from conjoin.machine import Mesh
from conjoin.ops import EXPERT_NETWORK, ROUTED_EXPERTS, Call, Split, TensorType

_STACK = 3
"""Dims of the matrices of all experts."""
_COUNT_BYTES = 8
"""Of how many rows there are for an expert."""


@dataclass(frozen=True, slots=True)
class Routing:
    """Which experts the ranks of a group have, in the order of their ranks."""

    axes: tuple[str, ...]
    experts: tuple[tuple[int, int], ...]
    """The first of each rank, and the one after its last."""


def routing_of(node: Node, placed: Placed, mesh: Mesh, rank: int = 0) -> Routing | None:
    """Where the rows of a rank go; None where experts are not owned by ranks that have other rows, or not alike."""
    if node.op != ROUTED_EXPERTS or placed.at:
        return None
    type, *others = (value.type for value in node.inputs if len(value.type.shape) == _STACK)
    axes = mesh.in_order(_split_axes(type) & set(dict(placed.splits).get("t", ())))
    if not axes or any(_split_axes(other) != _split_axes(type) for other in others):
        return None
    regions = (region_of(type.shape, type.layout, mesh, member)[0] for member in sorted(mesh.group(rank, axes)))
    return Routing(axes, tuple(regions))


def _split_axes(type: TensorType) -> set[str]:
    return {axis for axis, placement in type.layout if placement == Split(0)}


@dataclass(frozen=True, slots=True)
class RoutedBytes:
    """What every rank sends: how many rows there will be, the rows, and the answers."""

    counts: PerRank
    rows: PerRank
    answers: PerRank


def routed_bytes(node: Node, placed: Placed, mesh: Mesh) -> RoutedBytes:
    """The bytes of a step if all experts are chosen alike."""
    return _bytes_of(NodeOnMesh.of(node, placed, mesh))


@lru_cache(maxsize=1 << 8)
def _bytes_of(case: NodeOnMesh) -> RoutedBytes:
    counts, rows, answers = [], [], []
    mesh, (x, _, _, expert, *_, made) = case.mesh, case.types
    for rank in range(mesh.size):
        routing = routing_of(case.node, case.placed, mesh, rank)
        assert routing is not None
        own = sorted(mesh.group(rank, routing.axes)).index(rank)
        others = sum(stop - start for i, (start, stop) in enumerate(routing.experts) if i != own)
        sent = _local(expert, mesh, rank)[0] * others // case.call["experts"]
        counts.append(_COUNT_BYTES * others)
        rows.append(sent * _local(x, mesh, rank)[1] * x.dtype.itemsize)
        answers.append(sent * _local(made, mesh, rank)[1] * made.dtype.itemsize)
    return RoutedBytes(*(PerRank(_folded(found), mesh.size) for found in (counts, rows, answers)))


def _folded(values: list[int]) -> tuple[int, ...]:
    return (values[0],) if len(set(values)) == 1 else tuple(values)


def _local(type: TensorType, mesh: Mesh, rank: int) -> tuple[int, ...]:
    return region_shape(region_of(type.shape, type.layout, mesh, rank))


def routed_call(node: Node, mesh: Mesh, rank: int) -> Call:
    """What a rank computes if all experts are chosen alike: as many rows as it has, with the experts that it has."""
    whole = plain_call(node)
    local = [TensorType(_local(value.type, mesh, rank), value.type.dtype) for value in node.inputs]
    here = (*local[:4], local[1].shape[0], whole["activation"])
    return Call(EXPERT_NETWORK, here) if whole["gate"] is None else Call(ROUTED_EXPERTS, (*here, local[4]))


def moves_fewer_rows(node: Node, degree: int) -> bool:
    """Whether rows sent to their experts are fewer than those that would be gathered for them: each goes to as many
    devices as it has experts, not to all."""
    x, expert = node.inputs[0].type.shape, node.inputs[3].type.shape
    return expert[0] < degree * x[0]
