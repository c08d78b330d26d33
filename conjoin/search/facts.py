"""What the strategies ask of a graph: who carries gradients, what depends on the batch, which nodes are layers.

Everything is worked out once for each graph, and what depends on a call alone once for each call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from conjoin.ir import (
    Graph,
    GraphBuilder,
    Leaf,
    LeafKind,
    Node,
    Value,
    expand,
    make_leaf,
    make_node,
    plain_call,
    rules_for,
)
from conjoin.ops import (
    Call,
    Copies,
    Partial,
    ShardingRule,
    Split,
    TensorType,
    call_cache,
    map_tensors,
    output_types,
    space_of,
    spec_for,
)


@dataclass(frozen=True, slots=True)
class Layer:
    """A product of data with weights, summed over an index that both have (linear, matmul, convolution, einsum)."""

    data: int
    """The operand that is not made of weights alone."""
    weight: int
    columns: tuple[ShardingRule, ...]
    """Ways to split the output's features: data B, weight S, output S."""
    rows: tuple[ShardingRule, ...]
    """Ways to split the summed index: data S, weight S, output P."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """Rows of a table of weights, read at addresses (embedding, embedding bag)."""

    columns: tuple[ShardingRule, ...]
    """Ways to split the columns: the addresses B, the table S, the output S."""
    rows: tuple[ShardingRule, ...]
    """Ways to split the rows: the addresses B, the table S, the output P."""


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """One node with the ways it may be placed."""

    node: Node
    inputs: tuple[Value, ...]
    rules: tuple[ShardingRule, ...]
    sizes: Mapping[str, int]
    """The size of every index."""
    is_view: bool
    of_weights: bool
    """Made of weights and constants alone: its layout is decided by whoever reads it first."""
    weights: tuple[bool, ...]
    """Which operands are made of weights alone."""
    layer: Layer | None
    lookup: Lookup | None
    experts: tuple[ShardingRule, ...]
    """Ways to split weights that are stacked, one for each expert; none where they are not."""
    inside: tuple[ShardingRule, ...]
    """Ways to split every expert's weights where rows are sent to them: data B, weights S, output P."""
    expandable: bool
    """Whether it can be replaced by a composition of others."""
    has_parts: bool
    """Whether it can be taken by parts where a dim that it takes whole is split."""

    @property
    def is_convolution(self) -> bool:
        return self.node.op.removeprefix("_").startswith("conv")


@call_cache()
def _space_facts(call: Call) -> tuple[Mapping[str, int], bool, frozenset[int]]:
    """The sizes of the indices, whether the call is a view, and which operands are read at addresses."""
    spec = spec_for(call)
    if spec is None:
        return {}, False, frozenset()
    space = space_of(spec, call)
    addressed = {access.addresses for access in space.notation.operands} & space.notation.summed()
    tables = (i for i, access in enumerate(space.notation.operands) if addressed & access.indices())
    return space.sizes, spec.view, frozenset(tables)


@call_cache()
def _find_layer(call: Call, num_outputs: int, weights: tuple[bool, ...]) -> Layer | None:
    rules = rules_for(call, num_outputs)
    for weight, data in ((i, j) for i, w in enumerate(weights) for j, v in enumerate(weights) if w and not v):
        rows = tuple(
            rule
            for rule in rules
            if rule.index is not None
            and isinstance(rule.operands[weight], Split)
            and isinstance(rule.operands[data], Split)
            and rule.outputs[0] == Partial()
        )
        if rows:
            return Layer(data, weight, _columns(rules, weight, data), rows)
    return None


def _columns(rules: Iterable[ShardingRule], weight: int, data: int) -> tuple[ShardingRule, ...]:
    return tuple(
        rule
        for rule in rules
        if isinstance(rule.operands[weight], Split)
        and rule.operands[data] == Copies()
        and isinstance(rule.outputs[0], Split)
    )


def _find_lookup(call: Call, num_outputs: int, weights: tuple[bool, ...]) -> Lookup | None:
    rules = rules_for(call, num_outputs)
    for table in sorted(_space_facts(call)[2]):
        if not weights[table] or all(weights):
            continue
        address = weights.index(False)
        rows = tuple(
            rule
            for rule in rules
            if isinstance(rule.operands[table], Split)
            and rule.operands[address] == Copies()
            and rule.outputs[0] == Partial()
        )
        return Lookup(_columns(rules, table, address), rows)
    return None


@call_cache()
def _find_experts(call: Call, num_outputs: int, weights: tuple[bool, ...]) -> tuple[ShardingRule, ...]:
    """The ways to split all that is stacked: matrices that rows address, or that stand beside rows dealt to them."""
    rules, tables = rules_for(call, num_outputs), _space_facts(call)[2]
    matrices = [i for i, of_weights in enumerate(weights) if of_weights and len(call.tensors[i].shape) == 3]
    stacked = [i for i in matrices if not tables or i in tables]
    if not tables and _find_layer(call, num_outputs, weights) is None:
        return ()
    dealt = [i for i, of_weights in enumerate(weights) if not of_weights]
    spec = spec_for(call)
    is_owned = spec is not None and bool(spec.owned)
    wanted, made = (Copies(), Partial()) if tables and not is_owned else (Split(0), Split(0))
    return tuple(
        rule
        for rule in rules
        if stacked
        and all(rule.operands[i] == Split(0) for i in stacked)
        and all(rule.operands[i] == wanted for i in dealt)
        and rule.outputs == (made,)
    )


@call_cache()
def _find_inside(call: Call, num_outputs: int, weights: tuple[bool, ...]) -> tuple[ShardingRule, ...]:
    """The ways to split features between the layers of experts that devices own."""
    spec = spec_for(call)
    if spec is None or not spec.owned or not _find_experts(call, num_outputs, weights):
        return ()
    wanted = [Split if of_weights else Copies for of_weights in weights]
    return tuple(
        rule
        for rule in rules_for(call, num_outputs)
        if all(isinstance(placement, kind) for placement, kind in zip(rule.operands, wanted, strict=True))
        and Split(0) not in rule.operands
        and rule.outputs == (Partial(),)
    )


@call_cache()
def expands(call: Call, parts: bool) -> bool:
    """Whether a call expands to another composition: some forms of an operator expand to themselves."""
    spec = spec_for(call)
    if spec is None or (spec.by_parts if parts else spec.expansion) is None:
        return False
    node = alone(call, (LeafKind.INPUT,) * len(call.tensors))
    return expansion_of(node, parts).nodes != (node,)


def alone(call: Call, kinds: Sequence[LeafKind]) -> Node:
    """A declared call on leaves of its own, of these kinds."""
    spec, leaves = spec_for(call), enumerate(kinds)
    assert spec is not None

    def leaf(type: TensorType) -> Value:
        number, kind = next(leaves)
        return Value(make_leaf(kind, f"x{number}", type))

    return make_node(call.op, map_tensors(call.op, call.args, leaf), output_types(spec, call))


def expansion_of(node: Node, parts: bool) -> Graph:
    """What a call on inputs alone expands to."""
    builder = GraphBuilder()
    for value in dict.fromkeys(node.inputs):
        builder.add_leaf(value.owner)  # type: ignore[arg-type]
    builder.add_node(node)
    graph = builder.finish("expansion", training=True, inputs=(), outputs=tuple(node.outputs()))
    return expand(graph, (node,), parts=parts)


class Facts:
    """A graph with what the strategies ask of it."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.legal: dict[tuple[int, ...], tuple[tuple[ShardingRule, ...], tuple[object, ...]]] = {}
        """Rules whose pieces are long enough, beside what they were told by: `Propagation.legal`."""

    @cached_property
    def with_gradient(self) -> frozenset[Value]:
        """The values that a gradient flows back through."""
        found = {Value(leaf) for leaf in self.graph.leaves if leaf.trainable}
        for node in self.graph.nodes:
            if any(value in found for value in node.inputs) and (node.spec is None or node.spec.smooth):
                found.update(value for value in node.outputs() if value.type.dtype.is_floating_point)
        return frozenset(found)

    @cached_property
    def of_inputs(self) -> frozenset[Value]:
        """The values that depend on the inputs of the step."""
        found = {Value(leaf) for leaf in self.graph.leaves_of(LeafKind.INPUT)}
        for node in self.graph.nodes:
            if any(value in found for value in node.inputs):
                found.update(node.outputs())
        return frozenset(found)

    @cached_property
    def of_weights(self) -> frozenset[Value]:
        """The parameters, and the values made of them and of constants alone."""
        found = {Value(leaf) for leaf in self.graph.leaves_of(LeafKind.PARAMETER)}
        for node in self.graph.nodes:
            inputs = node.inputs
            if any(v in found for v in inputs) and not any(v in self.of_inputs for v in inputs):
                found.update(node.outputs())
        return frozenset(found)

    @cached_property
    def nodes(self) -> tuple[NodeFacts, ...]:
        """Every node, in the order of the graph."""
        return tuple(map(self._study, self.graph.nodes))

    @cached_property
    def by_node(self) -> Mapping[Node, NodeFacts]:
        return {facts.node: facts for facts in self.nodes}

    def _study(self, node: Node) -> NodeFacts:
        call, inputs, num_outputs = plain_call(node), node.inputs, len(node.types)
        sizes, is_view, tables = _space_facts(call)
        weights = tuple(value in self.of_weights for value in inputs)
        mixed = any(weights) and not all(weights)
        layer = _find_layer(call, num_outputs, weights) if mixed else None
        experts = _find_experts(call, num_outputs, weights) if mixed else ()
        return NodeFacts(
            node,
            inputs,
            rules_for(call, num_outputs),
            sizes,
            is_view,
            num_outputs > 0 and Value(node) in self.of_weights,
            weights,
            layer,
            _find_lookup(call, num_outputs, weights) if mixed and tables and not (layer or experts) else None,
            experts,
            _find_inside(call, num_outputs, weights) if experts else (),
            expands(call, parts=False),
            expands(call, parts=True),
        )

    def parameters(self) -> tuple[Leaf, ...]:
        """The parameters, in order."""
        return self.graph.leaves_of(LeafKind.PARAMETER)


@call_cache(8)
def study(graph: Graph) -> Facts:
    """The facts of a graph; those of the last few graphs are kept, since one model is planned in several ways."""
    return Facts(graph)


def where_in(graph: Graph, node: Node) -> str:
    """Where a node comes from: a line of the model, else its place in the graph."""
    source = graph.source_of(node)
    return str(source) if source else f"%{graph.numbers[Value(node)]}"
