"""What a training step of a plan puts on the wire: every collective with the bytes that each rank sends.

The walk is that of the runtime: a value is brought into each layout once, when it is first read; parameters travel
in bundles; where the local form of a node reads or makes another region than the layouts give, neighbours
exchange parts; backward goes by the reshard of the duals, wherever a gradient comes back. Bytes are payload, counted as
the communicators count: 2 (n-1)/n of a tensor for an all-reduce, and for the others what leaves the rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from conjoin.comm.exchanges import ExchangedBytes, node_exchanges
from conjoin.comm.gradients import Entry, gradient_flow
from conjoin.comm.halo import halo_bytes, halo_of
from conjoin.comm.made_once import find_made_once
from conjoin.comm.parameter_bundles import ParameterBundle, find_bundles, sent_bytes
from conjoin.comm.per_rank import PerRank, ring_bytes
from conjoin.comm.pieces import num_devices, splits_evenly
from conjoin.comm.places import changes_places
from conjoin.comm.recompute import recomputed
from conjoin.comm.ring import SEQUENCE, ring_bytes_of, ring_of
from conjoin.comm.route import backward_route, reshard
from conjoin.comm.routing import routed_bytes, routing_of
from conjoin.comm.steps import Route, Step, StepKind
from conjoin.comm.volume import bytes_received, bytes_sent
from conjoin.ir import (
    Leaf,
    Node,
    Placed,
    Plan,
    Value,
    is_parallel,
    is_random,
    micro_batched_parts,
    operators_of,
    origin,
    place,
    regathered_parameters,
)
from conjoin.machine import Mesh
from conjoin.ops import BATCH, Layout, TensorType

FORWARD, BACKWARD = "forward", "backward"
EXCHANGE = "exchange"
"""Beside the kinds of steps: parts between neighbours, for halos and for pieces that do not line up."""
RING = "ring"
"""Beside them, too: pieces that all go on to the next device at once."""
AGREEMENT_BYTES = 16
"""Two integers by which ranks that draw alike make sure that they do."""


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
    bundled: bool = False
    """Whether it is a bundle of parameters."""
    once: bool = False
    """Whether it moves once for all micro-batches of a step."""


class Traffic:
    """Follows a plan as its program runs, and tells at each place what moves there."""

    def __init__(self, plan: Plan) -> None:
        self._mesh = plan.mesh
        self._gradients = gradient_flow(plan.graph)
        self._bundles = {entry: bundle for bundle in find_bundles(plan) for entry in bundle.entries}
        self._there: set[Entry] = set()
        self._steps = plan.accumulation.steps if plan.accumulation is not None else 1
        made = find_made_once(plan.graph, self._bundles, regathered_parameters(plan)) if self._steps > 1 else None
        self._made_once: frozenset[Node] = made.nodes if made is not None else frozenset()
        self._brought_once: frozenset[Entry] = frozenset(made.entries if made is not None else ())
        operators, spans = operators_of(plan.graph), recomputed(plan, self._gradients)
        self._again = {node for first, last in spans for node in operators[first : last + 1]}
        """What the backward pass runs again."""
        self._lasts = {operators[last] for _, last in spans}
        parts = micro_batched_parts(plan.graph)
        self._parts = {node: part.count for part in parts for node in part.nodes if node.op != BATCH}
        """How often what runs in micro-batches of its own does, in the forward pass and again in the backward."""

    def at_start(self, nodes: Iterable[Node]) -> list[Transfer]:
        """What all ranks exchange before anything runs."""
        mesh = self._mesh
        drawn = [node for node in nodes if is_random(node.op, node.args)]
        if all(set(place(node, mesh).axes) == set(mesh.names) for node in drawn):
            return []
        sent = PerRank((ring_bytes(AGREEMENT_BYTES, mesh.size),), mesh.size)
        return [Transfer((), None, (Collective(StepKind.ALL_REDUCE.value, mesh.names, FORWARD, False, sent),))]

    def before(self, value: Value) -> list[Transfer]:
        """What moves so that a value is there in its layout."""
        return [self._repeated(transfer) for transfer in self._brought(value)]

    def _brought(self, value: Value) -> list[Transfer]:
        """The same of one micro-batch."""
        root, layout = origin(value), value.type.layout
        if root.type.layout == layout or (root, layout) in self._there:
            return []
        bundle = self._bundles.get((root, layout))
        self._there.update(((root, layout),) if bundle is None else bundle.entries)
        moved = self._reshard(root, layout) if bundle is None else self._bundle(bundle)
        if not moved.collectives:
            return []
        return [self._in_part(root.owner, replace(moved, once=(root, layout) in self._brought_once))]

    def _in_part(self, owner: Node | Leaf, transfer: Transfer) -> Transfer:
        """What moves inside a part moves for each of its micro-batches, and forward once more before the backward."""
        count = 0 if isinstance(owner, Leaf) else self._parts.get(owner, 0)
        if not count:
            return transfer
        every = (replace(c, sent=c.sent * count) for c in _twice(transfer).collectives)
        return replace(transfer, collectives=tuple(every))

    def before_node(self, node: Node, placed: Placed) -> list[Transfer]:
        """What moves so that a node can read its operands."""
        found: list[Transfer] = []
        moves = node_exchanges(node, placed, self._mesh)
        for i, value in enumerate(node.inputs):
            found += self._brought(value)
            exchanged = self._exchange(value, moves.operands[i], self._gradients.reach_operand(node, i))
            found += [self._in_part(node, transfer) for transfer in exchanged]
        among = self._ring(node, placed) + self._routed(node, placed) + self._halo(node, placed)
        found += [self._in_part(node, transfer) for transfer in among]
        return self._in_step(node, found, node in self._again)

    def after_node(self, node: Node, placed: Placed) -> list[Transfer]:
        """What moves so that the outputs of a node lie as stated."""
        moves = node_exchanges(node, placed, self._mesh)
        found = [
            self._in_part(node, transfer)
            for i, value in enumerate(node.outputs())
            for transfer in self._exchange(value, moves.outputs[i], self._gradients.reach(value))
        ]
        return self._in_step(node, found, node in self._again - self._lasts)

    def _in_step(self, node: Node, found: Iterable[Transfer], again: bool) -> list[Transfer]:
        """What a node moves in all of a step: for every micro-batch, and twice where it is run again."""
        if node in self._made_once:
            return [replace(transfer, once=True) for transfer in found]
        every = [self._repeated(transfer) for transfer in found]
        return [_twice(transfer) for transfer in every] if again else every

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
        """Gathered, and again for the backward pass; gradients reduce-scattered, then all-reduced."""
        mesh, kind = self._mesh, bundle.kind
        back = any(self._gradients.reach_read(*entry) for entry in bundle.entries)
        used = sent_bytes((root.type for root, _ in bundle.entries), kind.gathered, mesh)
        found: list[Collective] = []
        if kind.gathered:
            others = num_devices(kind.gathered, mesh) - 1
            gather = Collective(StepKind.ALL_GATHER.value, kind.gathered, FORWARD, False, used * others)
            sent = sent_bytes(bundle.sums, kind.gathered, mesh) * others
            found += [gather, *([replace(gather, direction=BACKWARD)] if bundle.is_gathered_again else [])]
            found += [Collective(StepKind.REDUCE_SCATTER.value, kind.gathered, BACKWARD, True, sent)] if back else []
        if kind.summed and back:
            held, num_members = sent_bytes(bundle.sums, (), mesh), num_devices(kind.summed, mesh)
            sent = PerRank(tuple(ring_bytes(size, num_members) for size in held.values), mesh.size)
            found.append(Collective(StepKind.ALL_REDUCE.value, kind.summed, BACKWARD, True, sent))
        return Transfer(*_of(bundle), tuple(found), bundled=True)

    def _exchange(self, value: Value, move: ExchangedBytes | None, with_gradient: bool) -> list[Transfer]:
        if move is None:
            return []
        ways = [(FORWARD, move.forward)] + ([(BACKWARD, move.backward)] if with_gradient else [])
        found = [
            Collective(EXCHANGE, move.axes, direction, direction == BACKWARD, sent)
            for direction, sent in ways
            if sent.largest
        ]
        return [Transfer((origin(value),), None, tuple(found))] if found else []

    def _ring(self, node: Node, placed: Placed) -> list[Transfer]:
        """Keys and values that go around, swapped before and after; the other way with their gradients."""
        if ring_of(node, placed, self._mesh) is None:
            return []
        axes = self._mesh.in_order(dict(placed.splits)[SEQUENCE])
        back = any(self._gradients.reach_operand(node, i) for i in range(len(node.inputs)))
        found = []
        ways = (FORWARD, BACKWARD)[: 1 + back]
        for direction, sent in zip(ways, ring_bytes_of(node, placed, self._mesh), strict=False):
            swap = StepKind.ALL_TO_ALL.value
            parts = [(swap, sent.before), *((RING, step) for step in sent.steps), (swap, sent.after)]
            made = ((kind, some) for kind, some in parts if some is not None and some.largest)
            found += [Collective(kind, axes, direction, direction == BACKWARD, some) for kind, some in made]
        return [Transfer((origin(node.inputs[1]),), None, tuple(found))]

    def _routed(self, node: Node, placed: Placed) -> list[Transfer]:
        """Rows that go to their experts and answers that come back, if all experts are chosen alike."""
        routing = routing_of(node, placed, self._mesh)
        if routing is None:
            return []
        sent, kind = routed_bytes(node, placed, self._mesh), StepKind.ALL_TO_ALL.value
        back = any(self._gradients.reach_operand(node, i) for i in range(len(node.inputs)))
        found = [Collective(kind, routing.axes, FORWARD, False, s) for s in (sent.counts, sent.rows, sent.answers)]
        if back:
            found += [Collective(kind, routing.axes, BACKWARD, True, s) for s in (sent.answers, sent.rows)]
        return [Transfer((origin(node.inputs[0]),), None, tuple(found))]

    def _halo(self, node: Node, placed: Placed) -> list[Transfer]:
        """Rows that edges read from other ranks, and their gradients the other way."""
        halo = halo_of(node, placed, self._mesh)
        if halo is None:
            return []
        kind, found = StepKind.ALL_TO_ALL.value, []
        for sent in halo_bytes(node, placed, self._mesh):
            operand = sent.operand
            moved = [Collective(kind, halo.axes, FORWARD, False, sent.rows)]
            if self._gradients.reach_operand(node, operand):
                moved.append(Collective(kind, halo.axes, BACKWARD, True, sent.gradients))
            found.append(Transfer((origin(node.inputs[operand]),), None, tuple(moved)))
        return found

    def _repeated(self, transfer: Transfer) -> Transfer:
        """What moves as often as there are micro-batches; bundles are all-reduced after the last."""
        if self._steps == 1 or transfer.once:
            return transfer
        once = StepKind.ALL_REDUCE.value if transfer.bundled else None
        every = (c if c.kind == once else replace(c, sent=c.sent * self._steps) for c in transfer.collectives)
        return replace(transfer, collectives=tuple(every))


def exchanges_in_passes(plan: Plan) -> bool:
    """Whether ranks exchange anything in a pass of one micro-batch: more than sums that are put off to the last."""
    traffic, graph = Traffic(plan), plan.graph
    nodes = [node for node in graph.nodes if not is_parallel(node)]
    found = traffic.at_start(nodes)
    for node in nodes:
        placed = place(node, plan.mesh)
        found += traffic.before_node(node, placed) + traffic.after_node(node, placed)
    for value in (*graph.outputs, *(value for _, value in graph.updates)):
        found += traffic.before(value) if isinstance(value, Value) else []
    put_off = StepKind.ALL_REDUCE.value
    return any(not t.bundled or c.kind != put_off for t in found for c in t.collectives)


def _twice(transfer: Transfer) -> Transfer:
    """What moves forward moves again in the backward pass; parameters in bundles come from outside."""
    if transfer.bundled or transfer.once:
        return transfer
    again = (replace(c, direction=BACKWARD) for c in transfer.collectives if c.direction == FORWARD)
    return replace(transfer, collectives=(*transfer.collectives, *again))


def _of(bundle: ParameterBundle) -> tuple[tuple[Value, ...], Layout | None]:
    layouts = {layout for _, layout in bundle.entries}
    return tuple(root for root, _ in bundle.entries), layouts.pop() if len(layouts) == 1 else None


@lru_cache(maxsize=1 << 14)
def step_bytes(step: Step, shape: tuple[int, ...], itemsize: int, mesh: Mesh) -> PerRank:
    """What every rank sends in a step of a route."""
    even = all(splits_evenly(shape, layout, mesh) for layout in (step.source, step.target))
    ranks = (0,) if even and step.kind is not StepKind.ALL_TO_ALL else range(mesh.size)
    return PerRank(tuple(bytes_sent(step, shape, itemsize, mesh, rank) for rank in ranks), mesh.size)


@lru_cache(maxsize=1 << 14)
def step_load(step: Step, shape: tuple[int, ...], itemsize: int, mesh: Mesh) -> int:
    """What the busiest rank sends in a step of a route, or receives where one rank gets the most."""
    sent = step_bytes(step, shape, itemsize, mesh).largest
    if not changes_places(step):
        return sent
    return max(sent, *(bytes_received(step, shape, itemsize, mesh, rank) for rank in range(mesh.size)))
