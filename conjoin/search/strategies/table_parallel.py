"""Table parallel, for recommendation models: embedding tables are split, the rest is data parallel.

A table is split by columns where it is wide enough, else by rows (its lookups are then partial sums). So what is
exchanged between is an all-to-all (S(features) -> S(batch)) or a reduce-scatter (P -> S(batch)).
"""

from __future__ import annotations

from dataclasses import replace

from conjoin.errors import StrategyError
from conjoin.ir import Leaf, Node
from conjoin.machine import Mesh
from conjoin.ops import Placement, ShardingRule, Split
from conjoin.search.drafts import Draft
from conjoin.search.facts import Facts
from conjoin.search.groups import Group
from conjoin.search.propagation import Flow, fits
from conjoin.search.request import Request
from conjoin.search.strategies.data_parallel import data_flow, data_group


def draft_table_parallel(facts: Facts, mesh: Mesh, request: Request) -> Draft:
    """Data parallel, with other ways for the lookups."""
    group = data_group(mesh, request)
    rules = _table_rules(facts, group)
    if group.degree > 1 and not rules:
        raise _no_tables(facts, group)
    return Draft(request.filled({"dp": group.degree}), (_with_rules(data_flow(facts, group), rules),))


def _table_rules(facts: Facts, group: Group) -> dict[Node, ShardingRule]:
    found: dict[Node, ShardingRule] = {}
    for node in facts.nodes:
        if node.lookup is not None:
            ways = (*node.lookup.columns, *node.lookup.rows)
            rule = next((rule for rule in ways if fits(node, rule, group.degree, ())), None)
            if rule is not None:
                found[node.node] = rule
    return found


def _with_rules(flow: Flow, rules: dict[Node, ShardingRule]) -> Flow:
    leaves: dict[Leaf, Placement] = dict(flow.leaves)
    placements = dict(flow.placements)
    for node, rule in rules.items():
        placements.update(zip(node.outputs(), rule.outputs, strict=True))
        for value, placement in zip(node.inputs, rule.operands, strict=True):
            if isinstance(value.owner, Leaf) and isinstance(placement, Split):
                leaves[value.owner] = placements[value] = placement
    return replace(flow, leaves=leaves, rules={**flow.rules, **rules}, placements=placements)


def _no_tables(facts: Facts, group: Group) -> StrategyError:
    lookups = [node for node in facts.nodes if node.lookup is not None]
    longest = max((max(v.type.shape) for node in lookups for v in node.inputs if v in facts.of_weights), default=0)
    return StrategyError(
        f"The embedding tables of {facts.graph.name} were to be split {group.degree} ways ({group}). It has "
        f"{len(lookups)} lookups in tables, which have at most {longest} rows or columns. Choose data-parallel, or "
        f"fewer devices."
    )
