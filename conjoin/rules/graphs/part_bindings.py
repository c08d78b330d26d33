"""Concatenations and splits in graphs: of any number of tensors, read as nested ones of two.

A piece is a range of a dim. The range [2, 5) of 7 is the first part of [2, 7) and the second part of [0, 5), and each
of those is a part of the whole: so a split into many is read in every nesting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate

from conjoin.ir import Node
from conjoin.rules.graphs.binding import Binding, Maker, Seen
from conjoin.rules.graphs.terms import (
    Miss,
    Reading,
    Shape,
    Term,
    Virtual,
    argument,
    rank_of,
    shape_of,
    with_shape,
)

_MOST_NESTINGS = 8
"""Tensors of one concatenation that are read in every nesting; more are read from either end only."""


def _resized(term: Term, dim: int, size: int) -> Shape:
    shape = shape_of(term)
    return (*shape[:dim], size, *shape[dim + 1 :])


# Concatenation.


def _cat(node: Node, index: int) -> Iterator[Seen]:
    parts = node.args[0]
    if len(parts) < 2 or len({(rank_of(part), part.type.dtype) for part in parts}) > 1:
        yield Miss("concat", "joins one tensor only, or tensors of different rank or dtype")
    else:
        yield from _nested(parts, node.call.dim())


def _nested(parts: tuple[Term, ...], dim: int) -> Iterator[Reading]:
    count = len(parts)
    cuts = range(1, count) if count <= _MOST_NESTINGS else (1, count - 1)
    for cut in cuts:
        yield Reading("concat", (("axis", dim),), (_joined(parts[:cut], dim), _joined(parts[cut:], dim)))


def _joined(parts: tuple[Term, ...], dim: int) -> Term:
    if len(parts) == 1:
        return parts[0]
    total = sum(shape_of(part)[dim] for part in parts)
    return Virtual("concat", (("axis", dim),), parts, with_shape(parts[0], _resized(parts[0], dim, total)))


def _joined_inside(term: Virtual) -> Iterator[Seen]:
    yield from _nested(term.args, dict(term.params)["axis"])


def _make_concat(maker: Maker, args: tuple[Term, ...], axis: int) -> Term:
    parts = [part for arg in args for part in _flat(arg, axis)]
    return maker.call("cat", tuple(map(maker.value, parts)), axis)


def _flat(term: Term, axis: int) -> tuple[Term, ...]:
    """The parts of nested concatenations along one dim."""
    if isinstance(term, Virtual) and term.op == "concat" and dict(term.params)["axis"] == axis:
        return tuple(part for arg in term.args for part in _flat(arg, axis))
    return (term,)


# Split.


def _cut(node: Node, index: int) -> Iterator[Seen]:
    """One of several pieces without gaps."""
    dim = node.call.dim()
    ends = tuple(accumulate((type.shape[dim] for type in node.types), initial=0))
    if len(ends) > 2 and all(type.shape[dim] for type in node.types):
        yield from _parts_of(node.args[0], dim, ends[index], ends[index + 1], ends)


def _narrowed(node: Node, index: int) -> Iterator[Seen]:
    """One piece."""
    x, dim = node.args[0], node.call.dim()
    size, length = shape_of(x)[dim], node.types[0].shape[dim]
    if argument(node, "step") not in (None, 1):
        yield Miss("split", f"takes every {argument(node, 'step')} positions")
        return
    start = argument(node, "start") or 0
    start = min(max(0, start + size) if start < 0 else start, size)
    if 0 < length < size:
        yield from _parts_of(x, dim, start, start + length, tuple(sorted({0, start, start + length, size})))


def _parts_of(x: Term, dim: int, start: int, stop: int, ends: tuple[int, ...]) -> Iterator[Reading]:
    """Every way in which a range is one of two parts of a longer range."""
    for end in ends:
        if end > stop:
            yield Reading("split", (("axis", dim), ("part", 0)), (_range(x, dim, start, end, ends),))
        elif end < start:
            yield Reading("split", (("axis", dim), ("part", 1)), (_range(x, dim, end, stop, ends),))


def _range(x: Term, dim: int, start: int, stop: int, ends: tuple[int, ...]) -> Term:
    if (start, stop) == (ends[0], ends[-1]):
        return x
    params = (("axis", dim), ("start", start), ("stop", stop), ("ends", ends))
    return Virtual("range", params, (x,), with_shape(x, _resized(x, dim, stop - start)))


def _range_inside(term: Virtual) -> Iterator[Seen]:
    given = dict(term.params)
    yield from _parts_of(term.args[0], given["axis"], given["start"], given["stop"], given["ends"])


def _make_split(maker: Maker, args: tuple[Term, ...], axis: int, part: int, shape: Shape) -> Term:
    x = maker.value(args[0])
    size, mine = shape_of(x)[axis], shape[axis]
    sizes = (mine, size - mine) if part == 0 else (size - mine, mine)
    return maker.call("split_with_sizes", x, sizes, axis, output=part)


_CUTS = ("split_with_sizes", "split.Tensor", "split.sizes", "chunk", "unsafe_split.Tensor", "unsafe_chunk")
UNFOLD: Mapping[str, Callable[[Virtual], Iterator[Seen]]] = {"concat": _joined_inside, "range": _range_inside}
"""Virtual terms that read in more ways than the one they are written in."""

BINDINGS: tuple[Binding, ...] = (
    Binding("concat", {"cat": _cat}, _make_concat),
    Binding(
        "split",
        {**dict.fromkeys(_CUTS, _cut), "narrow": _narrowed, "slice.Tensor": _narrowed},
        _make_split,
        takes_shape=True,
    ),
)
