"""Tensors that a model makes empty and fills part by part along one dim: their parts put together, as `cat` does.

    k = x.new_empty(…, 8);  k[…, :4] = a;    k[…, 4:] = b       becomes    k = cat([a, b], dim=-1)
    k = x.new_empty(…, 8);  k[…, ::2] = a;   k[…, 1::2] = b     becomes    k = stack([a, b], dim=-1).flatten(-2)

Nothing is left of what was empty, and so nothing of it has to be split, or cut into samples, as its parts are.
"""

from __future__ import annotations

from itertools import pairwise

from conjoin.ir import Graph, Node, Rewriting, Value, drop_unused
from conjoin.ops import OVERWRITE

_FRESH = ("empty", "new_empty", "empty_like", "zeros", "new_zeros", "zeros_like")
Part = tuple[range, Value]
"""Places along the dim, and what is written there."""


def with_parts_together(graph: Graph) -> Graph:
    """The graph with such tensors put together of their parts; the same graph where there is none."""
    found = {node: parts for node in graph.nodes if len(parts := _parts(graph, node)) > 1}
    if not found:
        return graph
    work, gone = Rewriting(graph), {_filled(node) for node in found}
    for node in graph.nodes:
        if node in found:
            work.values[Value(node)] = _together(work, node, found[node])
        elif node in gone or any(value.owner in gone for value in node.inputs):
            gone.add(node)
        else:
            work.keep(node)
    return drop_unused(work.finish())


def _together(work: Rewriting, last: Node, parts: list[Part]) -> Value:
    values, dim = tuple(work.values[value] for _, value in parts), last.call.dim()
    if parts[0][0].step == 1:
        made: Value = work.emit(last, "cat", values, dim)
        return made
    made = work.emit(last, "reshape", work.emit(last, "stack", values, dim + 1), last.types[0].shape)
    return made


def _filled(node: Node) -> Node:
    """What was empty before a row of writes that ends here."""
    while node.op == "slice_scatter":
        node = node.args[0].owner
    return node


def _parts(graph: Graph, last: Node) -> list[Part]:
    """The parts of what is whole after this write, in order; none if it is not made of such parts."""
    parts, node = list[Part](), last
    while node.op == "slice_scatter" and node.call.dim() == last.call.dim():
        part, base = _written(graph, node), node.args[0].owner
        if part is None or not isinstance(base, Node):
            return []
        parts.append(part)
        node = base
    parts.sort(key=lambda part: part[0].start)
    is_fresh = node.op.partition(".")[0] in _FRESH
    return parts if is_fresh and parts and _is_whole([places for places, _ in parts], last) else []


def _is_whole(parts: list[range], last: Node) -> bool:
    """Whether places follow each other up to the end, or take turns."""
    size = last.types[0].shape[last.call.dim()]
    if parts[0].step == 1:
        follow = all(one.step == other.step and one.stop == other.start for one, other in pairwise(parts))
        return follow and (parts[0].start, parts[-1].stop) == (0, size)
    return size % len(parts) == 0 and parts == [range(i, size, len(parts)) for i in range(len(parts))]


def _written(graph: Graph, node: Node) -> Part | None:
    """What is written into a slice; None if somebody else looks at what it is written into, or it fits only roughly."""
    base, source, whole, dim = node.args[0], node.args[1], node.types[0], node.call.dim()
    places = range(whole.shape[dim])[slice(*(node.call[key] for key in ("start", "end", "step")))]
    looks = [user for user in graph.users[base] if user is not node]
    if isinstance(source.owner, Node) and source.owner.op == OVERWRITE and looks == [source.owner.args[0].owner]:
        source = source.owner.args[1]
        looks = [user for look in looks for user in graph.users[Value(look)] if user.op != OVERWRITE]
    size = (*whole.shape[:dim], len(places), *whole.shape[dim + 1 :])
    fits = (source.type.shape, source.type.dtype) == (size, whole.dtype)
    return (places, source) if fits and not looks and base not in graph.outputs else None
