"""Why a rule does not apply: the places where most of it fits, and what does not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from conjoin.ir import Graph
from conjoin.rules.graphs.bindings import readings_of
from conjoin.rules.graphs.matching import Match, Matcher
from conjoin.rules.graphs.rewriting import Refused, apply
from conjoin.rules.graphs.sizes import sizing_of
from conjoin.rules.graphs.term_index import Index
from conjoin.rules.graphs.terms import Term
from conjoin.rules.patterns import Apply, Rule, operators_in

_MOST = 20
_ALONE = "no other call shares its inputs as the rule asks"


@dataclass(frozen=True, slots=True)
class NearMiss:
    """A place where a rule does not apply."""

    where: str
    reason: str
    num_fitting: int
    """How much of the rule fits there, in operators."""

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


def why(graph: Graph, rule: Rule, given: Mapping[str, Any] | None = None) -> list[NearMiss]:
    """Why a rule does not apply where it almost does, the nearest first; places where it applies are left out.

    >>> from conjoin.ir import parse_graph
    >>> from conjoin.rules.text import parse_rule
    >>> takes, gives = "input:x f32[2,2]\\ntakes [input:x] in null", "returns [%1] in null"
    >>> calls = "%0: f32[2,2] = relu(input:x)\\n%1: f32[2,2] = t(%0)"
    >>> graph = parse_graph(f'graph "g" train\\n{takes}\\n{calls}\\n{gives}\\n')
    >>> print(*why(graph, parse_rule("transposes-cancel", "transpose(transpose(x))", "x")))
    %1 t: %0 relu stands where the rule has transpose
    """
    sizing, root, index = sizing_of(rule), rule.left[0], Index(graph)
    if isinstance(sizing, str):
        return [NearMiss("the rule", sizing, 0)]
    if not isinstance(root, Apply):
        return [NearMiss("the rule", "its left side is a bare input: say at which value it is to be applied", 0)]
    found: list[NearMiss] = []
    for start in _starts(index, root.op):
        notes: list[tuple[int, str]] = []
        matcher = Matcher(index, rule, sizing, given or {}, notes)
        if not any(_applies(graph, match, notes) for match in matcher.matches(start)):
            count, reason = max(notes, key=lambda note: note[0], default=(0, _ALONE))
            found.append(NearMiss(index.name(start), reason, count))
    if not found and root.op not in index.by_op:
        found.append(NearMiss("the graph", f"nothing in it reads as {root.op}", 0))
    return sorted(found, key=lambda miss: -miss.num_fitting)[:_MOST]


def _applies(graph: Graph, match: Match, notes: list[tuple[int, str]]) -> bool:
    """Whether a match can be applied; if not, the reason goes to the notes."""
    try:
        apply(graph, match.rule, match)
    except Refused as refused:
        notes.append((len(operators_in(*match.rule.left)), str(refused)))
        return False
    return True


def _starts(index: Index, op: str) -> Iterator[Term]:
    """The terms that read as an operator, and those that would but for their form."""
    yield from index.by_op.get(op, ())
    for node in index.graph.nodes:
        for value in node.outputs():
            readings = readings_of(value)
            if op in readings.misses and op not in readings.by_op:
                yield value
