"""Which part of each operand a node reads on a rank, which part of each output it makes there, and what must move.

Mostly these are the regions that the layouts give. They differ where windows reach into a neighbour's piece (halos) and
where the pieces of an index do not line up with the pieces of the dim that it is a factor of (uneven heads).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from conjoin.ir.legality import Placed, plain_call
from conjoin.ir.nodes import Node
from conjoin.ir.regions import Range, Region, cut_for_all, is_cut_evenly, nothing, places_of_all, region_of
from conjoin.machine import Mesh
from conjoin.ops import (
    At,
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
    split_axes,
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
    axes = exchange_axes(node, placed, type, mesh)
    if not axes:
        return None
    return _operand_move(plain_call(node), operand, type, placed, mesh, mesh.group(rank, axes))


@call_cache(1 << 9)
def _operand_move(
    call: Call, operand: int, type: TensorType, placed: Placed, mesh: Mesh, group: tuple[int, ...]
) -> RegionMove | None:
    read, _ = spans_of_all(call, placed, mesh)
    return _move(group, _held(type, mesh, group), _cut_out_for_all(type, placed, read[operand], mesh, group))


def output_move(node: Node, output: int, placed: Placed, mesh: Mesh, rank: int) -> RegionMove | None:
    """What the rank's group exchanges after a node has made an output; None where everyone has what it wants."""
    type = node.types[output]
    axes = exchange_axes(node, placed, type, mesh)
    if not axes:
        return None
    return _output_move(plain_call(node), output, type, placed, mesh, mesh.group(rank, axes))


@call_cache(1 << 9)
def _output_move(
    call: Call, output: int, type: TensorType, placed: Placed, mesh: Mesh, group: tuple[int, ...]
) -> RegionMove | None:
    _, made = spans_of_all(call, placed, mesh)
    return _move(group, _cut_out_for_all(type, placed, made[output], mesh, group), _held(type, mesh, group))


def exchange_axes(node: Node, placed: Placed, type: TensorType, mesh: Mesh) -> tuple[str, ...]:
    """The axes along which ranks may have to exchange parts of a tensor: those that split it into unlike pieces."""
    unlike = unlike_axes(node, placed, mesh)
    return mesh.in_order(axis for axis, placement in type.layout if isinstance(placement, Split) and axis in unlike)


def _move(group: tuple[int, ...], have: Ranges, want: Ranges) -> RegionMove | None:
    return None if (have == want).all() else RegionMove(group, _regions(have), _regions(want))


def _regions(ranges: Ranges) -> tuple[Region, ...]:
    return tuple(tuple((start, stop) for start, stop in region) for region in ranges.tolist())


def _held(type: TensorType, mesh: Mesh, group: Sequence[int]) -> Ranges:
    """What each rank of a group has of a tensor that is split: `region_of` of each."""
    spans = {dim: cut_for_all(size, split_axes(type.layout, dim), mesh) for dim, size in enumerate(type.shape)}
    at = tuple((axis, placement.place) for axis, placement in type.layout if isinstance(placement, At))
    return _cut_out_for_all(type, Placed((), at), spans, mesh, group)


def _cut_out_for_all(
    type: TensorType, placed: Placed, spans: Mapping[int, Ranges], mesh: Mesh, group: Sequence[int]
) -> Ranges:
    """The regions that spans cut out of a tensor on each rank of a group: by rank and dim where they start and stop."""
    members = np.asarray(group)
    found = np.zeros((len(members), len(type.shape), 2), np.int64)
    found[:, :, 1] = type.shape
    for dim, ranges in spans.items():
        found[:, dim] = ranges[members]
    for axis, place in placed.at:
        found[places_of_all(mesh)[axis][members] != place] = 0
    return found


Ranges = NDArray[np.int64]
"""Where something starts and stops, by rank."""
Spans = tuple[Mapping[int, Ranges], ...]
"""For every tensor the dims of which not all is needed."""


@call_cache(1 << 8)
def spans_of_all(call: Call, placed: Placed, mesh: Mesh) -> tuple[Spans, Spans]:
    """The parts of operands and outputs that the local forms of a call read and make on all ranks at once."""
    spec = spec_for(call)
    assert spec is not None, f"{call.op} is opaque: it has no pieces"
    space = space_of(spec, call)
    reaching = _reaching(call)
    read: list[dict[int, Ranges]] = [{} for _ in space.notation.operands]
    made: list[dict[int, Ranges]] = [{} for _ in space.notation.outputs]
    for index, axes in placed.splits:
        ranges = cut_for_all(space.sizes[index], axes, mesh)
        if index in reaching:
            pieces, numbers = np.unique(ranges, axis=0, return_inverse=True)
            spans = [operand_spans(spec, call, {index: (start, stop)}) for start, stop in pieces.tolist()]
            for found, some in zip(read, zip(*spans, strict=True), strict=True):
                if some[0]:
                    found[some[0][0].dim] = np.array([(s.start, s.stop) for (s,) in some])[numbers.reshape(-1)]
        else:
            _scale_spans(read, operand_spans(spec, call, {index: (0, 1)}), ranges)
        _scale_spans(made, output_spans(spec, call, {index: (0, 1)}), ranges)
    return tuple(read), tuple(made)


def _scale_spans(found: Sequence[dict[int, Ranges]], one: Sequence[Sequence[Span]], ranges: Ranges) -> None:
    """Add what pieces take of each tensor, given what one position takes: it is in proportion."""
    for spans, some in zip(found, one, strict=True):
        spans |= {span.dim: ranges * span.stop for span in some}


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
    lacking = {*_reaching(call), *spec.owned}
    found: set[str] = set()
    for index, axes in placed.splits:
        if index in lacking or not is_cut_evenly(space.sizes[index], axes, mesh):
            found.update(axes)
    return frozenset(found)


def _reaching(call: Call) -> set[str]:
    """The indices of which a piece may need more of an operand than its own positions."""
    spec = spec_for(call)
    assert spec is not None
    dims = [dim for access in space_of(spec, call).notation.operands for dim in access.dims]
    return {*(dim.out for dim in dims if isinstance(dim, Window | Spread)), *spec.reaches}


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
