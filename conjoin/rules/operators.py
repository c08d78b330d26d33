"""The operators that rules are made of: parameters, shapes, and what each element of the result is.

Every definition is a sum (`sums.py`) over elements of the operands: a rule can be proven from definitions alone.
`tests/rules/test_operators.py` compares each with torch on many sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from conjoin.rules.definitions.affine import Affine, number
from conjoin.rules.definitions.calls import (
    Call,
    Define,
    Devices,
    Digits,
    Index,
    Tensor,
    bound_in,
    positions,
)
from conjoin.rules.definitions.dims import Dim, IllFormed, NotCovered
from conjoin.rules.definitions.sums import (
    Function,
    Guard,
    Largest,
    Sum,
    access,
    average,
    below,
    between,
    choose,
    constant,
    equal_to,
    of,
)
from conjoin.rules.patterns import Parameter


@dataclass(frozen=True, slots=True)
class RuleOp:
    """An operator of rules."""

    name: str
    num_args: int
    kind: str
    """Which ranks it takes: see `ranks.py`."""
    define: Define
    params: tuple[tuple[str, Parameter], ...] = ()
    """Parameters with their defaults; one without default must be given and is "" here."""
    words: str = ""
    """What it is, for the documentation."""
    parallel: bool = field(default=False)


# Elementwise.


def _alike(call: Call) -> tuple[Dim, ...]:
    """Operands of one shape."""
    first, *others = call.args
    for other in others:
        for a, b in zip(first.dims, other.dims, strict=True):
            call.dims.unify(a, b)
    return first.dims


def _elementwise(combine: Callable[..., Sum]) -> Define:
    def define(call: Call) -> Tensor:
        return Tensor(_alike(call), lambda index, devices: combine(*(arg.at(index, devices) for arg in call.args)))

    return define


def _function(name: str) -> Define:
    return _elementwise(lambda *values: of(Function(name, values)))


def _scale(call: Call) -> Tensor:
    x, factor = call.args
    return Tensor(x.dims, lambda index, devices: x.at(index, devices) * factor.at((), devices))


def _bias(call: Call) -> Tensor:
    """A vector added along the last dim."""
    x, vector = call.args
    call.dims.unify(x.dims[-1], vector.dims[0])
    return Tensor(x.dims, lambda index, devices: x.at(index, devices) + vector.at(index[-1:], devices))


# Products.


def _matmul(call: Call) -> Tensor:
    x, y = call.args
    *batch, rows, inner = x.dims
    for a, b in zip((*batch, inner), (*y.dims[:-2], y.dims[-2]), strict=True):
        call.dims.unify(a, b)

    def at(index: Index, devices: Devices) -> Sum:
        *lead, i, j = index
        return call.over(
            inner, lambda k: x.at((*lead, i, k), devices) * y.at((*lead, k, j), devices)
        )

    return Tensor((*batch, rows, y.dims[-1]), at)


def _linear(call: Call) -> Tensor:
    """x Wᵀ, as torch keeps weights."""
    x, weight = call.args[:2]
    call.dims.unify(x.dims[-1], weight.dims[1])

    def at(index: Index, devices: Devices) -> Sum:
        *lead, j = index
        return call.over(x.dims[-1], lambda k: x.at((*lead, k), devices) * weight.at((j, k), devices))

    return Tensor((*x.dims[:-1], weight.dims[0]), at)


def _transpose(call: Call) -> Tensor:
    (x,) = call.args
    *batch, rows, columns = x.dims
    return Tensor((*batch, columns, rows), lambda i, devices: x.at((*i[:-2], i[-1], i[-2]), devices))


# Windows.


def _window(call: Call, whole: Dim, kernel: Dim) -> tuple[Dim, Callable[[Digits, Digits], Affine]]:
    """How many windows there are along a dim, and where an element of one lies."""
    stride, pad = call.number("stride"), call.param("pad")
    if pad == "same":
        half = call.dims.odd(kernel)
        out = whole if stride == number(1) else call.dims.new("windows", window=(whole, None, stride, number(0)))
        return out, lambda position, inside: stride * position[0] + inside[0] - call.dims.size(half)
    padding = number(0) if pad == "valid" else call.number("pad")
    out = call.dims.new("windows", window=(whole, kernel, stride, padding))
    return out, lambda position, inside: stride * position[0] + inside[0] - padding


def _single(call: Call, dim: Dim) -> Affine:
    """The size of a dim that is read through a window."""
    if len(call.dims.digits(dim)) > 1:
        raise NotCovered("a divided dim is read through a window")
    return call.dims.size(dim)


def _conv(call: Call) -> Tensor:
    """Channels of both are divided into groups, the slow digit; one group: no digit at all."""
    x, weight = call.args
    batch, channels, height, width = x.dims
    features, inner, rows, columns = weight.dims
    groups = call.param("groups")
    lead: tuple[Dim, ...] = ()
    if groups == 1:
        call.dims.unify(channels, inner)
    else:
        count = call.dims.new("groups") if groups == "?" else call.named[f"groups {groups}"]
        call.dims.unify(call.dims.divide(channels, count), inner)
        call.dims.divide(features, count)
        lead = (count,)
    (out_height, down), (out_width, right) = _window(call, height, rows), _window(call, width, columns)

    def at(index: Index, devices: Devices) -> Sum:
        n, o, i, j = index
        group = o[: len(call.dims.digits(lead[0]))] if lead else ()

        def element(c: Digits, r: Digits, q: Digits) -> Sum:
            y, z = down(i, r), right(j, q)
            inside = between(0, y, _single(call, height)) | between(0, z, _single(call, width))
            value = x.at((n, (*group, *c), (y,), (z,)), devices) * weight.at((o, c, r, q), devices)
            return value.under(inside)

        return call.over(
            inner, lambda c: call.over(rows, lambda r: call.over(columns, lambda q: element(c, r, q)))
        )

    return _activated(call, Tensor((batch, features, out_height, out_width), at))


def _activated(call: Call, made: Tensor) -> Tensor:
    name = call.param("act")
    if name == "none":
        return made
    return Tensor(made.dims, lambda index, devices: of(Function(str(name), (made.at(index, devices),))))


def _enlarge(call: Call) -> Tensor:
    """Zeros around a kernel, as many on each side."""
    (weight,) = call.args
    *lead, rows, columns = weight.dims
    target = call.named[f"kernel {call.param('kernel')}"]
    offsets = [call.dims.odd(target), call.dims.odd(rows), call.dims.odd(columns)]
    call.dims.not_larger += [(half, offsets[0]) for half in offsets[1:]]

    def at(index: Index, devices: Devices) -> Sum:
        *first, (r,), (q,) = index
        down, right = (call.dims.size(offsets[0]) - call.dims.size(half) for half in offsets[1:])
        inside = between(0, r - down, call.dims.size(rows)) | between(0, q - right, call.dims.size(columns))
        return weight.at((*first, (r - down,), (q - right,)), devices).under(inside)

    return Tensor((*lead, target, target), at)


def _pool(call: Call) -> tuple[tuple[Dim, ...], Callable[[Index, Devices, Callable[..., Sum]], Sum], Dim]:
    (x,) = call.args
    *lead, height, width = x.dims
    kernel = call.named[f"kernel {call.param('kernel')}"]
    (out_height, down), (out_width, right) = _window(call, height, kernel), _window(call, width, kernel)

    def gather(index: Index, devices: Devices, reduce: Callable[..., Sum]) -> Sum:
        *first, i, j = index
        (r, in_rows), (q, in_columns) = positions(call.dims, kernel), positions(call.dims, kernel)
        y, z = down(i, r), right(j, q)
        inside = between(0, y, _single(call, height)) | between(0, z, _single(call, width))
        return reduce(bound_in((*r, *q)), in_rows | in_columns | inside, x.at((*first, (y,), (z,)), devices))

    return (*lead, out_height, out_width), gather, kernel


def _avg_pool(call: Call) -> Tensor:
    """The sum over a window divided by its size, padding counted as zeros."""
    dims, gather, kernel = _pool(call)

    def at(index: Index, devices: Devices) -> Sum:
        size = call.dims.size(kernel)
        return gather(index, devices, lambda bound, guard, value: value.over(bound, guard)) * average(size * size)

    return Tensor(dims, at)


def _max_pool(call: Call) -> Tensor:
    dims, gather, _ = _pool(call)
    return Tensor(
        dims,
        lambda index, devices: gather(
            index, devices, lambda bound, guard, value: of(Largest(bound, guard, value))
        ),
    )


# Parts.


def _concat(call: Call) -> Tensor:
    one, other = call.args
    place = _place(call, one)
    for i, (a, b) in enumerate(zip(one.dims, other.dims, strict=True)):
        if i != place:
            call.dims.unify(a, b)
    first, second = one.dims[place].find(), other.dims[place].find()
    if first.product and second.product:  # pieces of equal width, one row of them after another
        call.dims.unify(first.product[1], second.product[1])
        rows = call.dims.new("concatenation", sum=(first.product[0], second.product[0]))
        joined, limit = call.dims.new("concatenation", product=(rows, first.product[1])), first.product[0]
    else:
        joined, limit = call.dims.new("concatenation", sum=(first, second)), first

    def at(index: Index, devices: Devices) -> Sum:
        slow, *rest = index[place]
        if len(call.dims.digits(limit)) > 1:
            raise NotCovered("a concatenation of divided dims")
        size = call.dims.size(limit)
        later = _put(index, place, (slow - size, *rest))
        return choose(below(slow, size), one.at(index, devices), other.at(later, devices))

    return Tensor(_put(one.dims, place, joined), at)


def _split(call: Call) -> Tensor:
    (x,) = call.args
    place, part = _place(call, x), call.param("part")
    parts = call.dims.split(x.dims[place])
    if part not in (0, 1):
        raise IllFormed(f"a split has parts 0 and 1, not {part}")

    def at(index: Index, devices: Devices) -> Sum:
        (position,) = index[place]
        moved = position + call.dims.size(parts[0]) if part else position
        return x.at(_put(index, place, (moved,)), devices)

    return Tensor(_put(x.dims, place, parts[int(part)]), at)


def _put(items: Sequence, place: int, item: object) -> tuple:  # type: ignore[type-arg]
    return (*items[:place], item, *items[place + 1 :])


def _place(call: Call, tensor: Tensor) -> int:
    """The position of the dim that the parameter `axis` means; ranks are settled before."""
    return int(call.param("place")) % max(len(tensor.dims), 1)


# Reductions.


def _reduction(mean: bool) -> Define:
    def define(call: Call) -> Tensor:
        (x,) = call.args
        place = _place(call, x)
        dim = x.dims[place]

        def at(index: Index, devices: Devices) -> Sum:
            total = call.over(dim, lambda k: x.at((*index[:place], k, *index[place:]), devices))
            return total * average(call.dims.size(dim)) if mean else total

        return Tensor((*x.dims[:place], *x.dims[place + 1 :]), at)

    return define


def _softmax(call: Call) -> Tensor:
    (x,) = call.args
    place = _place(call, x)

    def at(index: Index, devices: Devices) -> Sum:
        def exponent(k: Digits) -> Sum:
            return of(Function("exp", (x.at(_put(index, place, k), devices),)))

        return exponent(index[place]) * of(Function("inverse", (call.over(x.dims[place], exponent),)))

    return Tensor(x.dims, at)


# Lookups: rows of a table as a product with what is 1 at one row.


def _hit(indices: Tensor, index: Index, row: Affine, devices: Devices) -> Sum:
    return of(Function("hit", (indices.at(index, devices), access("#", (row,)))))


def _embedding(call: Call) -> Tensor:
    table, indices = call.args

    def at(index: Index, devices: Devices) -> Sum:
        *place, j = index
        return call.over(
            table.dims[0], lambda v: table.at((v, j), devices) * _hit(indices, tuple(place), v[0], devices)
        )

    return Tensor((*indices.dims, table.dims[1]), at)


def _embedding_bag(call: Call) -> Tensor:
    """Rows summed over the last dim of the indices."""
    table, indices = call.args
    bag = indices.dims[-1]

    def at(index: Index, devices: Devices) -> Sum:
        *place, j = index

        def row(b: Digits) -> Sum:
            return call.over(
                table.dims[0], lambda v: table.at((v, j), devices) * _hit(indices, (*place, b), v[0], devices)
            )

        return call.over(bag, row)

    return Tensor((*indices.dims[:-1], table.dims[1]), at)


# Constants.


def _ones(call: Call) -> Tensor:
    return Tensor(call.result, lambda index, devices: constant(1))


def _identity(call: Call) -> Tensor:
    *_, rows, columns = call.result
    call.dims.unify(rows, columns)
    return Tensor(call.result, lambda index, devices: constant(1).under(_equal(index[-2], index[-1])))


def _equal(one: Digits, other: Digits) -> Guard:
    return frozenset().union(*(equal_to(a, b) for a, b in zip(one, other, strict=True)))


def _identity_kernel(call: Call) -> Tensor:
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


def _pool_kernel(call: Call) -> Tensor:
    """A convolution by it, each channel a group, averages over windows."""
    _, channels, rows, columns = call.result
    target = call.named[f"kernel {call.param('kernel')}"]
    call.dims.unify(channels, call.dims.new("one", known=1))
    call.dims.unify(rows, target)
    call.dims.unify(columns, target)

    def at(index: Index, devices: Devices) -> Sum:
        size = call.dims.size(target)
        return average(size * size)

    return Tensor(call.result, at)


# Over devices.


def _partition(call: Call) -> Tensor:
    (x,) = call.args
    place, axis = _place(call, x), str(call.param("mesh"))
    if x.dims[place].find().sum and call.named[axis].find().known == 2:
        return _partition_halves(call, x, place, axis)
    piece = call.dims.divide(x.dims[place], call.named[axis])

    def at(index: Index, devices: Devices) -> Sum:
        return x.at(_put(index, place, (devices[axis], *index[place])), _without(devices, axis))

    return Tensor(_put(x.dims, place, piece), at)


def _partition_halves(call: Call, x: Tensor, place: int, axis: str) -> Tensor:
    """A concatenation of two parts of one size over two devices: each gets one of them."""
    halves = x.dims[place].find().sum
    assert halves is not None
    call.dims.unify(*halves)

    def at(index: Index, devices: Devices) -> Sum:
        (position,) = index[place]
        others = _without(devices, axis)
        second = x.at(_put(index, place, (position + call.dims.size(halves[0]),)), others)
        first = x.at(_put(index, place, (position,)), others)
        return first.under(equal_to(devices[axis], 0)) + second.under(equal_to(devices[axis], 1))

    return Tensor(_put(x.dims, place, halves[0]), at)


def _combine(call: Call) -> Tensor:
    (x,) = call.args
    place, axis = _place(call, x), str(call.param("mesh"))
    whole = call.dims.new("whole", product=(call.named[axis], x.dims[place]))

    def at(index: Index, devices: Devices) -> Sum:
        device, *rest = index[place]
        return x.at(_put(index, place, tuple(rest)), {**devices, axis: device})

    return Tensor(_put(x.dims, place, whole), at)


def _replicate(call: Call) -> Tensor:
    (x,) = call.args
    axis = str(call.param("mesh"))
    return Tensor(x.dims, lambda index, devices: x.at(index, _without(devices, axis)))


def _without(devices: Devices, axis: str) -> Devices:
    return {name: device for name, device in devices.items() if name != axis}


def _reduce(call: Call) -> Tensor:
    (x,) = call.args
    axis = str(call.param("mesh"))

    def at(index: Index, devices: Devices) -> Sum:
        return call.over(call.named[axis], lambda d: x.at(index, {**devices, axis: d[0]}))

    return Tensor(x.dims, at)


_WINDOW: tuple[tuple[str, Parameter], ...] = (("stride", 1), ("pad", "same"))
_AXIS: tuple[tuple[str, Parameter], ...] = (("axis", ""),)
_MESH: tuple[tuple[str, Parameter], ...] = (("mesh", "m"),)
FUNCTIONS = ("relu", "gelu", "silu", "tanh", "sigmoid", "exp", "sqrt", "rsqrt", "square")
"""Functions of one number, about which proofs know nothing but their names."""

OPS: tuple[RuleOp, ...] = (
    RuleOp("add", 2, "same", _elementwise(lambda x, y: x + y), words="x + y"),
    RuleOp("sub", 2, "same", _elementwise(lambda x, y: x + y.scaled(-1)), words="x - y"),
    RuleOp("mul", 2, "same", _elementwise(lambda x, y: x * y), words="x y, element by element"),
    RuleOp("div", 2, "same", _elementwise(lambda x, y: x * of(Function("inverse", (y,)))), words="x / y"),
    RuleOp("neg", 1, "same", _elementwise(lambda x: x.scaled(-1)), words="-x"),
    *(RuleOp(name, 1, "same", _function(name), words=f"{name} of every element") for name in FUNCTIONS),
    RuleOp("scale", 2, "scale", _scale, words="x by a number"),
    RuleOp("bias", 2, "bias", _bias, words="a vector added along the last dim"),
    RuleOp("matmul", 2, "matrix", _matmul, words="products of matrices, one for each leading position"),
    RuleOp("linear", 2, "linear", _linear, words="x Wᵀ"),
    RuleOp("transpose", 1, "matrix", _transpose, words="the last two dims exchanged"),
    RuleOp("conv", 2, "image", _conv, (*_WINDOW, ("act", "none"), ("groups", "?")), "convolution of images"),
    RuleOp("enlarge", 1, "image", _enlarge, (("kernel", ""),), "a kernel with zeros around it"),
    RuleOp("avg_pool", 1, "image", _avg_pool, (("kernel", ""), *_WINDOW), "averages, padding counted"),
    RuleOp("max_pool", 1, "image", _max_pool, (("kernel", ""), *_WINDOW), "the largest of each window"),
    RuleOp("concat", 2, "same", _concat, _AXIS, "one after the other along a dim"),
    RuleOp("split", 1, "same", _split, (*_AXIS, ("part", "")), "the first or second part of a concatenation"),
    RuleOp("sum", 1, "reduce", _reduction(mean=False), _AXIS, "summed over a dim"),
    RuleOp("mean", 1, "reduce", _reduction(mean=True), _AXIS, "averaged over a dim"),
    RuleOp("softmax", 1, "same", _softmax, _AXIS, "exponents over their sum along a dim"),
    RuleOp("embedding", 2, "embedding", _embedding, words="rows of a table"),
    RuleOp("embedding_bag", 2, "bag", _embedding_bag, words="sums of rows of a table"),
    RuleOp("ones", 0, "constant", _ones, words="1 everywhere"),
    RuleOp("identity", 0, "identity", _identity, words="the identity matrix"),
    RuleOp("identity_kernel", 0, "image", _identity_kernel, (("kernel", ""),), "the kernel that changes nothing"),
    RuleOp("pool_kernel", 0, "image", _pool_kernel, (("kernel", ""),), "the kernel that averages"),
    RuleOp("partition", 1, "same", _partition, (*_AXIS, *_MESH), "I → S", parallel=True),
    RuleOp("combine", 1, "same", _combine, (*_AXIS, *_MESH), "S → I", parallel=True),
    RuleOp("replicate", 1, "same", _replicate, _MESH, "I → B", parallel=True),
    RuleOp("reduce", 1, "same", _reduce, _MESH, "P → I", parallel=True),
)
BY_NAME = {op.name: op for op in OPS}
