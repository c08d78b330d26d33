"""The forms in which calls enter a graph: one operator for all the ways export writes the same thing."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import fx
from torch._ops import OpOverload

from conjoin.frontends.drawn_orders import draws, order_of
from conjoin.frontends.folded_constants import reads_in_order, without_empty, without_idle_mask
from conjoin.frontends.switched_regions import CASTS
from conjoin.ir import Leaf, Node, Value
from conjoin.ops import (
    CAST,
    EMBEDDING_BAG,
    OVERWRITE,
    RAGGED_EMBEDDING_BAG,
    STRIDED_VIEW,
    STRIDED_WRITE,
    TensorType,
    bind_args,
    find_spec,
    operator_name,
    signature,
    walk_tensors,
)

_BAG_MODES = ("sum", "mean", "max")


class Refused(Exception):
    """A call in a form that cannot be captured; says what to do."""


IDENTITY = "identity"
"""Stands for a call that hands its first argument on: a tensor, or several."""
Canonical = tuple[str, tuple[Any, ...], tuple[TensorType, ...]]


def canonical(op: str, args: tuple[Any, ...], types: tuple[TensorType, ...], node: fx.Node) -> Canonical:
    """The form in which a call enters the graph, where that differs from what export emits."""
    spec = find_spec(op)
    if spec is not None and spec.one_dtype:
        factors = spec.terms.split() if isinstance(spec.terms, str) else ()
        found = [(name, value.type.dtype) for name, value in walk_tensors(op, args)]
        dtypes = {dtype for name, dtype in found if dtype.is_floating_point or name in factors}
        if len(dtypes) > 1:
            raise Refused(f"it is given {' and '.join(sorted(map(str, dtypes)))}: convert one to the other")
    change = _CANONICAL.get(op)
    return change(args, types, node) if change else (op, args, types)


def unused(node: fx.Node, index: int) -> bool:
    return all(user.target is operator.getitem and user.args[1] != index for user in node.users)


def _native_dropout(args: tuple[Any, ...], types: tuple[TensorType, ...], node: fx.Node) -> Canonical:
    """The operator the user's module calls, which draws as it does; the mask output is kept only where it is read."""
    return ("dropout", args, types[:1]) if unused(node, 1) else ("native_dropout", args, types)


def _batch_norm_in_evaluation(args: tuple[Any, ...], types: tuple[TensorType, ...], node: fx.Node) -> Canonical:
    """The operator the user's module calls; the statistics among the outputs of this one depend on the device."""
    if not (unused(node, 1) and unused(node, 2)):
        raise Refused("its second and third outputs are empty on some devices: do not use them")
    x, weight, bias, mean, variance, momentum, eps = args
    return "batch_norm", (x, weight, bias, mean, variance, False, momentum, eps, True), types[:1]


def _dropout(args: tuple[Any, ...], types: tuple[TensorType, ...], node: fx.Node) -> Canonical:
    """Out of training nothing is dropped."""
    return ("dropout" if args[2] else IDENTITY), args, types


def _cast(args: tuple[Any, ...], types: tuple[TensorType, ...], node: fx.Node) -> Canonical:
    """Every way to ask for a dtype is one operator; where the dtype is there already, nothing is done.

    Of a number `torch.vmap` makes a tensor so, where it goes over the last dim there is.
    """
    if isinstance(args[0], bool | int | float):
        return "full", bind_args("full", ((), args[0]), {"dtype": types[0].dtype}), types
    if args[0].type.dtype == types[0].dtype:
        return IDENTITY, args, types
    return CAST, bind_args(CAST, (args[0],), {"dtype": types[0].dtype}), types


def _divided(args: tuple[Any, ...], types: tuple[TensorType, ...], node: fx.Node) -> Canonical:
    """Division that rounds in no way is division."""
    op = operator_name(cast(OpOverload, node.target))
    return (op, args, types) if args[2] is not None else (op.removesuffix("_mode"), args[:2], types)


def _filled(args: tuple[Any, ...], types: tuple[TensorType, ...], node: fx.Node) -> Canonical:
    """Of the tensor that it is to be like only the type is read, and that is known: what is made is a constant."""
    op = operator_name(cast(OpOverload, node.target)).removeprefix("new_")
    value = (args[2],) if op == "full" else ()
    return op, bind_args(op, (types[0].shape, *value), {"dtype": types[0].dtype}), types


def _sized(args: tuple[Any, ...], types: tuple[TensorType, ...], node: fx.Node) -> Canonical:
    """A shape without -1, so that a piece's shape can take its place; what has that shape already is handed on."""
    if args[0].type.shape == types[0].shape:
        return IDENTITY, args, types
    return "expand", bind_args("expand", (args[0], types[0].shape), {}), types


def _broadcast_together(args: tuple[Any, ...], types: tuple[TensorType, ...], node: fx.Node) -> Canonical:
    """Tensors of one shape, as losses broadcast them, are handed on."""
    handed_on = len({value.type.shape for value in args[0]}) == 1
    return (IDENTITY, (tuple(args[0]),), types) if handed_on else ("broadcast_tensors", args, types)


def _joined(args: tuple[Any, ...], types: tuple[TensorType, ...], node: fx.Node) -> Canonical:
    """Pieces of no size, as of a cache that is still empty, add nothing."""
    pieces = without_empty(args, _trains)
    if len(pieces) == 1 < len(args[0]):  # a copy, as a concatenation is: what it gives may be written to
        return "clone", bind_args("clone", pieces, {"memory_format": torch.contiguous_format}), types
    return "cat", bind_args("cat", (pieces, args[1]), {}), types


def _attention(args: tuple[Any, ...], types: tuple[TensorType, ...], node: fx.Node) -> Canonical:
    """Without a mask where it says nothing, or what a flag says."""
    return "scaled_dot_product_attention", without_idle_mask(args), types


def _dense(args: tuple[Any, ...], types: tuple[TensorType, ...], node: fx.Node) -> Canonical:
    """What is dense already, as all is in a graph, stays."""
    return (IDENTITY if args[0].type.dtype == types[0].dtype else "to_dense"), args, types


def _indexed(args: tuple[Any, ...], types: tuple[TensorType, ...], node: fx.Node) -> Canonical:
    """What is read by the numbers of all its rows, one after the other, is seen in another shape."""
    if reads_in_order(args[0].type.shape, args[1]):
        return "reshape", (args[0], types[0].shape), types
    return "index.Tensor", args, types


def _reshaped(args: tuple[Any, ...], types: tuple[TensorType, ...], node: fx.Node) -> Canonical:
    """One operator for every change of shape, blind to strides: those of a run may differ from those at capture."""
    return "reshape", (args[0], types[0].shape), types


def _copy(args: tuple[Any, ...], types: tuple[TensorType, ...], node: fx.Node) -> Canonical:
    """The target's values are overwritten: only its type counts, and whether it then gets a gradient of zeros.

    Where numbers are drawn, what it gives lies in memory as the target does.
    """
    source, kind = args[1], types[0]
    if (_trains(args[0]) and kind.dtype.is_floating_point) or _lies_otherwise(node):
        return OVERWRITE, args[:2], types
    if source.type.shape == kind.shape:
        return CAST, bind_args(CAST, (source,), {"dtype": kind.dtype}), types
    return "expand", bind_args("expand", (source, kind.shape), {}), (TensorType(kind.shape, source.type.dtype),)


def _lies_otherwise(node: fx.Node) -> bool:
    """Whether what is copied lies in another order than what it is copied to, in a program that draws numbers."""
    target, source = (cast(fx.Node, read).meta["val"] for read in node.args[:2])
    return any(map(draws, node.graph.nodes)) and order_of(source.expand_as(target)) != order_of(target)


def _trains(value: Value) -> bool:
    """Whether a value is made of parameters that are trained."""
    waiting, seen = [value], set[Value]()
    while waiting:
        owner = (found := waiting.pop()).owner
        if isinstance(owner, Leaf):
            if owner.trainable:
                return True
        elif found not in seen and owner.op != "detach":
            waiting += owner.inputs
        seen.add(found)
    return False


def _strided(args: tuple[Any, ...], types: tuple[TensorType, ...], node: fx.Node) -> Canonical:
    """By where elements lie in memory: where those of the operand lay at capture is written down with the call."""
    x, *src, size, stride, offset = args
    memory = cast(fx.Node, node.args[0]).meta["val"]
    if memory.storage_offset() or memory.untyped_storage().nbytes() != x.type.bytes:
        raise Refused("its operand is a part of another tensor, whose memory a graph does not have: use slices")
    given = tuple(memory.stride())
    return (STRIDED_WRITE if src else STRIDED_VIEW), (x, *src, given, tuple(size), tuple(stride), offset or 0), types


def _embedding_bag(args: tuple[Any, ...], types: tuple[TensorType, ...], node: fx.Node) -> Canonical:
    """Bags of equal length, as `nn.EmbeddingBag` makes of a matrix of indices, are told from bags of any length."""
    weight, indices, offsets, scaled, mode, sparse, per_sample, last, padding = (*args, None)[:9]
    if scaled or sparse:
        raise Refused("its scale_grad_by_freq and sparse options change the gradient: leave them off")
    length = _bag_length(indices, offsets)
    flat = indices.owner.args[0] if length else None
    if length and per_sample is None and not last:
        return EMBEDDING_BAG, (weight, flat, None, _BAG_MODES[mode], padding), types[:1]
    return (
        RAGGED_EMBEDDING_BAG,
        (weight, indices, offsets, per_sample, _BAG_MODES[mode], bool(last), padding),
        types[:1],
    )


def _bag_length(indices: Value, offsets: Value) -> int | None:
    """The bag length when the indices are a flattened matrix and the offsets count its rows."""
    flat, steps = indices.owner, offsets.owner
    if not (isinstance(flat, Node) and isinstance(steps, Node)):
        return None
    if flat.op not in ("view", "reshape") or not steps.op.startswith("arange"):
        return None
    rows = flat.args[0].type.shape
    names = [parameter.name for parameter in signature(steps.op).parameters]
    given = dict(zip(names, steps.args, strict=True))
    found = (given.get("start", 0), given["end"], given.get("step", 1))
    return rows[1] if len(rows) == 2 and found == (0, rows[0] * rows[1], rows[1]) else None


_RESHAPES = (
    "view", "reshape", "_unsafe_view", "flatten.using_ints", "unflatten.int", "view_as", "reshape_as", "ravel",
)  # fmt: skip
_CANONICAL: Mapping[str, Callable[[Any, Any, fx.Node], Canonical]] = {
    "native_dropout": _native_dropout,
    "_native_batch_norm_legit_no_training": _batch_norm_in_evaluation,
    "dropout": _dropout,
    **dict.fromkeys(_RESHAPES, _reshaped),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), _sized),
    "broadcast_tensors": _broadcast_together,
    **dict.fromkeys((*CASTS, CAST), _cast),
    **dict.fromkeys(("new_zeros", "new_ones", "new_full"), _filled),
    "copy": _copy,
    "cat": _joined,
    "to_dense": _dense,
    "index.Tensor": _indexed,
    "scaled_dot_product_attention": _attention,
    **dict.fromkeys(("as_strided", "as_strided_scatter"), _strided),
    **dict.fromkeys(("div.Tensor_mode", "div.Scalar_mode"), _divided),
    "embedding_bag.padding_idx": _embedding_bag,
    "embedding_bag": _embedding_bag,
}
