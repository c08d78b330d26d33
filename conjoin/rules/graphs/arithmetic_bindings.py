"""Additions, multiplications and functions of every element in graphs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from conjoin.ir import Node, Value
from conjoin.ops import LINEAR_RELU
from conjoin.rules.graphs.binding import Binding, Maker, Reader, Seen, in_range, make_call, operands
from conjoin.rules.graphs.terms import Literal, Miss, Reading, Term, Virtual, argument, broadcast, rank_of, shape_of
from conjoin.rules.graphs.window_bindings import BIASED

_PLAIN = (("act", "none"),)
"""Of an addition that no function is fused into."""


def _pair(node: Node) -> tuple[Any, Any]:
    return node.args[0], node.args[1]


def _elementwise(op: str, *, commutes: bool = False) -> Reader:
    """Two tensors of one shape, or as the call broadcasts them."""

    def read(node: Node, index: int) -> Iterator[Seen]:
        one, other = _pair(node)
        if argument(node, "alpha") not in (None, 1):
            yield Miss(op, f"has alpha {argument(node, 'alpha')} and rules are for alpha 1")
        elif not isinstance(one, Value) or not isinstance(other, Value):
            yield Miss(op, "has a number for an operand and rules are for tensors")
        elif not _is_bias(one, other) and not _is_bias(other, one):
            shape = node.types[0].shape
            args = broadcast(one, shape), broadcast(other, shape)
            yield Reading(op, (), args)
            if commutes and one != other:
                yield Reading(op, (), args[::-1])

    return read


def _is_bias(x: Any, vector: Any) -> bool:
    """Whether a vector is added along the last dim of a tensor of higher rank."""
    if not isinstance(x, Value) or not isinstance(vector, Value):
        return False
    return rank_of(vector) == 1 and rank_of(x) > 1 and shape_of(x)[-1] == shape_of(vector)[0]


def _make_elementwise(op: str, maker: Maker, args: tuple[Term, ...]) -> Term:
    return maker.call(op, *operands(maker, args))


def _product_plus(product: str, node: Node, index: int) -> Iterator[Seen]:
    """`addmm`, `baddbmm`: a matrix of the result's shape added to a product."""
    added, one, other = node.args[:3]
    if node.args[3:] != (1, 1):
        yield Miss(product, f"has beta {node.args[3]} and alpha {node.args[4]} and rules are for 1")
        return
    inner = Virtual("matmul", (), (one, other), node.types[0])
    if product == "bias" and rank_of(added) == 1 and shape_of(added)[0] == node.types[0].shape[-1]:
        yield Reading("bias", _PLAIN, (inner, added))
    elif product == "add" and rank_of(added) != 1:
        args = inner, broadcast(added, node.types[0].shape)
        yield Reading("add", (), args)
        yield Reading("add", (), args[::-1])


def _function(name: str, node: Node, index: int) -> Iterator[Seen]:
    if argument(node, "approximate") not in (None, "none"):
        yield Miss(name, f"is approximated by {argument(node, 'approximate')} and rules are for the exact one")
    else:
        yield Reading(name, (), (node.args[0],))


def _square(node: Node, index: int) -> Iterator[Seen]:
    if argument(node, "exponent") == 2:
        yield Reading("square", (), (node.args[0],))


def _scale(node: Node, index: int) -> Iterator[Seen]:
    """A number, or a tensor without dims, as a factor or divisor."""
    one, other = _pair(node)
    divides = node.op.startswith("div")
    for x, factor in ((one, other),) if divides else ((one, other), (other, one)):
        if not isinstance(x, Value):
            continue
        if isinstance(factor, int | float) and not isinstance(factor, bool):
            if not (divides and factor == 0):
                yield Reading("scale", (), (x, Literal(factor, divides)))
        elif isinstance(factor, Value) and rank_of(factor) == 0 and not divides:
            yield Reading("scale", (), (x, factor))


def _make_scale(maker: Maker, args: tuple[Term, ...]) -> Term:
    x, factor = args
    if isinstance(x, Literal) and isinstance(factor, Literal):
        return Literal(in_range(x.factor * factor.factor, maker.dtype))
    if isinstance(x, Literal):
        x, factor = factor, x
    if isinstance(factor, Literal):
        return maker.call("div.Tensor" if factor.inverse else "mul.Tensor", maker.value(x), factor.number)
    return maker.call("mul.Tensor", maker.value(x), maker.value(factor))


def _bias(node: Node, index: int) -> Iterator[Seen]:
    one, other = _pair(node)
    if argument(node, "alpha") not in (None, 1):
        return
    for x, vector in ((one, other), (other, one)):
        if _is_bias(x, vector):
            yield Reading("bias", _PLAIN, (x, vector))


def _gain(node: Node, index: int) -> Iterator[Seen]:
    one, other = _pair(node)
    for x, vector in ((one, other), (other, one)):
        if _is_bias(x, vector):
            yield Reading("gain", (), (x, vector))


def _make_gain(maker: Maker, args: tuple[Term, ...]) -> Term:
    return maker.call("mul.Tensor", *map(maker.value, args))


def _biased_linear(node: Node, index: int) -> Iterator[Seen]:
    x, weight, vector = node.args
    if vector is not None and rank_of(weight) == 2:
        yield Reading("bias", _PLAIN, (Virtual("linear", (), (x, weight), node.types[0]), vector))


def _rectified_linear(node: Node, index: int) -> Iterator[Seen]:
    x, weight, vector = node.args
    yield Reading("bias", (("act", "relu"),), (Virtual("linear", (), (x, weight), node.types[0]), vector))


def _make_bias(maker: Maker, args: tuple[Term, ...], act: str = "none") -> Term:
    """A linear layer and a ReLU become one call; other functions follow on their own."""
    x, vector = args
    if isinstance(x, Virtual) and x.op == "linear":
        layer = LINEAR_RELU if act == "relu" else "linear"
        made = maker.call(layer, *map(maker.value, (*x.args, vector)))
        return made if act in ("none", "relu") else maker.call(act, made)
    made = maker.call("add.Tensor", maker.value(x), maker.value(vector))
    return made if act == "none" else maker.call(act, made)


_FUNCTIONS = ("relu", "gelu", "silu", "tanh", "sigmoid", "exp", "sqrt", "rsqrt", "square", "neg")
_ADDITIONS: dict[str, Reader] = {
    "add.Tensor": _elementwise("add", commutes=True),
    **dict.fromkeys(("addmm", "baddbmm"), partial(_product_plus, "add")),
    **BIASED,
}
_BIASES: dict[str, Reader] = {
    "add.Tensor": _bias, "linear": _biased_linear, LINEAR_RELU: _rectified_linear,
    "addmm": partial(_product_plus, "bias"),
}  # fmt: skip
_SCALINGS = dict.fromkeys(("mul.Tensor", "mul.Scalar", "div.Tensor", "div.Scalar"), _scale)

BINDINGS: tuple[Binding, ...] = (
    Binding("add", _ADDITIONS, partial(_make_elementwise, "add.Tensor")),
    Binding("sub", {"sub.Tensor": _elementwise("sub")}, partial(_make_elementwise, "sub.Tensor")),
    Binding("mul", {"mul.Tensor": _elementwise("mul", commutes=True)}, partial(_make_elementwise, "mul.Tensor")),
    Binding("div", {"div.Tensor": _elementwise("div")}, partial(_make_elementwise, "div.Tensor")),
    *(
        Binding(
            name,
            {name: partial(_function, name), **({"pow.Tensor_Scalar": _square} if name == "square" else {})},
            partial(make_call, name),
        )
        for name in _FUNCTIONS
    ),
    Binding("scale", _SCALINGS, _make_scale),
    Binding("bias", _BIASES, _make_bias),
    Binding("gain", {"mul.Tensor": _gain}, _make_gain),
)
