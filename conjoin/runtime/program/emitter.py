"""One node after the other as generated code: operators on a rank's local pieces, reshards where the plan has them.

Every node is emitted in its local form (`ops.run_local`); where an operand's local piece is not quite what the form
needs (halos, uneven heads), a move between neighbours stands before it. A node that runs at other places of the mesh is
passed by (`absence`).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import fx

from conjoin.comm import (
    ROWS,
    Chunking,
    ChunkPlaces,
    MadeOnce,
    changes_places_between,
    gradient_flow,
    is_product,
)
from conjoin.ir import (
    Graph,
    Leaf,
    Node,
    RegionMove,
    Source,
    Value,
    drawn_strides,
    holds,
    is_parallel,
    is_random,
    micro_batched_parts,
    operand_move,
    origin,
    output_move,
    place,
    plain_call,
    region_of,
    region_shape,
)
from conjoin.machine import Mesh
from conjoin.ops import (
    BATCH,
    PIPELINE,
    At,
    Copies,
    Layout,
    Split,
    bind_args,
    find_function,
    make_layout,
    map_tensors,
    run_local,
    signature,
    space_of,
    spread_args,
)
from conjoin.runtime.movement.absence import find_leaving, is_confined, join
from conjoin.runtime.movement.bundles import Bundle
from conjoin.runtime.program.failed_calls import CALL
from conjoin.runtime.program.functions import (
    BATCH_NORM,
    BATCH_NORMS,
    Function,
    as_written,
    is_plain_weight,
    of_pieces,
    pinned,
    run_batch_norm,
    update_batch_norm,
    updates_in_place,
    with_weight_as_torch_lays_it,
)
from conjoin.runtime.program.recompute import PART, SEGMENT, keeping, mark
from conjoin.runtime.program.written_over import mark_in_place
from conjoin.runtime.ranks.communicator import uncompiled
from conjoin.runtime.verification.strides import in_strides


class Carriers(Protocol):
    """Makes the functions that move tensors between the ranks; a program on one device needs none."""

    mesh: Mesh
    rank: int
    bundles: tuple[Bundle, ...]
    regathered: frozenset[str]
    """Parameters that are gathered again for the backward pass."""
    chunks: int
    """In how many chunks products go that collectives are next to."""
    offloaded: dict[Value, Function]
    """What tells of each tensor that is to lie on the host."""
    streamed: dict[Node, Function]
    """What runs each operator that reads inputs from the host."""

    def reshard(self, value: Value, target: Layout) -> Function:
        """From the layout of a value to another; differentiable."""

    def move(self, move: RegionMove) -> Function:
        """From the regions the ranks of a group have to those they want; differentiable."""

    def prepare(self, move: RegionMove) -> None:
        """Make ready for a move that other ranks make."""

    def among_ranks(self, node: Node) -> Function | None:
        """What runs a call in which ranks send each other more than regions: keys that go around, rows that go to their
        experts, or to their neighbours; None for any other."""

    def bundle(self, root: Value, layout: Layout) -> Bundle | None:
        """The bundle of parameters that brings this one into this layout; None where it goes on its own."""

    def draw(self, function: Function, axes: tuple[str, ...]) -> Function:
        """A random operator whose draws differ along the axes that split its output, and nowhere else."""

    def chunked(self, node: Node, chunking: Chunking, layouts: tuple[Layout | None, Layout | None]) -> Function:
        """A product in chunks, from its rows in their own layout, its matrix and what is added to what is made, in
        another layout, and the rows; a layout that does not change is None."""

    @property
    def arriving(self) -> Mapping[str, tuple[int, ...]]:
        """By name, how inputs that come from other stages lie in memory on one device."""

    def draws_whole(self) -> bool:
        """Whether every rank draws the randomness of the whole tensor and takes its part, as one device would."""


class Emitter:
    """Emits the nodes of a graph one after the other into an FX program."""

    def __init__(
        self,
        graph: Graph,
        carriers: Carriers | None = None,
        *,
        runs_again: bool = False,
        once: bool = True,
        apart: bool = False,
    ) -> None:
        self.program = fx.Graph()
        self.graph = graph
        self.carriers = carriers
        self.values: dict[tuple[Value, Layout], fx.Node] = {}
        """Every value that is there, in every layout it is there in."""
        self.read = {*graph.users, *(output for output in graph.outputs if isinstance(output, Value))}
        self.device: fx.Node | None = None
        self._held: dict[int, fx.Node] = {}
        self._cast_by_bundles = _cast_by_bundles(graph, carriers.bundles) if carriers is not None else frozenset()
        self._unpinned: dict[fx.Node, torch.dtype] = {}
        """What an autocast around the program may have made in another dtype than written."""
        self._once = once
        """Whether what is not in a segment runs once in a step."""
        self._apart = apart
        """Whether parameters of a bundle have nodes of their own in autograd: gradients may be made one by one."""
        self._strides: Mapping[Value, tuple[int, ...]] | None = None
        self._absent: dict[tuple[Value, Layout], tuple[fx.Node, ...]] = {}
        """Values of which this rank has nothing, with what their gradients go back to."""
        self._leaving = find_leaving(graph) if carriers is not None else {}
        self._confined = bool(self._leaving) or is_confined(graph)
        self._gradients = gradient_flow(graph) if self._confined or runs_again else None
        self._emitted: tuple[str, Source | None] | None = None
        """The operator that is being emitted, and the user's line that calls it."""
        self._segment: int | None = None
        """Of what is to be run again in the backward pass, the number of the segment that is being emitted."""
        self._last: Node | None = None
        self._communicates = False
        """Whether ranks speak with each other inside the segment."""
        self._shelved: frozenset[Node] = frozenset()
        """Calls in segments whose results are kept."""
        self._chunk_places: ChunkPlaces | None = None
        self._made_once: frozenset[Node] = frozenset()
        """What is made before the program runs, for all its runs in a step."""
        parts = enumerate(micro_batched_parts(graph))
        self._parts = {node: -1 - number for number, part in parts for node in part.nodes}
        """Of what runs in micro-batches, the number of the part, which is that of a segment."""
        self._untold: list[Value] = []
        """What lies on the host, of a segment that has not ended."""

    def begin(self) -> fx.Node:
        """Start a program with its state, which is given back, and its device."""
        stored = self.program.placeholder("state")
        self.device = self.program.placeholder("device")
        return stored

    def take(self, stored: fx.Node, state: Sequence[Leaf]) -> None:
        """The state is there, leaf by leaf."""
        for i, leaf in enumerate(state):
            self.set(Value(leaf), self.call(operator.getitem, stored, i))

    def set(self, value: Value, made: fx.Node) -> None:
        """A value is there in its own layout."""
        self.values[value, value.type.layout] = made

    def computed(self, node: Node, value: Value, made: fx.Node) -> None:
        """A node has made a value."""
        self.set(value, made)
        if not node.pinned and value.type.dtype.is_floating_point:
            self._unpinned[made] = value.type.dtype

    def find(self, value: Value) -> fx.Node:
        """A value in its layout, resharded from where its chain of reshards starts when it is not there yet."""
        return self.find_in(origin(value), value.type.layout)

    def find_in(self, root: Value, layout: Layout) -> fx.Node:
        """What a leaf or a node has made, in a layout."""
        self._bring(root, layout)
        if (root, layout) not in self.values:
            assert self.carriers is not None
            shape = region_shape(region_of(root.type.shape, layout, self.carriers.mesh, self.carriers.rank))
            operands = self._absent[root, layout]
            self.values[root, layout] = self.call(join, shape, root.type.dtype, self.device, *operands)
        return self.values[root, layout]

    def _bring(self, root: Value, layout: Layout) -> None:
        """Reshard a value that is not there yet; what micro-batches read as it is for all of them comes before them."""
        if (root, layout) in self.values or (root, layout) in self._absent:
            return
        segment = self._segment
        if self._parts:
            self._segment = self._part_of(root.owner)
        self._reshard(root, layout)
        self._segment = segment

    def _part_of(self, owner: Node | Leaf) -> int | None:
        """The part in micro-batches that something is made in."""
        return None if isinstance(owner, Leaf) or owner.op == BATCH else self._parts.get(owner)

    def _enter_part(self, node: Node) -> None:
        """A node of a part runs in micro-batches, but for what cuts them and joins them."""
        if self._parts:
            self._segment = None if node.op == PIPELINE else self._part_of(node)

    def _mark_part(self, node: Node, made: fx.Node) -> None:
        """The call that cuts micro-batches or joins them; what is moved for it comes before or after."""
        if node in self._parts and node.op in (PIPELINE, BATCH):
            made.meta[PART] = self._parts[node], node.op == PIPELINE, *node.args[1:]

    def _reshard(self, root: Value, layout: Layout) -> None:
        """Of what this rank has nothing before and after, nothing is made."""
        assert self.carriers is not None, "a program on one device has no reshards"
        bundle = self.carriers.bundle(root, layout)
        if bundle is not None:
            self._launch(bundle)
            return
        function, own = self.carriers.reshard(root, layout), root.type.layout
        changes = changes_places_between(own, layout)
        if not changes and not holds(own, self.carriers.mesh, self.carriers.rank):
            self._absent[root, layout] = self._operands_of(root, own)
            return
        self._communicates = True
        start = self.find(root)  # who has nothing of it takes it in the dtype written
        self.values[root, layout] = self.call(function, self._as_written(start) if changes else start)

    def _operands_of(self, root: Value, layout: Layout) -> tuple[fx.Node, ...]:
        """What the gradient of an empty value goes back to."""
        made = self.values.get((root, layout))
        return self._absent[root, layout] if made is None else (made,)

    def send(self, value: Value) -> None:
        """Bring a value that was just made to the places that read it."""
        for reading in self._leaving.get(value, ()):
            self._bring(origin(reading), reading.type.layout)

    def hold(self, bundle: Bundle) -> None:
        """Take the parameters of a bundle at the start of the program."""
        stored = [self.values[Value(leaf), leaf.type.layout] for leaf in bundle.leaves]
        self._held[id(bundle)] = self.call(uncompiled(bundle.hold), *stored)

    def _launch(self, bundle: Bundle) -> None:
        """Bring the parameters of a bundle; in a segment, of which they are given as stored, once more in its second
        run."""
        segment, self._segment = self._segment, None
        held = self._held[id(bundle)]
        given = [self.call(operator.getitem, held, i) for i in range(1 + len(bundle.entries))]
        self._segment = segment
        self._communicates |= bool(bundle.kind.gathered)
        made = self.call(uncompiled(bundle.launch), segment is not None, *given)
        for i, entry in enumerate(bundle.entries):
            brought = self.call(operator.getitem, made, i)
            self.values[entry] = self.call(torch.ops.aten.alias.default, brought) if self._apart else brought

    def call(self, function: Function, *args: Any, **kwargs: Any) -> fx.Node:
        made = self.program.call_function(function, args, kwargs)
        if self._emitted is not None:
            made.meta[CALL] = self._emitted
        if self._segment is not None:
            made.meta[SEGMENT] = self._segment
        return made

    def shelve(self, nodes: Iterable[Node]) -> None:
        """What these calls make is kept where their segments are run again."""
        self._shelved = frozenset(nodes)

    def take_made(self, once: MadeOnce, stored: fx.Node, start: int) -> None:
        """What is made of parameters alone stands among the state, from a place on."""
        self._made_once = once.nodes
        for i, (root, layout) in enumerate(once.entries, start):
            made = self.call(operator.getitem, stored, i)
            if isinstance(root.owner, Node) and layout == root.type.layout:
                self.computed(root.owner, root, made)
            else:
                self.values[root, layout] = made

    def chunk(self, places: ChunkPlaces) -> None:
        """Products go in chunks with the collectives next to them, as is told of each."""
        self._chunk_places = places

    def enter(self, segment: int, last: Node) -> None:
        """What is emitted from here up to a node is to be run again in the backward pass."""
        self._segment, self._last, self._communicates = segment, last, False

    def _leave(self, node: Node) -> None:
        """After the last node of a segment has computed: what it sends then is not run again."""
        if node is self._last:
            self._segment = self._last = None

    def _mark(self, node: Node) -> None:
        """Before the last node of a segment computes, have all ranks keep something: none may end its second run
        before a collective that others run again."""
        if node is self._last and self._communicates:
            self._communicates = False
            assert self._gradients is not None
            needing = (v for i, v in enumerate(node.inputs) if self._gradients.reach_operand(node, i))
            self.call(mark, self.find(next(needing)))

    def emit_node(self, node: Node) -> None:
        """One node in its local form; reshards wait until somebody reads them."""
        self._emitted = node.op, self.graph.source_of(node)
        self._emit(node)
        self._emitted = None

    def _emit(self, node: Node) -> None:
        if is_parallel(node):
            return
        if node in self._cast_by_bundles or node in self._made_once:
            self._leave(node)
            return
        if self.carriers is not None and self._passes_by(node, self.carriers):
            return
        self._enter_part(node)
        if self._emit_in_chunks(node):
            self._tell(node)
            return
        function = self._function_of(node)
        if self.carriers is not None and is_random(node.op, node.args):
            outputs = self._emit_draw(node, function, self.carriers)
        elif self.carriers is None or not any(t.layout for t in (*node.types, *(v.type for v in node.inputs))):
            outputs = self._apply(node, function, node.op, self._resolve(node))
        else:
            outputs = self._emit_local(node, function, self.carriers)
        self._leave(node)
        for value, made in zip(node.outputs(), outputs, strict=True):
            self.computed(node, value, made)
        for value in node.outputs():
            self.send(value)
        self._tell(node)

    def _tell(self, node: Node) -> None:
        """Tell of what lies on the host; of a segment when it is over: it may be run again."""
        offloaded = {} if self.carriers is None else self.carriers.offloaded
        there = (value for value in node.outputs() if (value, value.type.layout) in self.values)
        self._untold += (value for value in there if value in offloaded)
        while self._untold and self._segment is None:
            value = self._untold.pop(0)
            self.call(offloaded[value], self.find(value))

    def _emit_in_chunks(self, node: Node) -> bool:
        """Emit a product with what is sent before and after it, where that goes in chunks; whether it did."""
        if self._chunk_places is None or self.carriers is None or not is_product(node):
            return False
        read = node.inputs[ROWS[node.op]]
        root, wanted = origin(read), read.type.layout
        is_there = (root, wanted) in self.values or self.carriers.bundle(root, wanted) is not None
        found = self._chunk_places.find(node, None if is_there else root.type.layout)
        if found is None:
            return False
        chunking, target = found
        own = root.type.layout if chunking.operand is not None else None
        rows = self.find(read if own is None else root)
        others = [self.find(value) for value in node.inputs if value is not read]
        weight, *bias = reversed(others) if node.op == "addmm" else others
        given = [self._as_written(made) if node.pinned else made for made in (rows, weight, *bias)]
        self._communicates = True
        made = self.call(self.carriers.chunked(node, chunking, (own, target)), *given)
        result = self.call(operator.getitem, made, 0)
        if own is not None:
            self.values[root, wanted] = self.call(operator.getitem, made, 1)
        if target is None:
            self.computed(node, Value(node), result)
        else:
            self.values[Value(node), target] = result
        return True

    def _function_of(self, node: Node) -> Function:
        """What runs a call: torch's own function of the operator, but for batch norm of pieces, or if nobody reads what
        it saves, for convolutions whose weights were turned, and for what reads inputs from the host."""
        if self.carriers is not None and node in self.carriers.streamed:
            return self.carriers.streamed[node]
        if node.spec is not None and node.spec.family == "convolution" and not is_plain_weight(node.args[1]):
            return with_weight_as_torch_lays_it(find_function(node.op))
        norm = self._batch_norm_of(node)
        return of_pieces(norm) if self.carriers is not None and node.op in BATCH_NORMS else norm

    def _batch_norm_of(self, node: Node) -> Function:
        if node.op != BATCH_NORM or not self.read.isdisjoint(tuple(node.outputs())[1:3]):
            return find_function(node.op)
        return (
            update_batch_norm
            if self._once and self._segment is None and updates_in_place(self.graph, node)
            else run_batch_norm
        )

    def _passes_by(self, node: Node, carriers: Carriers) -> bool:
        """Skip a node that runs at other places; what is sent around it is made ready for as they do."""
        if not self._confined:
            return False
        assert self._gradients is not None
        placed, mesh, rank = place(node, carriers.mesh), carriers.mesh, carriers.rank
        random = is_random(node.op, node.args)
        if placed.runs_on(mesh, rank) or (random and carriers.draws_whole()):
            return False
        if random:
            carriers.draw(self._function_of(node), placed.axes)
        acting = mesh.rank_at({**mesh.coordinates(rank), **dict(placed.at)})
        operands: list[tuple[fx.Node, ...]] = []
        for i, value in enumerate(node.inputs):
            self._bring(origin(value), value.type.layout)
            self._prepare(operand_move(node, i, placed, mesh, acting), carriers)
            operands.append(self._operands_of(origin(value), value.type.layout))
        for i, value in enumerate(node.outputs()):
            self._prepare(output_move(node, i, placed, mesh, acting), carriers)
            passing = (made for operand in self._gradients.passing_operands(node, i) for made in operands[operand])
            self._absent[value, value.type.layout] = tuple(dict.fromkeys(passing))
        for value in node.outputs():
            self.send(value)
        return True

    def _prepare(self, move: RegionMove | None, carriers: Carriers) -> None:
        if move is not None:
            carriers.prepare(move)

    def _resolve(self, node: Node) -> tuple[Any, ...]:
        def resolve(argument: Any) -> Any:
            if isinstance(argument, Value):
                return self._as_written(self.find(argument)) if node.pinned else self.find(argument)
            return tuple(map(resolve, argument)) if isinstance(argument, tuple) else argument

        return tuple(map(resolve, node.args))

    def _as_written(self, made: fx.Node) -> fx.Node:
        """What a pinned call reads is in the dtype written, whatever autocast the caller runs under."""
        if made not in self._unpinned:
            return made
        return self.call(as_written, made, self._unpinned[made])

    def _apply(self, node: Node, function: Function, op: str, args: Sequence[Any]) -> tuple[fx.Node, ...]:
        """One call: on the caller's device where it makes a tensor; its outputs one by one."""
        self._mark(node)
        known = signature(op)
        positional, keywords = spread_args(op, args, None if any(map(_holds_node, args)) else self.device)
        function = keeping(function) if node in self._shelved and op == node.op else function
        made = self.call(pinned(function) if node.pinned else function, *positional, **keywords)
        self._mark_part(node, made)
        mark_in_place(node, made)
        if known.num_outputs == 1 and not known.returns_list:
            return (made,)
        count = len(node.types) if op == node.op else known.num_outputs
        return tuple(self.call(operator.getitem, made, i) for i in range(count))

    def _emit_local(self, node: Node, function: Function, carriers: Carriers) -> tuple[fx.Node, ...]:
        spec, call = node.spec, plain_call(node)
        placed = place(node, carriers.mesh)
        if spec is None or not placed.splits:
            return self._apply(node, function, node.op, self._resolve(node))
        among = carriers.among_ranks(node)
        if among is not None:
            self._communicates = True
            return self._apply(node, among, node.op, self._resolve(node))
        mesh, rank = carriers.mesh, carriers.rank

        def emit(op: str, *given: Any) -> Any:
            made = self._apply(node, function if op == node.op else find_function(op), op, bind_args(op, given, {}))
            return made if len(made) > 1 else made[0]

        parts = []
        for i, value in enumerate(node.inputs):
            part = self._as_written(self.find(value)) if node.pinned else self.find(value)
            parts.append(self._moved(part, operand_move(node, i, placed, mesh, rank)))
        pieces = placed.pieces(space_of(spec, call).sizes, mesh, rank)
        outputs = run_local(spec, call, pieces, parts, emit)
        self._leave(node)
        return tuple(self._moved(part, output_move(node, i, placed, mesh, rank)) for i, part in enumerate(outputs))

    def _emit_draw(self, node: Node, function: Function, carriers: Carriers) -> tuple[fx.Node, ...]:
        """A random call: pieces draw on their own, copies alike."""
        drawn = carriers.draw(function, place(node, carriers.mesh).axes)
        if carriers.draws_whole():
            return self._draw_whole(node, drawn, carriers)
        return self._emit_local(node, drawn, carriers)

    def _draw_whole(self, node: Node, function: Function, carriers: Carriers) -> tuple[fx.Node, ...]:
        """A random call as one device makes it, on whole tensors; then the part of this rank."""
        feed = iter([self._whole(value, node.pinned, carriers) for value in node.inputs])
        outputs = self._apply(node, function, node.op, map_tensors(node.op, node.args, lambda _: next(feed)))
        made = []
        for part, kind in zip(outputs, node.types, strict=True):
            region = region_of(kind.shape, kind.layout, carriers.mesh, carriers.rank)
            if len(region) > len(kind.shape):
                part = self.call(torch.ops.aten.reshape.default, part, [1])
            for dim, (start, stop) in enumerate(region):
                part = self.call(torch.ops.aten.slice.Tensor, part, dim, start, stop)
            made.append(part)
        return tuple(made)

    def _whole(self, value: Value, pinned: bool, carriers: Carriers) -> fx.Node:
        """An operand put together from its pieces, in the memory order that it has on one device: draws follow it."""
        part = self._as_written(self.find(value)) if pinned else self.find(value)
        layout = value.type.layout
        target = make_layout((axis, Copies() if isinstance(p, Split | At) else p) for axis, p in layout)
        whole = part if target == layout else self.call(carriers.reshard(value, target), part)
        if self._strides is None:
            self._strides = drawn_strides(self.graph, carriers.arriving)
        return self.call(in_strides, whole, self._strides[value])

    def _moved(self, part: fx.Node, move: RegionMove | None) -> fx.Node:
        """A part in the region wanted; nothing happens where every rank has it already."""
        if move is None:
            return part
        assert self.carriers is not None
        self._communicates = True
        return self.call(self.carriers.move(move), part)


def _cast_by_bundles(graph: Graph, bundles: Sequence[Bundle]) -> frozenset[Node]:
    """The casts of parameters that nobody reads but through bundles, which cast on the way."""
    brought = {entry for bundle in bundles for entry in bundle.entries}
    casts = {root.owner for root, _ in brought if isinstance(root.owner, Node)}
    results = (*graph.outputs, *(value for _, value in graph.updates))
    reads = [value for node in graph.nodes if not is_parallel(node) for value in node.inputs]
    for value in (*reads, *(value for value in results if isinstance(value, Value))):
        if (origin(value), value.type.layout) not in brought:
            casts.discard(origin(value).owner)
    return frozenset(node for node in casts if isinstance(node, Node))


def _holds_node(argument: Any) -> bool:
    return any(map(_holds_node, argument)) if isinstance(argument, tuple) else isinstance(argument, fx.Node)
