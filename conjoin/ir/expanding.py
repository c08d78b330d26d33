"""Operators replaced by compositions of others that may be split where they may not: batch norm, mean losses."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

from conjoin.ir.builder import GraphBuilder, is_random
from conjoin.ir.graph import Graph, Result
from conjoin.ir.nodes import Node, Source, Value, make_node
from conjoin.ops import Call, LocalForm, bind_args, map_tensors, output_types, space_of, spec_for


@dataclass(slots=True)
class _Expander:
    builder: GraphBuilder = field(default_factory=GraphBuilder)
    values: dict[Value, Value] = field(default_factory=dict)

    def expand(self, node: Node, source: Source | None) -> None:
        """Put the composition where the node stood."""
        spec = node.spec
        assert spec is not None and spec.expansion is not None, f"{node.op} has no expansion"
        args = map_tensors(node.op, node.args, lambda value: self.values[value])

        def emit(op: str, *given: Any) -> Any:
            bound = bind_args(op, given, {})
            call = Call(op, map_tensors(op, bound, lambda value: value.type))
            declared = spec_for(call)
            assert declared is not None, f"the expansion of {node.op} calls {op} in a form nobody declared"
            made = self.builder.add_call(op, bound, output_types(declared, call), source, pinned=node.pinned)
            outputs = tuple(made.outputs())
            return outputs if len(outputs) > 1 else outputs[0]

        result = spec.expansion(LocalForm(spec, node.call, space_of(spec, node.call), {}, args, emit))
        outputs = result if isinstance(result, tuple) else (result,)
        self.values.update(zip(node.outputs(), outputs, strict=True))

    def keep(self, node: Node, source: Source | None) -> None:
        """The node as it was, on the values as they are now."""
        args = map_tensors(node.op, node.args, lambda value: self.values[value])
        made = make_node(node.op, args, node.types, occurrence=node.occurrence, pinned=node.pinned)
        self.builder.add_node(made, source)
        self.values.update(zip(node.outputs(), made.outputs(), strict=True))


def can_expand(node: Node) -> bool:
    """Whether an operator is declared with an expansion."""
    return node.spec is not None and node.spec.expansion is not None


def expand(graph: Graph, nodes: Collection[Node]) -> Graph:
    """The graph with each of the nodes replaced by its expansion; nothing is left that nobody reads."""
    if not nodes:
        return graph
    work = _Expander()
    for leaf in graph.leaves:
        work.values[Value(leaf)] = work.builder.add_leaf(leaf)
    for node in graph.nodes:
        (work.expand if node in nodes else work.keep)(node, graph.source_of(node))

    def read(result: Result) -> Result:
        return work.values[result] if isinstance(result, Value) else result

    return drop_unused(
        work.builder.finish(
            graph.name,
            training=graph.training,
            inputs=tuple(map(read, graph.inputs)),
            outputs=tuple(map(read, graph.outputs)),
            updates=tuple((name, work.values[value]) for name, value in graph.updates),
            loss=graph.loss,
            input_structure=graph.input_structure,
            output_structure=graph.output_structure,
        )
    )


def drop_unused(graph: Graph) -> Graph:
    """The graph without the nodes that nothing reads, random draws excepted: leaving one out would shift the others."""
    used: set[Node] = set()
    results = [*graph.outputs, *(value for _, value in graph.updates)]
    wanted = {value.owner for value in results if isinstance(value, Value)}
    for node in reversed(graph.nodes):
        if node in wanted or is_random(node.op, node.args):
            used.add(node)
            wanted.update(value.owner for value in node.inputs)
    if len(used) == len(graph.nodes):
        return graph
    kept = [(node, graph.source_of(node)) for node in graph.nodes if node in used]
    sources = tuple(source for _, source in kept)
    return replace(graph, nodes=tuple(node for node, _ in kept), sources=sources if any(sources) else ())
