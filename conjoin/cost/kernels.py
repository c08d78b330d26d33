"""Calls that a GPU runs as other kernels than their own, each of which is a call that more is known of.

A convolution adds its bias in a pass of its own, and sums that bias's gradient in another. Attention is one kernel
where there is one for it; else it is spelled out: two products, a softmax and what stands between them, in float32.
A product with a matrix is that of a linear layer, of which far more were measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from conjoin.ops import ATTENTION_FROM_ROW, CAST, Call, TensorType, bind_args, output_types, spec_for

Asked = tuple[Call, tuple[int, ...]]
"""A call, and which of its operands get a gradient."""
Shapes = tuple[tuple[int, ...], ...]

ATTENTION, MASK = "scaled_dot_product_attention", "attn_mask"
_FUSED_RANK, _ALIGNMENT = 4, 16
HALVES = (torch.float16, torch.bfloat16)


def kernels_of(call: Call, needs: tuple[int, ...]) -> tuple[Asked, ...]:
    """The calls that a GPU runs for one; none where it runs the call itself.

    >>> x, w, b = (TensorType(shape, torch.float32) for shape in ((8, 3, 6, 6), (16, 3, 3, 3), (16,)))
    >>> parts = kernels_of(Call("conv2d", bind_args("conv2d", (x, w, b), {})), (1, 2))
    >>> [(part.op, needs) for part, needs in parts]
    [('conv2d', (1,)), ('add.Tensor', (0, 1))]
    """
    if call.op == ATTENTION_FROM_ROW:
        return tuple(_from_row(call, needs))
    if call.op == ATTENTION:
        shapes = tuple(tensor.shape for tensor in call.tensors)
        return () if fuses_attention(call, shapes, needs, "cuda") else tuple(_spelled_out(call, needs))
    if call.op in _PRODUCTS:
        return _as_layer(call, needs)
    spec = spec_for(call)
    biased = spec is not None and spec.family == "convolution" and call["bias"] is not None
    return _then_bias(call, needs) if biased else ()


CAST_FLOPS = 335.0
"""What dividing a number and rounding it to float8 takes, at a device's rate in float32: an H200 casts 200 thousand
million a second by torch's kernel, whatever their number, 2026-11-17."""


class Casts(NamedTuple):
    """What a product in eight bits does besides."""

    scaled: tuple[TensorType, ...]
    """Tensors of which the largest element is found: by a pass over them, and three tiny kernels."""
    num_elements: int
    """In all tensors that are divided by it and rounded."""


def casts_of(call: Call, needs: tuple[int, ...]) -> tuple[Casts, Casts]:
    """Of a product in eight bits, forward and backward: both operands by rows; then the gradient, and what it is
    multiplied by, by columns.
    """
    x, weight = call.tensors[:2]
    spec = spec_for(call)
    assert spec is not None, "it is declared"
    (made,) = output_types(spec, call)
    others = [tensor for i, tensor in ((0, weight), (1, x)) if i in needs]
    back = sum(made.num_elements + tensor.num_elements for tensor in others)
    return Casts((x, weight), x.num_elements + weight.num_elements), Casts((made,) if others else (), back)


def largest_of(tensor: TensorType) -> tuple[Call, ...]:
    """What finds the scale of a tensor."""
    flat, number = TensorType((tensor.num_elements,), tensor.dtype), TensorType((), torch.float32)
    tiny = Call("mul.Tensor", bind_args("mul.Tensor", (number, number), {}))
    return Call("amax", bind_args("amax", (flat, (0,)), {})), tiny, tiny, tiny


_PRODUCTS = {"mm": (0, 1), "matmul": (0, 1), "addmm": (2, 0, 1)}
"""Products that may be those of a linear layer: which operand each of theirs then is."""


def _as_layer(call: Call, needs: tuple[int, ...]) -> tuple[Asked, ...]:
    """The linear layer whose product it is; none for other products.

    >>> x, w = TensorType((4, 8, 16), torch.float32), TensorType((16, 32), torch.float32)
    >>> [(layer, needs)] = kernels_of(Call("matmul", (x, w)), (1,))
    >>> [tensor.shape for tensor in layer.tensors], needs
    ([(4, 8, 16), (32, 16)], (1,))
    """
    *bias, x, weight = call.tensors
    matrices = len(x.shape) >= 2 and len(weight.shape) == 2 and not call.turned
    if not matrices or any(added.shape != weight.shape[1:] for added in bias):
        return ()
    turned = TensorType((weight.shape[1], weight.shape[0]), weight.dtype)
    asked = tuple(sorted(_PRODUCTS[call.op][i] for i in needs))
    return ((Call("linear", (x, turned, *(bias or (None,)))), asked),)


def _from_row(call: Call, needs: tuple[int, ...]) -> Iterator[Asked]:
    """Attention to the keys before the first row, and to the others."""
    query, key, value = call.tensors
    first, length = call["first"], key.shape[2]
    for seen, causal in ((first, False), (length - first, True)):
        if seen:
            pair = (TensorType((*x.shape[:2], seen, x.shape[3]), x.dtype) for x in (key, value))
            yield Call(ATTENTION, (query, *pair, None, 0.0, causal, call["scale"], call["enable_gqa"])), needs


FLASH_BESIDE_CUDNN = {"Hopper": 1.67}
"""How many times as long attention takes by the kernel of torch that gives logarithms of sums, FlashAttention-2, as by
the one that torch 2.11 takes by itself, cuDNN's, which was measured. FlashAttention-3, which is as fast as cuDNN's, is
1.5 to 2.0 times as fast as FlashAttention-2 forward and 1.5 to 1.75 times backward (Shah et al., arXiv 2407.08608,
section 4.1): the geometric mean. Torch's benchmark has 631 against 329 teraflops forward on an H100, of each of the two
(pytorch issue 142132, 2024-12-05). Elsewhere torch takes FlashAttention-2 by itself."""


def _then_bias(call: Call, needs: tuple[int, ...]) -> tuple[Asked, ...]:
    bare = Call(call.op, tuple(None if i == 2 else arg for i, arg in enumerate(call.args)), call.turned)
    spec = spec_for(bare)
    if spec is None:
        return ()
    made, bias = output_types(spec, bare)[0], call["bias"]
    column = TensorType((*bias.shape, *(1 for _ in made.shape[2:])), bias.dtype)
    grown = tuple(i for i, wanted in enumerate((any(k < 2 for k in needs), 2 in needs)) if wanted)
    added = Call("add.Tensor", bind_args("add.Tensor", (made, column), {}))
    return (bare, tuple(i for i in needs if i < 2)), (added, grown)


def fuses_attention(call: Call, shapes: Shapes, needs: tuple[int, ...], kind: str) -> bool:
    """Whether a device of a kind has one kernel for attention on tensors of these shapes.

    With a batch and heads; on a GPU also with rows it can load whole, where neither is broadcast, and where the rows of
    the mask do, too. Heads of keys may be fewer than those of queries where the call says so, in halves, under a mask
    that is not trained. Seen on an H200 with torch 2.11.
    """
    query, key, value = shapes[:3]
    dtype = call.tensors[0].dtype
    if len(query) != _FUSED_RANK or kind == "cpu":
        return len(query) == _FUSED_RANK
    if dtype.itemsize > torch.float32.itemsize or call.turned:
        return False
    groups = dtype in HALVES and bool(call["enable_gqa"]) and not trains_mask(call, needs)
    if query[0] != key[0] or (query[1] != key[1] and not groups):
        return False
    aligned = all(size * dtype.itemsize % _ALIGNMENT == 0 for size in (query[-1], value[-1]))
    return aligned or (dtype in HALVES and call["attn_mask"] is None)


def trains_mask(call: Call, needs: tuple[int, ...]) -> bool:
    """Whether the mask of attention gets a gradient."""
    return any(call.operand_names[i] == MASK for i in needs)


def _spelled_out(call: Call, needs: tuple[int, ...]) -> Iterator[Asked]:
    query, key, value = call.tensors[:3]
    learns = bool(needs)
    wide = query.dtype if query.dtype not in HALVES else torch.float32
    q, k, v = (TensorType(x.shape, wide) for x in (query, key, value))
    if wide is not query.dtype:
        yield from (_asked(CAST, (x,), (i in needs,), dtype=wide) for i, x in enumerate((query, key, value)))
    if len(query.shape) == _FUSED_RANK and query.shape[1] != key.shape[1]:  # each head of keys is repeated
        k, v = (TensorType((*x.shape[:1], query.shape[1], *x.shape[2:]), wide) for x in (k, v))
        yield from (_asked("clone", (x,), (i in needs,)) for i, x in ((1, k), (2, v)))
    yield from (_asked("mul.Tensor", (x, 0.5), (i in needs,)) for i, x in ((0, q), (1, k)))
    turned = TensorType((*k.shape[:-2], k.shape[-1], k.shape[-2]), wide)
    scores = TensorType((*q.shape[:-1], k.shape[-2]), wide)
    yield _asked("matmul", (q, turned), (0 in needs, 1 in needs))
    if call["attn_mask"] is not None or call["is_causal"]:
        mask = call["attn_mask"] or TensorType(scores.shape[-2:], wide)
        yield _asked("add.Tensor", (scores, TensorType(mask.shape, wide)), (learns, 3 in needs))
    yield _asked("softmax.int", (scores, -1), (learns,))
    yield _asked("eq.Scalar", (scores, 0.5), (False,))  # rows that are hidden altogether become zeros
    yield _asked("where.self", (TensorType(scores.shape, torch.bool), scores, scores), (False, learns, False))
    if call["dropout_p"]:
        yield _asked("dropout", (scores, 0.5, True), (learns,))
    yield _asked("matmul", (scores, v), (learns, 2 in needs))
    if wide is not query.dtype:
        yield _asked(CAST, (TensorType((*q.shape[:-1], v.shape[-1]), wide),), (learns,), dtype=query.dtype)


def _asked(op: str, args: tuple[Any, ...], learns: tuple[bool, ...], **attributes: Any) -> Asked:
    return Call(op, bind_args(op, args, attributes)), tuple(i for i, wanted in enumerate(learns) if wanted)
