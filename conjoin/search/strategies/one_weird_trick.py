"""One weird trick (Krizhevsky, 2014): convolutions are data parallel, fully connected layers split by features.

Both on the same axes: the batch is gathered before the first fully connected layer, and taken up again at the loss.
"""

from __future__ import annotations

from conjoin.errors import StrategyError
from conjoin.machine import Mesh
from conjoin.ops import Partial, Placement, Split
from conjoin.search.batch import split_batch
from conjoin.search.drafts import Draft
from conjoin.search.facts import Facts, NodeFacts
from conjoin.search.propagation import Rules, follow, propagate
from conjoin.search.request import Request
from conjoin.search.strategies.data_parallel import data_group
from conjoin.search.strategies.layers import legal_of, rows_taking_up, split_layers, width_of


def split_by_features(facts: NodeFacts, arriving: tuple[Placement, ...], legal: Rules) -> Rules:
    """Fully connected layers by rows where their data arrives so, else by columns; their sums by features too."""
    if facts.layer is not None and not facts.is_convolution:
        found = rows_taking_up(facts, arriving, legal) or legal_of(facts.layer.columns, legal)
        return found or follow(facts, arriving, legal)
    if Partial() in arriving and not facts.is_view:
        last = {i: Split(len(facts.inputs[i].type.shape) - 1) for i, p in enumerate(arriving) if p == Partial()}
        scattered = [rule for rule in legal if all(rule.operands[i] == split for i, split in last.items())]
        return scattered or follow(facts, arriving, legal)
    return follow(facts, arriving, legal)


def draft_one_weird_trick(facts: Facts, mesh: Mesh, request: Request) -> Draft:
    """One group of all axes."""
    group = data_group(mesh, request)
    convolutions = [node for node in facts.nodes if node.is_convolution]
    connected = [node for node in facts.nodes if node.layer is not None and not node.is_convolution]
    if group.degree > 1 and not (convolutions and connected):
        raise StrategyError(
            f"The convolutions of {facts.graph.name} were to be split by the batch and its fully connected layers by "
            f"features ({group}). It has {len(convolutions)} convolutions and {len(connected)} fully connected layers, "
            f"and needs both. Choose data-parallel, or megatron."
        )
    flow = propagate(facts, group, split_batch(facts.graph, group), split_by_features)
    taken = {node.node for node in split_layers(facts, flow)}
    if group.degree > 1 and not any(node.node in taken for node in connected):
        raise StrategyError(
            f"The fully connected layers of {facts.graph.name} were to be split {group.degree} ways ({group}). The "
            f"widest of its {len(connected)} has {max(map(width_of, connected))} features. Choose data-parallel, or "
            f"fewer devices."
        )
    return Draft(request.filled({"dp": group.degree}), (flow,))
