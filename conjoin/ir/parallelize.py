"""From a graph and a layout for every tensor to a parallel graph: reshards stand wherever two layouts meet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from conjoin.ir.graph import Graph
from conjoin.ir.nodes import Leaf, LeafKind, Node, Source, Value, make_node, retype
from conjoin.ir.reshards import Elementary, is_parallel, reshard_chain
from conjoin.ir.rewriting import Rewriting
from conjoin.ops import Layout, ShardingRule, make_layout, map_tensors


@dataclass(frozen=True, slots=True)
class Choice:
    """The layouts in which a node reads its operands and makes its outputs."""

    operands: tuple[Layout, ...]
    outputs: tuple[Layout, ...]


def choose(rules: Mapping[str, ShardingRule]) -> Choice:
    """The choice that follows a rule on every axis; axes that split the same index nest in the order given."""
    if not rules:
        return Choice((), ())
    first = next(iter(rules.values()))
    return Choice(
        tuple(make_layout((axis, r.operands[i]) for axis, r in rules.items()) for i in range(len(first.operands))),
        tuple(make_layout((axis, r.outputs[i]) for axis, r in rules.items()) for i in range(len(first.outputs))),
    )


class _Placing:
    """A rewriting in which every value has a layout; a reshard is shared by all that read a value so."""

    def __init__(self, graph: Graph, leaves: Mapping[Leaf, Layout]) -> None:
        self.work = Rewriting(graph, lambda leaf: _laid_out(leaf, leaves.get(leaf, ())))
        self._resharded: dict[tuple[Value, Layout], Value] = {}

    def read(self, value: Value, layout: Layout, source: Source | None = None) -> Value:
        """A value of the old graph in a layout."""
        start = self.work.values[value]
        if start.type.layout == layout:
            return start
        if (value, layout) not in self._resharded:
            current = start
            for step, after in _reshards(start.type.layout, layout):
                node = make_node(step.op, (current, *step.attributes), (current.type.laid_out(after),))
                current = Value(self.work.builder.add_node(node, source))
            self._resharded[value, layout] = current
        return self._resharded[value, layout]

    def add_node(self, node: Node, choice: Choice | None) -> None:
        """Add a node in the layouts chosen; without a choice everything is I."""
        source = self.work.graph.source_of(node)
        operands = iter(choice.operands if choice else ((),) * len(node.inputs))
        args = map_tensors(node.op, node.args, lambda value: self.read(value, next(operands), source))
        outputs = choice.outputs if choice else ((),) * len(node.types)
        types = tuple(type.laid_out(layout) for type, layout in zip(node.types, outputs, strict=True))
        made = make_node(node.op, args, types, occurrence=node.occurrence, pinned=node.pinned)
        self.work.builder.add_node(made, source)
        self.work.values.update(zip(node.outputs(), made.outputs(), strict=True))


@lru_cache(1 << 14)
def _reshards(source: Layout, target: Layout) -> tuple[tuple[Elementary, Layout], ...]:
    """The reshards from one layout to another, each with the layout after it."""
    found, layout = [], source
    for step in reshard_chain(source, target):
        layout = step.apply(layout)
        found.append((step, layout))
    return tuple(found)


def parallelize(
    graph: Graph,
    leaves: Mapping[Leaf, Layout],
    choices: Mapping[Node, Choice],
    outputs: Mapping[int, Layout] | None = None,
) -> Graph:
    """The parallel graph; leaves, nodes and outputs that are not named are I on every axis."""
    placing = _Placing(graph, leaves)
    for node in graph.nodes:
        placing.add_node(node, choices.get(node))
    buffers = {leaf.name: leaves.get(leaf, ()) for leaf in graph.leaves_of(LeafKind.BUFFER)}
    wanted = outputs or {}
    return placing.work.finish(
        lambda i, value: placing.read(value, wanted.get(i, ())),
        lambda name, value: placing.read(value, buffers[name]),
    )


def sequential(graph: Graph) -> Graph:
    """The graph on one device: parallelization operators and layouts taken out."""
    placing = _Placing(graph, {})
    for node in graph.nodes:
        if is_parallel(node):
            placing.work.values[Value(node)] = placing.work.values[node.inputs[0]]
        else:
            placing.add_node(node, None)
    return placing.work.finish()


def _laid_out(leaf: Leaf, layout: Layout) -> Leaf:
    return retype(leaf, leaf.type.laid_out(layout))
