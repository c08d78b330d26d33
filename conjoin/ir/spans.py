"""Which part of each operand a node reads on a rank, which part of each output it makes there, and what must move.

Mostly these are the regions that the layouts give. They differ where windows reach into a neighbour's piece (halos) and
where the pieces of an index do not line up with the pieces of the dim that it is a factor of (uneven heads).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from conjoin.ir.nodes import Node
from conjoin.ir.placing import Placed, plain_call
from conjoin.ir.regions import Range, Region, is_cut_evenly, nothing, region_of
from conjoin.machine import Mesh
from conjoin.ops import (
    Call,
    Span,
    Split,
    Spread,
    TensorType,
    Window,
    call_cache,
    operand_spans,
    output_spans,
    space_of,
    spec_for,
)


@dataclass(frozen=True, slots=True)
class RegionMove:
    """What each rank of a group has of a tensor and what it wants, by position in the group."""

    group: tuple[int, ...]
    have: tuple[Region, ...]
    want: tuple[Region, ...]


def wanted_region(node: Node, operand: int, placed: Placed, mesh: Mesh, rank: int) -> Region:
    """The part of an operand that the local form of a node reads on a rank."""
    if not placed.runs_on(mesh, rank):
        return nothing(len(node.inputs[operand].type.shape))
    operands, _ = _regions_on(node, placed, mesh, rank)
    if operands is None:
        type = node.inputs[operand].type
        return region_of(type.shape, type.layout, mesh, rank)
    return operands[operand]


def made_region(node: Node, output: int, placed: Placed, mesh: Mesh, rank: int) -> Region:
    """The part of an output that the local form of a node makes on a rank."""
    if not placed.runs_on(mesh, rank):
        return nothing(len(node.types[output].shape))
    _, outputs = _regions_on(node, placed, mesh, rank)
    if outputs is None:
        type = node.types[output]
        return region_of(type.shape, type.layout, mesh, rank)
    return outputs[output]


def operand_move(node: Node, operand: int, placed: Placed, mesh: Mesh, rank: int) -> RegionMove | None:
    """What the rank's group exchanges before a node reads an operand; None where everyone has what it wants."""
    type = node.inputs[operand].type
    return _move(
        exchange_axes(node, placed, type, mesh),
        lambda member: region_of(type.shape, type.layout, mesh, member),
        lambda member: wanted_region(node, operand, placed, mesh, member),
        mesh,
        rank,
    )


def output_move(node: Node, output: int, placed: Placed, mesh: Mesh, rank: int) -> RegionMove | None:
    """What the rank's group exchanges after a node has made an output; None where everyone has what it wants."""
    type = node.types[output]
    return _move(
        exchange_axes(node, placed, type, mesh),
        lambda member: made_region(node, output, placed, mesh, member),
        lambda member: region_of(type.shape, type.layout, mesh, member),
        mesh,
        rank,
    )


def exchange_axes(node: Node, placed: Placed, type: TensorType, mesh: Mesh) -> tuple[str, ...]:
    """The axes along which ranks may have to exchange parts of a tensor: those that split it into unlike pieces."""
    unlike = unlike_axes(node, placed, mesh)
    return mesh.in_order(axis for axis, placement in type.layout if isinstance(placement, Split) and axis in unlike)


def _move(
    axes: tuple[str, ...], have: Callable[[int], Region], want: Callable[[int], Region], mesh: Mesh, rank: int
) -> RegionMove | None:
    if not axes:
        return None
    group = mesh.group(rank, axes)
    haves, wants = tuple(map(have, group)), tuple(map(want, group))
    return None if haves == wants else RegionMove(group, haves, wants)


def unlike_axes(node: Node, placed: Placed, mesh: Mesh) -> frozenset[str]:
    """The axes along which ranks may run a node on pieces of unlike shapes; where there are none, no rank lacks a part.

    Pieces are unlike where an index does not divide evenly, and at the borders of what windows reach over; where an
    operator reaches further than its piece, or others own what it needs, ranks lack parts.
    """
    call = plain_call(node)
    spec = spec_for(call)
    if spec is None or not placed.splits:
        return frozenset()
    return _unlike_axes(call, placed, mesh)


@call_cache(1 << 15)
def _unlike_axes(call: Call, placed: Placed, mesh: Mesh) -> frozenset[str]:
    spec = spec_for(call)
    assert spec is not None
    space = space_of(spec, call)
    dims = [dim for access in space.notation.operands for dim in access.dims]
    windowed = {dim.out for dim in dims if isinstance(dim, Window | Spread)}
    lacking = {*windowed, *spec.reaches, *spec.owned}
    found: set[str] = set()
    for index, axes in placed.splits:
        if index in lacking or not is_cut_evenly(space.sizes[index], axes, mesh):
            found.update(axes)
    return frozenset(found)


Regions = tuple[Region, ...]


@call_cache()
def _regions_on(node: Node, placed: Placed, mesh: Mesh, rank: int) -> tuple[Regions, Regions] | tuple[None, None]:
    """The regions of all operands and outputs; None where nothing is split and the layouts say it all."""
    call = plain_call(node)
    spec = spec_for(call)
    if spec is None or not placed.splits:
        return None, None
    pieces = placed.pieces(space_of(spec, call).sizes, mesh, rank)
    return _local_regions(call, node.types, tuple(pieces.items()))


@call_cache(1 << 15)
def _local_regions(
    call: Call, outputs: tuple[TensorType, ...], pieces: tuple[tuple[str, Range], ...]
) -> tuple[Regions, Regions]:
    spec = spec_for(call)
    assert spec is not None
    read, made = operand_spans(spec, call, dict(pieces)), output_spans(spec, call, dict(pieces))
    return (
        tuple(_cut_out(type.shape, spans) for type, spans in zip(call.tensors, read, strict=True)),
        tuple(_cut_out(type.shape, spans) for type, spans in zip(outputs, made, strict=True)),
    )


def _cut_out(shape: tuple[int, ...], spans: Sequence[Span]) -> Region:
    """The region that spans cut out of a tensor; dims without a span are whole."""
    region = [(0, size) for size in shape]
    for span in spans:
        region[span.dim] = (span.start, span.stop)
    return tuple(region)
