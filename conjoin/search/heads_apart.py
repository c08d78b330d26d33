"""Dims that are put together for a while are left apart: heads and samples, in torch's own attention.

    reshape(transpose(reshape(x, (t, b·h, f))), (b, h, t, f))    becomes    permute(reshape(x, (t, b, h, f)))

Of dims in one, only the first can be split there: of heads behind samples, those of a device do not lie side by side.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from itertools import accumulate, pairwise
from math import prod
from operator import mul

from conjoin.ir import Graph, Node, Rewriting, Value, bring_into_order, in_same_order, permutation
from conjoin.search.rehearsed import finish_rehearsed

Shape = tuple[int, ...]


def find_parted(graph: Graph, first: Node) -> dict[Node, tuple[Shape, Shape]]:
    """The reshapes that part what a reshape has put together, turned or not in between: of each the dims that all is
    made of, and their order then."""
    found: dict[Node, tuple[Shape, Shape]] = {}
    waiting = [(first, tuple(range(len(first.types[0].shape))))] if first.op == "reshape" and first.inputs else []
    while waiting:
        node, order = waiting.pop()
        for user in graph.users.get(Value(node), ()):
            if (turned := permutation(user)) is not None:
                waiting.append((user, tuple(order[place] for place in turned)))
            elif user.op == "reshape" and (parted := _parted(first, order, user.types[0].shape)) is not None:
                found[user] = parted
    return found


def _parted(first: Node, order: Shape, shape: Shape) -> tuple[Shape, Shape] | None:
    merged = first.types[0].shape
    parts = _common_parts(first.args[0].type.shape, merged)
    if parts is None or len(parts) == len(merged):
        return None
    groups = _grouped(parts, merged)
    left = tuple(place for dim in order for place in groups[dim])
    return (parts, left) if tuple(parts[place] for place in left) == shape else None


def part_dims(graph: Graph, reshapes: Collection[Node]) -> Graph:
    """The graph in which the dims that these reshapes put together stay apart, wherever they are parted again."""
    return in_same_order(graph, partial(_parted_by, graph, reshapes))


def _parted_by(graph: Graph, reshapes: Collection[Node], in_order: bool) -> Graph:
    ends = {end: (first.args[0], *way) for first in reshapes for end, way in find_parted(graph, first).items()}
    work = Rewriting(graph)
    for node in graph.nodes:
        if node in ends:
            value, parts, order = ends[node]
            x = work.values[value]
            apart = x if x.type.shape == parts else work.emit(node, "reshape", x, parts)
            work.values[Value(node)] = work.emit(node, "permute", apart, order)
            if in_order:
                bring_into_order(work, node, Value(node))
        else:
            work.keep(node)
    return finish_rehearsed(work)


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
