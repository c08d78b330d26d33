"""Operators that read inputs from the host block by block: what is copied, and what is on the device at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from conjoin.comm import (
    EDGE_BYTES,
    FIRST_BYTES,
    halo_call,
    halo_of,
    halo_rows,
    held_in_blocks,
    num_blocks,
    score_bytes,
)
from conjoin.ir import HostReader, Node, Placed, plain_call, region_of, region_shape
from conjoin.machine import Mesh
from conjoin.ops import GRAPH_ATTENTION, Call, TensorType
from conjoin.sim.engine import COMPUTE, FROM_HOST, Fragment, Instruction, Phase
from conjoin.sim.offloads import Act, copying
from conjoin.sim.prices import HostLink
from conjoin.sim.skeleton import Operator

Held = Callable[[int], int]
"""Bytes of an operand on a device."""


@dataclass(frozen=True, slots=True)
class Streaming:
    """What an operator has copied from the host, forward and backward, and what is there of it at once."""

    forward_bytes: int
    backward_bytes: int
    forward_held: int
    backward_held: int
    runs_again: bool
    """Whether the backward pass computes each block once more."""
    keeps: tuple[int, ...]
    """The operands on the device that are kept for that."""
    keeps_output: bool = False
    keeps_more: int = 0
    """Bytes that are kept besides."""


def streaming_of(operator: Operator, reader: HostReader, types: tuple[TensorType, ...], held: Held) -> Streaming:
    """An operator with operands of some types that reads some of them from the host."""
    back = bool(operator.needs)
    made = sum(kind.bytes for kind in operator.node.types)
    copied = sum(held(i) for i in reader.host)
    piece, there_at_once = made // num_blocks(copied), held_in_blocks(copied)
    on_device = tuple(i for i in range(len(types)) if i not in reader.host) if back else ()
    added = sum(held(i) for i in operator.needs if i not in reader.rows)
    behind = there_at_once + 2 * piece + added if back else 0
    return Streaming(copied, copied if back else 0, there_at_once + piece, behind, back, on_device)


@dataclass(frozen=True, slots=True)
class EdgesHere:
    """What a device has of an operator over edges, as if all vertices had as many."""

    call: Call
    types: tuple[TensorType, ...]
    """Its operands: of rows its own and those that others send, of edges those that come to its vertices."""
    made: TensorType
    received: int
    """The rows that others send."""
    is_split: bool
    """Whether others have rows that its edges read."""

    @classmethod
    def of(cls, node: Node, placed: Placed, mesh: Mesh) -> EdgesHere:
        halo, made = halo_of(node, placed, mesh), _here(node.types[0], mesh)
        if halo is not None:
            call = halo_call(node, placed, mesh, 0)
            return cls(call, tuple(call.tensors), made, halo_rows(node, halo).received, True)
        call, share = plain_call(node), made.shape[0] / max(node.types[0].shape[0], 1)
        types = tuple(
            _some_edges(value.type, share, mesh) if name in ("source", "target", "weight") else _here(value.type, mesh)
            for name, value in zip(call.operand_names, node.inputs, strict=True)
        )
        return cls(call, types, made, 0, False)


def _here(type: TensorType, mesh: Mesh) -> TensorType:
    return TensorType(region_shape(region_of(type.shape, type.layout, mesh, 0)), type.dtype)


def _some_edges(type: TensorType, share: float, mesh: Mesh) -> TensorType:
    """Those of a piece, or of all those that come to a share of the vertices."""
    here = _here(type, mesh)
    count = here.shape[0] if here.shape[0] < type.shape[0] else ceil(type.shape[0] * share)
    return TensorType((count, *here.shape[1:]), type.dtype)


def streaming_along_edges(here: EdgesHere, reader: HostReader, needs: Sequence[int]) -> Streaming:
    """Blocks of vertices with their edges, of targets and then of sources; sums go along the edges from a device's own
    rows while those of others come, and then along the others."""
    types, made, back = here.types, here.made, 0 in needs
    edges, attends = types[reader.host[0]].num_elements, here.call.op == GRAPH_ATTENTION
    greatest = not attends and here.call["reduce"] == "max"
    goes_twice = here.is_split and not attends and not greatest
    scores = score_bytes(types[1].shape[1], types[1].dtype.itemsize) if attends else 0
    copied = edges * EDGE_BYTES + sum(types[i].bytes for i in reader.host[2:])
    ends = [copied + FIRST_BYTES * rows for rows in (made.shape[0] * (1 + goes_twice), types[0].shape[0])]
    there = [size + edges * scores for size in ends]
    pieces = [rows // num_blocks(size) for rows, size in zip((made.bytes, types[0].bytes), there, strict=True)]
    others = types[0].bytes // max(types[0].shape[0], 1) * here.received
    held = [held_in_blocks(size) + some for size, some in zip(there, pieces, strict=True)]
    held[1] += made.bytes if greatest else 0  # each one's share of the gradient
    if goes_twice:
        held = [held[0] + others + made.bytes, held[1] + others]
    elif here.is_split:
        held = [max(held[0], others), max(held[1], types[0].bytes)]
    read = (0, 1) if attends else (0,) if greatest else ()
    keeps = () if here.is_split else read
    more = sum(types[i].bytes for i in read) if here.is_split else 0
    more += types[2].bytes if attends else made.bytes if greatest else 0
    kept = ((*keeps, *((2,) if attends else ())), bool(read), more) if back else ((), False, 0)
    return Streaming(ends[0], ends[1] if back else 0, held[0], held[1] if back else 0, False, *kept)


def in_blocks(fragment: Fragment, num_bytes: int, link: HostLink, phase: Phase, more: Fragment = ()) -> Fragment:
    """What computes with something on the host: each block while the next is copied.

    With `more` its backward pass, which computes that, too, for each block.
    """
    places = [i for i, task in enumerate(fragment) if task.stream == COMPUTE]
    if not num_bytes or not places:
        return fragment
    place = max(places, key=lambda i: int(np.max(fragment[i].ticks)))
    again = sum(task.ticks for task in more if task.stream == COMPUTE)
    whole, count = fragment[place], num_blocks(num_bytes)
    brings = [replace(copying(link, num_bytes // count, Phase.BACKWARD), phase=phase) for _ in range(count)]
    found = [brings[0]]
    for k in range(count):
        found.append(Instruction(Act.ASK.value, COMPUTE, 0, waits=(FROM_HOST,), phase=phase))
        found += brings[k + 1 : k + 2]
        found.append(replace(whole, ticks=(whole.ticks + again) // count))
    return (*fragment[:place], *found, *fragment[place + 1 :])
