"""Rewritings that no rule stands for, as strategies make them, tried before they are used: what is put in a place comes
to the same there, and so do its gradients. What cannot be run at small sizes is left to the tests of who makes it."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from conjoin.errors import StrategyError
from conjoin.ir import (
    Graph,
    Leaf,
    LeafKind,
    Node,
    Replacement,
    Rewriting,
    drop_unused,
    expand,
    is_random,
    plain_call,
    replacements,
)
from conjoin.ops import Call, call_cache
from conjoin.rules import at_small_sizes, find_fault
from conjoin.search.facts import alone, expansion_of, where_in


def finish_rehearsed(work: Rewriting) -> Graph:
    """The graph that a rewriting has made; StrategyError where something else comes of what it has put there."""
    for rewrite in replacements(work):
        _check(work.graph, rewrite.old[-1], "" if _draws((*rewrite.old, *rewrite.new)) else find_fault(rewrite))
    return drop_unused(work.finish())


def expand_rehearsed(graph: Graph, nodes: Collection[Node], *, parts: bool = False) -> Graph:
    """The graph with nodes expanded; StrategyError where something else comes of an expansion."""
    for node in nodes:
        kinds = tuple(x.owner.kind if isinstance(x.owner, Leaf) else LeafKind.INPUT for x in node.inputs)
        _check(graph, node, "" if _draws((node,)) else _expansion_fault(plain_call(node), kinds, parts))
    return expand(graph, nodes, parts=parts)


def _check(graph: Graph, node: Node, fault: str) -> None:
    if fault:
        raise StrategyError(
            f"{node.op} at {where_in(graph, node)} was to be replaced by what can be split. Tried out on small "
            f"numbers, {fault}. Take a strategy that leaves it as it is, and report this as an error of Conjoin."
        )


@call_cache()
def _expansion_fault(call: Call, kinds: tuple[LeafKind, ...], parts: bool) -> str:
    """In what an expansion differs; it is made anew for small sizes, since numbers in it may depend on them."""
    try:
        made = [(small, expansion_of(small, parts)) for small in at_small_sizes(alone(call, kinds))]
    except Exception:  # whatever a declaration says of sizes that it does not expect
        return ""
    for small, new in made:
        rewrite = Replacement((small,), new.nodes, tuple(zip(small.outputs(), new.outputs, strict=True)))  # type: ignore[arg-type]
        if fault := find_fault(rewrite, as_large=True):
            return fault
    return ""


def _draws(nodes: Iterable[Node]) -> bool:
    """Whether numbers are drawn: before and after there would be other ones."""
    return any(is_random(node.op, node.args) for node in nodes)
