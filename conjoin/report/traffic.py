"""What a training step of a plan puts on the wire: every collective with the bytes that each rank sends.

The walk is that of the runtime: a value is brought into each layout once, when it is first read; trainable parameters
travel in bundles; where the local form of a node reads or makes another region than the layouts give, neighbours
exchange parts; backward goes by the reshard of the duals, wherever a gradient comes back. Bytes are payload, counted as
the communicators count: 2 (n-1)/n of a tensor for an all-reduce, and for the others what leaves the rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from conjoin.comm import (
    ParameterBundle,
    Route,
    Step,
    StepKind,
    backward_route,
    bytes_sent,
    find_bundles,
    move_regions,
    reshard,
)
from conjoin.ir import (
    REGATHER,
    Node,
    Placed,
    Plan,
    Region,
    RegionMove,
    Value,
    is_random,
    num_elements,
    operand_move,
    origin,
    output_move,
    place,
    region_of,
)
from conjoin.machine import Mesh
from conjoin.ops import Call, Layout, Split, TensorType, split_axes
from conjoin.report.gradients import Entry, Gradients

FORWARD, BACKWARD = "forward", "backward"
EXCHANGE = "exchange"
"""Beside the kinds of steps: parts between neighbours, for halos and for pieces that do not line up."""
_AGREEMENT_BYTES = 16
"""Two integers by which ranks that draw alike make sure that they do."""


@dataclass(frozen=True, slots=True)
class PerRank:
    """A number of bytes for every rank; one entry stands for all where they are alike.

    >>> PerRank((3,), 4) + PerRank((1, 2, 3, 4), 4)
    PerRank(values=(4, 5, 6, 7), num_ranks=4)
    """

    values: tuple[int, ...]
    num_ranks: int

    def __getitem__(self, rank: int) -> int:
        return self.values[rank if len(self.values) > 1 else 0]

    def __add__(self, other: PerRank) -> PerRank:
        if len(self.values) == len(other.values) == 1:
            return PerRank((self.values[0] + other.values[0],), self.num_ranks)
        return PerRank(tuple(self[rank] + other[rank] for rank in range(self.num_ranks)), self.num_ranks)

    @property
    def largest(self) -> int:
        return max(self.values)

    @property
    def total(self) -> int:
        return sum(self.values) * (self.num_ranks // len(self.values))

    @property
    def all(self) -> tuple[int, ...]:
        """One number for each rank."""
        return self.values if len(self.values) > 1 else self.values * self.num_ranks


def sum_per_rank(parts: Iterable[PerRank], num_ranks: int) -> PerRank:
    """The sum of some numbers for every rank."""
    total = PerRank((0,), num_ranks)
    for part in parts:
        total += part
    return total


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective, in one pass of a step."""

    kind: str
    axes: tuple[str, ...]
    direction: str
    of_gradient: bool
    """False for values: all that moves forward, and parameters that are gathered again."""
    sent: PerRank


@dataclass(frozen=True, slots=True)
class Transfer:
    """What moves together: a tensor into another layout or other regions, or a bundle of parameters."""

    tensors: tuple[Value, ...]
    """None for what moves no tensor of the model."""
    target: Layout | None
    """The layout it comes into; None where the regions change and not the layout."""
    collectives: tuple[Collective, ...]


class Traffic:
    """Follows a plan as its program runs, and tells at each place what moves there."""

    def __init__(self, plan: Plan) -> None:
        self._mesh = plan.mesh
        self._gradients = Gradients(plan.graph)
        regathered = frozenset(action.tensor for action in plan.memory if action.action == REGATHER)
        bundles = find_bundles(plan.graph, plan.mesh, regathered)
        self._bundles = {entry: bundle for bundle in bundles for entry in bundle.entries}
        self._there: set[Entry] = set()
        self._moves: dict[tuple[Call, Placed, tuple[TensorType, ...]], _NodeMoves] = {}

    def at_start(self, nodes: Iterable[Node]) -> list[Transfer]:
        """What all ranks exchange before anything runs."""
        mesh = self._mesh
        drawn = [node for node in nodes if is_random(node.op, node.args)]
        if all(set(place(node, mesh).axes) == set(mesh.names) for node in drawn):
            return []
        sent = PerRank((_ring_bytes(_AGREEMENT_BYTES, mesh.size),), mesh.size)
        return [Transfer((), None, (Collective(StepKind.ALL_REDUCE.value, mesh.names, FORWARD, False, sent),))]

    def before(self, value: Value) -> list[Transfer]:
        """What moves so that a value is there in its layout."""
        root, layout = origin(value), value.type.layout
        if root.type.layout == layout or (root, layout) in self._there:
            return []
        bundle = self._bundles.get((root, layout))
        self._there.update(((root, layout),) if bundle is None else bundle.entries)
        moved = self._reshard(root, layout) if bundle is None else self._bundle(bundle)
        return [moved] if moved.collectives else []

    def before_node(self, node: Node, placed: Placed, call: Call) -> list[Transfer]:
        """What moves so that a node can read its operands."""
        found: list[Transfer] = []
        moves = self._node_moves(node, placed, call)
        for i, value in enumerate(node.inputs):
            found += self.before(value)
            found += self._exchange(value, moves.operands[i], self._gradients.reach_operand(node, i))
        return found

    def after_node(self, node: Node, placed: Placed, call: Call) -> list[Transfer]:
        """What moves so that the outputs of a node lie as stated."""
        moves = self._node_moves(node, placed, call)
        return [
            transfer
            for i, value in enumerate(node.outputs())
            for transfer in self._exchange(value, moves.outputs[i], self._gradients.reach(value))
        ]

    def _reshard(self, root: Value, layout: Layout) -> Transfer:
        there = reshard(root.type.shape, root.type.layout, layout, self._mesh)
        found = list(self._along(there, root.type, FORWARD))
        if self._gradients.reach_read(root, layout):
            found += self._along(backward_route(there, self._mesh), root.type, BACKWARD)
        return Transfer((root,), layout, tuple(found))

    def _along(self, route: Route, type: TensorType, direction: str) -> Iterator[Collective]:
        for step in route.steps:
            if not step.kind.is_local:
                sent = step_bytes(step, route.shape, type.dtype.itemsize, self._mesh)
                axes = self._mesh.in_order(step.axes)
                yield Collective(step.kind.value, axes, direction, direction == BACKWARD, sent)

    def _bundle(self, bundle: ParameterBundle) -> Transfer:
        mesh, kind = self._mesh, bundle.kind
        num_members = prod(mesh.sizes[axis] for axis in kind.axes)
        held = sum_per_rank((held_bytes(root.type, mesh) for root, _ in bundle.entries), mesh.size)
        back = any(self._gradients.reach_read(*entry) for entry in bundle.entries)

        def sent(kind_of: StepKind, direction: str, count: Callable[[int], int]) -> Collective:
            values = tuple(map(count, held.values))
            of_gradient = kind_of is not StepKind.ALL_GATHER
            return Collective(kind_of.value, kind.axes, direction, of_gradient, PerRank(values, mesh.size))

        if not kind.gathers:
            reduced = sent(StepKind.ALL_REDUCE, BACKWARD, lambda size: _ring_bytes(size, num_members))
            return Transfer(*_of(bundle), (reduced,) if back else ())
        to_others = lambda size: (num_members - 1) * size
        found = [sent(StepKind.ALL_GATHER, FORWARD, to_others)]
        if back:
            found += [sent(StepKind.ALL_GATHER, BACKWARD, to_others)] if self._gathered_again(bundle) else []
            found.append(sent(StepKind.REDUCE_SCATTER, BACKWARD, to_others))
        return Transfer(*_of(bundle), tuple(found))

    def _gathered_again(self, bundle: ParameterBundle) -> bool:
        """Whether it is dropped after the forward pass, and the backward pass reads one of its parameters."""
        return bundle.kind.regather and any(self._gradients.save(*entry) for entry in bundle.entries)

    def _exchange(self, value: Value, move: _Move | None, with_gradient: bool) -> list[Transfer]:
        if move is None:
            return []
        ways = [(FORWARD, move.forward)] + ([(BACKWARD, move.backward)] if with_gradient else [])
        found = [
            Collective(EXCHANGE, move.axes, direction, direction == BACKWARD, sent)
            for direction, sent in ways
            if sent.largest
        ]
        return [Transfer((origin(value),), None, tuple(found))] if found else []

    def _node_moves(self, node: Node, placed: Placed, call: Call) -> _NodeMoves:
        inputs = node.inputs
        key = call, placed, (*(value.type for value in inputs), *node.types)
        if key not in self._moves:
            self._moves[key] = _NodeMoves(
                tuple(self._count(operand_move, node, i, placed, value.type) for i, value in enumerate(inputs)),
                tuple(self._count(output_move, node, i, placed, type) for i, type in enumerate(node.types)),
            )
        return self._moves[key]

    def _count(self, find: FindMove, node: Node, i: int, placed: Placed, type: TensorType) -> _Move | None:
        """What is sent each way over all groups; None where nobody lacks anything."""
        mesh = self._mesh
        axes = mesh.in_order(axis for axis, placement in type.layout if isinstance(placement, Split))
        if not axes or not placed.splits:
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
        return _Move(axes, *(PerRank(tuple(size * n for n in counts), mesh.size) for counts in (forward, backward)))


FindMove = Callable[[Node, int, Placed, Mesh, int], RegionMove | None]


def _sent_to_others(parts: Iterable[tuple[int, Region]], group: tuple[int, ...], rank: int) -> int:
    return sum(num_elements(part) for place, part in parts if group[place] != rank)


@dataclass(frozen=True, slots=True)
class _Move:
    """The bytes that every rank sends in an exchange between neighbours."""

    axes: tuple[str, ...]
    forward: PerRank
    backward: PerRank


@dataclass(frozen=True, slots=True)
class _NodeMoves:
    operands: tuple[_Move | None, ...]
    outputs: tuple[_Move | None, ...]


def _of(bundle: ParameterBundle) -> tuple[tuple[Value, ...], Layout | None]:
    layouts = {layout for _, layout in bundle.entries}
    return tuple(root for root, _ in bundle.entries), layouts.pop() if len(layouts) == 1 else None


def _ring_bytes(num_bytes: int, num_members: int) -> int:
    return round(2 * (num_members - 1) * num_bytes / num_members)


@lru_cache(maxsize=1 << 14)
def held_bytes(type: TensorType, mesh: Mesh) -> PerRank:
    """What every rank holds of a tensor in its layout."""
    ranks = (0,) if _is_even(type.shape, type.layout, mesh) else range(mesh.size)
    sizes = (num_elements(region_of(type.shape, type.layout, mesh, rank)) for rank in ranks)
    return PerRank(tuple(size * type.dtype.itemsize for size in sizes), mesh.size)


@lru_cache(maxsize=1 << 14)
def step_bytes(step: Step, shape: tuple[int, ...], itemsize: int, mesh: Mesh) -> PerRank:
    """What every rank sends in a step of a route."""
    even = all(_is_even(shape, layout, mesh) for layout in (step.source, step.target))
    ranks = (0,) if even and step.kind is not StepKind.ALL_TO_ALL else range(mesh.size)
    return PerRank(tuple(bytes_sent(step, shape, itemsize, mesh, rank) for rank in ranks), mesh.size)


def _is_even(shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> bool:
    return all(
        size % prod(mesh.sizes[axis] for axis in split_axes(layout, dim)) == 0 for dim, size in enumerate(shape)
    )
