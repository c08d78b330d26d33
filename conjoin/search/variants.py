"""Variants of a model's graph: what named strategies rewrite, and everything expanded that can be."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from conjoin.ir import Graph, Plan, Substitution, plain_call, sequential
from conjoin.search.drafts import substitution_of
from conjoin.search.entries import Entry, Outcome, Variant, make_variant, name_of
from conjoin.search.facts import expands
from conjoin.search.features_once import with_constants_once
from conjoin.search.rehearsed import expand_rehearsed

_MAX_VARIANTS = 4


def variants_of(graph: Graph, starts: Iterable[Entry]) -> tuple[Variant, ...]:
    """The graph as it is, with everything expanded, and as the entries to start from have it; each once.

    Also with features that belong to the model, and are no others in any step, aggregated at the first alone.
    """
    found: dict[str, Variant] = {}
    whole = expanded(graph)
    entered = {v.graph: v for v in (without_plan(entry).variant for entry in starts)}.values()
    rewritten = [expanded(v.graph, v.substitutions) for v in entered if v.substitutions and v.steps == 1]
    once = with_constants_once(graph)
    for other, substitutions in ((graph, ()), whole, once, *rewritten):
        name = name_of(other)
        if name not in found and len(found) < _MAX_VARIANTS:
            found[name] = make_variant(other, substitutions)
    return tuple(found.values())


def expanded(graph: Graph, before: tuple[Substitution, ...] = ()) -> tuple[Graph, tuple[Substitution, ...]]:
    """The graph with everything expanded that can be, and how that was made."""
    nodes = {node for node in graph.nodes if expands(plain_call(node), parts=False)}
    if not nodes:
        return graph, before
    named = tuple(substitution_of(graph, node) for node in graph.nodes if node in nodes)
    return expand_rehearsed(graph, nodes), (*before, *named)


def as_variant(outcome: Outcome) -> Outcome:
    """The outcome of a plan as one of its graph without layouts, which can be laid out anew."""
    entry = without_plan(outcome.entry)
    return outcome if entry is outcome.entry else replace(outcome, entry=entry)


def without_plan(entry: Entry) -> Entry:
    """The same of an entry."""
    if entry.plan is None:
        return entry
    return replace(entry, variant=sequential_variant(entry.plan), plan=None, chunks=entry.plan.chunks)


def sequential_variant(plan: Plan) -> Variant:
    """The graph of a plan without layouts, which can be laid out anew."""
    return make_variant(sequential(plan.graph), plan.substitutions, plan.accumulation)
