"""The operators that rules are made of: parameters, ranks, and what each element of the result is.

What an operator is, `conjoin.ops` declares: `DECLARED` says where, and the definition, a sum (`sums.py`) over elements
of the operands, is read off the notation and terms there (`definitions/reading.py`). What notation cannot say is in the
two tables after it; `tests/rules/test_declarations.py` sees that nothing else is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from conjoin.ops import AGGREGATE, EMBEDDING_BAG
from conjoin.rules.definitions import constants, functions, left_open, over_devices
from conjoin.rules.definitions.calls import Call, Define, Tensor
from conjoin.rules.definitions.declarations import Declared
from conjoin.rules.definitions.reading import Open, derived
from conjoin.rules.definitions.sums import Function, of
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
    declared: Declared | None = None
    """What it is in `conjoin.ops`."""


FUNCTIONS = ("relu", "gelu", "silu", "tanh", "sigmoid", "exp", "sqrt", "rsqrt", "square")
"""Functions of one number, of which proofs know little but their names: see `functions.py`."""

_ALONG = (("dim", "place"),)
_VERTICES = (("vertices", "vertices"),)
_POOL = (("kernel_size", "kernel"), ("stride", "stride"), ("padding", "pad"))
DECLARED: Mapping[str, Declared] = {
    **{name: Declared(name) for name in FUNCTIONS},
    "add": Declared("add.Tensor"),
    "sub": Declared("sub.Tensor"),
    "mul": Declared("mul.Tensor"),
    "div": Declared("div.Tensor"),
    "neg": Declared("neg"),
    "scale": Declared("mul.Tensor"),
    "bias": Declared("add.Tensor"),
    "matmul": Declared("matmul"),
    "linear": Declared("linear"),
    "gain": Declared("mul.Tensor"),
    "transpose": Declared("transpose.int", fixed=(("dim0", -2), ("dim1", -1))),
    "swap": Declared("transpose.int", fixed=(("dim0", -3), ("dim1", -2))),
    "flatten": Declared("flatten.using_ints", fixed=(("start_dim", -2), ("end_dim", -1))),
    "unflatten": Declared("unflatten.int", (("sizes", "parts"),), (("dim", -1),)),
    "conv": Declared("conv2d", (("stride", "stride"), ("padding", "pad"), ("groups", "groups"))),
    "enlarge": Declared("constant_pad_nd", fixed=(("pad", (1, 1, 1, 1)),)),
    "avg_pool": Declared("avg_pool2d", _POOL),
    "max_pool": Declared("max_pool2d", _POOL),
    "concat": Declared("cat", _ALONG),
    "split": Declared("split_with_sizes", _ALONG, fixed=(("split_sizes", (2, 2)),)),
    "sum": Declared("sum.dim_IntList", _ALONG),
    "mean": Declared("mean.dim", _ALONG),
    "softmax": Declared("softmax.int", _ALONG),
    "embedding": Declared("embedding"),
    "embedding_bag": Declared(EMBEDDING_BAG, fixed=(("mode", "sum"),), flattened="b"),
    "aggregate": Declared(AGGREGATE, _VERTICES, (("reduce", "sum"),)),
    "aggregate_weighted": Declared(AGGREGATE, _VERTICES, (("reduce", "sum"),)),
    "aggregate_mean": Declared(AGGREGATE, _VERTICES, (("reduce", "mean"),)),
}
"""Operators by what declares them."""

LEFT_OPEN: Mapping[str, Open] = {
    "div": left_open.quotient,  # terms say that it is linear in the first operand, not what the second one does
    "enlarge": left_open.padding,  # of a whole dim notation says how large it becomes, not where its elements go
    "concat": left_open.concatenation,  # the same
    "split": left_open.piece,  # the same
    "softmax": left_open.normalisation,  # whole along its dim, and not linear
    "max_pool": left_open.maximum,  # over a window, and not linear
    "aggregate_mean": left_open.mean_over_edges,  # over the edges of each vertex, of which there are any number
}
"""What the declarations of some operators leave open."""

UNDECLARED: Mapping[str, Define] = {
    "ones": constants.ones,
    "identity": constants.identity,
    "identity_kernel": constants.identity_kernel,
    "pool_kernel": constants.pool_kernel,
    "partition": over_devices.partition,
    "combine": over_devices.combine,
    "replicate": over_devices.replicate,
    "reduce": over_devices.reduce,
}
"""Operators without operands, whose notation has nothing to say, and those that only change where a value lies."""


def _definition(name: str) -> Define:
    if name in UNDECLARED:
        return UNDECLARED[name]
    return derived(DECLARED[name], LEFT_OPEN.get(name) or functions.KNOWN.get(name))


def _activated(define: Define) -> Define:
    """With the function of the result that the parameter `act` names."""

    def activated(call: Call) -> Tensor:
        made, name = define(call), call.param("act")
        if name == "none":
            return made
        return Tensor(made.dims, lambda index, devices: of(Function(str(name), (made.at(index, devices),))))

    return activated


Parameters = tuple[tuple[str, Parameter], ...]


def _op(name: str, num_args: int, kind: str, words: str, params: Parameters = ()) -> RuleOp:
    definition = _definition(name)
    define = _activated(definition) if "act" in dict(params) else definition
    return RuleOp(name, num_args, kind, define, params, words, "mesh" in dict(params), DECLARED.get(name))


_WINDOW: Parameters = (("stride", 1), ("pad", "same"))
_KERNEL: Parameters = (("kernel", ""),)
_ACT: Parameters = (("act", "none"),)
_AXIS: Parameters = (("axis", ""),)
_MADE: Parameters = (("vertices", ""),)
_MESH: Parameters = (("mesh", "m"),)

OPS: tuple[RuleOp, ...] = (
    _op("add", 2, "same", "x + y"),
    _op("sub", 2, "same", "x - y"),
    _op("mul", 2, "same", "x y, element by element"),
    _op("div", 2, "same", "x / y"),
    _op("neg", 1, "same", "-x"),
    *(_op(name, 1, "same", f"{name} of every element") for name in FUNCTIONS),
    _op("scale", 2, "scale", "x by a number"),
    _op("bias", 2, "bias", "a vector added along the last dim, and a function of the sum", _ACT),
    _op("gain", 2, "bias", "a vector multiplied along the last dim"),
    _op("matmul", 2, "matrix", "products of matrices, one for each leading position"),
    _op("linear", 2, "linear", "x Wᵀ"),
    _op("transpose", 1, "matrix", "the last two dims exchanged"),
    _op("swap", 1, "cube", "the two dims before the last one exchanged"),
    _op("flatten", 1, "flat", "the last two dims as one"),
    _op("unflatten", 1, "unflat", "the last dim as two, of which the first counts parts", (("parts", ""),)),
    _op("conv", 2, "image", "convolution of images", (*_WINDOW, *_ACT, ("groups", "?"))),
    _op("enlarge", 1, "image", "a kernel with zeros around it", _KERNEL),
    _op("avg_pool", 1, "image", "averages, padding counted", (*_KERNEL, *_WINDOW)),
    _op("max_pool", 1, "image", "the largest of each window", (*_KERNEL, *_WINDOW)),
    _op("concat", 2, "same", "one after the other along a dim", _AXIS),
    _op("split", 1, "same", "the first or second part of a concatenation", (*_AXIS, ("part", ""))),
    _op("sum", 1, "reduce", "summed over a dim", _AXIS),
    _op("mean", 1, "reduce", "averaged over a dim", _AXIS),
    _op("softmax", 1, "same", "exponents over their sum along a dim", _AXIS),
    _op("embedding", 2, "embedding", "rows of a table"),
    _op("embedding_bag", 2, "bag", "sums of rows of a table"),
    _op("aggregate", 3, "edges", "rows at the sources of edges, added up at their targets", _MADE),
    _op("aggregate_weighted", 4, "edges", "the same, each row by the weight of its edge", _MADE),
    _op("aggregate_mean", 3, "edges", "the same, averaged over the edges of a vertex; 0 where it has none", _MADE),
    _op("ones", 0, "constant", "1 everywhere"),
    _op("identity", 0, "identity", "the identity matrix"),
    _op("identity_kernel", 0, "image", "the kernel that changes nothing", _KERNEL),
    _op("pool_kernel", 0, "image", "the kernel that averages", _KERNEL),
    _op("partition", 1, "same", "I → S", (*_AXIS, *_MESH)),
    _op("combine", 1, "same", "S → I", (*_AXIS, *_MESH)),
    _op("replicate", 1, "same", "I → B", _MESH),
    _op("reduce", 1, "same", "P → I", _MESH),
)
BY_NAME = {op.name: op for op in OPS}
