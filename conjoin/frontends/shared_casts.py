"""A tensor that several operators take in a narrower dtype is cast for all of them at once.

Autocast casts it for each, and keeps as many copies for the backward pass: of what a block of a transformer is given,
one for query, key and value each. Split over devices each copy would travel by itself, too. Gradients of one copy are
added up in its dtype, as in a model whose activations are in that dtype; autocast adds them up in the wider one.
"""

from __future__ import annotations

from typing import Any

from conjoin.ir import Graph, Node, Rewriting, Value, drop_unused
from conjoin.ops import CAST


def share_casts(graph: Graph) -> Graph:
    """The graph with equal casts to narrower floats made once."""
    if len({_told(node) for node in graph.nodes if _narrows(node)}) == sum(map(_narrows, graph.nodes)):
        return graph
    work = Rewriting(graph)
    made: dict[Any, Value] = {}
    for node in graph.nodes:
        if not _narrows(node):
            work.keep(node)
        elif (told := _told(node)) in made:
            work.values[Value(node)] = made[told]
        else:
            work.keep(node)
            made[told] = work.values[Value(node)]
    return drop_unused(work.finish())


def _narrows(node: Node) -> bool:
    if node.op != CAST:
        return False
    before, after = node.inputs[0].type.dtype, node.types[0].dtype
    return before.is_floating_point and after.is_floating_point and after.itemsize < before.itemsize


def _told(node: Node) -> Any:
    """The same for casts of one value to one dtype."""
    return node.args, node.types, node.pinned
