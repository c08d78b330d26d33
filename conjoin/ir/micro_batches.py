"""A step in micro-batches, one after the other: gradients and losses of the parts add up to those of the batch.

That is a split of the batch along an axis of *time*, on which the algebra of layouts says what is legal: inputs are
S(0), parameters B, the loss comes out as P. Nothing can be sent between times, so no operator may need a reshard along
this axis. What depends on the batch alone, such as how many targets count, is there as a whole at any time.

The graph of one micro-batch is a graph like any other: each operator in its local form on a piece of the batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from conjoin.errors import StrategyError
from conjoin.ir.builder import GraphBuilder, is_random
from conjoin.ir.expanding import can_expand, drop_unused, expand
from conjoin.ir.graph import Graph
from conjoin.ir.nodes import Leaf, LeafKind, Node, Value, make_leaf, make_node
from conjoin.ir.placing import plain_call, rules_for
from conjoin.ir.structure import LEAF
from conjoin.ops import (
    Call,
    Copies,
    Invariant,
    Partial,
    Placement,
    ShardingRule,
    Split,
    bind_args,
    map_tensors,
    output_types,
    run_local,
    space_of,
    spec_for,
)

WHOLE = " (whole)"
_BATCH_NORM = "_native_batch_norm_legit_functional"
"""What the name of an input ends with that is there as a whole beside its part."""


@dataclass(frozen=True, slots=True)
class Accumulation:
    """How many micro-batches make up a step, and what they are of its inputs."""

    steps: int
    cut: tuple[str, ...]
    """Inputs that are cut along their first dim; the others are the same for all."""
    whole: tuple[tuple[str, str], ...] = ()
    """Inputs of the graph that are others as a whole: name, and name of the other."""


def cut_in_micro_batches(graph: Graph, steps: int, *, own_statistics: bool = False) -> tuple[Graph, Accumulation]:
    """The graph of one of so many micro-batches; StrategyError where the step cannot be taken so.

    With `own_statistics` batch norm takes those of each micro-batch, as in a loop over them, and buffers change with
    every one; otherwise a step means the same as that of the whole batch.
    """
    _check(graph, steps, own_statistics)
    expandable = {node for node in graph.nodes if can_expand(node) and not (own_statistics and _has_statistics(node))}
    expanded = expand(graph, expandable)
    work = _Cutting(expanded, steps, 0)
    made = work.run()
    if _Cutting(expanded, steps, steps - 1).run() != made:
        raise _refusal(graph, steps, "its operators do something else for each part of the batch")
    return made, Accumulation(steps, tuple(leaf.name for leaf in work.cut), tuple(work.whole_names(made)))


def _has_statistics(node: Node) -> bool:
    """Whether a node takes statistics of a batch, beside what it makes of every sample."""
    return node.op == _BATCH_NORM


def _check(graph: Graph, steps: int, own_statistics: bool) -> None:
    outputs = [value for value in graph.outputs if isinstance(value, Value)]
    if not graph.training or graph.loss is None or len(outputs) != 1 or len(graph.input_structure.children) != 4:
        raise _refusal(graph, steps, "micro-batches give a loss and nothing else, and it is not trained like that")
    if graph.updates and not own_statistics:
        names = ", ".join(name for name, _ in graph.updates[:2])
        raise _refusal(graph, steps, f"it takes statistics of a whole batch ({names})")


def _refusal(graph: Graph, steps: int, why: str) -> StrategyError:
    return StrategyError(
        f"A step of {graph.name} was to be taken in {steps} micro-batches. That cannot be: {why}. "
        f"Use fewer micro-batches, or none."
    )


def _cut_inputs(graph: Graph, steps: int) -> tuple[Leaf, ...]:
    """The inputs that have the batch: the size that the leading dims of most inputs share."""
    inputs = [leaf for leaf in graph.leaves_of(LeafKind.INPUT) if leaf.type.shape]
    size = Counter(leaf.type.shape[0] for leaf in inputs).most_common(1)[0][0] if inputs else 0
    if size < steps or size % steps:
        raise _refusal(graph, steps, f"a batch of {size} has no {steps} equal parts")
    return tuple(leaf for leaf in inputs if leaf.type.shape[0] == size)


class _Cutting:
    """The graph of one micro-batch as far as it is built."""

    def __init__(self, graph: Graph, steps: int, number: int) -> None:
        self.graph, self.steps, self.number = graph, steps, number
        self.cut = _cut_inputs(graph, steps)
        self._builder = GraphBuilder()
        self._placed: dict[Value, Placement] = {}
        """Along the axis of time."""
        self._parts: dict[Value, Value] = {}
        self._wholes: dict[Value, Value] = {}
        """What is there as a whole: of parameters and constants, and of the batch where nothing else is in it."""
        self._whole_leaves: dict[Leaf, Leaf] = {}
        self._of_batch = {Value(leaf) for leaf in self.cut}
        self._learned = {Value(leaf) for leaf in graph.leaves if leaf.trainable}
        for leaf in graph.leaves:
            self._add_leaf(leaf)

    def run(self) -> Graph:
        for node in self.graph.nodes:
            self._add(node)
        loss = next(value for value in self.graph.outputs if isinstance(value, Value))
        if self._placed.get(loss) != Partial():
            raise _refusal(self.graph, self.steps, "its loss is not a sum over the samples of a batch")
        for name, value in self.graph.updates:
            if value in self._placed or value in self._of_batch:
                raise _refusal(self.graph, self.steps, f"the buffer {name} is made of all samples of a batch")
        return self._finish(loss)

    def whole_names(self, made: Graph) -> list[tuple[str, str]]:
        kept = {leaf.name for leaf in made.leaves_of(LeafKind.INPUT)}
        return [(new.name, old.name) for old, new in self._whole_leaves.items() if new.name in kept]

    def _add_leaf(self, leaf: Leaf) -> None:
        if leaf not in self.cut:
            self._wholes[Value(leaf)] = self._builder.add_leaf(leaf)
            return
        part = make_leaf(leaf.kind, leaf.name, _shrunk(leaf, self.steps))
        self._parts[Value(leaf)], self._placed[Value(leaf)] = self._builder.add_leaf(part), Split(0)
        whole = make_leaf(leaf.kind, leaf.name + WHOLE, leaf.type)
        self._whole_leaves[leaf], self._wholes[Value(leaf)] = whole, Value(whole)

    def _add(self, node: Node) -> None:
        if self._can_be_whole(node):
            args = map_tensors(node.op, node.args, self._wholes.__getitem__)
            whole = make_node(node.op, args, node.types, occurrence=node.occurrence, pinned=node.pinned)
            self._builder.add_node(whole, self.graph.source_of(node))
            self._wholes.update(zip(node.outputs(), whole.outputs(), strict=True))
        if not any(value in self._placed for value in node.inputs):
            if any(value not in self._wholes for value in node.outputs()):
                raise self._cannot(node, "draws random numbers that all samples share")
            return
        if _has_statistics(node) and self._placed.get(node.inputs[0]) == Split(0):
            self._emit_with_statistics(node)
            return
        rule = self._rule(node)
        if rule is not None:
            self._emit(node, rule)
        elif any(value not in self._wholes for value in node.outputs()):
            raise self._cannot(node, "needs all samples at once")

    def _can_be_whole(self, node: Node) -> bool:
        """Whether what a node makes is there as a whole: of the batch alone, or of all but the batch."""
        if is_random(node.op, node.args) or any(value not in self._wholes for value in node.inputs):
            return False
        of_batch = any(value in self._of_batch for value in node.inputs)
        learned = any(value in self._learned for value in node.inputs)
        self._of_batch.update(node.outputs() if of_batch else ())
        self._learned.update(node.outputs() if learned else ())
        return not (of_batch and learned)

    def _cannot(self, node: Node, why: str) -> StrategyError:
        source = self.graph.source_of(node)
        where = f" ({source.module or source.file}:{source.line})" if source else ""
        return _refusal(self.graph, self.steps, f"{node.op}{where} {why}")

    def _rule(self, node: Node) -> ShardingRule | None:
        """The way in which a node works on a part of the batch, with what is there; rather split than summed up."""
        found = [rule for rule in rules_for(plain_call(node), len(node.types)) if self._suits(node, rule)]
        return min(found, key=lambda rule: sum(isinstance(p, Partial) for p in rule.outputs), default=None)

    def _suits(self, node: Node, rule: ShardingRule) -> bool:
        if all(isinstance(p, Invariant | Copies) for p in rule.outputs):
            return False
        call, spec = plain_call(node), spec_for(plain_call(node))
        if rule.index is not None and spec is not None and space_of(spec, call).sizes[rule.index] % self.steps:
            return False
        return all(self._reads(v, p) for v, p in zip(node.inputs, rule.operands, strict=True))

    def _reads(self, value: Value, wanted: Placement) -> bool:
        if isinstance(wanted, Copies):
            return value in self._wholes
        return self._placed.get(value) == wanted

    def _emit(self, node: Node, rule: ShardingRule) -> None:
        call, spec = plain_call(node), spec_for(plain_call(node))
        pairs = zip(node.inputs, rule.operands, strict=True)
        parts = [self._wholes[v] if isinstance(p, Copies) else self._parts[v] for v, p in pairs]
        if rule.index is None or spec is None:
            feed = iter(parts)
            made: Any = self._call(node, node.op, *map_tensors(node.op, node.args, lambda _: next(feed)))
            outputs = made if isinstance(made, tuple) else (made,)
        else:
            size = space_of(spec, call).sizes[rule.index] // self.steps
            piece = {rule.index: (self.number * size, (self.number + 1) * size)}
            outputs = run_local(spec, call, piece, parts, partial(self._call, node))
        self._parts.update(zip(node.outputs(), outputs, strict=True))
        self._placed.update(zip(node.outputs(), rule.outputs, strict=True))

    def _emit_with_statistics(self, node: Node) -> None:
        """A batch norm of a micro-batch, by its own statistics; what it notes of them is for buffers alone."""
        args = map_tensors(node.op, node.args, lambda v: self._parts[v] if v in self._placed else self._wholes[v])
        call = Call(node.op, map_tensors(node.op, args, lambda value: value.type))
        spec = spec_for(call)
        assert spec is not None, "batch norm is declared"
        made = self._builder.add_call(
            node.op, args, output_types(spec, call), self.graph.source_of(node), pinned=node.pinned
        )
        self._parts.update(zip(node.outputs(), made.outputs(), strict=True))
        self._placed[Value(node)] = Split(0)

    def _call(self, node: Node, op: str, *given: Any) -> Any:
        bound = bind_args(op, given, {})
        call = Call(op, map_tensors(op, bound, lambda value: value.type))
        declared = spec_for(call)
        if declared is None:
            raise self._cannot(node, f"calls {op} in a form nobody declared")
        made = self._builder.add_call(
            op, bound, output_types(declared, call), self.graph.source_of(node), pinned=node.pinned
        )
        outputs = tuple(made.outputs())
        return outputs if len(outputs) > 1 else outputs[0]

    def _finish(self, loss: Value) -> Graph:
        """The boundary of the old graph; inputs that are read as a whole come after those of the loss."""
        old = self.graph
        read = {value.owner for node in self._needed(loss) for value in node.inputs}
        wholes = [new for new in self._whole_leaves.values() if new in read]
        for new in wholes:
            self._builder.add_leaf(new)
        given: list[Any] = [self._given(value) for value in old.inputs]
        children = old.input_structure.children
        place = sum(child.num_leaves for child in children[:3])
        given[place:place] = [Value(new) for new in wholes]
        for_loss = replace(children[2], children=(*children[2].children, *(LEAF for _ in wholes)))
        structure = replace(old.input_structure, children=(*children[:2], for_loss, children[3]))
        made = self._builder.finish(
            old.name,
            training=True,
            inputs=tuple(given),
            outputs=tuple(self._parts[v] if isinstance(v, Value) else v for v in old.outputs),
            updates=tuple((name, self._parts.get(value) or self._wholes[value]) for name, value in old.updates),
            loss=old.loss,
            input_structure=structure,
            output_structure=old.output_structure,
        )
        return drop_unused(replace(made, rounding=old.rounding))

    def _needed(self, loss: Value) -> Sequence[Node]:
        """The nodes that the loss of a micro-batch is made of."""
        graph = self._builder.finish("", training=True, inputs=(), outputs=(self._parts[loss],))
        return drop_unused(graph).nodes

    def _given(self, value: Any) -> Any:
        if not isinstance(value, Value):
            return value
        return self._parts.get(value, self._wholes[value])


def _shrunk(leaf: Leaf, steps: int) -> Any:
    return replace(leaf.type, shape=(leaf.type.shape[0] // steps, *leaf.type.shape[1:]))


def calling_graph(graph: Graph, accumulation: Accumulation) -> Graph:
    """The graph as its caller sees it: without inputs that are others as a whole."""
    names = {name for name, _ in accumulation.whole}
    kept = tuple(v for v in graph.inputs if not (isinstance(v, Value) and _name(v) in names))
    children = graph.input_structure.children
    for_loss = replace(children[2], children=children[2].children[: len(children[2].children) - len(names)])
    structure = replace(graph.input_structure, children=(*children[:2], for_loss, *children[3:]))
    leaves = tuple(leaf for leaf in graph.leaves if leaf.kind is not LeafKind.INPUT or leaf.name not in names)
    return replace(graph, inputs=kept, input_structure=structure, leaves=leaves)


def _name(value: Value) -> str:
    return value.owner.name if isinstance(value.owner, Leaf) else ""


def check_accumulation(graph: Graph, accumulation: Accumulation, *, own_statistics: bool = False) -> None:
    """ValueError where a graph does not take micro-batches as stated."""
    inputs: Mapping[str, Leaf] = {leaf.name: leaf for leaf in graph.leaves_of(LeafKind.INPUT)}
    if not 2 <= accumulation.steps <= 2**20:
        raise ValueError(f"a step of {accumulation.steps} micro-batches")
    if (graph.updates and not own_statistics) or graph.loss is None or not graph.training:
        raise ValueError("micro-batches are for training with a loss, without buffers that change")
    whole = dict(accumulation.whole)
    for name in (*accumulation.cut, *whole, *whole.values()):
        if name not in inputs or not inputs[name].type.shape:
            raise ValueError(f"micro-batches of {name[:60]!r}, which is no input with a batch")
    if len(graph.input_structure.children) != 4 or set(whole.values()) - set(accumulation.cut):
        raise ValueError("inputs as a whole that are not cut")
