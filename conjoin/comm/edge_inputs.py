"""Which inputs of a graph network are lists of edges, and what is said of every edge."""

from __future__ import annotations

from dataclasses import dataclass

from conjoin.comm.halo import OVER_EDGES
from conjoin.ir import Graph, Leaf, LeafKind, Node, Value

_ENDS = ("source", "target", "weight")
_SAME = ("_to_copy", "reshape", "unsqueeze", "squeeze.dim", "clone")


@dataclass(frozen=True, slots=True)
class EdgeInput:
    """An input, or a buffer, with a number for every edge."""

    leaf: Leaf
    use: str
    """`source`, `target` or `weight`."""
    dim: int
    """That which has a place for every edge."""
    row: int | None
    """Which row of it, where it has more than one list."""


def edge_inputs(graph: Graph) -> tuple[EdgeInput, ...]:
    """All that aggregations of a captured graph read of edges, each use once, in the order of the aggregations."""
    found: dict[EdgeInput, None] = {}
    for node in graph.nodes:
        if node.op not in OVER_EDGES:
            continue
        named = dict(zip(node.call.operand_names, node.inputs, strict=True))
        count = node.call["source"].shape[0]
        for use in _ENDS:
            made = _find(named[use], use, count) if use in named else None
            if made is not None:
                found.setdefault(made)
    return tuple(found)


def _find(value: Value, use: str, count: int) -> EdgeInput | None:
    row = None
    while isinstance(value.owner, Node):
        node, row_here = value.owner, None
        if node.op == "select.int" and node.call.dim() == 0:
            row_here = node.call["index"] % node.inputs[0].type.shape[0]
        elif node.op == "unbind.int" and node.call.dim() == 0:
            row_here = value.index
        elif node.op not in _SAME or node.inputs[0].type.num_elements != value.type.num_elements:
            return None
        if row_here is not None and row is not None:
            return None
        row, value = row if row_here is None else row_here, node.inputs[0]
    leaf = value.owner
    if leaf.kind not in (LeafKind.INPUT, LeafKind.BUFFER):
        return None
    dim = 0 if row is None else 1
    return EdgeInput(leaf, use, dim, row) if leaf.type.shape[dim : dim + 1] == (count,) else None
