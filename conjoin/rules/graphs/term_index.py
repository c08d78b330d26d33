"""The terms of a graph, found by the rule operator they read as and by their operands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import or_

from conjoin.ir import Graph, Node, Value
from conjoin.rules.graphs.bindings import readings_of
from conjoin.rules.graphs.terms import Literal, Reading, Term, Virtual


@dataclass(frozen=True, slots=True)
class Host:
    """The value whose call a virtual output is part of, and the readings and operands that lead down to it."""

    value: Value
    path: tuple[tuple[Reading, int], ...]


class Index:
    """The terms of a graph by how they read; made once for many rules."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.by_op: dict[str, dict[Term, None]] = {}
        self.by_operand: dict[tuple[str, int, Term], dict[Term, None]] = {}
        self._around: dict[Virtual, list[tuple[Term, tuple[Reading, int]]]] = {}
        self._seen: set[Virtual] = set()
        for node in graph.nodes:
            for value in node.outputs():
                self._add(value)

    def _add(self, term: Term) -> None:
        for op, readings in readings_of(term).by_op.items():
            self.by_op.setdefault(op, {})[term] = None
            for reading in readings:
                for place, arg in enumerate(reading.args):
                    self.by_operand.setdefault((op, place, arg), {})[term] = None
                    if isinstance(arg, Virtual):
                        self._around.setdefault(arg, []).append((term, (reading, place)))
                        if arg not in self._seen:
                            self._seen.add(arg)
                            self._add(arg)

    @cached_property
    def places(self) -> Mapping[Node, int]:
        return {node: place for place, node in enumerate(self.graph.nodes)}

    @cached_property
    def _needs(self) -> Mapping[Node, int]:
        """For every call the set of calls it needs, a bit for each place."""
        found: dict[Node, int] = {}
        for node in self.graph.nodes:
            owners = {value.owner for value in node.inputs if isinstance(value.owner, Node)}
            found[node] = reduce(or_, (found[owner] | 1 << self.places[owner] for owner in owners), 0)
        return found

    def are_apart(self, one: Term, other: Term) -> bool:
        """Whether neither of two terms is needed to compute the other."""
        a, b = self._owner(one), self._owner(other)
        if a is None or b is None or a is b:
            return True
        return not (self._needs[a] >> self.places[b] & 1 or self._needs[b] >> self.places[a] & 1)

    def _owner(self, term: Term) -> Node | None:
        """The call that computes a term, by itself or as a part."""
        hosts = self.hosts(term) if isinstance(term, Virtual) else ()
        value = hosts[0].value if hosts else term
        return value.owner if isinstance(value, Value) and isinstance(value.owner, Node) else None

    def hosts(self, term: Virtual) -> tuple[Host, ...]:
        """Every value that a virtual term is part of, by one way each."""
        found: dict[Value, Host] = {}
        seen = {term}
        queue: list[tuple[Virtual, tuple[tuple[Reading, int], ...]]] = [(term, ())]
        while queue:
            inner, path = queue.pop(0)
            for outer, step in self._around.get(inner, ()):
                way = (step, *path)
                if isinstance(outer, Value):
                    found.setdefault(outer, Host(outer, way))
                elif isinstance(outer, Virtual) and outer not in seen:
                    seen.add(outer)
                    queue.append((outer, way))
        return tuple(found.values())

    def name(self, term: Term) -> str:
        """How a reader finds a term: `%12 conv2d`."""
        if isinstance(term, Literal):
            return str(term.number)
        if isinstance(term, Virtual):
            hosts = self.hosts(term)
            return f"{term.op} in {self.name(hosts[0].value)}" if hosts else term.op
        if not isinstance(term.owner, Node):
            return str(term.owner)
        number = f".{term.index}" if len(term.owner.types) > 1 else ""
        place = self.places.get(term.owner)
        return f"{'%?' if place is None else self.graph.label_of(place)}{number} {term.owner.op}"
