"""Making one graph out of another: what became of each value, nodes kept or replaced, the same boundary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from conjoin.ir.builder import GraphBuilder, is_random
from conjoin.ir.graph import Graph, Result
from conjoin.ir.nodes import Leaf, Node, Value, make_node
from conjoin.ops import bind_args, call_on, map_tensors, output_types, spec_for


class Rewriting:
    """A new graph as far as it is built; every value of the old one is found in it by `values`."""

    def __init__(self, graph: Graph, leaf: Callable[[Leaf], Leaf] = lambda leaf: leaf) -> None:
        self.graph = graph
        self.builder = GraphBuilder()
        self.kept: set[Node] = set()
        self.values: dict[Value, Value] = {Value(old): self.builder.add_leaf(leaf(old)) for old in graph.leaves}

    def keep(self, node: Node) -> None:
        """The node as it was, on the values as they are now."""
        args = map_tensors(node.op, node.args, lambda value: self.values[value])
        made = make_node(node.op, args, node.types, occurrence=node.occurrence, pinned=node.pinned)
        while self.builder.holds(made) and is_random(made.op, args):  # two draws from what has become one tensor
            made = make_node(node.op, args, node.types, occurrence=made.occurrence + 1, pinned=node.pinned)
        self.builder.add_node(made, self.graph.source_of(node))
        self.kept.add(node)
        self.values.update(zip(node.outputs(), made.outputs(), strict=True))

    def emit(self, node: Node, op: str, *given: Any) -> Any:
        """A call of a declared operator on new values, at the place of an old node; its output, or all of them."""
        bound = bind_args(op, given, {})
        call = call_on(op, bound, lambda value: value.type)
        declared = spec_for(call)
        assert declared is not None, f"{op} is called in a form nobody declared, in place of {node.op}"
        types = output_types(declared, call)
        made = self.builder.add_call(op, bound, types, self.graph.source_of(node), pinned=node.pinned)
        outputs = tuple(made.outputs())
        return outputs if len(outputs) > 1 else outputs[0]

    def finish(
        self,
        output: Callable[[int, Value], Value] | None = None,
        update: Callable[[str, Value], Value] | None = None,
    ) -> Graph:
        """The new graph; `output` and `update` say where results are found when `values` does not."""
        old = self.graph

        def result(i: int, value: Result) -> Result:
            if not isinstance(value, Value):
                return value
            return self.values[value] if output is None else output(i, value)

        made = self.builder.finish(
            old.name,
            training=old.training,
            inputs=tuple(self.values[value] if isinstance(value, Value) else value for value in old.inputs),
            outputs=tuple(result(i, value) for i, value in enumerate(old.outputs)),
            updates=tuple((n, self.values[v] if update is None else update(n, v)) for n, v in old.updates),
            loss=old.loss,
            input_structure=old.input_structure,
            output_structure=old.output_structure,
        )
        return replace(made, rounding=old.rounding)
