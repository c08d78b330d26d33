"""Operators that read inputs from the host block by block: what is copied, and what is on the device at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from conjoin.comm import EDGE_BYTES, FIRST_BYTES, held_in_blocks, num_blocks, score_bytes
from conjoin.ir import HostReader, plain_call
from conjoin.ops import GRAPH_ATTENTION, TensorType
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
    if reader.is_by_edges:
        return _of_edges(operator, reader, types)
    copied = sum(held(i) for i in reader.host)
    piece, there_at_once = made // num_blocks(copied), held_in_blocks(copied)
    on_device = tuple(i for i in range(len(types)) if i not in reader.host) if back else ()
    added = sum(held(i) for i in operator.needs if i not in reader.rows)
    behind = there_at_once + 2 * piece + added if back else 0
    return Streaming(copied, copied if back else 0, there_at_once + piece, behind, back, on_device)


def _of_edges(operator: Operator, reader: HostReader, types: tuple[TensorType, ...]) -> Streaming:
    """Blocks of vertices with their edges, of targets and then of sources."""
    node, back = operator.node, 0 in operator.needs
    made, edges = node.types[0], types[reader.host[0]].num_elements
    attends = node.op == GRAPH_ATTENTION
    scores = score_bytes(types[1].shape[1], types[1].dtype.itemsize) if attends else 0
    copied = edges * EDGE_BYTES + sum(types[i].bytes for i in reader.host[2:])
    ends = [copied + FIRST_BYTES * rows for rows in (made.shape[0], types[0].shape[0])]
    there = [size + edges * scores for size in ends]
    pieces = [rows // num_blocks(size) for rows, size in zip((made.bytes, types[0].bytes), there, strict=True)]
    held = [held_in_blocks(size) + piece for size, piece in zip(there, pieces, strict=True)]
    keeps: tuple[int, ...]
    if attends:
        keeps, more = (0, 1, 2), types[2].bytes
    else:
        keeps, more = ((0,), made.bytes) if plain_call(node)["reduce"] == "max" else ((), 0)
    kept = (keeps, bool(keeps), more) if back else ((), False, 0)
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
