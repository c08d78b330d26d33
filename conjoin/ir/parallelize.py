"""From a graph and a layout for every tensor to a parallel graph: reshards stand wherever two layouts meet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from conjoin.ir.builder import GraphBuilder
from conjoin.ir.graph import Graph, Result
from conjoin.ir.nodes import Leaf, LeafKind, Node, Source, Value, make_leaf, make_node
from conjoin.ir.reshards import is_parallel, reshard_chain
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


@dataclass(slots=True)
class _Rewriter:
    """The parallel graph as far as it is built, and where each value of the old one is found in it."""

    builder: GraphBuilder = field(default_factory=GraphBuilder)
    values: dict[Value, Value] = field(default_factory=dict)
    resharded: dict[tuple[Value, Layout], Value] = field(default_factory=dict)

    def read(self, value: Value, layout: Layout, source: Source | None = None) -> Value:
        """A value of the old graph in a layout; the reshard is shared by all that read it so."""
        start = self.values[value]
        if start.type.layout == layout:
            return start
        if (value, layout) not in self.resharded:
            current = start
            for step in reshard_chain(start.type.layout, layout):
                type = current.type.laid_out(step.apply(current.type.layout))
                node = make_node(step.op, (current, *step.attributes), (type,))
                current = Value(self.builder.add_node(node, source))
            self.resharded[value, layout] = current
        return self.resharded[value, layout]

    def add_node(self, node: Node, choice: Choice | None, source: Source | None) -> None:
        """Add a node in the layouts chosen; without a choice everything is I."""
        operands = iter(choice.operands if choice else ((),) * len(node.inputs))
        args = map_tensors(node.op, node.args, lambda value: self.read(value, next(operands), source))
        outputs = choice.outputs if choice else ((),) * len(node.types)
        types = tuple(type.laid_out(layout) for type, layout in zip(node.types, outputs, strict=True))
        made = make_node(node.op, args, types, occurrence=node.occurrence, pinned=node.pinned)
        self.builder.add_node(made, source)
        self.values.update(zip(node.outputs(), made.outputs(), strict=True))


    def finish(self, graph: Graph, outputs: Mapping[int, Layout], buffers: Mapping[str, Layout]) -> Graph:
        """The parallel graph with the boundary of the old one."""

        def result(i: int, value: Result) -> Result:
            return self.read(value, outputs.get(i, ())) if isinstance(value, Value) else value

        return self.builder.finish(
            graph.name,
            training=graph.training,
            inputs=tuple(self.values[value] if isinstance(value, Value) else value for value in graph.inputs),
            outputs=tuple(result(i, value) for i, value in enumerate(graph.outputs)),
            updates=tuple((name, self.read(value, buffers.get(name, ()))) for name, value in graph.updates),
            loss=graph.loss,
            input_structure=graph.input_structure,
            output_structure=graph.output_structure,
        )


def parallelize(
    graph: Graph,
    leaves: Mapping[Leaf, Layout],
    choices: Mapping[Node, Choice],
    outputs: Mapping[int, Layout] | None = None,
) -> Graph:
    """The parallel graph; leaves, nodes and outputs that are not named are I on every axis."""
    work = _Rewriter()
    for leaf in graph.leaves:
        laid = _laid_out(leaf, leaves.get(leaf, ()))
        work.values[Value(leaf)] = work.builder.add_leaf(laid)
    for node in graph.nodes:
        work.add_node(node, choices.get(node), graph.source_of(node))
    buffers = {leaf.name: leaves.get(leaf, ()) for leaf in graph.leaves_of(LeafKind.BUFFER)}
    return work.finish(graph, outputs or {}, buffers)


def _laid_out(leaf: Leaf, layout: Layout) -> Leaf:
    return make_leaf(
        leaf.kind, leaf.name, leaf.type.laid_out(layout), trainable=leaf.trainable, aliases=leaf.aliases, data=leaf.data
    )


def sequential(graph: Graph) -> Graph:
    """The graph on one device: parallelization operators and layouts taken out."""
    work = _Rewriter()
    for leaf in graph.leaves:
        work.values[Value(leaf)] = work.builder.add_leaf(_laid_out(leaf, ()))
    for node in graph.nodes:
        if is_parallel(node):
            work.values[Value(node)] = work.values[node.inputs[0]]
        else:
            work.add_node(node, None, graph.source_of(node))
    return work.finish(graph, {}, {})
