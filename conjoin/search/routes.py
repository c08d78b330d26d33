"""Experts whose rows are sent to them, where that moves less than gathering rows for all experts would."""

from __future__ import annotations

from conjoin.comm import moves_fewer_rows
from conjoin.ir import Graph, Rewriting, Substitution, Value, drop_unused
from conjoin.ops import EXPERT_NETWORK, ROUTED_EXPERTS
from conjoin.search.facts import where_in
from conjoin.search.request import Request

_WHY = "the same networks; rows go to the device that has their expert, and back"


def with_routes(graph: Graph, request: Request) -> tuple[Graph, tuple[Substitution, ...]]:
    """The graph with experts that are owned by devices, and how that is told in a plan; beside tensor parallelism,
    which splits experts itself, they stay as they are."""
    degree = request.degrees.get("ep", 1)
    if request.degrees.get("tp", 1) > 1:
        return graph, ()
    routed = [node for node in graph.nodes if node.op == EXPERT_NETWORK and moves_fewer_rows(node, degree)]
    if not routed:
        return graph, ()
    work = Rewriting(graph)
    for node in graph.nodes:
        if node not in routed:
            work.keep(node)
            continue
        args = (work.values[arg] if isinstance(arg, Value) else arg for arg in node.args)
        work.values[Value(node)] = work.emit(node, ROUTED_EXPERTS, *args)
    told = tuple(Substitution(f"route-{node.op}", where_in(graph, node), _WHY) for node in routed)
    return drop_unused(work.finish()), told
