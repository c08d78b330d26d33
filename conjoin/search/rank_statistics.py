"""Batch norm by the statistics of each rank's own piece of the batch, where a strategy is asked for that."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from conjoin.errors import StrategyError
from conjoin.ir import Graph, Node, Substitution, batch_norms, norm_by_pieces
from conjoin.ops import BATCH_NORM_BY_PIECES, Split
from conjoin.search.facts import where_in
from conjoin.search.propagation import Flow
from conjoin.search.request import Request

_OF_BATCH = ("dp", "shard", "replicate")
"""Degrees by which the batch is split."""
STATISTICS = "statistics-"
"""What the name of such a substitution begins with."""


def with_rank_statistics(graph: Graph, request: Request) -> tuple[Graph, tuple[Substitution, ...]]:
    """The graph whose batch norms take statistics of as many pieces as a request splits the batch in, and how that is
    told in a plan."""
    pieces = prod(request.degrees.get(key, 1) for key in _OF_BATCH)
    changed = norm_by_pieces(graph, pieces)
    if changed is graph:
        return graph, ()
    why = f"asked for: statistics of each of {pieces} pieces of the batch, running ones of the first"
    return changed, tuple(Substitution(f"{STATISTICS}{n.op}", where_in(graph, n), why) for n in batch_norms(graph))


def check_rank_statistics(graph: Graph, flows: Sequence[Flow]) -> None:
    """Refuse where a rank does not have just the piece whose statistics it is to take."""
    for node in graph.nodes:
        if node.op != BATCH_NORM_BY_PIECES:
            continue
        pieces = node.call["pieces"]
        found = prod(flow.group.degree for flow in flows if flow.rules[node].index == "p")
        others = [flow.group.role for flow in flows if _gathers(flow, node)]
        if found != pieces or others:
            raise StrategyError(
                f"Batch norm was to take the statistics of each rank's own piece ({where_in(graph, node)}). The batch "
                f"is split in {pieces}, and what this batch norm reads in {found} along its first dim"
                f"{', and gathered over ' + ' and '.join(others) if others else ''}. Take statistics over all."
            )


def _gathers(flow: Flow, node: Node) -> bool:
    arriving = flow.placements[node.inputs[0]]
    return isinstance(arriving, Split) and flow.rules[node].operands[0] != arriving
