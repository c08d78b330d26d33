"""Drafts of a graph with many equal blocks: made on the short graph, with few of them, and unfolded.

A strategy goes through a graph in order, and what it decides for a block depends on how the block before was treated.
Where it treats the two blocks alike that stand on the two sides of what the short graph leaves out, it would treat all
between them so too; where it does not, the whole graph is drafted.
"""

from __future__ import annotations

from dataclasses import replace

from conjoin.ir import REGATHER, Graph
from conjoin.search.drafting import Draft, Strategy, draft_in_full
from conjoin.search.facts import study
from conjoin.search.fold import Fold, fold
from conjoin.search.propagation import Flow


def draft_folded(graph: Graph, strategy: Strategy) -> Draft:
    """What a strategy decides, looked at for few of many equal blocks."""
    found = fold(graph)
    short = None if found is None else strategy(study(found.short))
    if found is None or short is None or not _is_steady(found, short):
        return draft_in_full(graph, strategy)
    return replace(
        short,
        flows=tuple(_unfolded(found, flow) for flow in short.flows),
        storage={leaf: short.storage[one] for leaf, one in found.leaves.items() if one in short.storage},
        memory=tuple(
            replace(action, tensor=leaf.name)
            for action in short.memory
            for leaf, one in found.leaves.items()
            if one.name == action.tensor
        ),
    )


def _is_steady(found: Fold, draft: Draft) -> bool:
    """Whether the blocks on the two sides of what is left out are treated alike, and nothing is told of other things
    than parameters."""
    nodes, leaves = found.middle
    if any(action.action != REGATHER for action in draft.memory):
        return False
    again = {action.tensor for action in draft.memory}
    alike = all(draft.storage.get(a) == draft.storage.get(b) for a, b in leaves)
    alike = alike and all((a.name in again) == (b.name in again) for a, b in leaves)
    for flow in draft.flows:
        alike = alike and all(flow.rules[a] == flow.rules[b] for a, b in nodes)
        alike = alike and all(flow.leaves[a] == flow.leaves[b] for a, b in leaves)
        stuck = frozenset(flow.stuck)
        alike = alike and all((a in stuck) == (b in stuck) for a, b in nodes)
    return alike


def _unfolded(found: Fold, flow: Flow) -> Flow:
    stuck = frozenset(flow.stuck)
    return Flow(
        flow.group,
        {leaf: flow.leaves[one] for leaf, one in found.leaves.items()},
        {node: flow.rules[one] for node, one in found.nodes.items()},
        {value: flow.placements[one] for value, one in found.values.items()},
        tuple(node for node, one in found.nodes.items() if one in stuck),
    )
