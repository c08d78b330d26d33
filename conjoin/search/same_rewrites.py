"""The rewrites of a plan's graph, done to another graph of the same model as far as they apply there.

What a plan says of its substitutions is their names. Where they were applied shows in its graph: an operator that the
plan still has was not rewritten, one that it has no more was.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import lru_cache
from itertools import groupby

from conjoin.ir import Graph, Node, Plan, Substitution, plain_call
from conjoin.ops import Kind, signature
from conjoin.rules import Index, Library, apply_all, find_matches, rehearse, replacement_of
from conjoin.search.counterparts import find_counterparts
from conjoin.search.drafts import open_up, substitution_of
from conjoin.search.facts import expands
from conjoin.search.fused_layers import find_fused
from conjoin.search.heads_apart import find_parted
from conjoin.search.packed_weights import find_packed
from conjoin.search.rewrites import RuleWay, ways_of
from conjoin.search.unflattened_tokens import find_flattened

_log = logging.getLogger(__name__)
Rewritten = tuple[Graph, tuple[Substitution, ...]]


def rewrite_alike(plan: Plan, graph: Graph) -> Rewritten:
    """A graph after the substitutions of a plan, and which those were."""
    done: tuple[Substitution, ...] = ()
    for is_rule, entries in groupby(plan.substitutions, key=_is_by_rule):
        names = tuple(dict.fromkeys(each.name for each in entries))
        for name in names if is_rule else (None,):
            graph, more = _by_rule(plan, graph, name) if name else _opened_up(plan, graph, frozenset(names))
            done += more
    return graph, done


def _is_by_rule(applied: Substitution) -> bool:
    """Whether its proof is a stamp of the library, not a sentence."""
    return " " not in applied.proof


@lru_cache(maxsize=1)
def _known_ways() -> dict[str, RuleWay]:
    return {way.rule.name: way for way in ways_of(Library.shipped())}


def _opened_up(plan: Plan, graph: Graph, names: frozenset[str]) -> Rewritten:
    """A graph in which is expanded or taken apart what is in the plan's."""
    done: tuple[Substitution, ...] = ()
    operators = {name.partition("-")[2] for name in names}
    while True:
        named = [node for node in graph.nodes if node.op in operators]
        kept = _kept(plan, graph, named) if named else frozenset()
        gone = [node for node in named if node not in kept]
        opened = {node for node in gone if _can_open(graph, node) and substitution_of(graph, node).name in names}
        told, made = open_up(graph, frozenset(opened)) if opened else ((), graph)
        if made is graph:
            return graph, done
        graph, done = made, (*done, *told)


def _kept(plan: Plan, graph: Graph, asked: Iterable[Node]) -> frozenset[Node]:
    """Those of some operators of a graph that the plan still has, with all their attributes but sizes."""
    found = find_counterparts(graph, plan.graph)
    return frozenset(node for node in asked if node in found and _attributes(node) == _attributes(found[node]))


_SIZES = frozenset({"size", "shape", "sizes", "split_size", "split_sizes", "start", "end", "repeats"})
"""Attributes that are other ones for another batch."""


def _attributes(node: Node) -> list[str]:
    parameters = zip(signature(node.op).parameters, node.args, strict=True)
    return [repr(x) for p, x in parameters if p.kind is Kind.ATTRIBUTE and p.name not in _SIZES]


def _can_open(graph: Graph, node: Node) -> bool:
    call = plain_call(node)
    whole = expands(call, parts=False) or expands(call, parts=True) or bool(find_parted(graph, node))
    found = find_flattened(graph, node), find_fused(graph, node), find_packed(graph, node)
    return whole or any(each is not None for each in found)


def _by_rule(plan: Plan, graph: Graph, name: str) -> Rewritten:
    """A graph with a rule applied wherever its left side stands and the plan has it no more."""
    way, index = _known_ways().get(name), Index(graph)
    if way is None or not way.may_match(index):
        return graph, ()
    kept = _kept(plan, graph, graph.nodes)
    found = [m for m in find_matches(index, way.rule, apart=True) if not kept.issuperset(m.nodes)]
    ordered = sorted(found, key=lambda m: -max(index.places[node] for node in m.nodes))
    made, places = apply_all(graph, way.rule, ordered)
    fault = next((reason for match in places if (reason := rehearse(replacement_of(match)))), "")
    if fault:
        _log.warning("the substitution %s is not used: %s", name, fault)
    if fault or not places:
        return graph, ()
    where = str(places[0]) if len(places) == 1 else f"{places[0]} and {len(places) - 1} more"
    return made, (Substitution(name, where, way.proof),)
