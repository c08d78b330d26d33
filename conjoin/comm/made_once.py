"""What is made of parameters alone: the same for all micro-batches of a step, so it is made once for all of them.

Matrices cut from one that holds several, casts, transposes, norms of weights, and parameters that are used in another
layout than they are stored in, as far as they do not travel in bundles, which know by themselves what to do once.
Gradients of what is made are added up as it lies, and go back the way it was made once, when micro-batches are over.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from conjoin.comm.gradients import Entry
from conjoin.comm.route import backward_route, reshard
from conjoin.ir import Graph, Leaf, LeafKind, Node, Value, is_parallel, is_random, origin
from conjoin.machine import Mesh
from conjoin.ops import CAST


@dataclass(frozen=True, slots=True)
class MadeOnce:
    """What a step makes once."""

    nodes: frozenset[Node]
    entries: tuple[Entry, ...]
    """What others read of it: values of these nodes and parameters, each in a layout, in the order of reading."""

    def casts(self, mesh: Mesh) -> dict[int, Entry]:
        """By place among the entries, what those are cast from that are read as they are cast, or where nothing is
        sent between."""
        found: dict[int, Entry] = {}
        for i, (root, layout) in enumerate(self.entries):
            if isinstance(root.owner, Node) and root.owner.op == CAST:
                source, own = root.owner.inputs[0], root.type.layout
                there = reshard(root.type.shape, own, layout, mesh)
                steps = (*there.steps, *backward_route(there, mesh).steps)
                floats = source.type.dtype.is_floating_point and root.type.dtype.is_floating_point
                if floats and source.type.layout == own and all(step.kind.is_local for step in steps):
                    found[i] = origin(source), layout
        return found


def find_made_once(graph: Graph, bundled: Collection[Entry], regathered: Collection[str] = ()) -> MadeOnce:
    """What of a graph is made of parameters alone, and does not come in bundles; parameters that are to be gathered
    again whenever they are used are left."""
    updated = {name for name, _ in graph.updates}
    once: dict[Node, None] = {}
    depending: set[Node] = set()
    """Those of them that a parameter goes into: others are made once for all steps."""

    def holds(value: Value) -> bool:
        root = origin(value)
        owner, moves = root.owner, value.type.layout != root.type.layout
        if moves and (root, value.type.layout) in bundled:
            return False
        if isinstance(owner, Node):
            return owner in once
        is_stored = owner.kind is not LeafKind.INPUT and not (owner.kind is LeafKind.BUFFER and owner.name in updated)
        return is_stored and not (moves and owner.name in regathered)

    def depends(value: Value) -> bool:
        owner = origin(value).owner
        return owner in depending if isinstance(owner, Node) else owner.kind is LeafKind.PARAMETER

    operators = [node for node in graph.nodes if not is_parallel(node)]
    for node in operators:
        if node.inputs and not is_random(node.op, node.args) and all(map(holds, node.inputs)):
            once[node] = None
            if any(map(depends, node.inputs)):
                depending.add(node)
    reads = [value for node in operators if node not in depending for value in node.inputs]
    results = [value for value in (*graph.outputs, *(v for _, v in graph.updates)) if isinstance(value, Value)]
    found: dict[Entry, None] = {}
    for value in (*reads, *results):
        root, layout = origin(value), value.type.layout
        is_brought = isinstance(root.owner, Leaf) and layout != root.type.layout and depends(value) and holds(value)
        is_made = isinstance(root.owner, Node) and root.owner in depending
        if (is_made or is_brought) and (root, layout) not in bundled:
            found[root, layout] = None
    return MadeOnce(frozenset(depending), tuple(found))
