"""Attention along a split sequence, whose keys and values go around a ring (Liu et al., 2023, section 3).

In step s a device has the keys of the piece s before its own; it computes with them while they go on to the next device
and others come. In the backward pass they go around once more, and their gradients with them, one step further: home.

Under a causal mask the device of the last piece would have as much to do as all others together. So pieces are swapped
first: of 2n halves of pieces a device takes the one of its own number and the one as far from the end, and gives its
results back. Then in every step each device computes with one half of its queries, or of the keys that came.

A mask does not go around: every device has the rows of its own queries, for all keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch

from conjoin.comm.node_on_mesh import NodeOnMesh
from conjoin.comm.per_rank import PerRank
from conjoin.ir import Node, Placed, plain_call, region_of, region_shape
from conjoin.machine import Mesh
from conjoin.ops import RING_ATTENTION, Call, TensorType, space_of, spec_for

SEQUENCE = "t"
"""The index that is split."""
DIM = 2
"""The dim of queries, keys, values and results that has it."""


@dataclass(frozen=True, slots=True)
class Block:
    """Which of a device's queries look at which of the keys that came."""

    queries: slice
    keys: slice
    is_causal: bool


@dataclass(frozen=True, slots=True)
class Ring:
    """How the pieces of a sequence go around: their lengths, in the order of the sequence."""

    axes: tuple[str, ...]
    """Along which the devices of a ring lie, in the order of the mesh."""
    lengths: tuple[int, ...]
    is_causal: bool

    @property
    def size(self) -> int:
        return len(self.lengths)

    @property
    def swaps(self) -> bool:
        """Whether halves of pieces are swapped, so that all have as much to do."""
        return self.is_causal and len(set(self.lengths)) == 1 and self.lengths[0] % 2 == 0

    def block(self, position: int, step: int) -> Block | None:
        """What the device at a position of the ring computes in a step; None where it sees none of the keys."""
        source = (position - step) % self.size
        everything = slice(None)
        if not self.is_causal or source == position:
            return Block(everything, everything, self.is_causal)
        half = self.lengths[0] // 2
        if source < position:
            return Block(everything, slice(None, half) if self.swaps else everything, False)
        return Block(slice(half, None), everything, False) if self.swaps else None

    def holder(self, half: int) -> int:
        """Who computes with a half of a piece, when they are swapped."""
        return half if half < self.size else 2 * self.size - 1 - half

    def halves_sent(self, position: int) -> dict[int, list[int]]:
        """Which halves of its piece a device gives to each, itself too, in the order of the sequence."""
        found: dict[int, list[int]] = {}
        for half in (2 * position, 2 * position + 1):
            found.setdefault(self.holder(half), []).append(half)
        return found

    def halves_taken(self, position: int) -> dict[int, list[int]]:
        """Which halves it gets from each."""
        found: dict[int, list[int]] = {}
        for half in (position, 2 * self.size - 1 - position):
            found.setdefault(half // 2, []).append(half)
        return found


def ring_of(node: Node, placed: Placed, mesh: Mesh) -> Ring | None:
    """How keys and values of a node go around; None where nothing does, or pieces do not line up along other axes."""
    return None if node.op != RING_ATTENTION or placed.at else _ring(plain_call(node), placed, mesh)


@lru_cache(maxsize=1 << 10)
def _ring(call: Call, placed: Placed, mesh: Mesh) -> Ring | None:
    spec, splits = spec_for(call), dict(placed.splits)
    if spec is None or SEQUENCE not in splits:
        return None
    sizes = space_of(spec, call).sizes
    if any(sizes[i] % prod(mesh.sizes[a] for a in along) for i, along in splits.items() if i != SEQUENCE):
        return None
    starts = sorted(placed.pieces(sizes, mesh, rank)[SEQUENCE] for rank in mesh.group(0, splits[SEQUENCE]))
    return Ring(mesh.in_order(splits[SEQUENCE]), tuple(stop - start for start, stop in starts), call["is_causal"])


def ring_members(node: Node, placed: Placed, mesh: Mesh, rank: int) -> tuple[int, ...]:
    """The ranks of the ring that a rank is in, in the order of their pieces."""
    call, axes = plain_call(node), dict(placed.splits)[SEQUENCE]
    spec = spec_for(call)
    assert spec is not None
    sizes = space_of(spec, call).sizes
    return tuple(sorted(mesh.group(rank, axes), key=lambda member: placed.pieces(sizes, mesh, member)[SEQUENCE]))


@dataclass(frozen=True, slots=True)
class RingBytes:
    """What every rank sends: before it, in each step, and after it."""

    before: PerRank | None
    steps: tuple[PerRank, ...]
    after: PerRank | None


def ring_bytes_of(node: Node, placed: Placed, mesh: Mesh) -> tuple[RingBytes, RingBytes]:
    """The bytes forward, and backward."""
    return _bytes_of(NodeOnMesh.of(node, placed, mesh))


@lru_cache(maxsize=1 << 8)
def _bytes_of(case: NodeOnMesh) -> tuple[RingBytes, RingBytes]:
    ring, made = ring_of(case.node, case.placed, case.mesh), case.types[-1].dtype
    assert ring is not None
    q, k, v, out = (_row_bytes(type, case.mesh) for type in (*case.types[:3], case.types[-1]))
    wide = (k + v) // made.itemsize * torch.promote_types(made, torch.float32).itemsize
    positions = _positions(case)
    keys = [_at_step(ring, positions, step, k + v) for step in range(ring.size - 1)]
    gradients = [_at_step(ring, positions, step, wide) for step in range(ring.size)]
    back = [keys[0], *(one + two for one, two in zip(gradients, keys[1:], strict=False)), *gradients[-2:]]
    swapped = [_swapped(ring, positions, row) for row in (q + k + v, out)] if ring.swaps else (None, None)
    there = RingBytes(swapped[0], tuple(keys), swapped[1])
    return there, RingBytes(swapped[1], tuple(back), swapped[0])


def _row_bytes(type: TensorType, mesh: Mesh) -> int:
    """Of one position of what a rank holds of a tensor."""
    shape = region_shape(region_of(type.shape, type.layout, mesh, 0))
    return prod(n for dim, n in enumerate(shape) if dim != DIM) * type.dtype.itemsize


def _positions(case: NodeOnMesh) -> list[int]:
    """Of every rank its position in its ring."""
    found: dict[int, int] = {}
    for group in case.mesh.groups(dict(case.placed.splits)[SEQUENCE]):
        members = ring_members(case.node, case.placed, case.mesh, group[0])
        found.update({member: position for position, member in enumerate(members)})
    return [found[rank] for rank in range(case.mesh.size)]


def _at_step(ring: Ring, positions: Sequence[int], step: int, row: int) -> PerRank:
    if len(set(ring.lengths)) == 1:
        return PerRank((ring.lengths[0] * row,), len(positions))
    sent = (ring.lengths[(position - step) % ring.size] * row for position in positions)
    return PerRank(tuple(sent), len(positions))


def _swapped(ring: Ring, positions: Sequence[int], row: int) -> PerRank:
    half = ring.lengths[0] // 2 * row
    sent = [
        half * sum(len(halves) for to, halves in ring.halves_sent(position).items() if to != position)
        for position in range(ring.size)
    ]
    return PerRank(tuple(sent[position] for position in positions), len(positions))
