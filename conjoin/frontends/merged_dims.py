"""Dims that a model puts together for a while, left apart: torch's own attention does both.

    reshape(linear(reshape(x, (t·b, f))), (t, b, g))       becomes    linear(reshape(x, (t, b, f)))
    reshape(transpose(reshape(x, (t, b·h, f))), (b, h, …)) becomes    permute(reshape(x, (t, b, h, f)), …)

Of dims in one, only the first can be split there: what a device has of the others does not lie side by side. Neither
samples behind positions nor heads behind samples could be.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import prod
from operator import mul

from conjoin.ir import Graph, Node, Rewriting, Value, drop_unused, permutation
from conjoin.ops import CAST

_ROW_BY_ROW = ("linear", CAST, "relu", "gelu", "silu", "tanh", "sigmoid")
"""What makes each row of that row alone, whatever dims rows stand in."""
Shape = tuple[int, ...]


def with_dims_apart(graph: Graph) -> Graph:
    """The graph without dims that others are put into for a while; the same graph where there is none."""
    reshapes = [node for node in graph.nodes if node.op == "reshape"]
    rows = {node: way for node in reshapes if (way := _rows_on_the_way_to(node, graph)) is not None}
    views = {node: view for node in graph.nodes if (view := _view_through(node)) is not None}
    if not rows and not views:
        return graph
    work = Rewriting(graph)
    for node in graph.nodes:
        if node in rows:
            work.values[Value(node)] = _in_their_dims(rows[node], work)
        elif node in views:
            root, dims, order = views[node]
            x = work.values[root]
            parted = x if x.type.shape == dims else work.emit(node, "reshape", x, dims)
            work.values[Value(node)] = work.emit(node, "permute", parted, order)
        else:
            work.keep(node)
    return drop_unused(work.finish())


def _rows_on_the_way_to(last: Node, graph: Graph) -> list[Node] | None:
    """From the reshape that puts rows into one dim to the one that brings them back into theirs, a product between
    them, where nobody else reads what is made on the way."""
    way = [last]
    while way[0].op in _ROW_BY_ROW or way == [last]:
        read = way[0].args[0]
        if not isinstance(read.owner, Node) or len(graph.users[read]) > 1 or read in graph.outputs:
            return None
        way.insert(0, read.owner)
    shape, (rows, *features) = last.types[0].shape, last.args[0].type.shape
    comes_back = way[0].op == "reshape" and prod(shape[:-1]) == rows and [*shape[-1:]] == features
    is_merged = comes_back and len(shape) > 2 and way[0].types[0].shape[:-1] == (rows,)
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


def _view_through(last: Node) -> tuple[Value, Shape, Shape] | None:
    """What views make of a value, as a shape for it and a permutation of its dims: a reshape that parts what a reshape
    before it had put together, or a dim that came and goes again; None for other views."""
    if last.op not in ("reshape", "squeeze.dim"):
        return None
    value, order = last.args[0], tuple(range(len(last.args[0].type.shape)))
    while isinstance(value.owner, Node) and (turned := permutation(value.owner)) is not None:
        value, order = value.owner.args[0], tuple(turned[place] for place in order)
    first = value.owner
    if not isinstance(first, Node):
        return None
    start, shape = first.args[0].type.shape if first.inputs else (), value.type.shape
    if last.op == "squeeze.dim" and first.op == "unsqueeze":
        gone = first.call.dim(rank=len(shape))
        left = tuple(place - (place > gone) for place in order if place != gone)
        return (first.args[0], start, left) if order[last.call.dim()] == gone else None
    parts = _common_parts(start, shape) if last.op == first.op == "reshape" else None
    if parts is None:
        return None
    groups = _grouped(parts, shape)
    left = tuple(place for dim in order for place in groups[dim])
    parts_again = tuple(parts[place] for place in left) == last.types[0].shape and len(parts) > len(shape)
    return (first.args[0], parts, left) if parts_again else None


def _common_parts(one: Shape, other: Shape) -> Shape | None:
    """The dims that both shapes are made of by putting neighbours together.

    >>> _common_parts((6, 8, 16), (6, 16, 8)), _common_parts((4, 6), (6, 4))
    ((6, 8, 2, 8), None)
    """
    if 0 in one:
        return None
    ends = sorted({end for shape in (one, other) for end in accumulate(reversed(shape), mul, initial=1)})
    if any(high % low for low, high in pairwise(ends)):
        return None
    return tuple(high // low for low, high in pairwise(ends))[::-1]


def _grouped(parts: Shape, dims: Shape) -> list[Sequence[int]]:
    """Which of the parts, by their places, each dim is made of."""
    groups, place = list[Sequence[int]](), 0
    for dim in dims:
        start = place
        while prod(parts[start:place]) < dim:
            place += 1
        groups.append(range(start, place))
    return groups
