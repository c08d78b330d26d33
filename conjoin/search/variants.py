"""Variants of a model's graph: what named strategies rewrite, and everything expanded that can be."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from conjoin.ir import Graph, Node, Plan, Substitution, expand, fingerprint, sequential
from conjoin.search.contest import Outcome, Variant, make_variant
from conjoin.search.drafting import substitution_of
from conjoin.search.facts import study

_MAX_VARIANTS = 4


def variants_of(graph: Graph, plans: Iterable[Plan]) -> tuple[Variant, ...]:
    """The graph as it is, with everything expanded, and as the plans of strategies have it; each once."""
    found: dict[str, Variant] = {}
    whole = expanded(graph)
    rewritten = [(sequential(plan.graph), plan.substitutions) for plan in plans if plan.substitutions]
    for other, substitutions in ((graph, ()), whole, *((expanded(g, s)) for g, s in rewritten)):
        name = fingerprint(other, constants=False)
        if name not in found and len(found) < _MAX_VARIANTS:
            found[name] = make_variant(other, substitutions)
    return tuple(found.values())


def expanded(graph: Graph, before: tuple[Substitution, ...] = ()) -> tuple[Graph, tuple[Substitution, ...]]:
    """The graph with everything expanded that can be, and how that was made."""
    nodes: set[Node] = {facts.node for facts in study(graph).nodes if facts.expandable}
    if not nodes:
        return graph, before
    named = tuple(substitution_of(graph, node) for node in graph.nodes if node in nodes)
    return expand(graph, nodes), (*before, *named)


def as_variant(outcome: Outcome) -> Outcome:
    """The outcome of a plan as one of its graph without layouts, which can be laid out anew."""
    entry = outcome.entry
    if entry.plan is None:
        return outcome
    variant = make_variant(sequential(entry.plan.graph), entry.plan.substitutions)
    return replace(outcome, entry=replace(entry, variant=variant, plan=None))
