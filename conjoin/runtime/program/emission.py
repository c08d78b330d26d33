"""A graph as generated code: what one rank runs, and what is made once for several runs of it or for all steps.

On one device nothing is split and the code is the model's own program.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

from torch import fx

from conjoin.comm import (
    ChunkPlaces,
    Entry,
    MadeOnce,
    find_made_once,
)
from conjoin.ir import (
    Graph,
    Leaf,
    LeafKind,
    Node,
    Segment,
    Value,
    check_registered,
    fixed_nodes,
    kept_between_steps,
    operand_move,
    operators_of,
    output_move,
    place,
)
from conjoin.runtime.movement.absence import is_confined
from conjoin.runtime.program.emitter import Carriers, Emitter
from conjoin.runtime.program.programs import Emitted


def emit_program(
    graph: Graph,
    state: Sequence[Leaf],
    carriers: Carriers | None = None,
    again: Sequence[Segment] = (),
    *,
    once: bool = True,
    apart: bool = False,
) -> Emitted:
    """A graph as FX, over the leaves that are its state.

    Nodes of segments to be run `again` in the backward pass are marked as such. A program that runs `once` in a
    step may write over running statistics. Kept `apart`, parameters of one bundle may get their gradients one by one.
    """
    check_registered(graph)
    emitter = Emitter(graph, carriers, runs_again=bool(again), once=once, apart=apart)
    kept, values = _kept_between_steps(graph, carriers)
    made = _made_once(graph, None if once else carriers)
    operators = operators_of(graph)
    starts = {operators[first]: (i, operators[last]) for i, (first, last) in enumerate(again)}
    emitter.shelve(operators[place] for segment in again for place in segment.kept)
    if carriers is not None and carriers.chunks > 1 and not is_confined(graph):
        emitter.chunk(ChunkPlaces(graph, carriers.mesh, carriers.chunks, again))
    stored = emitter.begin()
    for i, leaf in enumerate(graph.leaves_of(LeafKind.INPUT)):
        emitter.set(Value(leaf), emitter.program.placeholder(f"input_{i}"))
    emitter.take(stored, state)
    emitter.take_made(made, stored, len(state))
    for i, value in enumerate(values, len(state) + len(made.entries)):
        assert isinstance(value.owner, Node)
        emitter.computed(value.owner, value, emitter.call(operator.getitem, stored, i))
    for bundle in carriers.bundles if carriers else ():
        emitter.hold(bundle)
    for leaf in graph.leaves if carriers else ():
        emitter.send(Value(leaf))
    for node in graph.nodes:
        if node in starts:
            emitter.enter(*starts[node])
        if node not in kept:
            emitter.emit_node(node)
    results = [emitter.find(output) if isinstance(output, Value) else output for output in graph.outputs]
    emitter.program.output((*results, *(emitter.find(value) for _, value in graph.updates)))
    fixed = _emit_apart(graph, state, [(value, value.type.layout) for value in values], carriers) if values else None
    if not made.entries or carriers is None:
        return Emitted(emitter.program, fixed)
    casts = made.casts(carriers.mesh)
    making = _emit_apart(graph, state, (*made.entries, *casts.values()), carriers)
    return Emitted(emitter.program, fixed, making, tuple(casts))


def _made_once(graph: Graph, carriers: Carriers | None) -> MadeOnce:
    """What a program that runs several times in a step is given; nothing where branches run at places."""
    if carriers is None or is_confined(graph):
        return MadeOnce(frozenset(), ())
    bundled = {entry for bundle in carriers.bundles for entry in bundle.entries}
    return find_made_once(graph, bundled, carriers.regathered)


def _kept_between_steps(graph: Graph, carriers: Carriers | None) -> tuple[Mapping[Node, None], tuple[Value, ...]]:
    """What is made once for all steps; nothing where branches run at places, which all ranks must come through."""
    if carriers is not None and is_confined(graph):
        return {}, ()
    nodes, values = kept_between_steps(graph)
    if carriers is not None and any(_moves(node, carriers) for node in fixed_nodes(graph)):
        return {}, ()
    return dict.fromkeys(nodes), values


def _moves(node: Node, carriers: Carriers) -> bool:
    """Whether ranks exchange parts around a call."""
    placed = place(node, carriers.mesh)
    operands = (operand_move(node, i, placed, carriers.mesh, carriers.rank) for i in range(len(node.inputs)))
    outputs = (output_move(node, i, placed, carriers.mesh, carriers.rank) for i in range(len(node.types)))
    return any(move is not None for move in (*operands, *outputs))


def _emit_apart(graph: Graph, state: Sequence[Leaf], entries: Sequence[Entry], carriers: Carriers | None) -> fx.Graph:
    """What makes some values, each in a layout, of the state alone."""
    needed, waiting = set[Node](), [root.owner for root, _ in entries]
    while waiting:
        owner = waiting.pop()
        if isinstance(owner, Node) and owner not in needed:
            needed.add(owner)
            waiting += [value.owner for value in owner.inputs]
    emitter = Emitter(graph, carriers)
    emitter.take(emitter.begin(), state)
    for node in graph.nodes:
        if node in needed:
            emitter.emit_node(node)
    emitter.program.output(tuple(emitter.find_in(*entry) for entry in entries))
    return emitter.program
