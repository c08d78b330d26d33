"""Products of matrices, reductions, lookups and parallelization operators in graphs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from conjoin.ir import Node
from conjoin.ops import COMBINE, EMBEDDING_BAG, PARTITION, REDUCE, REPLICATE
from conjoin.rules.graphs.binding import Binding, Maker, Seen, make_call
from conjoin.rules.graphs.terms import Miss, Reading, Term, Virtual, argument, rank_of, shape_of, with_shape


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


def _transpose(node: Node, index: int) -> Iterator[Seen]:
    rank = rank_of(node.args[0])
    if rank < 2:
        return
    order = _order(node, rank)
    if order == (*range(rank - 2), rank - 1, rank - 2):
        yield Reading("transpose", (), (node.args[0],))
    elif order != tuple(range(rank)):
        yield Miss("transpose", f"orders the dims {list(order)} and rules exchange the last two")


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


def _make_transpose(maker: Maker, args: tuple[Term, ...]) -> Term:
    if isinstance(args[0], Virtual) and args[0].op == "transpose":
        return args[0].args[0]
    return maker.call("transpose.int", maker.value(args[0]), -2, -1)


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


_TURNS = ("transpose.int", "permute", "t", "mT", "numpy_T")
_SUMS = dict.fromkeys(("sum.dim_IntList", "sum"), partial(_reduction, "sum"))
_MEANS = dict.fromkeys(("mean.dim", "mean"), partial(_reduction, "mean"))
_AXES = {"partition": PARTITION, "combine": COMBINE, "replicate": REPLICATE, "reduce": REDUCE}

BINDINGS: tuple[Binding, ...] = (
    Binding("matmul", dict.fromkeys(("matmul", "mm", "bmm"), _matmul), partial(make_call, "matmul")),
    Binding("linear", {"linear": _linear, "matmul": _linear_by_matmul}, _make_linear),
    Binding("transpose", dict.fromkeys(_TURNS, _transpose), _make_transpose),
    Binding("sum", _SUMS, partial(_make_reduction, "sum.dim_IntList")),
    Binding("mean", _MEANS, partial(_make_reduction, "mean.dim")),
    Binding("softmax", dict.fromkeys(("softmax.int", "_softmax"), _softmax), _make_softmax),
    Binding("embedding", {"embedding": _embedding}, partial(make_call, "embedding")),
    Binding("embedding_bag", {EMBEDDING_BAG: _embedding_bag}, _make_embedding_bag),
    *(Binding(op, {name: partial(_along_axes, op)}, partial(_make_along_axes, name)) for op, name in _AXES.items()),
)
