"""Operators evaluated on many concrete values at once, over the integers modulo a prime or over floats.

Modulo a prime nothing is rounded, so that two graphs are either equal or not. There `max_pool` goes by the order of
the residues around 0, `relu` rounds down to an irregular grid, and every other function, the inverse in a division
among them, is a fixed but arbitrary one: only what holds for any function in its place is found. Rounding has what is
special about `relu`, that it keeps the order and that twice is as once; and it changes most numbers, so that a few of
them tell that it is there. An average is a product with the inverse of the count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from conjoin.rules.generator.shapes import Params, Type, size_of
from conjoin.rules.patterns import Apply

Array = npt.NDArray[Any]
"""Many values: the first dim counts them."""
PRIME = 268435399
"""The largest prime below 2²⁸: sums of 128 products of residues fit into 64 bits."""

_STEP = 1024
"""Of the grid to which `relu` rounds residues."""


class Field(Protocol):
    """What numbers are computed with."""

    lowest: float
    """What is smaller than every number."""

    def reduce(self, x: Array) -> Array: ...
    def inverse(self, x: Array) -> Array: ...
    def function(self, name: str, x: Array) -> Array: ...
    def ordered(self, x: Array) -> Array: ...


class Residues:
    """Integers modulo the prime."""

    lowest: float = PRIME // 2 + 1

    def reduce(self, x: Array) -> Array:
        return x % PRIME

    def inverse(self, x: Array) -> Array:
        """By Fermat's little theorem; 0 has none and stays 0."""
        result, power, exponent = np.ones_like(x), x, PRIME - 2
        while exponent:
            if exponent & 1:
                result = result * power % PRIME
            power, exponent = power * power % PRIME, exponent >> 1
        return result

    def function(self, name: str, x: Array) -> Array:
        if name == "relu":
            return _rounded(_signed(x)) % PRIME
        if name == "square":
            return x * x % PRIME
        seed = np.uint64(int.from_bytes(name.encode()[:7], "little"))
        mixed = (x.astype(np.uint64) + seed) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(31)
        mixed *= np.uint64(0xBF58476D1CE4E5B9)
        mixed ^= mixed >> np.uint64(29)
        return np.asarray(mixed % np.uint64(PRIME), np.int64)

    def ordered(self, x: Array) -> Array:
        """Residues around 0: the order that a maximum goes by."""
        return _signed(x)


def _signed(x: Array) -> Array:
    return np.where(x > PRIME // 2, x - PRIME, x)


def _rounded(x: Array) -> Array:
    """Down to a grid of which one point lies at random in each step; below the first step nothing is changed."""
    step = x // _STEP
    point, before = (at * _STEP + (at * 0x9E3779B1 >> 13) % _STEP for at in (step, step - 1))
    return np.where((x >= 0) & (x < _STEP), x, np.where(point <= x, point, before))


class Floats:
    """Numbers of 64 bits."""

    lowest: float = -np.inf

    def reduce(self, x: Array) -> Array:
        return x

    def inverse(self, x: Array) -> Array:
        return 1 / x

    def function(self, name: str, x: Array) -> Array:
        return _FLOAT_FUNCTIONS[name](x)

    def ordered(self, x: Array) -> Array:
        return x


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


_FLOAT_FUNCTIONS: Mapping[str, Callable[[Array], Array]] = {
    "relu": lambda x: np.maximum(x, 0),
    "gelu": lambda x: 0.5 * x * (1 + np.tanh(0.7978845608 * (x + 0.044715 * x**3))),
    "silu": lambda x: x * _sigmoid(x),
    "tanh": np.tanh,
    "sigmoid": _sigmoid,
    "exp": np.exp,
    "inverse": lambda x: 1 / x,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "square": np.square,
}


def evaluate(field: Field, op: str, params: Params, types: Sequence[Type], args: Sequence[Array]) -> Array:
    """An operator applied to each of many values; operands have the types, which are known to fit."""
    if op == "split":
        return _split(params, types[0], args[0])
    parallel = _PARALLEL.get(op)
    if parallel is not None:
        return field.reduce(parallel(params, len(types[0].dims), args[0]))
    if not types[0].spread:
        return _apply(field, op, params, args)
    count, devices = len(args[0]), types[0].spread
    folded = [arg.reshape(count * devices, *arg.shape[2:]) for arg in args]
    made = _apply(field, op, params, folded)
    return made.reshape(count, devices, *made.shape[1:])


def _apply(field: Field, op: str, params: Params, args: Sequence[Array]) -> Array:
    if op in _ELEMENTWISE:
        return field.reduce(_ELEMENTWISE[op](*args))
    if op in _FLOAT_FUNCTIONS:
        return field.function(op, args[0])
    return _OTHERS[op](field, params, *args)


def _axis(params: Params, ndim: int) -> int:
    """The dim of an array with the count in front, from the front."""
    axis = int(params["axis"])
    return axis + 1 if axis >= 0 else axis + ndim


_ELEMENTWISE: Mapping[str, Callable[..., Array]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "neg": lambda x: -x,
    "scale": lambda x, factor: x * factor.reshape(-1, *[1] * (x.ndim - 1)),
    "gain": lambda x, vector: x * vector.reshape(len(vector), *[1] * (x.ndim - 2), -1),
    "matmul": lambda x, y: x @ y,
    "linear": lambda x, weight: _linear(x, weight),
    "transpose": lambda x: x.swapaxes(-1, -2),
    "swap": lambda x: x.swapaxes(-3, -2),
    "flatten": lambda x: x.reshape(*x.shape[:-2], -1),
}


def _linear(x: Array, weight: Array) -> Array:
    rows = x.reshape(len(x), -1, x.shape[-1])
    return (rows @ weight.swapaxes(-1, -2)).reshape(*x.shape[:-1], weight.shape[1])


def _bias(field: Field, params: Params, x: Array, vector: Array) -> Array:
    return _activated(field, params, field.reduce(x + vector.reshape(len(vector), *[1] * (x.ndim - 2), -1)))


def _activated(field: Field, params: Params, made: Array) -> Array:
    act = str(params["act"])
    return made if act == "none" else field.function(act, made)


def _divide(field: Field, params: Params, x: Array, y: Array) -> Array:
    return field.reduce(x * field.function("inverse", y))


def _unflatten(field: Field, params: Params, x: Array) -> Array:
    return x.reshape(*x.shape[:-1], int(params["parts"]), -1)


def _conv(field: Field, params: Params, x: Array, weight: Array) -> Array:
    count, batch, channels = x.shape[:3]
    _, features, inner, rows, columns = weight.shape
    groups = channels // inner
    found = _window_view(params, x, (rows, columns))
    high, wide = found.shape[3:5]
    found = found.reshape(count, batch, groups, inner, high * wide, rows * columns)
    found = found.transpose(0, 1, 2, 3, 5, 4).reshape(count, batch, groups, inner * rows * columns, high * wide)
    kernels = weight.reshape(count, 1, groups, features // groups, -1)
    made = field.reduce(kernels @ found).reshape(count, batch, features, high, wide)
    return _activated(field, params, made)


def _window_view(params: Params, x: Array, kernel: tuple[int, int]) -> Array:
    """All windows of images, their rows and columns last."""
    stride = int(params["stride"])
    view = np.lib.stride_tricks.sliding_window_view(_padded(params, x, kernel, 0), kernel, axis=(-2, -1))
    return view[..., ::stride, ::stride, :, :]


def _padded(params: Params, x: Array, kernel: tuple[int, int], outside: float) -> Array:
    if params["pad"] != "same":
        return x
    around = [(size // 2, size // 2) for size in kernel]
    return np.pad(x, [*[(0, 0)] * (x.ndim - 2), *around], constant_values=outside)


def _enlarge(field: Field, params: Params, weight: Array) -> Array:
    around = (int(params["kernel"]) - weight.shape[-1]) // 2
    return np.pad(weight, [*[(0, 0)] * (weight.ndim - 2), *[(around, around)] * 2])


def _pooled(params: Params, x: Array, combine: Callable[[Array, Array], Array]) -> Array:
    """The elements of each window combined: rows first, then columns."""
    size, stride = int(params["kernel"]), int(params["stride"])
    for _ in range(2):
        x = x.swapaxes(-1, -2)
        last = x.shape[-1] - size + 1
        x = reduce(combine, (x[..., start : start + last : stride] for start in range(size)))
    return x


def _avg_pool(field: Field, params: Params, x: Array) -> Array:
    size = int(params["kernel"])
    found = field.reduce(_pooled(params, _padded(params, x, (size, size), 0), np.add))
    return _over(field, found, size**2)


def _over(field: Field, x: Array, count: int) -> Array:
    return field.reduce(x * field.inverse(np.array(count, x.dtype)))


def _max_pool(field: Field, params: Params, x: Array) -> Array:
    size = int(params["kernel"])
    padded = _padded(params, x, (size, size), field.lowest)
    return field.reduce(_pooled(params, field.ordered(padded), np.maximum))


def _concat(field: Field, params: Params, x: Array, y: Array) -> Array:
    return np.concatenate((x, y), _axis(params, x.ndim))


def _sum(field: Field, params: Params, x: Array) -> Array:
    return field.reduce(x.sum(_axis(params, x.ndim)))


def _mean(field: Field, params: Params, x: Array) -> Array:
    return _over(field, _sum(field, params, x), x.shape[_axis(params, x.ndim)])


def _softmax(field: Field, params: Params, x: Array) -> Array:
    exponents = field.function("exp", x)
    total = field.reduce(exponents.sum(_axis(params, x.ndim), keepdims=True))
    return field.reduce(exponents * field.function("inverse", total))


def _embedding(field: Field, params: Params, table: Array, indices: Array) -> Array:
    """Rows of a table; what is looked up beyond its end is 0."""
    rows = table.shape[1]
    longer = np.concatenate((table, np.zeros_like(table[:, :1])), 1)
    flat = np.minimum(indices.reshape(len(table), -1), rows).astype(np.int64)
    found = np.take_along_axis(longer, flat[:, :, None], 1)
    return found.reshape(*indices.shape, table.shape[2])


def _embedding_bag(field: Field, params: Params, table: Array, indices: Array) -> Array:
    return field.reduce(_embedding(field, params, table, indices).sum(-2))


_OTHERS: Mapping[str, Callable[..., Array]] = {
    "bias": _bias, "div": _divide, "conv": _conv, "enlarge": _enlarge, "avg_pool": _avg_pool, "max_pool": _max_pool,
    "concat": _concat, "sum": _sum, "mean": _mean, "softmax": _softmax, "embedding": _embedding,
    "embedding_bag": _embedding_bag, "unflatten": _unflatten,
}  # fmt: skip


def _split(params: Params, of: Type, x: Array) -> Array:
    """One part of a concatenation."""
    axis = int(params["axis"]) % len(of.dims)
    tree = of.dims[axis]
    assert not isinstance(tree, int)
    first = size_of(tree[0])
    picked = slice(first, None) if params["part"] else slice(0, first)
    return x[(slice(None),) * (axis + 1 + bool(of.spread)) + (picked,)]


def _partition(params: Params, rank: int, x: Array) -> Array:
    axis = int(params["axis"]) % rank + 1
    return np.stack(np.split(x, int(params["devices"]), axis), 1)


def _combine(params: Params, rank: int, x: Array) -> Array:
    return np.concatenate([x[:, device] for device in range(x.shape[1])], int(params["axis"]) % rank + 1)


_PARALLEL: Mapping[str, Callable[[Params, int, Array], Array]] = {
    "partition": _partition,
    "combine": _combine,
    "replicate": lambda params, rank, x: np.stack([x] * int(params["devices"]), 1),
    "reduce": lambda params, rank, x: x.sum(1),
}


def constant(field: Field, expr: Apply, params: Params, shape: tuple[int, ...], dtype: type) -> Array:
    """A constant, once."""
    made: Array
    if expr.op == "ones":
        made = np.ones(shape, dtype)
    elif expr.op == "identity":
        made = np.eye(shape[-1], dtype=dtype)
    elif expr.op == "identity_kernel":
        made = np.zeros(shape, dtype)
        middle = int(params["kernel"]) // 2
        made[:, :, middle, middle] = np.eye(*shape[:2], dtype=dtype)
    else:
        made = _over(field, np.ones(shape, dtype), int(params["kernel"]) ** 2)
    return made[None]
