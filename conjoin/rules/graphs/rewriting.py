"""A graph with one match of a rule replaced by the rule's right side.

The right side is emitted as calls on what the inputs are bound to; everything that read an output of the match reads
the new one. What nothing reads any more is gone; all else is as it was, in the order it had, as far as the new calls
let it. Random draws keep their order always, and what they are drawn for its order in memory. A subexpression of
weights alone (two of them concatenated) is computed in every step like all others.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import cast

from conjoin.ir import (
    Graph,
    LayoutError,
    Leaf,
    Node,
    Replacement,
    Result,
    Source,
    Value,
    add_strides,
    is_random,
    looks_at_order,
    make_node,
    orders_looked_at,
    strides_in,
)
from conjoin.ops import map_tensors
from conjoin.rules.graphs.binding import Refused
from conjoin.rules.graphs.matching import Match
from conjoin.rules.graphs.right_side import Emitter
from conjoin.rules.patterns import Input, Rule, inputs_of

__all__ = ["Refused", "apply", "apply_all", "kept_values", "replacement_of"]


def apply(graph: Graph, rule: Rule, match: Match) -> Graph:
    """The graph after a rewrite, the same object when nothing changes; Refused says why it cannot be.

    >>> from conjoin.ir import parse_graph
    >>> from conjoin.rules.graphs.matching import find_matches
    >>> from conjoin.rules.text import parse_rule
    >>> takes, gives = "input:x f32[2,2]\\ntakes [input:x] in null", "returns [%2] in null"
    >>> calls = "%0: f32[2,2] = t(input:x)\\n%1: f32[2,2] = t(%0)\\n%2: f32[2,2] = relu(%1)"
    >>> graph = parse_graph(f'graph "g" train\\n{takes}\\n{calls}\\n{gives}\\n')
    >>> rule = parse_rule("transposes-cancel", "transpose(transpose(x))", "x")
    >>> [node.op for node in apply(graph, rule, find_matches(graph, rule)[0]).nodes]
    ['relu']
    """
    if not set(match.nodes) <= set(graph.nodes):
        raise Refused("the match is one of another graph")
    return _rebuilt(graph, rule, [_change(rule, match)])


def replacement_of(match: Match) -> Replacement:
    """What applying a match takes away and puts there; Refused says why it cannot be."""
    change, needed = _change(match.rule, match), dict.fromkeys(match.nodes)
    old: dict[Node, None] = {}

    def visit(node: Node) -> None:
        for value in node.inputs:
            if isinstance(value.owner, Node) and value.owner in needed and value.owner not in old:
                visit(value.owner)
        old.setdefault(node)

    for node in needed:
        visit(node)
    return Replacement(tuple(old), change.added, tuple(change.replaced.items()))


def apply_all(graph: Graph, rule: Rule, matches: Iterable[Match]) -> tuple[Graph, tuple[Match, ...]]:
    """The graph after a rewrite at many matches of a rule in it, and at which: those that have no call in common.

    The graph is made anew once, not for every match. Matches that are possible one by one may need each other; then
    they are applied one after another, as far as that goes.
    """
    taken: set[Node] = set()
    picked: list[tuple[Match, _Change]] = []
    for match in matches:
        if taken.isdisjoint(match.nodes):
            try:
                change = _change(rule, match)
            except Refused:
                continue
            if change.replaced:
                taken.update(match.nodes)
                picked.append((match, change))
    try:
        made = _rebuilt(graph, rule, [change for _, change in picked])
    except Refused:
        return _apply_each(graph, rule, [match for match, _ in picked])
    return made, tuple(match for match, _ in picked) if made is not graph else ()


def _apply_each(graph: Graph, rule: Rule, matches: Iterable[Match]) -> tuple[Graph, tuple[Match, ...]]:
    applied = []
    for match in matches:
        try:
            changed = apply(graph, rule, match)
        except Refused:
            continue
        if changed is not graph:
            applied.append(match)
            graph = changed
    return graph, tuple(applied)


@dataclass(frozen=True, slots=True)
class _Change:
    """What one match makes of a graph."""

    added: tuple[Node, ...]
    replaced: Mapping[Value, Value]
    bare: frozenset[object]
    """Outputs that are inputs as well: the right side reads what they were."""


def _change(rule: Rule, match: Match) -> _Change:
    if match.rule != rule:
        raise Refused(f"the match is one of {match.rule.name}, not of {rule.name}")
    try:
        emitter = Emitter(match)
        replaced = dict(_replaced(emitter, match))
    except LayoutError as error:
        raise Refused(str(error)) from None
    bare = (out for out, left in zip(match.outputs, match.form.left, strict=True) if isinstance(left, Input))
    return _Change(tuple(emitter.nodes), {old: new for old, new in replaced.items() if old != new}, frozenset(bare))


def _rebuilt(graph: Graph, rule: Rule, changes: Sequence[_Change]) -> Graph:
    replaced = {old: new for change in changes for old, new in change.replaced.items()}
    if not replaced:
        return graph
    if len(changes) > 1 and any(change.bare for change in changes):
        raise Refused("an output that is an input stays what it was for one match only")
    added = tuple(node for change in changes for node in change.added)
    made = _Program(graph, added, replaced, frozenset().union(*(change.bare for change in changes))).rebuild()
    if len(rule.left) > 1 or set(inputs_of(*rule.left)) - set(inputs_of(*rule.right)):
        _check_parameters(graph, made)
    if any(map(looks_at_order, graph.nodes)):
        _check_order(graph, made, changes)
    return graph if made == graph else made


def _check_order(before: Graph, after: Graph, changes: Sequence[_Change]) -> None:
    """The same values may lie in memory in another order, and what is drawn for them behind then goes to others."""
    for channels_last in (False, True):
        found = dict(strides_in(before, channels_last))
        for change in changes:
            add_strides(found, change.added)
        if all(found[old] == found[new] for change in changes for old, new in change.replaced.items()):
            continue
        if orders_looked_at(before, channels_last) != orders_looked_at(after, channels_last):
            raise Refused("a random draw or an opaque call behind it would meet its elements in another order")


def _check_parameters(before: Graph, after: Graph) -> None:
    """A rule may leave out an input that does not count; optimizers tell a gradient of zeros from none."""
    lost = sorted(leaf.name for leaf in _trained(before) - _trained(after))
    if lost:
        raise Refused(f"{lost[0]} would get no gradient where it gets one of zeros")


def _trained(graph: Graph) -> set[Leaf]:
    """The trainable parameters from which a way leads to the loss, or to an output where there is none."""
    ends = graph.outputs if graph.loss is None else (graph.outputs[graph.loss],)
    waiting, seen = [value.owner for value in ends if isinstance(value, Value)], set[Leaf | Node]()
    while waiting:
        owner = waiting.pop()
        if owner not in seen and isinstance(owner, Node) and owner.op != "detach":
            waiting += [value.owner for value in _facts(owner)[0]]
        seen.add(owner)
    return {owner for owner in seen if isinstance(owner, Leaf) and owner.trainable}


def _replaced(emitter: Emitter, match: Match) -> Iterator[tuple[Value, Value]]:
    """What takes the place of each value; its type must be the same."""
    hosts, seen = dict(match.hosts), set[Value]()
    for output, expr in zip(match.outputs, match.form.right, strict=True):
        new = emitter.emit(expr)
        if isinstance(output, Value):
            pairs = [(output, emitter.value(new))]
        else:
            pairs = [(host.value, emitter.around(host, new)) for host in hosts[output]]  # type: ignore[index]
        for old, value in pairs:
            if old in seen:
                raise Refused("two outputs of the rule are parts of one call")
            if old.type != value.type:
                raise Refused(f"{expr} gives {value.type} where {old.type} is needed")
            seen.add(old)
            yield old, value


@lru_cache(maxsize=1 << 16)
def _facts(node: Node) -> tuple[tuple[Value, ...], bool]:
    """What a node reads, and whether it draws random numbers."""
    return tuple(dict.fromkeys(node.inputs)), is_random(node.op, node.args)


_Item = tuple[bool, Node]
"""A call of the new graph: one that the right side adds (True), or one that was there."""


class _Program:
    """The calls of the new graph, to be put in order."""

    def __init__(
        self, graph: Graph, added: tuple[Node, ...], replaced: Mapping[Value, Value], bare: Collection[object]
    ) -> None:
        self.graph, self.replaced = graph, replaced
        self.added = dict.fromkeys(added)
        self.bare = bare

    def _places(self, values: Iterable[Value]) -> Iterator[int]:
        """Where the calls stand that make some values."""
        owners = {value.owner for value in values}
        return (place for place, node in enumerate(self.graph.nodes) if node in owners)

    def rebuild(self) -> Graph:
        """The new graph."""
        places = {node: place for place, node in enumerate(self.graph.nodes)}
        sources = self.graph.sources or (None,) * len(places)
        first = next(self._places(self.replaced), 0)
        kept: dict[Node, Source | None] = {}
        current: dict[tuple[bool, Value], Value] = {}
        for item in self._alive(self._order(first)):
            added, node = item
            place = first if added else places[node]
            new = node if place < first else self._remade(item, current)
            while new in kept and _facts(node)[1]:  # two draws from what has become one tensor are still two
                new = make_node(new.op, new.args, new.types, occurrence=new.occurrence + 1, pinned=new.pinned)
            if new is not node:
                current.update(zip(((added, v) for v in node.outputs()), new.outputs(), strict=True))
            kept.setdefault(new, sources[place])

        def result(value: Result) -> Result:
            if not isinstance(value, Value):
                return value
            end = self._resolve(value)
            return current.get(end, end[1])

        return replace(
            self.graph,
            nodes=tuple(kept),
            sources=tuple(kept.values()) if any(kept.values()) else (),
            outputs=tuple(map(result, self.graph.outputs)),
            updates=tuple((name, cast(Value, result(value))) for name, value in self.graph.updates),
            labels=(),
        )

    def _remade(self, item: _Item, current: Mapping[tuple[bool, Value], Value]) -> Node:
        """A call on what its operands are now."""
        node, now = item[1], dict[Value, Value]()
        for value in _facts(node)[0]:
            end = self._operand(item, value)
            now[value] = current.get(end, end[1])
        if all(old == new for old, new in now.items()):
            return node
        args = map_tensors(node.op, node.args, now.__getitem__)
        return make_node(node.op, args, node.types, occurrence=node.occurrence, pinned=node.pinned)

    def _operand(self, item: _Item, value: Value) -> tuple[bool, Value]:
        """Where an operand comes from: a value of an added call (True), or one that was there."""
        if item[0] and value.owner in self.added:
            return True, value
        if item[0] and value in self.bare:
            return False, value
        return self._resolve(value) if value in self.replaced else (False, value)

    def _resolve(self, value: Value) -> tuple[bool, Value]:
        seen = {value}
        while value in self.replaced:
            value = self.replaced[value]
            if value.owner in self.added:
                return True, value
            if value in seen:
                raise Refused("its outputs would be each other")
            seen.add(value)
        return False, value

    def _needs(self, item: _Item) -> set[_Item]:
        ends = (self._operand(item, value) for value in _facts(item[1])[0])
        return {(made, end.owner) for made, end in ends if isinstance(end.owner, Node)}

    def _order(self, first: int) -> list[_Item]:
        """All calls in the order they had, each after what it reads.

        Only those are moved that stand between the first output of the match and the last thing that the right side
        needs: before and after them nothing has to be.
        """
        needed = {value for node in self.added for value in _facts(node)[0]} | {*self.replaced, *self.replaced.values()}
        last = max(self._places(needed), default=first - 1)
        nodes = self.graph.nodes
        between: list[_Item] = [*((True, node) for node in self.added), *((False, n) for n in nodes[first : last + 1])]
        draws: list[_Item] = [item for item in between if _facts(item[1])[1]]
        order = _sorted(between, self._needs, dict(zip(draws[1:], draws, strict=False)))
        if len(order) < len(between):
            if len(_sorted(between, self._needs, {})) == len(between):
                raise Refused("random draws would change their order")
            raise Refused("one of its outputs is needed to compute an input of another: the result would need itself")
        return [*((False, node) for node in nodes[:first]), *order, *((False, node) for node in nodes[last + 1 :])]

    def _alive(self, order: list[_Item]) -> list[_Item]:
        """The calls that something reads, and random draws: leaving one out would shift the others."""
        results = [*self.graph.outputs, *(value for _, value in self.graph.updates)]
        ends = [self._resolve(value) for value in results if isinstance(value, Value)]
        wanted: set[tuple[bool, object]] = {(made, end.owner) for made, end in ends}
        kept = []
        for item in reversed(order):
            if item in wanted or _facts(item[1])[1]:
                kept.append(item)
                wanted |= self._needs(item)
        return kept[::-1]


def _sorted(items: list[_Item], needs: Callable[[_Item], set[_Item]], later: Mapping[_Item, _Item]) -> list[_Item]:
    """Items as far as they can be put each after what it needs, else in order; `later` adds to what they need."""
    rank = {item: i for i, item in enumerate(items)}
    users: dict[_Item, list[_Item]] = {}
    waiting: dict[_Item, int] = {}
    for item in items:
        before = {need for need in needs(item) if need in rank} | ({later[item]} if item in later else set())
        waiting[item] = len(before)
        for need in before:
            users.setdefault(need, []).append(item)
    ready = [rank[item] for item, count in waiting.items() if count == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        item = items[heapq.heappop(ready)]
        order.append(item)
        for user in users.get(item, ()):
            waiting[user] -= 1
            if waiting[user] == 0:
                heapq.heappush(ready, rank[user])
    return order


def kept_values(graph: Graph, match: Match) -> tuple[Value, ...]:
    """The values inside of a match that stay computed, since something else reads them."""
    outputs: Iterable[object] = match.outputs
    inside = [v for node in match.nodes for v in node.outputs() if v not in outputs]
    results = {*graph.outputs, *(value for _, value in graph.updates)}
    return tuple(v for v in inside if v in results or any(user not in match.nodes for user in graph.users.get(v, ())))
