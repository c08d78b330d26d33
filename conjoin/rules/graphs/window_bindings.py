"""Convolutions, pooling, kernels and constants in graphs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from conjoin.ir import Node, Value
from conjoin.rules.graphs.binding import Binding, Maker, Seen, Words
from conjoin.rules.graphs.terms import (
    Miss,
    Params,
    Reading,
    Shape,
    Term,
    Virtual,
    argument,
    broadcast,
    rank_of,
    shape_of,
    with_shape,
)

_CONVOLUTIONS = ("conv2d", "conv2d.padding", "convolution")


def _both(value: Any) -> tuple[int, int]:
    """A number for each of two dims."""
    given = value if isinstance(value, tuple) else (value,)
    return (given[0], given[-1])


def _padding_words(padding: Any, kernel: Sequence[int]) -> Words:
    """Every way in which rules speak of a padding; none where it is not the same on both dims."""
    if isinstance(padding, str):
        pads = (0, 0) if padding == "valid" else tuple((k - 1) / 2 for k in kernel)
    else:
        pads = _both(padding)
    words: list[Any] = []
    if all(2 * p == k - 1 for p, k in zip(pads, kernel, strict=True)) and all(k % 2 for k in kernel):
        words.append("same")
    if pads[0] == pads[1] and pads[0] == int(pads[0]):
        words.append(int(pads[0]))
    if pads == (0, 0):
        words.append("valid")
    return Words(words)


def _conv_params(node: Node) -> Params | Miss:
    """Stride, padding and groups; or why rules do not cover the convolution."""
    x, weight = node.args[:2]
    stride, dilation = _both(argument(node, "stride")), _both(argument(node, "dilation"))
    kernel = shape_of(weight)[2:]
    pad = _padding_words(argument(node, "padding"), kernel)
    problem = ""
    if rank_of(x) != 4 or rank_of(weight) != 4 or argument(node, "transposed"):
        problem = "is not one of two-dimensional images in batches"
    elif stride[0] != stride[1]:
        problem = f"has strides {stride[0]} and {stride[1]} and rules are for equal ones"
    elif dilation != (1, 1):
        problem = f"has dilation {dilation[0]}×{dilation[1]} and rules are for dilation 1"
    elif not pad:
        problem = f"has padding {argument(node, 'padding')} around a kernel of {kernel[0]}×{kernel[1]}"
    if problem:
        return Miss("conv", problem)
    return ("stride", stride[0]), ("pad", pad), ("groups", argument(node, "groups")), ("act", "none")


def _conv(node: Node, index: int) -> Iterator[Seen]:
    x, weight, bias = node.args[:3]
    params = _conv_params(node)
    if isinstance(params, Miss):
        yield params
    elif bias is None:
        yield Reading("conv", params, (x, weight))


def _biased_conv(node: Node, index: int) -> Iterator[Seen]:
    """A number added to every channel, seen as a tensor of the result's shape."""
    x, weight, bias = node.args[:3]
    params = _conv_params(node)
    if bias is None or isinstance(params, Miss):
        return
    column = Virtual("column", (), (bias,), with_shape(bias, (*shape_of(bias), 1, 1)))
    args = Virtual("conv", params, (x, weight), node.types[0]), broadcast(column, node.types[0].shape)
    yield Reading("add", (), args)
    yield Reading("add", (), args[::-1])


def _activated(node: Node, index: int) -> Iterator[Seen]:
    """A convolution with the function that follows it."""
    inner = node.args[0].owner
    if isinstance(inner, Node) and inner.op in _CONVOLUTIONS:
        for seen in _conv(inner, 0):
            if isinstance(seen, Reading):
                yield Reading("conv", (*seen.params[:-1], ("act", node.op)), seen.args, (inner,))


def _make_conv(
    maker: Maker, args: tuple[Term, ...], stride: int, pad: Any, act: str = "none", groups: Any = None
) -> Term:
    x, weight = map(maker.value, args)
    _, inner, *kernel = shape_of(weight)
    made = maker.call("conv2d", x, weight, None, (stride, stride), _pads(pad, kernel), (1, 1), shape_of(x)[1] // inner)
    return made if act == "none" else maker.call(act, made)


def _pads(pad: Any, kernel: Sequence[int]) -> tuple[int, ...]:
    if pad == "same":
        return tuple(k // 2 for k in kernel)
    return (0, 0) if pad == "valid" else (pad, pad)


def _enlarge(node: Node, index: int) -> Iterator[Seen]:
    weight, pads = node.args[0], argument(node, "pad")
    if argument(node, "mode") not in (None, "constant") or argument(node, "value") not in (None, 0):
        yield Miss("enlarge", "does not pad with zeros")
    elif rank_of(weight) != 4 or len(pads) != 4 or pads[::2] != pads[1::2] or min(pads) < 0:
        yield Miss("enlarge", f"pads by {list(pads)} and rules pad the last two dims of a kernel alike on both sides")
    else:
        rows, columns = node.types[0].shape[2:]
        if rows == columns:
            yield Reading("enlarge", (("kernel", rows),), (weight,))
        else:
            yield Miss("enlarge", f"makes a kernel of {rows}×{columns} and rules are for square ones")


def _make_enlarge(maker: Maker, args: tuple[Term, ...], kernel: int, shape: Shape) -> Term:
    weight = maker.value(args[0])
    down, right = ((kernel - size) // 2 for size in shape_of(weight)[2:])
    return maker.call("constant_pad_nd", weight, (right, right, down, down), 0.0)


def _pool(op: str, node: Node, index: int) -> Iterator[Seen]:
    x, kernel = node.args[0], _both(argument(node, "kernel_size"))
    stride = _both(argument(node, "stride") or kernel)
    padding = argument(node, "padding")
    pad = _padding_words(padding, kernel)
    counted = argument(node, "count_include_pad")
    problem = ""
    if rank_of(x) != 4 or index != 0:
        problem = "is not one of images in batches"
    elif kernel[0] != kernel[1] or stride[0] != stride[1] or not pad:
        problem = f"has kernel {kernel}, stride {stride} and padding {padding} and rules are for square ones"
    elif argument(node, "ceil_mode") or _both(argument(node, "dilation") or 1) != (1, 1):
        problem = "has ceil_mode or dilation"
    elif argument(node, "divisor_override") is not None or (counted is False and _both(padding) != (0, 0)):
        problem = "does not count the padding, or divides by another number"
    if problem:
        yield Miss(op, problem)
    else:
        yield Reading(op, (("kernel", kernel[0]), ("stride", stride[0]), ("pad", pad)), (x,))


def _make_pool(op: str, maker: Maker, args: tuple[Term, ...], kernel: int, stride: int, pad: Any) -> Term:
    sizes = (kernel, kernel)
    return maker.call(op, maker.value(args[0]), sizes, (stride, stride), _pads(pad, sizes))


# Constants.


def _ones(node: Node, index: int) -> Iterator[Seen]:
    if argument(node, "fill_value") in (None, 1):
        yield Reading("ones", (), ())


def _identity(node: Node, index: int) -> Iterator[Seen]:
    if node.types[0].shape[0] == node.types[0].shape[1]:
        yield Reading("identity", (), ())


def _make_ones(maker: Maker, args: tuple[Term, ...], shape: Shape) -> Term:
    return maker.call("full", shape, 1.0, maker.dtype)


def _eye(maker: Maker, size: int) -> Value:
    return maker.call("eye", size, maker.dtype)


def _make_identity(maker: Maker, args: tuple[Term, ...], shape: Shape) -> Term:
    matrix = _eye(maker, shape[-1])
    return matrix if len(shape) == 2 else maker.call("expand", matrix, shape)


def _make_identity_kernel(maker: Maker, args: tuple[Term, ...], kernel: int, shape: Shape) -> Term:
    channels, half = shape[0], kernel // 2
    point = maker.call("reshape", _eye(maker, channels), (channels, channels, 1, 1))
    return maker.call("constant_pad_nd", point, (half,) * 4, 0.0) if half else point


def _make_pool_kernel(maker: Maker, args: tuple[Term, ...], kernel: int, shape: Shape) -> Term:
    return maker.call("full", shape, 1.0 / kernel**2, maker.dtype)


_ONES = ("ones", "full", "new_ones", "new_full", "ones_like", "full_like")
_ACTIVATIONS = ("relu", "silu", "tanh", "sigmoid")
BIASED = dict.fromkeys(_CONVOLUTIONS, _biased_conv)
"""Where an addition is found in a convolution."""

BINDINGS: tuple[Binding, ...] = (
    Binding("conv", {**dict.fromkeys(_CONVOLUTIONS, _conv), **dict.fromkeys(_ACTIVATIONS, _activated)}, _make_conv),
    Binding("enlarge", dict.fromkeys(("constant_pad_nd", "pad"), _enlarge), _make_enlarge, takes_shape=True),
    Binding("avg_pool", {"avg_pool2d": partial(_pool, "avg_pool")}, partial(_make_pool, "avg_pool2d")),
    Binding(
        "max_pool",
        dict.fromkeys(("max_pool2d", "max_pool2d_with_indices"), partial(_pool, "max_pool")),
        partial(_make_pool, "max_pool2d"),
    ),
    Binding("ones", dict.fromkeys(_ONES, _ones), _make_ones, takes_shape=True),
    Binding("identity", {"eye": _identity, "eye.m": _identity}, _make_identity, takes_shape=True),
    Binding("identity_kernel", {}, _make_identity_kernel, takes_shape=True),
    Binding("pool_kernel", {}, _make_pool_kernel, takes_shape=True),
)
