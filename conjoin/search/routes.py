"""Experts whose rows are sent to them, where that moves less than gathering rows for all experts would."""

from __future__ import annotations

from conjoin.comm import moves_fewer_rows
from conjoin.ir import Graph, Node, Rewriting, Substitution, Value
from conjoin.ops import EXPERT_NETWORK, ROUTED_EXPERTS
from conjoin.search.facts import where_in
from conjoin.search.rehearsed import finish_rehearsed
from conjoin.search.request import Request

_WHY = "the same networks; rows go to the device that has their expert, and back"


def with_routes(graph: Graph, request: Request) -> tuple[Graph, tuple[Substitution, ...]]:
    """The graph with experts that are owned by devices, and how that is told in a plan; beside tensor parallelism the
    features of each are split, so what gates them is cut off."""
    degree, inside = (request.degrees.get(role, 1) for role in ("ep", "tp"))
    networks = [node for node in graph.nodes if node.op == EXPERT_NETWORK]
    routed = [node for node in networks if moves_fewer_rows(node, degree) or _num_experts(node) < degree * inside]
    if not routed:
        return graph, ()
    work = Rewriting(graph)
    for node in graph.nodes:
        if node not in routed:
            work.keep(node)
            continue
        x, inward, *others = (work.values[arg] if isinstance(arg, Value) else arg for arg in node.args)
        width, gate = node.call["outward"].shape[1], None
        if inside > 1 and inward.type.shape[2] != width:
            gate, inward = work.emit(node, "split_with_sizes", inward, (width, width), 2)
        work.values[Value(node)] = work.emit(node, ROUTED_EXPERTS, x, inward, *others, gate)
    told = tuple(Substitution(f"route-{node.op}", where_in(graph, node), _WHY) for node in routed)
    return finish_rehearsed(work), told


def _num_experts(node: Node) -> int:
    return int(node.call["experts"])
