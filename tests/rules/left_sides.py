"""Left sides of rules as graphs of torch's calls: any ranks and dims that fit, sizes that differ unless they must not.

Shapes follow from what torch's operators do, from the outputs down to the inputs, and from nothing that proofs or
matching say. Where a rule says `axis=a`, any dim is taken, also one that the rule is not about. Each operator is
written in one of the forms that models have it in, and inputs may be permuted, expanded, and of any dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from random import Random
from typing import Any

import torch

from conjoin.ir import LEAF, Graph, GraphBuilder, LeafKind, Structure, Value, make_leaf
from conjoin.ops import (
    AGGREGATE,
    EMBEDDING_BAG,
    Call,
    NotationError,
    TensorType,
    bind_args,
    map_tensors,
    output_types,
    spec_for,
)
from conjoin.rules.parameters import is_any, parameters
from conjoin.rules.patterns import Apply, Expr, Input, Rule, walk

FUNCTIONS = ("relu", "gelu", "silu", "tanh", "sigmoid", "exp", "sqrt", "rsqrt", "square", "neg")


class Unfit(Exception):
    """The ranks, dims and sizes drawn do not fit together; others may."""


@dataclass(eq=False)
class Size:
    """The size of a dim: free, or made of others."""

    make: Callable[..., int] | None = None
    of: tuple[Size, ...] = ()
    kind: object = None
    """Sizes of one kind are equal when what they are made of is."""
    odd: bool = False
    same: Size | None = None

    def find(self) -> Size:
        return self.same.find() if self.same is not None else self


def fixed(value: int) -> Size:
    return Size(lambda: value, (), ("fixed", value))


def total(*parts: Size) -> Size:
    return Size(lambda *sizes: sum(sizes), parts, "sum")


def product(*factors: Size) -> Size:
    return Size(lambda *sizes: prod(sizes), factors, "product")


def windows(whole: Size, kernel: Size, stride: int, pad: int | str) -> Size:
    def count(size: int, reach: int) -> int:
        padding = reach // 2 if pad == "same" else int(pad)
        return (size + 2 * padding - reach) // stride + 1

    return Size(count, (whole, kernel), ("windows", stride, pad))


Shape = tuple[Size, ...]
NO_EDGES = fixed(0).kind


OVER_EDGES = ("aggregate", "aggregate_weighted", "aggregate_mean")
LEAST_RANKS = {
    "bias": 1, "gain": 1, "linear": 1, "matmul": 2, "transpose": 2, "swap": 3, "flatten": 1, "unflatten": 2,
    "embedding": 1, "embedding_bag": 1, "identity": 2,
    **dict.fromkeys(OVER_EDGES, 2),
}  # fmt: skip
IMAGES = ("conv", "enlarge", "avg_pool", "max_pool", "identity_kernel", "pool_kernel")


def _with_second(op: str, shape: Shape) -> list[Shape] | None:
    """The shapes of operands of which some differ from the result's; None for all other operators."""
    inner, more = Size(), Size()
    match op:
        case "scale":
            return [shape, ()]
        case "bias" | "gain":
            return [shape, shape[-1:]]
        case "matmul":
            return [(*shape[:-1], inner), (*shape[:-2], inner, shape[-1])]
        case "linear":
            return [(*shape[:-1], inner), (shape[-1], inner)]
        case "transpose":
            return [(*shape[:-2], shape[-1], shape[-2])]
        case "swap":
            return [(*shape[:-3], shape[-2], shape[-3], shape[-1])]
        case "embedding" | "embedding_bag":
            return [(inner, shape[-1]), shape[:-1] if op == "embedding" else (*shape[:-1], more)]
    return None


@dataclass
class Shapes:
    """Shapes of everything on the left side of a rule, drawn."""

    rng: Random
    alike: str = "none"
    """Which sizes are alike that need not be."""
    bound: dict[Expr, Shape] = field(default_factory=dict)
    dims: dict[tuple[object, int], int] = field(default_factory=dict)
    params: dict[str, Any] = field(default_factory=dict)
    axes: dict[Expr, int] = field(default_factory=dict)
    equations: list[tuple[Size, Size]] = field(default_factory=list)
    sizes: dict[Size, int] = field(default_factory=dict)

    def equal(self, one: Size, other: Size, depth: int = 0) -> None:
        one, other = one.find(), other.find()
        if one is other:
            return
        if depth > 8:
            raise Unfit
        if one.make is None or (one.kind == other.kind and len(one.of) == len(other.of)):
            other.odd = other.odd or one.odd
            pairs = zip(one.of, other.of, strict=False)
            one.same = other
            for a, b in pairs:
                self.equal(a, b, depth + 1)
        elif other.make is None:
            self.equal(other, one, depth + 1)
        else:
            self.equations.append((one, other))

    def want(self, expr: Expr, shape: Shape) -> None:
        """Let an expression have a shape."""
        if expr in self.bound:
            if len(self.bound[expr]) != len(shape):
                raise Unfit
            for a, b in zip(self.bound[expr], shape, strict=True):
                self.equal(a, b)
            return
        self.bound[expr] = shape
        if isinstance(expr, Apply):
            for arg, wanted in zip(expr.args, self._operands(expr, shape), strict=True):
                self.want(arg, wanted)

    def param(self, expr: Apply, name: str, choices: Sequence[Any]) -> Any:
        value = dict(parameters(expr))[name]
        if value in ("same", "valid"):
            return 0 if value == "valid" else "same"
        if value != "?" and not is_any(name, value):
            return value
        key = f"{name} of {expr}" if value == "?" else str(value)
        if key not in self.params:
            self.params[key] = self.rng.choice(choices)
        return self.params[key]

    def axis(self, expr: Apply, rank: int) -> int:
        axis = expr.param("axis")
        if isinstance(axis, int):
            if not -rank <= axis < rank:
                raise Unfit
            found = axis % rank
        elif rank == 0:
            raise Unfit
        else:
            found = self.dims.setdefault((axis, rank), self.rng.randrange(rank))
        self.axes[expr] = found
        return found

    def _operands(self, expr: Apply, shape: Shape) -> list[Shape]:
        rank, op = len(shape), expr.op
        if rank < LEAST_RANKS.get(op, 0) or (op in IMAGES and rank != 4):
            raise Unfit
        if op in IMAGES:
            return self._image(expr, shape)
        if op in ("concat", "split", "softmax", "sum", "mean"):
            return self._along(expr, shape)
        if op in ("flatten", "unflatten"):
            return [self._regrouped(expr, shape)]
        if op == "identity":
            self.equal(shape[-1], shape[-2])
        if op in OVER_EDGES:
            if rank != 2:
                raise Unfit
            self.equal(shape[0], fixed(self.param(expr, "vertices", (1, 3, 4, 7))))
            edges = fixed(0) if self.rng.randrange(4) == 0 else Size()
            return [(Size(), shape[1]), *[(edges,)] * (len(expr.args) - 1)]
        return _with_second(op, shape) or [shape] * len(expr.args)

    def _regrouped(self, expr: Apply, shape: Shape) -> Shape:
        if expr.op == "unflatten":
            self.equal(shape[-2], fixed(self.param(expr, "parts", (2, 3))))
            return (*shape[:-2], product(*shape[-2:]))
        slow, fast = Size(), Size()
        self.equal(shape[-1], product(slow, fast))
        return (*shape[:-1], slow, fast)

    def _along(self, expr: Apply, shape: Shape) -> list[Shape]:
        rank, reduces = len(shape), expr.op in ("sum", "mean")
        at = self.axis(expr, rank + reduces)
        if expr.op == "softmax":
            return [shape]
        before, after = shape[:at], shape[at + (not reduces) :]
        if reduces:
            return [(*before, Size(), *after)]
        if expr.op == "concat":
            parts = Size(), Size()
            self.equal(shape[at], total(*parts))
            return [(*before, part, *after) for part in parts]
        parts = (shape[at], Size()) if expr.param("part") == 0 else (Size(), shape[at])
        return [(*before, total(*parts), *after)]

    def _image(self, expr: Apply, shape: Shape) -> list[Shape]:
        batch, channels, rows, columns = shape
        if expr.op in ("identity_kernel", "pool_kernel", "enlarge"):
            kernel = fixed(self.param(expr, "kernel", (3, 5)))
            for size in (rows, columns):
                self.equal(size, kernel)
            if expr.op == "enlarge":
                return [(batch, channels, Size(odd=True), Size(odd=True))]
            self.equal(*((batch, channels) if expr.op == "identity_kernel" else (channels, fixed(1))))
            return []
        stride, pad = self.param(expr, "stride", (1, 2)), self.param(expr, "pad", (0, 1))
        whole = Size(), Size()
        if expr.op == "conv":
            kernels = tuple(Size(odd=pad == "same") for _ in range(2))
        else:
            size = self.param(expr, "kernel", (3,) if pad == "same" else (2, 3))
            kernels = fixed(size), fixed(size)
        for one, large, kernel in zip((rows, columns), whole, kernels, strict=True):
            self.equal(one, windows(large, kernel, stride, pad))
        if expr.op != "conv":
            return [(batch, channels, *whole)]
        groups = self.param(expr, "groups", (1, 1, 2))
        inner, outer = Size(), Size()
        self.equal(channels, product(fixed(groups), outer) if groups > 1 else outer)
        return [(batch, product(fixed(groups), inner) if groups > 1 else inner, *whole), (channels, inner, *kernels)]

    def settle(self) -> None:
        """Give every size a number: free ones differ from each other, or some are alike or one, or all are alike."""
        match self.alike:
            case "none":
                numbers = self.rng.sample(range(2, 8), 6) + self.rng.sample(range(8, 14), 6)
            case "some":
                numbers = self.rng.choices((2, 3), k=24)
            case "ones":
                numbers = self.rng.choices((1, 1, 2, 3), k=24)
            case _:
                numbers = [4] * 24
        odd = [3, 1, 5, 3] if self.alike != "ones" else [1, 3, 1, 1]
        for shape in self.bound.values():
            for size in shape:
                self._number(size, numbers, odd, 0)
        if any(self._number(a, numbers, odd, 0) != self._number(b, numbers, odd, 0) for a, b in self.equations):
            raise Unfit
        if any(number < (size.kind != NO_EDGES) or number > 200 for size, number in self.sizes.items()):
            raise Unfit

    def _number(self, size: Size, numbers: list[int], odd: list[int], depth: int) -> int:
        size = size.find()
        if depth > 12:
            raise Unfit
        if size not in self.sizes:
            if size.make is None:
                pool = odd if size.odd else numbers
                self.sizes[size] = pool.pop(0) if pool else 3
            else:
                self.sizes[size] = size.make(*(self._number(part, numbers, odd, depth + 1) for part in size.of))
        if size.odd and self.sizes[size] % 2 == 0:
            raise Unfit
        return self.sizes[size]

    def shape(self, expr: Expr) -> tuple[int, ...]:
        return tuple(self.sizes[size.find()] for size in self.bound[expr])


def draw_shapes(rule: Rule, rng: Random, alike: str, tries: int = 60) -> Shapes | None:
    """Shapes for the left side of a rule; None where none are found."""
    for _ in range(tries):
        shapes = Shapes(rng, alike)
        try:
            for root in rule.left:
                rank = 4 if _is_image(root) else rng.choice((0, 1, 2, 2, 3, 3, 4))
                shapes.want(root, tuple(Size() for _ in range(rank)))
            shapes.settle()
        except Unfit:
            continue
        return shapes
    return None


def _is_image(root: Expr) -> bool:
    return any(isinstance(e, Apply) and e.op in ("conv", "avg_pool", "max_pool", "enlarge") for e in walk(root))


@dataclass
class LeftSide:
    """The left side of a rule being written as a graph."""

    shapes: Shapes
    rng: Random
    dtypes: Mapping[str, torch.dtype]
    """Of inputs that are not of the usual one."""
    dtype: torch.dtype = torch.float64
    disguised: bool = True
    builder: GraphBuilder = field(default_factory=GraphBuilder)
    values: dict[Expr, Value] = field(default_factory=dict)
    leaves: list[Value] = field(default_factory=list)

    def write(self, rule: Rule) -> Graph:
        """The graph; Unfit where torch's operators do not take what was drawn."""
        outputs = tuple(self.value(root) for root in rule.left)
        takes, gives = (Structure("tuple", (), (LEAF,) * len(values)) for values in (self.leaves, outputs))
        return self.builder.finish(
            "left", training=True, inputs=tuple(self.leaves), outputs=outputs, input_structure=takes,
            output_structure=gives,
        )  # fmt: skip

    def call(self, op: str, *args: Any, output: int = 0) -> Value:
        bound = bind_args(op, args, {})
        typed = Call(op, map_tensors(op, bound, lambda value: value.type))
        try:
            spec = spec_for(typed)
            types = output_types(spec, typed) if spec is not None else None
        except NotationError:
            types = None
        if types is None:
            raise Unfit
        return Value(self.builder.add_call(op, bound, types), output)

    def value(self, expr: Expr) -> Value:
        if expr not in self.values:
            self.values[expr] = self._leaf(expr) if isinstance(expr, Input) else self._apply(expr)
        return self.values[expr]

    def _leaf(self, expr: Input) -> Value:
        shape, dtype = self.shapes.shape(expr), self.dtypes.get(expr.name, self.dtype)
        form = self.rng.choice(("plain", "permuted", "expanded", "plain")) if self.disguised else "plain"
        kept = shape
        if form == "permuted":
            kept = shape[::-1]
        elif form == "expanded" and shape:
            at = self.rng.randrange(len(shape))
            kept = (*shape[:at], 1, *shape[at + 1 :])
        leaf = make_leaf(LeafKind.INPUT, expr.name, TensorType(kept, dtype))
        value = self.builder.add_leaf(leaf)
        self.leaves.append(value)
        if form == "permuted" and len(shape) > 1:
            return self.call("permute", value, tuple(range(len(shape)))[::-1])
        return self.call("expand", value, shape) if kept != shape and form == "expanded" else value

    def _apply(self, expr: Apply) -> Value:
        args = [self.value(arg) for arg in expr.args]
        shape, op, pick = self.shapes.shape(expr), expr.op, self.rng.choice
        if op in FUNCTIONS:
            return self.call("pow.Tensor_Scalar", *args, 2) if op == "square" and pick((0, 1)) else self.call(op, *args)
        if op in IMAGES:
            return self._image(expr, args, shape)
        if expr in self.shapes.axes:
            return self._along(expr, args, shape, self.shapes.axes[expr])
        if op in ("add", "mul", "sub", "div", "scale", "bias", "gain"):
            return self._elementwise(expr, args)
        if op in OVER_EDGES:
            weight = args[3] if len(args) > 3 else None
            return self.call(AGGREGATE, *args[:3], weight, shape[0], "mean" if op.endswith("mean") else "sum")
        return self._rest(op, args, shape)

    def _rest(self, op: str, args: list[Value], shape: tuple[int, ...]) -> Value:
        pick = self.rng.choice
        match op:
            case "transpose" | "swap":
                return self._turned(op, args[0])
            case "flatten" | "unflatten":
                return self.call("reshape", args[0], shape)
            case "embedding_bag":
                return self.call(EMBEDDING_BAG, *args, None, "sum", None)
            case "ones":
                return self.call("full", shape, 1.0, self.dtype)
            case "identity":
                eye = self.call("eye", shape[-1], self.dtype)
                return eye if len(shape) == 2 else self.call("expand", eye, shape)
        return self.call("mm" if op == "matmul" and len(shape) == 2 and pick((0, 1)) else op, *args)

    def _along(self, expr: Apply, args: list[Value], shape: tuple[int, ...], at: int) -> Value:
        match expr.op:
            case "concat":
                return self.call("cat", tuple(args), at)
            case "split":
                return self._piece(expr, args[0], shape[at], at)
            case "softmax":
                return self.call("softmax.int", args[0], at)
        return self.call({"sum": "sum.dim_IntList", "mean": "mean.dim"}[expr.op], args[0], (at,))

    def _elementwise(self, expr: Apply, args: list[Value]) -> Value:
        turned, pick = args[::-1], self.rng.choice
        match expr.op:
            case "sub" | "div":
                return self.call(f"{expr.op}.Tensor", *args)
            case "scale":
                return self.call("mul.Tensor", *pick((args, turned, [args[0], pick((2.0, 0.5, -3, 3))])))
            case "mul" | "gain":
                return self.call("mul.Tensor", *pick((args, turned)))
        return self._activated(expr, self.call("add.Tensor", *pick((args, turned))))

    def _activated(self, expr: Apply, made: Value) -> Value:
        act = dict(parameters(expr)).get("act", "none")
        if is_any("act", act):
            act = self.shapes.params.setdefault(str(act), self.rng.choice(("none", "relu", "tanh")))
        return made if act == "none" else self.call(str(act), made)

    def _turned(self, op: str, x: Value) -> Value:
        rank = len(x.type.shape)
        dims = (rank - 2, rank - 1) if op == "transpose" else (rank - 3, rank - 2)
        order = list(range(rank))
        order[dims[0]], order[dims[1]] = order[dims[1]], order[dims[0]]
        if self.rng.choice((0, 1)):
            return self.call("permute", x, tuple(order))
        return self.call("transpose.int", x, *(dim - rank for dim in dims))

    def _piece(self, expr: Apply, x: Value, size: int, at: int) -> Value:
        part, rest = int(expr.param("part")), x.type.shape[at] - size
        start = 0 if part == 0 else rest
        match self.rng.randrange(3):
            case 0:
                return self.call("narrow", x, at, start, size)
            case 1:
                return self.call("slice.Tensor", x, at, start, start + size, 1)
        return self.call("split_with_sizes", x, (size, rest) if part == 0 else (rest, size), at, output=part)

    def _image(self, expr: Apply, args: list[Value], shape: tuple[int, ...]) -> Value:
        shapes = self.shapes
        if expr.op == "enlarge":
            small = shapes.shape(expr.args[0])
            down, right = ((large - size) // 2 for large, size in zip(shape[2:], small[2:], strict=True))
            if min(down, right) < 0:
                raise Unfit
            return self.call("constant_pad_nd", args[0], (right, right, down, down), 0.0)
        if expr.op in ("identity_kernel", "pool_kernel"):
            raise Unfit
        kernel = shapes.shape(expr.args[1])[2:] if expr.op == "conv" else (shapes.param(expr, "kernel", ()),) * 2
        stride, pad = shapes.param(expr, "stride", ()), shapes.param(expr, "pad", ())
        pads = tuple(k // 2 for k in kernel) if pad == "same" else (pad, pad)
        if expr.op == "conv":
            groups = shapes.param(expr, "groups", ())
            made = self.call("conv2d", *args, None, (stride, stride), pads, (1, 1), groups)
            return self._activated(expr, made)
        return self.call(f"{expr.op}2d", args[0], kernel, (stride, stride), pads)


def draw_left_side(
    rule: Rule,
    seed: int,
    dtype: torch.dtype = torch.float64,
    odd_one: torch.dtype | None = None,
    disguised: bool = True,
) -> Graph | None:
    """The left side of a rule as a graph, drawn; one input may have another dtype. None where nothing fits."""
    rng = Random(f"{rule.name} {seed}")
    shapes = draw_shapes(rule, rng, ("none", "all", "some", "ones")[seed % 4])
    if shapes is None:
        return None
    tables = [e for e in walk(*rule.left) if isinstance(e, Apply) and e.op.startswith(("embedding", "aggregate"))]
    lookups = [arg for e in tables for arg in e.args[1:3]]
    rows = {e.name for e in walk(*lookups) if isinstance(e, Input)}
    names = [e.name for e in walk(*rule.left) if isinstance(e, Input)]
    dtypes = dict.fromkeys(rows, torch.int64)
    if odd_one is not None and (others := [name for name in names if name not in rows]):
        dtypes[rng.choice(others)] = odd_one
    try:
        return LeftSide(shapes, rng, dtypes, dtype, disguised).write(rule)
    except Unfit:
        return None
