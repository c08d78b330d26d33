"""Attention along split sequences as rings, where a strategy is asked for that: keys and values are never gathered."""

from __future__ import annotations

from collections.abc import Sequence

from conjoin.cost import ATTENTION
from conjoin.errors import StrategyError
from conjoin.ir import Graph, Node, Rewriting, Substitution, Value
from conjoin.ops import RING_ATTENTION
from conjoin.search.facts import where_in
from conjoin.search.propagation import Flow
from conjoin.search.rehearsed import finish_rehearsed

_WHY = "the same attention; keys and values come one piece after the other"
_QUERIES = "l"


def with_rings(graph: Graph, flows: Sequence[Flow]) -> tuple[Graph, tuple[Substitution, ...]]:
    """The graph with attention along split sequences as rings, and how that is told in a plan."""
    split = [n for n in graph.nodes if n.op == ATTENTION and any(flow.rules[n].index == _QUERIES for flow in flows)]
    for node in split:
        _check(graph, node)
    if not split:
        return graph, ()
    work = Rewriting(graph)
    for node in graph.nodes:
        if node not in split:
            work.keep(node)
            continue
        query, key, value, *mask = (work.values[value] for value in node.inputs)
        attributes = (node.call[name] for name in ("is_causal", "scale", "enable_gqa"))
        work.values[Value(node)] = work.emit(node, RING_ATTENTION, query, key, value, *attributes, *mask)
    told = tuple(Substitution(f"ring-{node.op}", where_in(graph, node), _WHY) for node in split)
    return finish_rehearsed(work), told


def _check(graph: Graph, node: Node) -> None:
    query, key, *_ = (value.type.shape for value in node.inputs)
    why = ""
    if node.call["dropout_p"]:
        why = f"It drops {node.call['dropout_p']:g} of its weights, and one device would draw other ones than several"
    elif len(query) != 4 or query[2] != key[2]:
        why = f"It looks from {query} at {key}, which is not one sequence of heads"
    if why:
        raise StrategyError(
            f"Attention was to pass keys and values around ({where_in(graph, node)}). {why}. "
            f"Leave ring out: then they are gathered."
        )
