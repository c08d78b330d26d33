"""Layers split by columns and then by rows: the policy that Megatron and AutoDDL's 3-D matmul share.

A layer whose data arrives whole is split by columns (its output is then split by features); a layer whose data arrives
split along the index it sums over is split by rows (its output is then a partial sum). Everything between follows. A
split that is gathered before a row-split layer takes it up was not worth making: the pass goes back to that
column-split layer and leaves it whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Protocol

from conjoin.comm import ROWS
from conjoin.cost import ATTENTION
from conjoin.ir import Node, Value
from conjoin.ops import Partial, Placement, ShardingRule, Split
from conjoin.search.facts import Facts, NodeFacts
from conjoin.search.fused_layers import find_fused_at
from conjoin.search.groups import Group
from conjoin.search.heads_apart import find_parted
from conjoin.search.packed_weights import cuts_of_split_weights
from conjoin.search.propagation import Flow, Policy, Propagation, Rules, follow

_SUMS = ("add.Tensor", "sub.Tensor")
Pairs = frozenset[tuple[Node, frozenset[Node]]]
"""Layers split by rows, each with the layers split by columns whose split it took up."""


class LayerPolicy(Policy, Protocol):
    """A policy that splits layers by columns, and can be told to leave some of them."""

    def without(self, nodes: frozenset[Node]) -> LayerPolicy:
        """The same policy that leaves these layers whole too."""
        ...

    def past(self, nodes: frozenset[Node]) -> LayerPolicy:
        """The same policy that splits what is behind these narrow layers, and not them."""
        ...


def legal_of(some: Rules, legal: Rules) -> list[ShardingRule]:
    """Those of some ways that are legal."""
    return [rule for rule in some if rule in legal]


def rows_taking_up(facts: NodeFacts, arriving: tuple[Placement, ...], legal: Rules) -> Rules:
    """The ways to split a layer by rows that need nothing moved; where weights that others use too are stored
    otherwise, the one way that gathers the data."""
    layer = facts.layer
    if layer is None:
        return []
    rows = [rule for rule in legal_of(layer.rows, legal) if rule.operands[layer.data] == arriving[layer.data]]
    return as_stored(facts, arriving, rows) or legal[: min(1, len(rows))]


def as_stored(facts: NodeFacts, arriving: tuple[Placement, ...], some: Rules) -> Rules:
    """Those of some ways of a layer that take its weights as they are stored, where a split is decided already."""
    assert facts.layer is not None
    weight = facts.layer.weight
    stored = arriving[weight]
    return [rule for rule in some if rule.operands[weight] == stored] if isinstance(stored, Split) else some


@dataclass(frozen=True, slots=True)
class ColumnsThenRows:
    """Megatron's policy (Shoeybi et al., 2019); with `sequence`, sums are scattered along the sequence between blocks
    (Korthikanti et al., 2022); the tables of the lookups in `vocabulary` are split by
    rows. Networks of experts are split by experts, whose sum is what a layer split by rows gives; those that rows are
    sent to are split inside, by the features between their layers."""

    left: frozenset[Node] = frozenset()
    narrow: frozenset[Node] = frozenset()
    """Layers that are left as they find their data, so that those behind them are split by columns."""
    sequence: bool = False
    vocabulary: frozenset[Node] = frozenset()
    at_once: bool = False
    """Whether what a layer split by rows makes is summed up where it is made: then that may go beside its product."""

    def __call__(self, facts: NodeFacts, arriving: tuple[Placement, ...], legal: Rules) -> Rules:
        """The ways considered at a node."""
        if facts.layer is not None:
            return self._layer(facts, arriving, legal)
        if facts.experts:
            return legal_of(facts.inside or facts.experts, legal) or follow(facts, arriving, legal)
        if facts.lookup is not None and facts.node in self.vocabulary:
            return legal_of(facts.lookup.rows, legal) or follow(facts, arriving, legal)
        if self.at_once and not self.sequence and _reads_layer(facts, arriving):
            return legal[:1]
        if self.sequence and Partial() in arriving:
            return _scatter(facts, arriving, legal) or follow(facts, arriving, legal)
        return follow(facts, arriving, legal)

    def without(self, nodes: frozenset[Node]) -> ColumnsThenRows:
        """The same policy that leaves these layers whole too."""
        return replace(self, left=self.left | nodes)

    def past(self, nodes: frozenset[Node]) -> ColumnsThenRows:
        """The same policy that splits what is behind these narrow layers, and not them."""
        return replace(self, narrow=self.narrow | nodes)

    def _layer(self, facts: NodeFacts, arriving: tuple[Placement, ...], legal: Rules) -> Rules:
        assert facts.layer is not None
        if facts.node in self.narrow:
            return follow(facts, arriving, legal)
        rows = rows_taking_up(facts, arriving, legal)
        is_split = isinstance(arriving[facts.layer.data], Split)
        if rows or (is_split and not self.sequence):
            return rows or follow(facts, arriving, legal)
        if facts.node not in self.left:
            columns = as_stored(facts, arriving, legal_of(facts.layer.columns, legal))
            if columns:
                return columns
        return legal[:1] if is_split else follow(facts, arriving, legal)


def _reads_layer(facts: NodeFacts, arriving: tuple[Placement, ...]) -> bool:
    """Whether a node reads a partial sum as a layer has made it."""
    pairs = zip(facts.inputs, arriving, strict=True)
    return any(p == Partial() and isinstance(v.owner, Node) and v.owner.op in ROWS for v, p in pairs)


def _scatter(facts: NodeFacts, arriving: tuple[Placement, ...], legal: Rules) -> Rules:
    """The ways that read sums scattered along the sequence: the second of three dims or more, else the first."""
    sums = [i for i, placement in enumerate(arriving) if placement == Partial()]
    if facts.is_view:
        return [rule for rule in legal if rule.index is None and Partial() in rule.outputs]
    dims = {i: Split(1 if len(facts.inputs[i].type.shape) > 2 else 0) for i in sums if facts.inputs[i].type.shape}
    return [rule for rule in legal if len(dims) == len(sums) and all(rule.operands[i] == d for i, d in dims.items())]


def settle_columns(facts: Facts, group: Group, policy: LayerPolicy, earlier: Sequence[Flow]) -> Flow:
    """Run the group through the graph; where the split of a column-split layer would be gathered, go back and leave
    that layer.

    Layers that are left because several were computed as one are noted as stuck: taken apart, they may be split. So are
    reshapes that put the split dim behind another one for a while. Of a pair that is narrow between its layers, and
    makes what is added to such a split (a LoRA) or all heads of an attention (a latent), the second is split instead.
    """
    work = Propagation(facts, group, tuple(earlier))
    work.start({})
    carried: dict[Value, frozenset[Node]] = {}
    summed: dict[Value, Pairs] = {}
    positions = {node.node: position for position, node in enumerate(facts.nodes)}
    fused: dict[Node, None] = {}
    left: set[Node] = set()
    while True:
        gathered, narrow = frozenset[Node](), frozenset[Node]()
        while not gathered and not narrow and len(work.marks) < len(facts.nodes):
            node = facts.nodes[len(work.marks)]
            work.lay_out(node, policy)
            gathered = _carry(facts, node, work, carried) - left
            _note_sums(facts, node, work, carried, summed)
            narrow = _narrow_behind(facts, node, work, summed, gathered) - left
            fused.update({node.node: None} if gathered and find_parted(facts.graph, node.node) else {})
        gathered = gathered or narrow or _carried_out(facts, carried) - left
        if not gathered:
            flow = work.finish()
            return replace(flow, stuck=(*flow.stuck, *fused, *cuts_of_split_weights(facts.graph, flow)))
        found = (find_fused_at(facts.graph, node) for node in gathered)
        fused.update(dict.fromkeys(node for node in found if node is not None))
        policy, gathered = (policy.past(narrow), narrow) if narrow else (policy.without(gathered), gathered)
        left |= gathered
        work.take_back(min(positions[node] for node in gathered))


def _carry(facts: Facts, node: NodeFacts, work: Propagation, carried: dict[Value, frozenset[Node]]) -> frozenset[Node]:
    """Note which column-split layers the outputs of a node owe their split to; those whose split the node undoes.

    A split that is added to an activation which is whole would run on through all the blocks; it is undone, too. A node
    that is yet to be expanded undoes none, unless others read what it reads: a norm at the head of a block is no reason
    to split what goes by the block. Of splits that meet and do not agree that of the fewest weights is given up.
    """
    rule = work.rules.get(node.node)
    if rule is None:
        return frozenset()
    sources = {node.node} if is_column(node, rule) else set()
    gathered: set[Node] = set()
    undone: dict[Value, frozenset[Node]] = {}
    for value, placement in zip(node.inputs, rule.operands, strict=True):
        if value in carried:
            kept = placement == work.placements[value] or (node.node in work.stuck and _all_open(facts, value))
            sources.update(carried[value] if kept else ())
            undone.update({} if kept else {value: carried[value]})
        elif node.node.op in _SUMS and value in facts.with_gradient and value not in facts.of_weights:
            is_cut = isinstance(placement, Split) and not isinstance(work.placements[value], Split)
            gathered.update(*(carried[v] for v in node.inputs if is_cut and v in carried))
    agree = len({work.placements[value] for value in undone}) < 2 or _has_convolutions(facts, undone.values())
    gathered.update(*(undone.values() if agree else (min(undone.values(), key=partial(_num_weights, facts)),)))
    for value in node.node.outputs():
        carried.pop(value, None)
        if sources and isinstance(work.placements[value], Split):
            carried[value] = frozenset(sources)
    return frozenset(gathered)


def _note_sums(
    facts: Facts,
    node: NodeFacts,
    work: Propagation,
    carried: Mapping[Value, frozenset[Node]],
    summed: dict[Value, Pairs],
) -> None:
    """Note what is made of a layer split by rows, up to the next layer: that one, and those whose split it took up."""
    rule = work.rules.get(node.node)
    data = [value for value in node.inputs if value in facts.with_gradient and value not in facts.of_weights]
    found = Pairs()
    if rule is not None and is_row(node, rule):
        found = frozenset({(node.node, frozenset[Node]().union(*(carried.get(value, ()) for value in data)))})
    elif node.layer is None:
        found = found.union(*(summed.get(value, ()) for value in data))
    for value in node.node.outputs():
        summed.pop(value, None)
        summed.update({value: found} if found else {})


def _narrow_behind(
    facts: Facts, node: NodeFacts, work: Propagation, summed: Mapping[Value, Pairs], gathered: Set[Node]
) -> frozenset[Node]:
    """The column-split layers for which this node finds its data whole, if there is less of them than of what would be
    split without: layers whose split is gathered here for a sum, or the second ones of pairs that make all heads."""
    pairs, rule = Pairs().union(*(summed.get(value, ()) for value in node.inputs)), work.rules.get(node.node)
    narrow = frozenset[Node]().union(*(columns for _, columns in pairs))
    if _has_convolutions(facts, [narrow, gathered]):
        return frozenset()
    if node.node.op == ATTENTION and rule is not None and rule.index is None:
        return narrow if _num_weights(facts, narrow) < _num_weights(facts, {row for row, _ in pairs}) else frozenset()
    if node.node.op in _SUMS and _num_weights(facts, narrow) < _num_weights(facts, gathered):
        return narrow
    return frozenset()


def _has_convolutions(facts: Facts, some: Iterable[Set[Node]]) -> bool:
    """Convolutions have few weights for what they make: how many there are says little of what a split saves."""
    return any(facts.by_node[node].is_convolution for layers in some for node in layers)


def _num_weights(facts: Facts, layers: Set[Node]) -> int:
    found = (facts.by_node[node] for node in layers)
    return sum(prod(each.inputs[each.layer.weight].type.shape) for each in found if each.layer is not None)


def _all_open(facts: Facts, value: Value) -> bool:
    """Whether all who read a value can be expanded."""
    return all(node.expandable or node.has_parts for node in map(facts.by_node.__getitem__, facts.graph.users[value]))


def _carried_out(facts: Facts, carried: dict[Value, frozenset[Node]]) -> frozenset[Node]:
    """Without a loss the outputs are gathered for the caller."""
    if facts.graph.loss is not None:
        return frozenset()
    outputs = (value for value in facts.graph.outputs if isinstance(value, Value))
    return frozenset(node for value in outputs for node in carried.get(value, ()))


def is_column(facts: NodeFacts, rule: ShardingRule) -> bool:
    """Whether a way splits a layer by columns."""
    return facts.layer is not None and rule in facts.layer.columns


def is_row(facts: NodeFacts, rule: ShardingRule) -> bool:
    """Whether a way splits a layer by rows."""
    return facts.layer is not None and rule in facts.layer.rows


def split_layers(facts: Facts, flow: Flow) -> list[NodeFacts]:
    """The layers that a flow splits by columns or rows."""
    pairs = ((node, flow.rules[node.node]) for node in facts.nodes)
    return [node for node, rule in pairs if is_column(node, rule) or is_row(node, rule)]


def width_of(facts: NodeFacts) -> int:
    """The largest number of features or of terms in a sum that a layer has."""
    assert facts.layer is not None
    rules = facts.layer.columns + facts.layer.rows
    return max(facts.sizes[rule.index] for rule in rules if rule.index is not None)


def embedding_nodes(facts: Facts) -> frozenset[Node]:
    """The lookups at addresses that come from the batch, as those of words do and those of positions do not."""
    found = (node for node in facts.nodes if node.lookup is not None)
    return frozenset(node.node for node in found if any(value in facts.of_inputs for value in node.inputs))
