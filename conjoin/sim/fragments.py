"""The instructions of one operator in its layouts, forward and backward, with the reshards and exchanges around it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace
from math import prod

import torch

from conjoin.comm import (
    EXCHANGE,
    RING,
    ROWS,
    Chunking,
    ExchangedBytes,
    PerRank,
    Ring,
    Route,
    StepKind,
    backward_route,
    chunking_of,
    common_places,
    halo_bytes,
    halo_of,
    is_product,
    node_exchanges,
    reshard,
    ring_bytes_of,
    ring_of,
    routed_bytes,
    routing_of,
    step_bytes,
    step_load,
)
from conjoin.cost import OperatorCost, Seconds, Source, weakest
from conjoin.ir import (
    BUNDLE_BYTES,
    Choice,
    LeafKind,
    Node,
    Placed,
    Value,
    make_leaf,
    make_node,
    place,
    region_of,
    region_shape,
    unlike_axes,
)
from conjoin.machine import Mesh
from conjoin.ops import Call, Layout, TensorType, map_tensors
from conjoin.sim.autograd_keeps import Kept, kept_by
from conjoin.sim.chunk_calls import beside_each_other, chunk_call
from conjoin.sim.engine import BETWEEN, COMPUTE, INSIDE, Fragment, Instruction, Phase, Ticks, to_ticks
from conjoin.sim.instructions import computed, computing, folded, only_where, ordered, phases, waits_for
from conjoin.sim.operator_work import Work, Works, busiest, calls_on
from conjoin.sim.prices import Prices
from conjoin.sim.ring_calls import ring_calls
from conjoin.sim.skeleton import Task
from conjoin.sim.symmetry import Classes

_BY_ENGINE = 0.3
"""What the host takes where autograd's engine adds up gradients, mostly in place, of what that call takes in Python:
4.1 µs each of the 1,803 in the backward of DenseNet-201 on an H200's host, where the call takes 13.4 (2026-11-19)."""


@dataclass(frozen=True, slots=True)
class Supply:
    """How an operand comes to an operator."""

    own: Layout
    """In which it is made or stored."""
    arrives: bool
    """Whether it is brought into the layout of its use here; else it is there already, or comes in a bundle."""
    back: bool
    """Whether a gradient goes the way back."""
    adds: bool
    """Whether the gradient made here is added to that of later readers, whose backward ran before."""


@dataclass(frozen=True, slots=True)
class Departure:
    """How what an operator makes leaves for a place where others read it, as soon as it is made."""

    output: int
    target: Layout
    back: bool
    """Whether a gradient comes the way back."""


Places = tuple[tuple[str, int], ...]
"""Axes with the one place of each where something happens."""


@dataclass
class Drafts:
    """Makes the fragments of operators; equal ones are made once, and are then the same object."""

    mesh: Mesh
    prices: Prices
    classes: Classes
    bundle_bytes: int = BUNDLE_BYTES
    chunks: int = 1
    """In how many chunks products go that collectives are next to."""
    copies: dict[tuple[int, torch.dtype, torch.dtype, Phase], Instruction] = field(default_factory=dict)
    """What copying elements takes, by how many, from and to which dtype, and when."""
    _nodes: dict[tuple[int, Choice], tuple[Node, Placed]] = field(default_factory=dict)
    _works: dict[tuple[int, Choice], Work] = field(default_factory=dict)
    _routes: dict[tuple[TensorType, Layout, Layout], tuple[Fragment, Fragment]] = field(default_factory=dict)
    _made: dict[Hashable, tuple[Fragment, Fragment]] = field(default_factory=dict)
    _collectives: dict[Hashable, Instruction] = field(default_factory=dict)
    _priced: dict[Hashable, tuple[Ticks, Source]] = field(default_factory=dict)
    _kept: dict[tuple[int, Choice, str], Kept] = field(default_factory=dict)
    _numbers: dict[Task, int] = field(default_factory=dict)
    _tasks: list[Task] = field(default_factory=list)

    def number(self, task: Task) -> int:
        """A short name for a task."""
        found = self._numbers.setdefault(task, len(self._tasks))
        if found == len(self._tasks):
            self._tasks.append(task)
        return found

    def fragments(
        self,
        number: int,
        choice: Choice,
        supplies: tuple[Supply, ...],
        departures: tuple[Departure, ...] = (),
        *,
        is_whole: bool = True,
    ) -> tuple[Fragment, Fragment]:
        """An operator forward and backward; the backward is empty where it gives nobody a gradient. One that need not
        run as a `is_whole` may go in chunks with what is sent before and after it."""
        key = number, choice, supplies, departures, is_whole
        if key not in self._made and not is_whole:
            made = self._in_chunks(number, choice, supplies, departures)
            if made is not None:
                self._made[key] = made
        if key not in self._made:
            there, back = self._make(number, choice, supplies)
            if departures:
                types = self._tasks[number].types
                ways = [self.route(types[d.output], choice.outputs[d.output], d.target) for d in departures]
                away = [instruction for forward, _ in ways for instruction in forward]
                home = [i for (_, way), d in zip(ways, departures, strict=True) if d.back for i in way]
                there, back = ordered([*there, *away]), ordered([*home, *back])
            self._made[key] = there, back
        return self._made[key]

    def sums_in_chunks(self, number: int, choice: Choice, target: Layout) -> bool:
        """Whether what a product makes can be summed up in chunks into a layout."""
        if self.chunks == 1:
            return False
        return chunking_of(*self.node(number, choice), self.mesh, self.chunks, None, target) is not None

    def _in_chunks(
        self, number: int, choice: Choice, supplies: tuple[Supply, ...], departures: tuple[Departure, ...]
    ) -> tuple[Fragment, Fragment] | None:
        """A product in chunks; None where it goes at once."""
        node, placed = self.node(number, choice)
        if self.chunks == 1 or not is_product(node):
            return None
        supply, target = supplies[ROWS[node.op]], departures[0].target if departures else None
        own = supply.own if supply.arrives else None
        chunking = chunking_of(node, placed, self.mesh, self.chunks, own, target)
        if chunking is None:
            return None
        task, rows, count = self._tasks[number], ROWS[node.op], chunking.count
        others = [i for i in range(len(supplies)) if i != rows or chunking.operand is None]
        there, after = self._brought(task, choice, supplies, others)
        none: tuple[Fragment, Fragment] = ((), ())
        read = self.route(task.call.tensors[rows], supply.own, choice.operands[rows]) if chunking.operand else none
        made = self.route(task.types[0], choice.outputs[0], target) if target is not None and chunking.output else none
        coming, going = self._parts(read[0], count), self._parts(made[0], count)
        products = self._products(task.call, placed, chunking if coming or going else None, task.needs)
        forward = beside_each_other(coming, [p[0] for p in products], going)
        joined = [self._copied(node.types[0])] if coming else []
        if not task.needs:
            return (*ordered(there), *forward, *joined, *waits_for(going)), ()
        coming = self._parts(made[1], count) if departures and departures[0].back else []
        going = self._parts(read[1], count) if supply.back else []
        products = self._products(task.call, placed, chunking if coming or going else None, task.needs)
        added = [self._addition(node.inputs[rows].type)] if supply.adds and chunking.operand else []
        of_rows = beside_each_other(coming, [p[1] for p in products], going)
        backward = (*added, *of_rows, *products[0][2], *waits_for(going), *ordered(after))
        return (*ordered(there), *forward, *joined, *waits_for(made[0])), backward

    def _brought(
        self, task: Task, choice: Choice, supplies: tuple[Supply, ...], some: Iterable[int]
    ) -> tuple[list[Instruction], list[Instruction]]:
        """How some operands come to an operator whose pieces line up, and their gradients back."""
        there: list[Instruction] = []
        after: list[Instruction] = []
        for i in some:
            type, supply = task.call.tensors[i], supplies[i]
            forward, backward = self.route(type, supply.own, choice.operands[i]) if supply.arrives else ((), ())
            there += forward
            after += [self._addition(type.laid_out(choice.operands[i]))] if supply.adds else []
            after += backward if supply.back else ()
        return there, after

    def _parts(self, moved: Fragment, count: int) -> list[Instruction]:
        """A collective as many of them, each of a part."""
        return [self.collective(m.name, m.axes, -(-m.sent // count), m.phase) for m in moved for _ in range(count)]

    def _products(
        self, call: Call, placed: Placed, chunking: Chunking | None, needs: tuple[int, ...]
    ) -> list[tuple[Instruction, Instruction, Fragment]]:
        """A product forward, the gradient of its rows, and those of the others: chunk by chunk, or at once; the last
        of all rows at once."""
        rows, (local, *_) = ROWS[call.op], calls_on(call, placed, needs, self.mesh, 0)
        part = local.call if chunking is None else chunk_call(local.call, chunking)
        own, others = tuple(i for i in needs if i == rows), tuple(i for i in needs if i != rows)
        cost, rest = self._costs_of(part, own), self._costs_of(local.call, others)
        last = (computed(call.op, Phase.BACKWARD, rest.backward, rest),) if others else ()
        both = [computed(call.op, phase, seconds, cost) for phase, seconds in phases(cost)]
        return [(both[0], both[1], last)] * (1 if chunking is None else chunking.count)

    def _copied(self, type: TensorType) -> Instruction:
        """Putting chunks of what was made together."""
        flat = TensorType((prod(local_shape(type, self.mesh)),), type.dtype)
        cost = self.prices.operator(Call("clone", (flat, None)), (), 0)
        return computed("pack", Phase.FORWARD, cost.forward, cost)

    def node(self, number: int, choice: Choice) -> tuple[Node, Placed]:
        """The operator in its layouts on tensors from nowhere, and how it lies on the mesh."""
        if (number, choice) not in self._nodes:
            node = _bare_node(self._tasks[number], choice)
            self._nodes[number, choice] = node, place(node, self.mesh)
        return self._nodes[number, choice]

    def kept(self, number: int, choice: Choice, kind: str) -> Kept:
        """What the rank with the most to do of an operator keeps of it for its backward pass on a device of a kind."""
        key = number, choice, kind
        if key not in self._kept:
            node, placed = self.node(number, choice)
            rank = busiest(self._tasks[number].call, placed, self.mesh)
            self._kept[key] = kept_by(self._tasks[number], node, placed, self.mesh, rank, kind)
        return self._kept[key]

    def unlike_axes(self, number: int, choice: Choice) -> frozenset[str]:
        """The axes along which devices do unlike work for an operator."""
        node, placed = self.node(number, choice)
        if ring_of(node, placed, self.mesh) is not None:  # taken as those with the most to do
            return frozenset()
        if routing_of(node, placed, self.mesh) is not None:  # as if all experts were chosen alike
            return frozenset()
        if halo_of(node, placed, self.mesh) is not None:  # as if all vertices had as many edges
            return frozenset()
        return unlike_axes(node, placed, self.mesh) | {axis for axis, _ in placed.at}

    def route(self, type: TensorType, source: Layout, target: Layout) -> tuple[Fragment, Fragment]:
        """A reshard forward, and that of the gradient backward."""
        key = type, source, target
        if key not in self._routes:
            there = reshard(type.shape, source, target, self.mesh)
            back = backward_route(there, self.mesh)
            self._routes[key] = (
                tuple(self._steps(there, type, Phase.FORWARD)),
                tuple(self._steps(back, type, Phase.BACKWARD)),
            )
        return self._routes[key]

    def collective(self, kind: str, axes: tuple[str, ...], sent: int, phase: Phase, places: Places = ()) -> Instruction:
        """A collective of all groups along some axes, or of those at some places, after all that was computed."""
        key = kind, axes, sent, phase, places
        if key not in self._collectives:
            self._collectives[key] = self._collective(kind, axes, sent, phase, places)
        return self._collectives[key]

    def _collective(self, kind: str, axes: tuple[str, ...], sent: int, phase: Phase, places: Places) -> Instruction:
        seconds = self.prices.collective(kind, axes, sent)
        between = any(axis.between_nodes for axis in self.mesh.axes if axis.name in axes)
        return Instruction(
            name=kind,
            stream=BETWEEN if between else INSIDE,
            ticks=to_ticks(seconds.value),
            host=only_where(to_ticks(self.prices.launch()), self.classes.at(places)),
            group=self.classes.group(axes),
            waits=(COMPUTE,),
            phase=phase,
            axes=axes,
            sent=sent,
            source=seconds.source,
            where=self.classes.at(places),
        )

    def work(self, number: int, choice: Choice) -> Work:
        """What the devices compute for an operator."""
        if (number, choice) not in self._works:
            made = Works(self.mesh, self.prices, self.classes).of(self._tasks[number], *self.node(number, choice))
            self._works[number, choice] = made
        return self._works[number, choice]

    def per_class(self, key: Hashable, price: Callable[[int], Seconds], alike: bool) -> tuple[Ticks, Source]:
        """Seconds on one device of every class, in ticks; a key stands for what was asked before."""
        if key not in self._priced:
            found = [price(rank) for rank in (self.classes.ranks[:1] if alike else self.classes.ranks)]
            source = weakest(*(seconds.source for seconds in found))
            self._priced[key] = folded([to_ticks(seconds.value) for seconds in found], self.classes), source
        return self._priced[key]

    def _steps(self, route: Route, type: TensorType, phase: Phase) -> Iterable[Instruction]:
        for step in route.steps:
            if not step.kind.is_local:
                told = step, route.shape, type.dtype.itemsize, self.mesh
                sent, load = step_bytes(*told).largest, step_load(*told)
                places = common_places(step.source, step.target)
                made = self.collective(step.kind.value, self.mesh.in_order(step.axes), load, phase, places)
                yield made if load == sent else replace(made, sent=sent)

    def _exchange(self, exchange: ExchangedBytes | None, phase: Phase, places: Places) -> Fragment:
        if exchange is None:
            return ()
        there = phase is Phase.FORWARD
        sent = (exchange.forward if there else exchange.backward).largest
        load = exchange.forward_load if there else exchange.backward_load
        if not sent:
            return ()
        made = self.collective(EXCHANGE, exchange.axes, load, phase, places)
        return (made if load == sent else replace(made, sent=sent),)

    def _make(self, number: int, choice: Choice, supplies: tuple[Supply, ...]) -> tuple[Fragment, Fragment]:
        task = self._tasks[number]
        call, needs = task.call, task.needs
        node, placed = self.node(number, choice)
        exchanges = node_exchanges(node, placed, self.mesh)
        work, at, where = self.work(number, choice), placed.at, self.classes.at(placed.at)
        there: list[Instruction] = []
        back: list[Instruction] = []
        after: list[Instruction] = []
        around = ring_of(node, placed, self.mesh)
        for i, (supply, wanted) in enumerate(zip(supplies, choice.operands, strict=True)):
            forward, backward = self.route(call.tensors[i], supply.own, wanted) if supply.arrives else ((), ())
            there += (*forward, *self._exchange(exchanges.operands[i], Phase.FORWARD, at))
            if i in needs:
                after += self._exchange(exchanges.operands[i], Phase.BACKWARD, at)
            if supply.adds:
                after.append(self._addition(node.inputs[i].type))
            after += backward if supply.back else ()
        if around is not None:
            forward, backward = self._around(node, placed, around, needs)
            return (*ordered(there), *forward), (*backward, *ordered(after)) if needs else ()
        routing = routing_of(node, placed, self.mesh)
        if routing is not None:
            moved = routed_bytes(node, placed, self.mesh)
            there += self._sent(routing.axes, Phase.FORWARD, moved.counts, moved.rows)
            back += self._sent(routing.axes, Phase.BACKWARD, moved.answers)
            after = [*self._sent(routing.axes, Phase.BACKWARD, moved.rows), *after]
        halo = halo_of(node, placed, self.mesh)
        if halo is not None:
            rows = halo_bytes(node, placed, self.mesh)
            there += self._sent(halo.axes, Phase.FORWARD, *(sent.rows for sent in rows))
            sent_back = (sent.gradients for sent in rows if sent.operand in needs)
            after = [*self._sent(halo.axes, Phase.BACKWARD, *sent_back), *after]
        forward_work = work.forward, work.host_forward, work.source, where
        there.append(computing(node.op, Phase.FORWARD, *forward_work))
        there += self._sent(routing.axes, Phase.FORWARD, moved.answers) if routing is not None else ()
        for exchange in exchanges.outputs:
            there += self._exchange(exchange, Phase.FORWARD, at)
            back += self._exchange(exchange, Phase.BACKWARD, at) if needs else ()
        if needs:
            back.append(computing(node.op, Phase.BACKWARD, work.backward, work.host_backward, work.source, where))
        return ordered(there), ordered([*back, *after])

    def _around(self, node: Node, placed: Placed, ring: Ring, needs: tuple[int, ...]) -> tuple[Fragment, Fragment]:
        """Attention around a ring: while a device computes with the keys that it has, the next ones come."""
        costs = [self._costs_of(call, needs) for call in ring_calls(node, ring, self.mesh)]
        found: list[Fragment] = []
        for phase, sent in zip((Phase.FORWARD, Phase.BACKWARD), ring_bytes_of(node, placed, self.mesh), strict=True):
            there = phase is Phase.FORWARD
            own = [computed(node.op, phase, cost.forward if there else cost.backward, cost) for cost in costs]
            steps: list[Instruction] = []
            for i in range(max(len(own), len(sent.steps))):
                moved = [self._passed_on(ring, sent.steps[i].largest, phase)] if i < len(sent.steps) else []
                steps += (*moved, *own[i : i + 1], *waits_for(moved))
            before, after = (self._swapped(ring, some, phase) for some in (sent.before, sent.after))
            found.append((*before, *steps, *after))
        return found[0], found[1]

    def _sent(self, axes: tuple[str, ...], phase: Phase, *sent: PerRank) -> list[Instruction]:
        """Rows to their experts and back, one after the other."""
        return [self.collective(StepKind.ALL_TO_ALL.value, axes, each.largest, phase) for each in sent]

    def _costs_of(self, call: Call, needs: tuple[int, ...]) -> OperatorCost:
        return self.prices.operator(call, needs, 0)

    def _passed_on(self, ring: Ring, sent: int, phase: Phase) -> Instruction:
        """What goes on to the next device; neighbours exchange as much with both sides in twice the time."""
        made = self.collective(EXCHANGE, ring.axes, sent * min(2, ring.size - 1), phase)
        return replace(made, name=RING, sent=sent)

    def _swapped(self, ring: Ring, sent: PerRank | None, phase: Phase) -> Fragment:
        if sent is None or not sent.largest:
            return ()
        return ordered([self.collective(StepKind.ALL_TO_ALL.value, ring.axes, sent.largest, phase)])

    def _addition(self, type: TensorType) -> Instruction:
        """Adding the gradients that two readers of a tensor give it."""
        places = common_places(type.layout)
        rank = self.mesh.rank_at(dict(places))
        local = TensorType(local_shape(type, self.mesh, rank), type.dtype)
        cost = self.prices.operator(Call("add.Tensor", (local, local, 1)), (), rank)
        ticks, where = to_ticks(cost.forward.value), self.classes.at(places)
        host = only_where(to_ticks(_BY_ENGINE * cost.host_forward), where)
        return computing("add", Phase.BACKWARD, ticks, host, cost.forward.source, where)


def local_shape(type: TensorType, mesh: Mesh, rank: int = 0) -> tuple[int, ...]:
    """The shape of a tensor on a rank; rank 0 holds as much as any."""
    return region_shape(region_of(type.shape, type.layout, mesh, rank))


def _bare_node(task: Task, choice: Choice) -> Node:
    """The call in its layouts, on tensors that come from nowhere."""
    operands = iter(enumerate(choice.operands))

    def operand(type: TensorType) -> Value:
        i, layout = next(operands)
        return Value(make_leaf(LeafKind.INPUT, f"operand {i}", type.laid_out(layout)))

    call = task.call
    types = tuple(type.laid_out(layout) for type, layout in zip(task.types, choice.outputs, strict=True))
    return make_node(call.op, map_tensors(call.op, call.args, operand), types)
