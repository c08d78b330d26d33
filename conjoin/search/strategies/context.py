"""Context parallelism: the sequence is split; every device has its own queries, and gathers the keys of all.

Attention along split sequences in the way of Llama 3 (Grattafiori et al. 2024, section 3.3.2): keys and values are
gathered, their gradients come back by reduce-scatter. With `heads` queries, keys and values are exchanged for heads
instead, and the results back (Jacobs et al. 2023, DeepSpeed-Ulysses).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from conjoin.cost import ATTENTION
from conjoin.errors import StrategyError
from conjoin.ops import ATTENTION_SUMS, RING_ATTENTION, Placement, Split
from conjoin.search.batch import split_sequences
from conjoin.search.facts import Facts, NodeFacts
from conjoin.search.groups import Group
from conjoin.search.propagation import Flow, Rules, follow, propagate
from conjoin.search.unflattened_tokens import find_flattened


def context_flow(facts: Facts, group: Group, earlier: Sequence[Flow], by_heads: bool) -> Flow:
    """The sequence runs through the graph; weights are replicated where they meet it."""
    flow = propagate(facts, group, split_sequences(facts.graph, group), _exchanged if by_heads else _gathered, earlier)
    attention = [node for node in facts.nodes if node.node.op in (ATTENTION, ATTENTION_SUMS, RING_ATTENTION)]
    if group.degree > 1 and not flow.stuck and all(flow.rules[node.node].index is None for node in attention):
        raise StrategyError(
            f"The sequences of {facts.graph.name} were to be split {group.degree} ways ({group}). None of its "
            f"{len(attention)} calls of scaled_dot_product_attention can be, so all of it would be gathered. Choose "
            f"a lower cp, or megatron."
        )
    return with_flattened(facts, flow)


def with_flattened(facts: Facts, flow: Flow) -> Flow:
    """The flow with those reshapes stuck that put dims into one for a loss of which the second arrives split."""
    flattened = [
        node.node
        for node in facts.nodes
        if node.node.op == "reshape"
        and flow.placements[node.inputs[0]] == Split(1)
        and find_flattened(facts.graph, node.node) is not None
    ]
    return replace(flow, stuck=(*flow.stuck, *flattened))


def _gathered(facts: NodeFacts, arriving: tuple[Placement, ...], legal: Rules) -> Rules:
    """As everything that arrives split; attention has its own queries and all keys."""
    if facts.node.op == ATTENTION and isinstance(arriving[0], Split):
        return [rule for rule in legal if rule.operands[0] == arriving[0]] or legal
    return follow(facts, arriving, legal)


def _exchanged(facts: NodeFacts, arriving: tuple[Placement, ...], legal: Rules) -> Rules:
    """As everything that arrives split; attention has some of the heads, and the layer behind it the sequence again."""
    if facts.node.op == ATTENTION and isinstance(arriving[0], Split):
        return [rule for rule in legal if rule.index == "h"] or _gathered(facts, arriving, legal)
    back = [] if facts.layer is None else [rule for rule in legal if rule.operands[facts.layer.data] == Split(1)]
    return back or follow(facts, arriving, legal)
