"""The order in memory of values on one device, found without data: what random calls draw follows it.

`dropout` of a transposed tensor draws for its elements in the order in which they lie. A graph whose values are the
same but lie otherwise draws other numbers for each of them. And convolutions of images whose channels lie last run by
other kernels, which take another time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from math import prod
from types import MappingProxyType

import torch
from torch import Tensor

from conjoin.ir.builder import is_random
from conjoin.ir.graph import Graph
from conjoin.ir.legality import plain_call
from conjoin.ir.nodes import Leaf, Node, Value
from conjoin.ir.reshards import is_parallel
from conjoin.ops import (
    Call,
    OpSpec,
    TensorType,
    call_cache,
    drawing,
    output_types,
    run_whole,
    space_of,
    spec_for,
)

Strides = tuple[int, ...]
_IMAGE_RANK, _MATRIX_RANK = 4, 2
_RESHAPE = "view"
_FEW = 1 << 16
"""Elements that a call is run on to see how its results lie."""
_SMALL = (4, 32)
"""Sizes of dims at which kernels are asked where the call has more elements; the second has room for most windows."""
ORDERED_BY_KERNELS = frozenset((
    "_native_batch_norm_legit.no_stats", "_native_batch_norm_legit_functional",
    "_native_batch_norm_legit_no_training", "angle", "batch_norm", "binary_cross_entropy",
    "conjoin::batch_norm_by_pieces", "conjoin::normalize_channels", "conv1d", "conv1d.padding", "conv2d",
    "conv2d.padding", "conv3d",
    "conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input", "convolution", "copysign.Tensor",
    "cross_entropy_loss", "div.Tensor_mode",
    *(f"fft_{way}fft{rank}" for way in ("", "i", "r", "ir") for rank in ("", "2", "n")),
    "floor_divide", "heaviside", "im2col", "index.Tensor",
    "isin.Tensor_Tensor", "log_sigmoid", "logaddexp", "logaddexp2", "logical_and", "logical_or", "logical_xor",
    "max_pool3d", "max_pool3d_with_indices", "max_unpool2d", "nll_loss2d", "nll_loss_nd", "normal.Tensor_Tensor",
    "normal.float_Tensor", "one_hot", "pad", "pixel_shuffle", "poisson", "pow.Scalar", "reflection_pad2d",
    "reflection_pad3d", "replication_pad2d", "replication_pad3d", "rrelu", "scaled_dot_product_attention",
    "xlogy.Tensor",
))  # fmt: skip
"""Operators whose kernels order their results otherwise than torch says without data."""


@call_cache(32)
def strides_in(graph: Graph, channels_last: bool = False) -> Mapping[Value, Strides]:
    """The strides of all values. Leaves lie as they did when captured, or all images with their channels last."""
    found = {Value(leaf): _usual(leaf.type, channels_last or leaf.channels_last) for leaf in graph.leaves}
    add_strides(found, graph.nodes)
    return found


def strides_after(graph: Graph, arriving: Mapping[str, Strides]) -> Mapping[Value, Strides]:
    """The strides of all values, given those of some inputs by their names."""
    if not arriving:
        return strides_in(graph)
    found = {Value(leaf): arriving.get(leaf.name) or _usual(leaf.type, leaf.channels_last) for leaf in graph.leaves}
    add_strides(found, graph.nodes)
    return found


def add_strides(found: dict[Value, Strides], nodes: Iterable[Node]) -> None:
    """Add the strides of what calls make to those of what they read."""
    for node in nodes:
        if is_parallel(node):
            found[Value(node)] = found[node.inputs[0]]
        else:
            made = _made(node.call, tuple(found[value] for value in node.inputs), _has_learned_mask(node))
            found.update(zip(node.outputs(), made or (_usual(type, False) for type in node.types), strict=True))


def calls_as_they_lie(graph: Graph) -> dict[Node, Call]:
    """The calls on whole tensors, without layouts, of all nodes but reshards. Where other kernels run because of how
    images or masks lie, or numbers are read that lie apart, they say so.
    """
    calls = {node: plain_call(node) for node in graph.nodes if not is_parallel(node)}
    if any(map(_turns, calls)) or any(leaf.channels_last for leaf in graph.leaves):
        strides = strides_in(graph)
        for node, call in calls.items():
            if node.spec is not None and _reads_turned(node, node.spec, strides):
                calls[node] = replace(call, turned=True)
    return calls


def _reads_turned(node: Node, spec: OpSpec, strides: Mapping[Value, Strides]) -> bool:
    """Whether a call reads images whose channels lie last, a mask whose rows do not, or, where its kernels do not care,
    numbers that lie apart one after the other: such a call copies them first, or takes as long as if it did.
    """
    if spec.by_order:
        value = _ordered(node)
        turned = _has_rows_apart if _is_attention(node) else _has_channels_last
        return value is not None and turned(value.type.shape, strides[value])
    if spec.by_rows:
        rows = node.inputs[0]
        return _has_rows_apart(rows.type.shape, strides[rows])
    made = Value(node)
    if spec.name == _RESHAPE:
        (given,) = node.inputs
        return not _is_view(given.type.shape, strides[given], made.type.shape)
    if spec.view or len(made.type.shape) < _MATRIX_RANK:
        return False
    fastest = _fastest(made.type.shape, strides[made])
    return any(
        value.type.shape == made.type.shape and _fastest(value.type.shape, strides[value]) not in (fastest, None)
        for value in _alike(node)
    )


@call_cache()
def _alike(node: Node) -> tuple[Value, ...]:
    """What is read along the same indices as the first result has."""
    call = plain_call(node)
    spec = spec_for(call)
    if spec is None or not node.inputs or all(value.type.shape != node.types[0].shape for value in node.inputs):
        return ()
    notation = space_of(spec, call).notation
    same = zip(node.inputs, notation.operands, strict=True)
    return tuple(value for value, access in same if access.dims == notation.outputs[0].dims)


@lru_cache(1 << 14)
def _fastest(shape: tuple[int, ...], strides: Strides) -> int | None:
    """The dim along which neighbours in memory lie; None where all is one number.

    >>> _fastest((4, 3), (3, 1)), _fastest((4, 3), (1, 4)), _fastest((4, 1), (1, 1)), _fastest((4, 3), (0, 0))
    (1, 0, 0, None)
    """
    moving = [(stride, -dim) for dim, stride in enumerate(strides) if shape[dim] > 1 and stride]
    return -min(moving)[1] if moving else None


@lru_cache(1 << 14)
def _is_view(shape: tuple[int, ...], strides: Strides, wanted: tuple[int, ...]) -> bool:
    """Whether a tensor that lies so can be seen in another shape."""
    try:
        torch.empty_strided(shape, strides, device="meta").view(wanted)
    except RuntimeError:
        return False
    return True


def _ordered(node: Node) -> Value | None:
    """What decides by its order in memory which kernel runs: images, or the mask of attention if there is one."""
    if not _is_attention(node):
        return node.inputs[0]
    mask = node.args[node.call.signature.position("attn_mask")]
    return mask if isinstance(mask, Value) else None


def _is_attention(node: Node) -> bool:
    return node.spec is not None and node.spec.family == "attention"


def _has_learned_mask(node: Node) -> bool:
    """Whether a gradient goes to the mask of an attention: the fast kernels, whose results lie otherwise, give none."""
    mask = _ordered(node) if _is_attention(node) else None
    return mask is not None and _is_learned(mask)


@call_cache()
def _is_learned(value: Value) -> bool:
    """Whether a value depends on what is trained, in numbers that have a gradient."""
    seen, left = {value}, [value]
    while left:
        made, owner = (one := left.pop()).type.dtype, one.owner
        if not (made.is_floating_point or made.is_complex):
            continue
        if isinstance(owner, Leaf):
            if owner.trainable:
                return True
        elif owner.spec is None or owner.spec.smooth:
            left += [read for read in owner.inputs if read not in seen]
            seen.update(owner.inputs)
    return False


def _has_rows_apart(shape: tuple[int, ...], strides: Strides) -> bool:
    """Whether the numbers of a row do not lie one after the other: kernels of attention take no such mask."""
    return strides[-1] != 1 and shape[-1] > 1


def _turns(node: Node) -> bool:
    """Whether a call may bring tensors into another order in memory: by a view of their dims, or as it is asked to."""
    views = node.spec is not None and node.spec.view and len(node.types[0].shape) >= _MATRIX_RANK
    return views or any(isinstance(arg, torch.memory_format) for arg in node.args)


def _has_channels_last(shape: tuple[int, ...], strides: Strides) -> bool:
    """Whether the channels of images lie last, and nothing else can be said of them.

    >>> _has_channels_last((2, 3, 4, 4), (48, 1, 12, 3)), _has_channels_last((2, 3, 4, 4), (48, 16, 4, 1))
    (True, False)
    """
    return len(shape) >= _IMAGE_RANK and strides[1] == 1 and shape[1] > 1 and prod(shape[2:]) > 1


def drawn_strides(graph: Graph, arriving: Mapping[str, Strides] = MappingProxyType({})) -> dict[Value, Strides]:
    """How what random calls draw for each of their operands lies in memory, given how inputs do that come from others
    and would have been made here on one device."""
    random = [node for node in graph.nodes if is_random(node.op, node.args)]
    strides = strides_after(graph, arriving) if random else {}
    return {value: _drawn(value.type, strides[value]) for node in random for value in node.inputs}


@call_cache(8)
def orders_looked_at(graph: Graph, channels_last: bool) -> tuple[Strides, ...]:
    """The order in memory as all calls see it that look at it, one after the other.

    Those are random calls. An opaque call may look at it too: `as_strided` reads what lies there.
    """
    looking = [node for node in graph.nodes if looks_at_order(node)]
    strides = strides_in(graph, channels_last) if looking else {}
    return tuple(
        _drawn(value.type, strides[value]) if is_random(node.op, node.args) else strides[value]
        for node in looking
        for value in node.inputs
    )


@lru_cache(1 << 14)
def _drawn(type: TensorType, strides: Strides) -> Strides:
    return torch.empty_like(_on_meta(type, strides)).stride()


@call_cache()
def looks_at_order(node: Node) -> bool:
    """Whether what a call gives may depend on the order in memory of what it reads."""
    return is_random(node.op, node.args) or (node.spec is None and not is_parallel(node))


@call_cache(1 << 14)
def _made(call: Call, operands: tuple[Strides, ...], learned_mask: bool = False) -> tuple[Strides, ...]:
    """The strides that a call gives its results; none are known where it is opaque or has no form without data.

    The judge is the call itself, run on zeros where they are few. What torch says without data is right for views and
    most arithmetic, but not for all that has kernels of its own: those are run on few elements that lie alike.
    """
    spec = spec_for(call)
    if spec is None or not operands:
        return ()
    if sum(type.num_elements for type in call.tensors) <= _FEW:
        zeros = [_zeros(type.shape, strides, type.dtype) for type, strides in _given(call, operands)]
        made = _run(call, zeros, learned_mask)
        if made is not None:
            return tuple(x.stride() for x in made)
    for limit in _SMALL if spec.name in ORDERED_BY_KERNELS else ():
        small = [(tuple(min(n, limit) for n in t.shape), strides, t.dtype) for t, strides in _given(call, operands)]
        made = _run(call, [_zeros(*one) for one in small], learned_mask)
        if made is not None:
            return tuple(map(_like, made, (type.shape for type in output_types(spec, call))))
    made = _run(call, [_on_meta(type, strides) for type, strides in _given(call, operands)], learned_mask)
    return () if made is None else tuple(x.stride() for x in made)


def _given(call: Call, operands: tuple[Strides, ...]) -> Iterator[tuple[TensorType, Strides]]:
    return zip(call.tensors, operands, strict=True)


def _run(call: Call, tensors: list[Tensor], learned_mask: bool) -> tuple[Tensor, ...] | None:
    """The results of a call, or None where it does not take these: an index is too large, a shape stands in it."""
    tensors[0].requires_grad_(tensors[0].is_floating_point())  # kernels ask for it, and in training most do
    if learned_mask:
        tensors[call.operand_names.index("attn_mask")].requires_grad_()
    try:
        if not is_random(call.op, call.args):
            return run_whole(call, tensors)
        with drawing, torch.random.fork_rng(devices=[]):
            return run_whole(call, tensors)
    except (NotImplementedError, RuntimeError, IndexError, ValueError):
        return None


def _like(small: Tensor, shape: tuple[int, ...]) -> Strides:
    """The strides of a tensor of another shape whose dims lie in the same order, without gaps."""
    strides, size = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (small.stride(dim), -dim)):
        strides[dim], size = size, size * shape[dim]
    return tuple(strides)


def _usual(type: TensorType, channels_last: bool) -> Strides:
    order = torch.channels_last if channels_last and len(type.shape) == _IMAGE_RANK else torch.contiguous_format
    return torch.empty(type.shape, device="meta", memory_format=order).stride()


def _zeros(shape: tuple[int, ...], strides: Strides, dtype: torch.dtype) -> Tensor:
    """Zeros that lie so; what lies between them is not written, since that may be more than there is memory for."""
    size = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    memory = torch.empty(max(size, 1), dtype=dtype, device="cpu")
    memory.as_strided([n if stride else min(n, 1) for n, stride in zip(shape, strides, strict=True)], strides).zero_()
    return memory.as_strided(shape, strides)


def _on_meta(type: TensorType, strides: Strides) -> Tensor:
    return torch.empty_strided(type.shape, strides, dtype=type.dtype, device="meta")
