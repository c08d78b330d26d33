"""Tensors that rules make up. Torch has no operator for most of them, and no notation says what a constant is."""

from __future__ import annotations

from conjoin.rules.definitions.calls import Call, Devices, Digits, Index, Tensor
from conjoin.rules.definitions.dims import NotCovered
from conjoin.rules.definitions.sums import Guard, Sum, average, constant, equal_to


def ones(call: Call) -> Tensor:
    """1 everywhere."""
    return Tensor(call.result, lambda index, devices: constant(1))


def identity(call: Call) -> Tensor:
    """1 on the diagonal."""
    *_, rows, columns = call.result
    call.dims.unify(rows, columns)
    return Tensor(call.result, lambda index, devices: constant(1).under(_equal(index[-2], index[-1])))


def _equal(one: Digits, other: Digits) -> Guard:
    if len(one) != len(other):
        raise NotCovered("rows and columns are divided in different ways")
    return frozenset().union(*(equal_to(a, b) for a, b in zip(one, other, strict=True)))


def identity_kernel(call: Call) -> Tensor:
    """A convolution by it changes nothing: 1 in the middle from every channel to itself."""
    features, channels, rows, columns = call.result
    target = call.named[f"kernel {call.param('kernel')}"]
    for a, b in ((features, channels), (rows, target), (columns, target)):
        call.dims.unify(a, b)
    half = call.dims.odd(target)

    def at(index: Index, devices: Devices) -> Sum:
        o, c, (r,), (q,) = index
        middle = call.dims.size(half)
        return constant(1).under(_equal(o, c) | equal_to(r, middle) | equal_to(q, middle))

    return Tensor(call.result, at)


def pool_kernel(call: Call) -> Tensor:
    """A convolution by it, each channel a group, averages over windows."""
    _, channels, rows, columns = call.result
    target = call.named[f"kernel {call.param('kernel')}"]
    call.dims.unify(channels, call.dims.new("1", known=1))
    call.dims.unify(rows, target)
    call.dims.unify(columns, target)

    def at(index: Index, devices: Devices) -> Sum:
        size = call.dims.size(target)
        return average(size * size)

    return Tensor(call.result, at)
