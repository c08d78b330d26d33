"""Features that stay as they are, aggregated once, not in every step: A·(X·W) as (A·X)·W, with A·X made at first.

That aggregation may come before the product with weights is a rule of the library, with its proof. It pays where the
rows are features that no step changes: what changes then is W alone. Features that are dropped out, or made by
weights, are others in every step. What is aggregated once is by its declaration what is aggregated in every step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from conjoin.errors import StrategyError
from conjoin.ir import Graph, Leaf, LeafKind, Node, Rewriting, Substitution, Value
from conjoin.ops import AGGREGATE, AGGREGATE_ONCE
from conjoin.rules import Library, Match, apply_all, find_matches, rehearse, replacement_of
from conjoin.search.facts import where_in
from conjoin.search.rehearsed import finish_rehearsed
from conjoin.search.rewrites import RuleWay, ways_of

_WHY = "no step changes what is aggregated, and it is kept as long as nobody writes to it"
_OVER_EDGES = ("aggregate", "aggregate_weighted", "aggregate_mean")
_LAYERS = ("linear", "matmul")
Stays = Callable[[Graph, Value], bool]
Once = tuple[Graph, tuple[Substitution, ...]]


def with_features_once(graph: Graph) -> Once:
    """The graph with features aggregated once that are given and that no step changes, and how a plan tells that."""
    if any(node.op == AGGREGATE_ONCE for node in graph.nodes):
        return graph, ()
    found = _once(graph, _stays)
    if not found[1]:
        raise StrategyError(
            f"The features of {graph.name} were to be aggregated once. No aggregation in it reads features that stay "
            f"as they are, or a product of such with weights and no bias. Leave once out."
        )
    return found


def with_constants_once(graph: Graph) -> Once:
    """The same of what belongs to the model: what is given with a batch may be another in every step."""
    if not any(node.op == AGGREGATE for node in graph.nodes):
        return graph, ()
    return _once(graph, _is_of_model)


def _once(graph: Graph, stays: Stays) -> Once:
    first, exchanged = _aggregated_first(graph, stays)
    found = [node for node in first.nodes if _aggregates(first, node, stays)]
    if not found:
        return graph, ()
    work = Rewriting(first)
    for node in first.nodes:
        if node not in found:
            work.keep(node)
            continue
        args = (work.values[arg] if isinstance(arg, Value) else arg for arg in node.args[:6])
        work.values[Value(node)] = work.emit(node, AGGREGATE_ONCE, *args, ())
    told = tuple(Substitution("aggregate-features-once", where_in(first, node), _WHY) for node in found)
    return finish_rehearsed(work), (*exchanged, *told)


def _aggregated_first(graph: Graph, stays: Stays) -> Once:
    """Aggregation before layers, where what the layer reads stays."""
    told: tuple[Substitution, ...] = ()
    for way in _exchanges():
        matches = [match for match in find_matches(graph, way.rule, apart=True) if _may_come_first(graph, match, stays)]
        graph, places = apply_all(graph, way.rule, matches)
        told += tuple(Substitution(way.rule.name, str(match), way.proof) for match in places)
    return graph, told


def _may_come_first(graph: Graph, match: Match, stays: Stays) -> bool:
    given = [term for name, term in match.inputs if name != "y"]  # which are the weights of the layer
    return all(isinstance(term, Value) and stays(graph, term) for term in given) and not rehearse(replacement_of(match))


@lru_cache(maxsize=1)
def _exchanges() -> tuple[RuleWay, ...]:
    """The library's rules by which aggregation comes before a layer without bias."""
    names = {f"{layer}-{op}-to-{op}-{layer}-back" for layer in _LAYERS for op in _OVER_EDGES}
    return tuple(way for way in ways_of(Library.shipped()) if way.rule.name in names)


def _aggregates(graph: Graph, node: Node, stays: Stays) -> bool:
    """Whether a node adds up rows that stay, along edges and with weights that do."""
    if node.op != AGGREGATE or node.call["reduce"] == "max" or node.call["window"]:
        return False
    given = [arg for arg in node.args[:4] if isinstance(arg, Value)]
    return isinstance(given[0].owner, Leaf) and all(stays(graph, value) for value in given)


def _stays(graph: Graph, value: Value) -> bool:
    """Whether a tensor is given, or a part of what is given, and no step writes to it."""
    owner = value.owner
    if isinstance(owner, Leaf):
        return owner.kind is not LeafKind.PARAMETER and owner.name not in {name for name, _ in graph.updates}
    return owner.spec is not None and owner.spec.view and all(_stays(graph, read) for read in owner.inputs)


def _is_of_model(graph: Graph, value: Value) -> bool:
    """Whether it stays, and no batch brings another."""
    owner = value.owner
    if isinstance(owner, Leaf):
        return owner.kind is not LeafKind.INPUT and _stays(graph, value)
    return _stays(graph, value) and all(_is_of_model(graph, read) for read in owner.inputs)
