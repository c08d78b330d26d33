"""Products of matrices, reductions, lookups and parallelization operators in graphs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from conjoin.ir import Node
from conjoin.ops import AGGREGATE, COMBINE, EMBEDDING_BAG, PARTITION, REDUCE, REPLICATE
from conjoin.rules.graphs.binding import Binding, Maker, Seen, make_call
from conjoin.rules.graphs.terms import Miss, Reading, Shape, Term, Virtual, argument, rank_of, shape_of, with_shape


def _matmul(node: Node, index: int) -> Iterator[Seen]:
    one, other = node.args[:2]
    if rank_of(one) == rank_of(other) >= 2 and shape_of(one)[:-2] == shape_of(other)[:-2]:
        yield Reading("matmul", (), (one, other))
    elif rank_of(other) != 2 or rank_of(one) < 2:
        shapes = " and ".join(str(list(shape_of(x))) for x in (one, other))
        yield Miss("matmul", f"is of {shapes} and rules are for equal leading dims")


def _linear(node: Node, index: int) -> Iterator[Seen]:
    x, weight, vector = node.args
    if vector is None and rank_of(weight) == 2:
        yield Reading("linear", (), (x, weight))


def _linear_by_matmul(node: Node, index: int) -> Iterator[Seen]:
    """Every row of a tensor times one matrix."""
    one, other = node.args[:2]
    if rank_of(one) > 2 and rank_of(other) == 2:
        turned = with_shape(other, shape_of(other)[::-1])
        yield Reading("linear", (), (one, Virtual("transpose", (), (other,), turned)))


def _make_linear(maker: Maker, args: tuple[Term, ...]) -> Term:
    x, weight = args
    if isinstance(weight, Virtual) and weight.op == "transpose":
        return maker.call("matmul", maker.value(x), maker.value(weight.args[0]))
    return maker.call("linear", maker.value(x), maker.value(weight))


_TURNS: Mapping[tuple[int, ...], tuple[tuple[str, ...], ...]] = {
    (0, 2, 1): (("transpose",),),
    (1, 0, 2): (("swap",),),
    (1, 2, 0): (("swap", "transpose"),),
    (2, 0, 1): (("transpose", "swap"),),
    (2, 1, 0): (("swap", "transpose", "swap"), ("transpose", "swap", "transpose")),
}
"""Every order of three dims as exchanges one after another."""
_EXCHANGED = {"transpose": (-2, -1), "swap": (-3, -2)}


def _turned(op: str, node: Node, index: int) -> Iterator[Seen]:
    x = node.args[0]
    rank = rank_of(x)
    order = _order(node, rank) if rank > 1 else ()
    if order == tuple(range(rank)):
        return
    last = (0, 2, 1) if order == (1, 0) else tuple(place - (rank - 3) for place in order[-3:])
    if order[:-3] != tuple(range(rank - 3)) or last not in _TURNS:
        yield Miss(op, f"orders the dims {list(order)} and rules order the last three")
        return
    for steps in _TURNS[last]:
        if steps[-1] == op:
            yield Reading(op, (), (_through(x, steps[:-1]),))


def _through(x: Term, steps: tuple[str, ...]) -> Term:
    for op in steps:
        shape = _exchanged(shape_of(x), op)
        x = Virtual(op, (), (x,), with_shape(x, shape))
    return x


def _exchanged(items: tuple[int, ...], op: str) -> tuple[int, ...]:
    """Sizes of dims, or their places, with two of them exchanged."""
    found, (a, b) = list(items), _EXCHANGED[op]
    found[a], found[b] = found[b], found[a]
    return tuple(found)


def _order(node: Node, rank: int) -> tuple[int, ...]:
    order = list(range(rank))
    if node.op == "permute":
        return node.call.dims("dims")
    if node.op == "transpose.int":
        a, b = node.call.dim("dim0"), node.call.dim("dim1")
    else:
        a, b = rank - 2, rank - 1
    order[a], order[b] = order[b], order[a]
    return tuple(order)


def _make_turned(op: str, maker: Maker, args: tuple[Term, ...]) -> Term:
    """All exchanges one after another as one call, or none."""
    (x,), steps = args, [op]
    while isinstance(x, Virtual) and x.op in _EXCHANGED:
        steps.append(x.op)
        (x,) = x.args
    order = tuple(range(rank_of(x)))
    for step in reversed(steps):
        order = _exchanged(order, step)
    if order == tuple(range(len(order))):
        return x
    for dims in _EXCHANGED.values():
        if len(order) >= -dims[0] and order == _exchanged(tuple(range(len(order))), _BY_DIMS[dims]):
            return maker.call("transpose.int", maker.value(x), *dims)
    return maker.call("permute", maker.value(x), order)


_BY_DIMS = {dims: op for op, dims in _EXCHANGED.items()}


def _reshaped(op: str, node: Node, index: int) -> Iterator[Seen]:
    """The last two dims as one, or the last as two; several may be meant where one of them has one element."""
    x = node.args[0]
    before, after = shape_of(x), node.types[0].shape
    if op == "flatten" and len(after) == len(before) - 1 >= 1 and after[:-1] == before[:-2]:
        yield Reading("flatten", (), (x,))
    elif op == "unflatten" and len(after) == len(before) + 1 >= 2 and after[:-2] == before[:-1] and after[-2]:
        yield Reading("unflatten", (("parts", after[-2]),), (x,))
    elif before != after and not (abs(len(before) - len(after)) == 1 and before[:-2] == after[:-2]):
        yield Miss(op, f"makes {list(after)} of {list(before)} and rules are for the last two dims")


def _make_flatten(maker: Maker, args: tuple[Term, ...], shape: Shape) -> Term:
    return maker.call("reshape", maker.value(args[0]), shape)


def _make_unflatten(maker: Maker, args: tuple[Term, ...], parts: int, shape: Shape) -> Term:
    return maker.call("reshape", maker.value(args[0]), shape)


# Reductions and lookups.


def _reduction(op: str, node: Node, index: int) -> Iterator[Seen]:
    """Over one dim after another, the last one first."""
    x = node.args[0]
    if argument(node, "keepdim"):
        yield Miss(op, "keeps the dims it reduces and rules drop them")
    elif argument(node, "dtype") is not None:
        yield Miss(op, f"converts to {argument(node, 'dtype')}")
    elif rank_of(x) > 0:
        first, *rest = sorted(node.call.dims())
        for dim in reversed(rest):
            shape = (*shape_of(x)[:dim], *shape_of(x)[dim + 1 :])
            x = Virtual(op, (("axis", dim),), (x,), with_shape(x, shape))
        yield Reading(op, (("axis", first),), (x,))


def _make_reduction(op: str, maker: Maker, args: tuple[Term, ...], axis: int) -> Term:
    return maker.call(op, maker.value(args[0]), (axis,))


def _softmax(node: Node, index: int) -> Iterator[Seen]:
    if argument(node, "dtype") is not None or argument(node, "half_to_float"):
        yield Miss("softmax", "converts its operand to another dtype")
    elif rank_of(node.args[0]) > 0:
        yield Reading("softmax", (("axis", node.call.dim()),), (node.args[0],))


def _embedding(node: Node, index: int) -> Iterator[Seen]:
    table, indices, padding, *scaled = node.args
    if padding != -1 or any(scaled):
        yield Miss("embedding", f"has padding_idx {padding} or scaled gradients and rules are for plain ones")
    else:
        yield Reading("embedding", (), (table, indices))


def _embedding_bag(node: Node, index: int) -> Iterator[Seen]:
    table, indices, weights, mode, padding = node.args
    if mode != "sum" or weights is not None or padding not in (None, -1):
        yield Miss("embedding_bag", f"has mode {mode}, weights or a padding_idx and rules are for plain sums")
    else:
        yield Reading("embedding_bag", (), (table, indices))


_OVER_EDGES = {
    ("sum", False): "aggregate", ("sum", True): "aggregate_weighted", ("mean", False): "aggregate_mean",
}  # fmt: skip
"""By what is made of the edges of a vertex, and whether these have weights."""


def _aggregated(op: str, node: Node, index: int) -> Iterator[Seen]:
    x, source, target, weight, vertices, reduce, window, *_ = node.args
    if rank_of(x) != 2 or (weight is not None and rank_of(weight) != 1):
        yield Miss(op, "has rows of several dims, or a weight for each, and rules are for rows of numbers")
    elif window or (reduce, weight is not None) not in _OVER_EDGES:
        yield Miss(op, f"is of some vertices, or a {reduce}, and rules are for sums, and means without weights")
    elif _OVER_EDGES[reduce, weight is not None] == op:
        operands = (x, source, target) if weight is None else (x, source, target, weight)
        yield Reading(op, (("vertices", vertices),), operands)


def _make_aggregated(op: str, maker: Maker, args: tuple[Term, ...], vertices: int) -> Term:
    """As many rows are sent between parts of the graph as before, whatever is in them."""
    x, source, target, *weight = map(maker.value, args)
    reduce = next(reduce for (reduce, _), name in _OVER_EDGES.items() if name == op)
    halos = maker.said(AGGREGATE, "halos") or ()
    return maker.call(AGGREGATE, x, source, target, weight[0] if weight else None, vertices, reduce, (), halos)


# Over devices.


def _along_axes(op: str, node: Node, index: int) -> Iterator[Seen]:
    x, *dim, axes = node.args
    axis = (("axis", dim[0]),) if dim else ()
    yield Reading(op, (*axis, ("mesh", axes)), (x,))


def _make_along_axes(
    name: str, maker: Maker, args: tuple[Term, ...], mesh: tuple[str, ...], axis: int | None = None
) -> Term:
    return maker.call(name, maker.value(args[0]), *(() if axis is None else (axis,)), mesh)


def _make_softmax(maker: Maker, args: tuple[Term, ...], axis: int) -> Term:
    return maker.call("softmax.int", maker.value(args[0]), axis)


def _make_embedding_bag(maker: Maker, args: tuple[Term, ...]) -> Term:
    return maker.call(EMBEDDING_BAG, *map(maker.value, args), None, "sum", None)


_ORDERS = ("transpose.int", "permute", "t", "mT", "numpy_T")
_RESHAPES = ("view", "reshape", "_unsafe_view", "flatten.using_ints", "unflatten.int")
_SUMS = dict.fromkeys(("sum.dim_IntList", "sum"), partial(_reduction, "sum"))
_MEANS = dict.fromkeys(("mean.dim", "mean"), partial(_reduction, "mean"))
_AXES = {"partition": PARTITION, "combine": COMBINE, "replicate": REPLICATE, "reduce": REDUCE}

BINDINGS: tuple[Binding, ...] = (
    Binding("matmul", dict.fromkeys(("matmul", "mm", "bmm"), _matmul), partial(make_call, "matmul")),
    Binding("linear", {"linear": _linear, "matmul": _linear_by_matmul}, _make_linear),
    *(Binding(op, dict.fromkeys(_ORDERS, partial(_turned, op)), partial(_make_turned, op)) for op in _EXCHANGED),
    Binding("flatten", dict.fromkeys(_RESHAPES, partial(_reshaped, "flatten")), _make_flatten, takes_shape=True),
    Binding("unflatten", dict.fromkeys(_RESHAPES, partial(_reshaped, "unflatten")), _make_unflatten, takes_shape=True),
    Binding("sum", _SUMS, partial(_make_reduction, "sum.dim_IntList")),
    Binding("mean", _MEANS, partial(_make_reduction, "mean.dim")),
    Binding("softmax", dict.fromkeys(("softmax.int", "_softmax"), _softmax), _make_softmax),
    Binding("embedding", {"embedding": _embedding}, partial(make_call, "embedding")),
    Binding("embedding_bag", {EMBEDDING_BAG: _embedding_bag}, _make_embedding_bag),
    *(Binding(op, {AGGREGATE: partial(_aggregated, op)}, partial(_make_aggregated, op)) for op in _OVER_EDGES.values()),
    *(Binding(op, {name: partial(_along_axes, op)}, partial(_make_along_axes, name)) for op, name in _AXES.items()),
)
