"""Drafts of what is alike: made once, and carried over.

A strategy goes through a graph in order, and what it decides for a block depends on how the block before was treated.
So a graph with many equal blocks is drafted as the short graph, with few of them: where a strategy treats the two
blocks alike that stand on the two sides of what the short graph leaves out, it would treat all between them so too;
where it does not, the whole graph is drafted. Graphs of the same form, as those of stages, are drafted once.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Set
from dataclasses import dataclass, field, replace

from conjoin.ir import REGATHER, Graph, Leaf, Node, Value, graph_form
from conjoin.search.drafts import Draft, Strategy, draft_in_full
from conjoin.search.facts import study
from conjoin.search.fold import Fold, fold
from conjoin.search.propagation import Flow


def draft_folded(graph: Graph, strategy: Strategy) -> Draft:
    """What a strategy decides, looked at for few of many equal blocks."""
    found = fold(graph)
    short = None if found is None else strategy(study(found.short))
    if found is None or short is None or not _is_steady(found, short):
        return draft_in_full(graph, strategy)
    if any(flow.stuck for flow in short.flows):  # it is only asked what is
        flows = (replace(flow, stuck=_standing_for({*flow.stuck}, found.nodes)) for flow in short.flows)
        return replace(short, flows=tuple(flows))
    return _carried_over(short, found.leaves, found.nodes)


def _standing_for(some: Set[Node], nodes: Mapping[Node, Node]) -> tuple[Node, ...]:
    """The nodes for which some stand."""
    return tuple(node for node, one in nodes.items() if one in some)


@dataclass
class DraftsByForm:
    """What a strategy decides for graphs, once for all of the same form."""

    _known: dict[Hashable, tuple[Graph, Draft]] = field(default_factory=dict)

    def draft(self, graph: Graph, strategy: Strategy) -> Draft:
        """What the strategy decides for one."""
        form = graph_form(graph)
        twin, found = self._known.get(form, (None, None))
        if twin is None or found is None or any(action.action != REGATHER for action in found.memory):
            self._known[form] = graph, draft_in_full(graph, strategy)
            return self._known[form][1]
        leaves = dict(zip(graph.leaves, twin.leaves, strict=True))
        return _carried_over(found, leaves, dict(zip(graph.nodes, twin.nodes, strict=True)))


def _carried_over(draft: Draft, leaves: Mapping[Leaf, Leaf], nodes: Mapping[Node, Node]) -> Draft:
    """A draft for leaves and nodes that others stand for, which were drafted."""
    return replace(
        draft,
        flows=tuple(_carried_flow(flow, leaves, nodes) for flow in draft.flows),
        storage={leaf: draft.storage[one] for leaf, one in leaves.items() if one in draft.storage},
        memory=tuple(
            replace(action, tensor=leaf.name)
            for action in draft.memory
            for leaf, one in leaves.items()
            if one.name == action.tensor
        ),
    )


def _carried_flow(flow: Flow, leaves: Mapping[Leaf, Leaf], nodes: Mapping[Node, Node]) -> Flow:
    placements = {Value(leaf): flow.placements[Value(one)] for leaf, one in leaves.items()}
    for node, one in nodes.items():
        placements.update(zip(node.outputs(), map(flow.placements.__getitem__, one.outputs()), strict=True))
    return Flow(
        flow.group,
        {leaf: flow.leaves[one] for leaf, one in leaves.items()},
        {node: flow.rules[one] for node, one in nodes.items()},
        placements,
        _standing_for({*flow.stuck}, nodes),
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
