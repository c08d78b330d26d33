"""One group of axes runs through a graph: in order, every node takes one of the ways it may be placed on the group.

A policy narrows the ways; among those left the one is taken that moves the fewest bytes of activations, then the
fewest bytes of weights, then the one that divides the work. In numbers, for a rule r of a node:

    sum over operands of step_bytes(where it lies -> r.operand)  +  sum over outputs of sum_bytes(r.output)

A reshard that another reader needs already is free. Values made of weights alone have no place of their own: the first
reader decides it, back to the parameters, which are stored where that reader wants its part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Protocol

from conjoin.cost import ATTENTION
from conjoin.ir import Graph, Leaf, LeafKind, Node, Value
from conjoin.ops import Copies, Invariant, Partial, Placement, ShardingRule, Split
from conjoin.search.facts import Facts, NodeFacts
from conjoin.search.groups import Group
from conjoin.search.reshard_bytes import step_bytes, sum_bytes

Rules = Sequence[ShardingRule]
_STACK = 3
"""Dims of the matrices of all experts: too large to be stored whole by all, they are where pieces must change dims."""


class Policy(Protocol):
    """What makes a strategy: which of the legal ways of a node it considers."""

    def __call__(self, facts: NodeFacts, arriving: tuple[Placement, ...], legal: Rules) -> Rules:
        """Some of the legal ways, given where the operands lie; the first legal one is always all I."""
        ...


def follow(facts: NodeFacts, arriving: tuple[Placement, ...], legal: Rules) -> Rules:
    """What arrives split stays so where a way allows it; nothing else is split. Sums are passed on or
    reduced, and always reduced before a layer, which would otherwise have to sum its weights' gradients."""
    operands = enumerate(zip(arriving, facts.weights, strict=True))
    split = [
        (i, placement) for i, (placement, of_weights) in operands if not of_weights and isinstance(placement, Split)
    ]
    if split:
        return [rule for rule in legal if all(rule.operands[i] == placement for i, placement in split)] or legal
    if facts.layer is not None or all(placement == Invariant() for placement in arriving):
        return legal[:1]
    unsplit = [rule for rule in legal if rule.index is None]
    if all(placement == Partial() for placement in arriving):  # several sums are added up as one
        if len(arriving) > 1 == len(facts.node.types):
            return [rule for rule in unsplit if rule.operands == arriving] or unsplit
        if len(facts.node.types) > 1 == len(arriving):
            return legal[:1]
    return unsplit


@dataclass(frozen=True, slots=True)
class Flow:
    """How a group runs through a graph: where the leaves are stored, the way of every node, where its outputs lie."""

    group: Group
    leaves: Mapping[Leaf, Placement]
    rules: Mapping[Node, ShardingRule]
    placements: Mapping[Value, Placement]
    stuck: tuple[Node, ...] = ()
    """Nodes that gather or exchange what arrives split, and need not once they are expanded. The flow goes on as if
    they were, so that all of them are found at once; it is no flow to make a plan from."""


@dataclass(frozen=True, slots=True)
class Bytes:
    """What a way of placing a node moves, for each device and step."""

    activations: float = 0.0
    weights: float = 0.0

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(self.activations + other.activations, self.weights + other.weights)


def propagate(
    facts: Facts, group: Group, inputs: Mapping[Leaf, Placement], policy: Policy, earlier: Sequence[Flow] = ()
) -> Flow:
    """Run a group through the graph, beside the groups that ran before; inputs that are not named are I."""
    work = Propagation(facts, group, tuple(earlier))
    work.start(inputs)
    for node in facts.nodes:
        work.lay_out(node, policy)
    return work.finish()


def fits(facts: NodeFacts, rule: ShardingRule, degree: int, earlier: Sequence[Flow]) -> bool:
    """Whether every piece is at least one element long, beside what earlier groups split."""
    if rule.index is None:
        return True
    before = [(flow.group.degree, flow.rules[facts.node]) for flow in earlier]
    ways = degree
    for other_degree, other in before:
        ways *= other_degree if other.index == rule.index else 1
    if ways > facts.sizes[rule.index]:
        return False
    shapes = [value.type.shape for value in facts.inputs] + [type.shape for type in facts.node.types]
    for i, (shape, placement) in enumerate(zip(shapes, (*rule.operands, *rule.outputs), strict=True)):
        if isinstance(placement, Split):
            same = [(d, o) for d, o in before if (*o.operands, *o.outputs)[i] == placement]
            pieces = degree * prod(other_degree for other_degree, _ in same)
            if pieces > shape[placement.dim] or any(other.index != rule.index for _, other in same):
                return False
    return True


def _is_gathered_for(node: NodeFacts, arriving: tuple[Placement, ...], rule: ShardingRule) -> bool:
    """Whether a node gathers on purpose: rows for experts, keys for queries that are split themselves."""
    return rule in node.experts or (node.node.op == ATTENTION and isinstance(arriving[0], Split))


@dataclass(slots=True)
class Propagation:
    """A flow as far as it is decided; the nodes are placed in order, and the last ones can be taken back."""

    facts: Facts
    group: Group
    earlier: tuple[Flow, ...]
    rules: dict[Node, ShardingRule] = field(default_factory=dict)
    placements: dict[Value, Placement] = field(default_factory=dict)
    reads: dict[Value, tuple[Placement, ...]] = field(default_factory=dict)
    """The placements in which each value is read so far."""
    stuck: dict[Node, None] = field(default_factory=dict)
    pulled: dict[tuple[Value, Placement], tuple[ShardingRule | None, float]] = field(default_factory=dict)
    """For values of weights that nobody has read yet: the best way to make them so, and its bytes."""
    undo: list[Callable[[], object]] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    """How long `undo` was before each node was placed."""

    def start(self, inputs: Mapping[Leaf, Placement]) -> None:
        """Place the leaves, but for the parameters."""
        for leaf in self.facts.graph.leaves:
            if leaf.kind is not LeafKind.PARAMETER:
                self.placements[Value(leaf)] = inputs.get(leaf, Invariant())

    def lay_out(self, node: NodeFacts, policy: Policy) -> None:
        """Choose the way of the next node; one that is made of weights alone waits for its first reader."""
        self.marks.append(len(self.undo))
        if node.of_weights:
            return
        arriving = tuple(self.placements.get(value, Invariant()) for value in node.inputs)
        candidates = policy(node, arriving, self.legal(node))
        rule = candidates[0]
        if len(candidates) > 1:
            rule = min(enumerate(candidates), key=lambda option: (*self._rank(node, option[1]), option[0]))[1]
        self._decide(node, rule)
        if (node.expandable or node.has_parts) and not _is_gathered_for(node, arriving, rule):
            self._pass_by(node, arriving, rule)

    def take_back(self, num_kept: int) -> None:
        """Forget all that was decided after the first so many nodes."""
        length = self.marks[num_kept]
        while len(self.undo) > length:
            self.undo.pop()()
        del self.marks[num_kept:]
        self.pulled.clear()

    def finish(self) -> Flow:
        """The flow, when all nodes are placed; weights that nobody read are I."""
        for node in self.facts.nodes:
            if node.node not in self.rules:
                self._decide(node, node.rules[0])
        for leaf in self.facts.parameters():
            self.placements.setdefault(Value(leaf), Invariant())
        leaves = {leaf: self.placements[Value(leaf)] for leaf in self.facts.graph.leaves}
        return Flow(self.group, leaves, self.rules, self.placements, tuple(self.stuck))

    def _pass_by(self, node: NodeFacts, arriving: tuple[Placement, ...], rule: ShardingRule) -> None:
        """Note a node that is to be expanded; its outputs are taken to lie as the operand of their shape."""
        for value, placement, wanted in zip(node.inputs, arriving, rule.operands, strict=True):
            if isinstance(placement, Split) and wanted != placement:
                self._set(self.stuck, node.node, None)
                for output in node.node.outputs():
                    if output.type.shape == value.type.shape:
                        self._set(self.placements, output, placement)
                return

    def _set(self, table: dict[Any, Any], key: Any, value: Any) -> None:
        """Write to one of the tables so that it can be taken back."""
        if key in table:
            before = table[key]
            self.undo.append(lambda: table.__setitem__(key, before))
        else:
            self.undo.append(lambda: table.pop(key))
        table[key] = value

    def legal(self, node: NodeFacts) -> tuple[ShardingRule, ...]:
        """The ways of a node whose pieces are long enough: found once for equal calls, which share their rules, and as
        many groups that split them alike; by identity, so that what is told apart is held."""
        before = tuple(flow.rules[node.node] for flow in self.earlier)
        degrees = self.group.degree, *(flow.group.degree for flow in self.earlier)
        key = id(node.rules), *map(id, before), *degrees
        if key not in self.facts.legal:
            kept = tuple(rule for rule in node.rules if fits(node, rule, self.group.degree, self.earlier))
            self.facts.legal[key] = kept, (node.rules, before)
        return self.facts.legal[key][0]

    def _rank(self, node: NodeFacts, rule: ShardingRule) -> tuple[float, float, bool, bool]:
        moved = Bytes()
        for value, placement in dict.fromkeys(zip(node.inputs, rule.operands, strict=True)):
            moved += self._read_bytes(value, placement)
        for value, placement in zip(node.node.outputs(), rule.outputs, strict=True):
            moved += Bytes(sum_bytes(placement, self._local_bytes(value), self.group.degree))
        sums = Partial() in rule.outputs
        unsplit = rule.index is None
        return round(moved.activations, 3), round(moved.weights, 3), unsplit, sums != node.is_view

    def _local_bytes(self, value: Value) -> float:
        """The bytes of what the group has of a value: earlier groups may have split it."""
        size = float(value.type.bytes)
        for flow in self.earlier:
            if isinstance(flow.placements[value], Split):
                size /= flow.group.degree
        return size

    def _step_bytes(self, value: Value, source: Placement, target: Placement) -> float:
        with_gradient = value in self.facts.with_gradient
        return step_bytes(source, target, self._local_bytes(value), self.group.degree, with_gradient)

    def _read_bytes(self, value: Value, wanted: Placement) -> Bytes:
        if value not in self.placements:
            return Bytes(weights=self._pull(value, wanted)[1])
        sources = (self.placements[value], *self.reads.get(value, ()))
        moved = min(self._step_bytes(value, source, wanted) for source in sources)
        return Bytes(weights=moved) if value in self.facts.of_weights else Bytes(moved)

    def _pull(self, value: Value, wanted: Placement) -> tuple[ShardingRule | None, float]:
        """The best way to make a value of weights that nobody has read yet, and the bytes it takes."""
        key = value, wanted
        if key not in self.pulled:
            self.pulled[key] = self._best_pull(value, wanted)
        return self.pulled[key]

    def _best_pull(self, value: Value, wanted: Placement) -> tuple[ShardingRule | None, float]:
        if isinstance(value.owner, Leaf):
            stored = self._storage(value, wanted)
            return None, self._step_bytes(value, stored, wanted)
        node = self.facts.by_node[value.owner]
        legal = self.legal(node)
        best, fewest = legal[0], self._step_bytes(value, Invariant(), wanted)
        is_stack = len(value.type.shape) == _STACK and isinstance(wanted, Split)
        for rule in legal:
            made = rule.outputs[value.index]
            if made == wanted or (is_stack and isinstance(made, Split)):
                pairs = zip(node.inputs, rule.operands, strict=True)
                moved = sum(self._read_bytes(*pair).weights for pair in pairs)
                moved += 0 if made == wanted else self._step_bytes(value, made, wanted)
                if moved <= fewest:
                    best, fewest = rule, moved
        return best, fewest

    def _storage(self, value: Value, wanted: Placement) -> Placement:
        """Where a parameter is stored for its first reader: split as that wants it if it is long enough, else I."""
        if not isinstance(wanted, Split):
            return Invariant()
        ways = self.group.degree
        for flow in self.earlier:
            ways *= flow.group.degree if flow.placements[value] == wanted else 1
        return wanted if ways <= value.type.shape[wanted.dim] else Invariant()

    def _decide(self, node: NodeFacts, rule: ShardingRule) -> None:
        self._set(self.rules, node.node, rule)
        for value, placement in zip(node.inputs, rule.operands, strict=True):
            self._read(value, placement)
        for value, placement in zip(node.node.outputs(), rule.outputs, strict=True):
            self._set(self.placements, value, placement)

    def _read(self, value: Value, wanted: Placement) -> None:
        """Decide what a reader makes necessary: its reshard, and the places of weights that it is the first to read."""
        if value not in self.placements:
            rule, _ = self._pull(value, wanted)
            if isinstance(value.owner, Leaf):
                self._set(self.placements, value, self._storage(value, wanted))
            else:
                assert rule is not None
                self._decide(self.facts.by_node[value.owner], rule)
            self.pulled.clear()
        if wanted != self.placements[value]:
            self._set(self.reads, value, (*self.reads.get(value, ()), wanted))


def output_placements(graph: Graph, flow: Flow, *, is_stage: bool = False) -> dict[int, Placement]:
    """Where the outputs are left: the loss is I, and all are where there is no loss; others lie as they are made, and
    so does what a stage makes for others."""
    kept: dict[int, Placement] = {}
    for i, value in enumerate(graph.outputs):
        if isinstance(value, Value) and i != graph.loss and (is_stage or graph.loss is not None):
            placement = flow.placements[value]
            if not isinstance(placement, Partial | Copies):
                kept[i] = placement
    return kept
