"""The form of a graph: what graphs share that compute the same, whatever their tensors are called, as stages may."""

from __future__ import annotations

from collections.abc import Hashable

from conjoin.ir.graph import Graph
from conjoin.ir.nodes import Value
from conjoin.ops import map_tensors


def graph_form(graph: Graph) -> Hashable:
    """Calls and types, with what they read by numbers, leaves but for their names, and which values come out."""
    numbers = {Value(leaf): f"%{number}" for number, leaf in enumerate(graph.leaves)}
    nodes = []
    for node in graph.nodes:
        args = repr(map_tensors(node.op, node.args, numbers.__getitem__))
        nodes.append((node.op, args, node.types, node.occurrence, node.pinned))
        numbers.update((value, f"%{len(numbers)}") for value in node.outputs())
    leaves = tuple(
        (leaf.kind, leaf.type, leaf.trainable, len(leaf.aliases), leaf.data, leaf.channels_last)
        for leaf in graph.leaves
    )
    results = tuple(numbers[value] for value in graph.outputs if isinstance(value, Value))
    updates = tuple(numbers[value] for _, value in graph.updates)
    return tuple(nodes), leaves, results, updates, graph.loss, graph.training, graph.rounding
