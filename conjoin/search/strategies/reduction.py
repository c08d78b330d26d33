"""Reduction parallelism: every layer is split along the index it sums over, and its output reduced."""

from __future__ import annotations

from conjoin.errors import StrategyError
from conjoin.machine import Mesh
from conjoin.ops import Placement
from conjoin.search.drafts import Draft
from conjoin.search.facts import Facts, NodeFacts
from conjoin.search.groups import make_groups
from conjoin.search.propagation import Rules, follow, propagate
from conjoin.search.request import Request
from conjoin.search.strategies.layers import legal_of, split_layers


def split_sums(facts: NodeFacts, arriving: tuple[Placement, ...], legal: Rules) -> Rules:
    """Layers by rows, the rest follows."""
    rows = legal_of(facts.layer.rows, legal) if facts.layer is not None else []
    return rows or follow(facts, arriving, legal)


def draft_reduction(facts: Facts, mesh: Mesh, request: Request) -> Draft:
    """One group of all axes."""
    group = make_groups(mesh, {"k": request.degrees.get("k", mesh.size)})["k"]
    flow = propagate(facts, group, {}, split_sums)
    if group.degree > 1 and not split_layers(facts, flow):
        layers = [node for node in facts.nodes if node.layer is not None]
        raise StrategyError(
            f"The sums in the layers of {facts.graph.name} were to be split {group.degree} ways ({group}). None of its "
            f"{len(layers)} layers with weights can be: none sums {group.degree} terms or more. Choose data-parallel, "
            f"or fewer devices."
        )
    return Draft(request.filled({"k": group.degree}), (flow,))
