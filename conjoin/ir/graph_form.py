"""The form of a graph: what graphs share that compute the same, whatever their tensors are called, as stages may."""

from __future__ import annotations

from collections.abc import Hashable

from conjoin.ir.graph import Graph
from conjoin.ir.nodes import Leaf, Value
from conjoin.ops import map_tensors


def graph_form(graph: Graph) -> Hashable:
    """Calls and types, with what they read by numbers, leaves but for their names, and which values come out."""
    numbers = {Value(leaf): f"%{number}" for number, leaf in enumerate(graph.leaves)}
    nodes = []
    for node in graph.nodes:
        args = repr(map_tensors(node.op, node.args, numbers.__getitem__))
        nodes.append((node.op, args, node.types, node.occurrence, node.pinned))
        numbers.update((value, f"%{len(numbers)}") for value in node.outputs())
    tensors = list(dict.fromkeys(leaf.names[0] for leaf in graph.leaves))
    leaves = tuple(
        (leaf.kind, leaf.type, leaf.trainable, len(leaf.aliases), leaf.data, leaf.channels_last, _part(leaf, tensors))
        for leaf in graph.leaves
    )
    results = tuple(numbers[value] for value in graph.outputs if isinstance(value, Value))
    updates = tuple(numbers[value] for _, value in graph.updates)
    return tuple(nodes), leaves, results, updates, graph.loss, graph.training, graph.rounding


def _part(leaf: Leaf, tensors: list[str]) -> Hashable:
    """Of which packed weight it is which part; None of what is a tensor by itself."""
    found = leaf.section
    return None if found is None else (tensors.index(found.of), found.dim, found.start, found.whole)
