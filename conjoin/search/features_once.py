"""Features that stay as they are, aggregated once, not in every step: A·(X·W) as (A·X)·W, with A·X made at first.

Aggregation by sums and means is linear in the rows and does to every feature the same, so that it may come before the
product with weights. That pays where the rows are features that no step changes: what changes then is W alone. Features
that are dropped out, or made by weights, are others in every step.
"""

from __future__ import annotations

from conjoin.errors import StrategyError
from conjoin.ir import Graph, Leaf, LeafKind, Node, Rewriting, Substitution, Value, drop_unused
from conjoin.ops import AGGREGATE, AGGREGATE_ONCE
from conjoin.search.facts import where_in

_WHY = "aggregation is linear in the rows, and the same for every feature"
_LINEAR = ("sum", "mean")


def with_features_once(graph: Graph) -> tuple[Graph, tuple[Substitution, ...]]:
    """The graph with constant features aggregated once, and how that is told in a plan."""
    if any(node.op == AGGREGATE_ONCE for node in graph.nodes):
        return graph, ()
    found = [node for node in graph.nodes if _aggregates_constants(graph, node)]
    if not found:
        raise StrategyError(
            f"The features of {graph.name} were to be aggregated once. No aggregation in it reads features that stay "
            f"as they are, or a product of such with weights and no bias. Leave once out."
        )
    work = Rewriting(graph)
    for node in graph.nodes:
        if node not in found:
            work.keep(node)
            continue
        layer = _layer(node)
        features = node.args[0] if layer is None else layer.args[0]
        _, source, target, weight, vertices, reduce = (
            work.values[arg] if isinstance(arg, Value) else arg for arg in node.args[:6]
        )
        made = work.emit(node, AGGREGATE_ONCE, work.values[features], source, target, weight, vertices, reduce, ())
        if layer is not None:
            made = work.emit(layer, "linear", made, work.values[layer.args[1]], None)
        work.values[Value(node)] = made
    told = tuple(Substitution("aggregate-features-once", where_in(graph, node), _WHY) for node in found)
    return drop_unused(work.finish()), told


def _layer(node: Node) -> Node | None:
    """The layer without bias whose output is aggregated."""
    owner = node.args[0].owner
    return owner if isinstance(owner, Node) and owner.op == "linear" and owner.args[2] is None else None


def _aggregates_constants(graph: Graph, node: Node) -> bool:
    if node.op != AGGREGATE or node.call["reduce"] not in _LINEAR or node.call["window"]:
        return False
    layer = _layer(node)
    if layer is not None and (graph.users[Value(layer)] != (node,) or not _is_alike_for_features(node)):
        return False
    features = node.args[0] if layer is None else layer.args[0]
    edges = [arg for arg in node.args[1:4] if isinstance(arg, Value)]
    return isinstance(features.owner, Leaf) and all(_stays(graph, value) for value in (features, *edges))


def _is_alike_for_features(node: Node) -> bool:
    """Whether every feature of a row is aggregated alike: an edge may have a weight, but not one for each feature."""
    x, weight = node.args[0], node.args[3]
    return len(x.type.shape) == 2 and (weight is None or len(weight.type.shape) == 1)


def _stays(graph: Graph, value: Value) -> bool:
    """Whether a tensor is given, or a part of what is given, and no step writes to it."""
    owner = value.owner
    if isinstance(owner, Leaf):
        return owner.kind is not LeafKind.PARAMETER and owner.name not in {name for name, _ in graph.updates}
    return owner.spec is not None and owner.spec.view and all(_stays(graph, read) for read in owner.inputs)
