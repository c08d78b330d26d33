"""Rows that a model puts into one dim for a product, left in their dims: torch's own attention does so.

    reshape(linear(reshape(x, (t·b, f))), (t, b, g))    becomes    linear(reshape(x, (t, b, f)))

Of dims in one, only the first can be split there: of samples behind positions, those of a device do not lie side by
side.
"""

from __future__ import annotations

from math import prod

from conjoin.ir import Graph, Node, Rewriting, Value, drop_unused
from conjoin.ops import CAST

_ROW_BY_ROW = ("linear", CAST, "relu", "gelu", "silu", "tanh", "sigmoid")
"""What makes each row of that row alone, whatever dims rows stand in."""


def with_rows_in_their_dims(graph: Graph) -> Graph:
    """The graph without dims that rows are put into for products alone; the same graph where there is none."""
    reshapes = [node for node in graph.nodes if node.op == "reshape"]
    ways = {node: way for node in reshapes if (way := _way_to(node, graph)) is not None}
    if not ways:
        return graph
    work = Rewriting(graph)
    for node in graph.nodes:
        if node in ways:
            work.values[Value(node)] = _in_their_dims(ways[node], work)
        else:
            work.keep(node)
    return drop_unused(work.finish())


def _way_to(last: Node, graph: Graph) -> list[Node] | None:
    """From the reshape that puts rows into one dim to the one that brings them back into theirs, a product between
    them, where nobody else reads what is made on the way."""
    way = [last]
    while way[0].op in _ROW_BY_ROW or way == [last]:
        read = way[0].args[0]
        if not isinstance(read.owner, Node) or len(graph.users[read]) > 1 or read in graph.outputs:
            return None
        way.insert(0, read.owner)
    shape, merged = last.types[0].shape, last.args[0].type.shape
    comes_back = way[0].op == "reshape" and (prod(shape[:-1]), *shape[-1:]) == merged
    is_merged = comes_back and len(shape) > 2 and way[0].types[0].shape[:-1] == merged[:1]
    return way if is_merged and any(node.op == "linear" for node in way) else None


def _in_their_dims(way: list[Node], work: Rewriting) -> Value:
    """What comes at the end of a way, with rows as they stand there all along."""
    first, *between, last = way
    shape = (*last.types[0].shape[:-1], first.types[0].shape[-1])
    x = work.values[first.args[0]]
    if isinstance(x.owner, Node) and x.owner.spec is not None and x.owner.spec.view:
        x = work.emit(first, "contiguous", x)  # as the reshape makes it: torch takes longer for products of others
    if x.type.shape != shape:
        x = work.emit(first, "reshape", x, shape)
    for node in between:
        x = work.emit(node, node.op, x, *(work.values[a] if isinstance(a, Value) else a for a in node.args[1:]))
    return x
