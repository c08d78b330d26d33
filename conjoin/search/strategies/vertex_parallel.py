"""The vertices of a graph are split: every device has the rows of its own, and gets those that its edges read.

ROC (Jia et al. 2020, section 4): the graph is cut in contiguous parts. All that is done to each vertex by itself is
data parallel; of neighbours that other devices have, each row comes once for every layer, and its gradient goes back.
Edges are split too, and lie with their targets or go there when a graph is first seen. Where they have weights, which
would go there in every step, every device has all of them instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from conjoin.comm import OVER_EDGES, edge_inputs, moved_edges
from conjoin.errors import StrategyError
from conjoin.ir import Graph, Leaf, LeafKind, Node, Value
from conjoin.machine import Mesh
from conjoin.ops import AGGREGATE, AGGREGATE_ONCE, Placement, Split
from conjoin.search.drafts import Draft
from conjoin.search.facts import Facts, NodeFacts
from conjoin.search.groups import Group, make_groups
from conjoin.search.propagation import Rules, follow, propagate
from conjoin.search.request import Request


def draft_vertex_parallel(facts: Facts, mesh: Mesh, request: Request) -> Draft:
    """Vertices are split, weights are stored whole."""
    group = make_groups(mesh, {"parts": request.degrees.get("parts", mesh.size)})["parts"]
    flow = propagate(facts, group, _split_vertices(facts, group), _follow)
    return Draft(request.filled({"parts": group.degree}), (flow,))


def _follow(facts: NodeFacts, arriving: tuple[Placement, ...], legal: Rules) -> Rules:
    """As everything that arrives split; features that are aggregated once are whole, and each device makes its part."""
    if facts.node.op == AGGREGATE_ONCE:
        return [rule for rule in legal if rule.index == "v"] or legal
    return follow(facts, arriving, legal)


def _split_vertices(facts: Facts, group: Group) -> Mapping[Leaf, Placement]:
    """What has a row for every vertex, split along it."""
    sizes = {node.node.call["vertices"] for node in facts.nodes if node.node.op in (*OVER_EDGES, AGGREGATE_ONCE)}
    if group.degree == 1:
        return {}
    if not sizes:
        raise StrategyError(
            f"The vertices of {facts.graph.name} were to be split {group.degree} ways ({group}). Nothing in it reads "
            f"rows at the sources of edges and adds them up at their targets. Choose data-parallel."
        )
    if min(sizes) < group.degree:
        raise StrategyError(
            f"The vertices of {facts.graph.name} were to be split {group.degree} ways ({group}). It has {min(sizes)}, "
            f"and no device may be left without one. Use a larger graph, or fewer parts."
        )
    leaves = [*facts.graph.leaves_of(LeafKind.INPUT), *facts.graph.leaves_of(LeafKind.BUFFER)]
    edges = _split_edges(facts, leaves, group.degree)
    split = [leaf for leaf in leaves if leaf.type.shape[:1] and leaf.type.shape[0] in sizes and leaf not in edges]
    return {leaf: Split(0) for leaf in split if not _is_aggregated_once(facts.graph, leaf)} | edges


def _split_edges(facts: Facts, leaves: Sequence[Leaf], parts: int) -> dict[Leaf, Placement]:
    """The dims of lists of edges, and of what is said of each edge, along which they are split; empty where not."""
    nodes = [each.node for each in facts.nodes]
    if any(node.op == AGGREGATE_ONCE for node in nodes) or any(_sends_weights(n, parts) for n in nodes):
        return {}
    given = [each for each in edge_inputs(facts.graph) if each.leaf in leaves]
    return {each.leaf: Split(each.dim) for each in given if each.leaf.type.shape[each.dim] >= parts}


def _sends_weights(node: Node, parts: int) -> bool:
    """Whether weights of edges would go to where the edges' targets are."""
    if node.op != AGGREGATE or node.call["weight"] is None:
        return False
    return any(moved_edges(node.call["halos"] or (), parts, rank).sent for rank in range(parts))


def _is_aggregated_once(graph: Graph, leaf: Leaf) -> bool:
    """Whether a device needs all of it at the first step; what else reads it takes its part of that."""
    return any(node.op == AGGREGATE_ONCE for node in graph.users.get(Value(leaf), ()))
