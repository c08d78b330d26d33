"""AutoDDL's 3-D matmul (its section 4.2.2): the batch over m, and layers alternating between columns and rows.

Layer l has its output's features split over the n-axes and its sum over the k-axes. Its output is then split over n,
which is what layer l+1 sums over: n and k change roles from layer to layer, and no activation is exchanged between.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from conjoin.errors import StrategyError
from conjoin.ir import Node, Value
from conjoin.machine import Mesh
from conjoin.ops import Placement, Split
from conjoin.search.drafts import Draft
from conjoin.search.facts import Facts, NodeFacts
from conjoin.search.groups import Group, deal, make_groups, sizes_left
from conjoin.search.propagation import Rules, follow
from conjoin.search.request import Request
from conjoin.search.strategies.data_parallel import data_flow
from conjoin.search.strategies.layers import as_stored, legal_of, rows_taking_up, settle_columns, split_layers, width_of


@dataclass(frozen=True, slots=True)
class Alternating:
    """Rows where the data arrives split so, else columns; layers in `rows` are split by rows whatever arrives."""

    rows: frozenset[Node] = frozenset()

    def __call__(self, facts: NodeFacts, arriving: tuple[Placement, ...], legal: Rules) -> Rules:
        """The ways considered at a node."""
        if facts.layer is None:
            return follow(facts, arriving, legal)
        found = rows_taking_up(facts, arriving, legal)
        if not found and not isinstance(arriving[facts.layer.data], Split):
            some = facts.layer.rows if facts.node in self.rows else facts.layer.columns
            found = as_stored(facts, arriving, legal_of(some, legal))
        return found or follow(facts, arriving, legal)

    def without(self, nodes: frozenset[Node]) -> Alternating:
        """The same policy that splits these layers by rows."""
        return replace(self, rows=self.rows | nodes)

    def past(self, nodes: frozenset[Node]) -> Alternating:
        """The same policy: it leaves no layer whole."""
        return self


def draft_sbp3d(facts: Facts, mesh: Mesh, request: Request) -> Draft:
    """The k-axes innermost, then n, then m."""
    given = request.degrees
    missing = tuple(role for role in ("n", "k", "m") if role not in given)
    dealt = deal(sizes_left(mesh, given), missing) if missing else {}
    degrees = {role: {**given, **dealt}[role] for role in ("m", "n", "k")}
    groups = make_groups(mesh, {role: degrees[role] for role in ("k", "n", "m")})
    flows = [data_flow(facts, groups["m"])]
    for role, rows in ("n", frozenset[Node]()), ("k", _first_layers(facts)):
        if groups[role].degree > 1:
            flow = settle_columns(facts, groups[role], Alternating(rows), flows)
            if not flow.stuck and not split_layers(facts, flow):
                raise _too_narrow(facts, groups[role])
            flows.append(flow)
    return Draft(request.filled(degrees), tuple(flows))


def _first_layers(facts: Facts) -> frozenset[Node]:
    """The layers whose data has passed through no other layer."""
    passed: set[Value] = set()
    first: set[Node] = set()
    for node in facts.nodes:
        behind = any(value in passed for value in node.inputs)
        if behind or node.layer is not None:
            passed.update(node.node.outputs())
        if node.layer is not None and not behind:
            first.add(node.node)
    return frozenset(first)


def _too_narrow(facts: Facts, group: Group) -> StrategyError:
    layers = [node for node in facts.nodes if node.layer is not None]
    width = max((width_of(node) for node in layers), default=0)
    return StrategyError(
        f"The layers of {facts.graph.name} were to be split {group.degree} ways ({group}). None of its {len(layers)} "
        f"layers with weights can be: they have at most {width} features. Choose a lower {group.role}, or "
        f"data-parallel."
    )
