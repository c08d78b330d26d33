"""Which calls reach like shares of what a device could do: classes from the general to the special."""

from __future__ import annotations

from math import log2, prod

from conjoin.cost.roofline import AS_HALVES
from conjoin.cost.work import ATTENTION, CONTRACTION, CONVOLUTION, REDUCTION, CallWork, is_composed
from conjoin.ops import Call, find_spec, output_types, spec_for

_ALIGNED_BYTES = 16
"""Rows that begin at a multiple of it are what tensor cores read; a product with others runs without them."""
_FEW_CHANNELS = 4
_MANY_BLOCKS = 256
"""More than any GPU runs at a time of those that fill a multiprocessor."""
_ALONG_A_DIM = ("softmax.int", "log_softmax.int", "cross_entropy_loss")
_USUAL_HEADS = (32, 64, 96, 128, 192, 256)
_LIKE = {"float16": "bfloat16", **AS_HALVES}
"""Dtypes that kernels treat alike."""


def classes_of(call: Call, work: CallWork, rate: str, *, backward: bool, by_flops: bool) -> tuple[str, ...]:
    """The names of a call's classes, computed at the rate of some dtype; an operator of many kernels is like no other.

    >>> import torch
    >>> from conjoin.cost.work import work_of
    >>> from conjoin.ops import TensorType
    >>> x, w = TensorType((8, 64), torch.bfloat16), TensorType((50257, 64), torch.bfloat16)
    >>> call = Call("linear", (x, w, None))
    >>> classes_of(call, work_of(call, ()), "bfloat16", backward=False, by_flops=True)[2:]
    ('contraction bfloat16 odd by flops', 'linear bfloat16 odd by flops')
    """
    spec = find_spec(call.op)
    kernels = spec.kernels if spec and work.family == REDUCTION else ""
    family = call.op if is_composed(call.op) else kernels or work.family
    way = " backward" if backward else ""
    dtype = _LIKE.get(rate, rate)
    special = f"{dtype} {_shape_class(call, work.family, rate, backward)}{'by flops' if by_flops else 'by bytes'}"
    general = f"{family}{way}", f"{family}{way} {dtype}", f"{family}{way} {special}"
    return general if is_composed(call.op) else (*general, f"{call.op}{way} {special}")


def _shape_class(call: Call, family: str, rate: str, backward: bool) -> str:
    if family == CONTRACTION:
        return "odd " if rate != "float32" and _is_odd(call) else ""
    if family == CONVOLUTION:
        return _convolution(call)
    if family == ATTENTION:
        return _attention(call)
    spec, how = find_spec(call.op), "channels last " if call.turned else ""
    if _is_across(call):
        return f"{how}across "
    if spec is None or spec.blocks is None:
        return how
    if backward and (crowd := _made_of_one(call)) > 1:
        return f"{how}of one for {crowd} "
    return f"{how}of {min(2 ** max(spec.blocks(call) - 1, 0).bit_length(), _MANY_BLOCKS)} blocks "


def _is_across(call: Call) -> bool:
    """Whether it goes over another dim than the last: classes of pixels, for which there are other kernels."""
    if call.op not in _ALONG_A_DIM:
        return False
    rank = len(call.tensors[0].shape)
    along = min(1, rank - 1) if call.op == "cross_entropy_loss" else call["dim"]
    return rank > 0 and along % rank != rank - 1


def _made_of_one(call: Call) -> int:
    """How many outputs an element of the input has a part in, as a power of two: in backward they add up in one place,
    one after the other.
    """
    spec = spec_for(call)
    made = prod(output_types(spec, call)[0].shape) if spec else 0
    given = prod(call.tensors[0].shape)
    return 2 ** round(log2(made / given)) if made > given > 0 else 1


def _is_odd(call: Call) -> bool:
    """Whether rows of a matrix product are no multiple of what tensor cores read."""
    spec = spec_for(call)
    matrices = [t for t in (*call.tensors, *(output_types(spec, call) if spec else ())) if len(t.shape) > 1]
    return any(t.shape[-1] * t.dtype.itemsize % _ALIGNED_BYTES for t in matrices)


def _convolution(call: Call) -> str:
    groups, channels, kernel = call["groups"] or 1, call.tensors[0].shape[1], call.tensors[1].shape[2:]
    how = ("channels last " if call.turned else "") + ("of films " if len(kernel) > 2 else "")
    how += "dilated " if any(step > 1 < n for step, n in zip(call["dilation"], kernel, strict=False)) else ""
    if groups == channels > 1:
        return f"{how}depthwise "
    if groups > 1:
        return f"{how}grouped "
    if channels <= _FEW_CHANNELS:
        return f"{how}of few channels "
    return f"{how}pointwise " if all(n == 1 for n in kernel) else how


def _attention(call: Call) -> str:
    """What decides which kernel runs, and how much of it."""
    words = [
        "masked " if call["attn_mask"] is not None else "",
        "causal " if call["is_causal"] else "",
        "dropped " if call["dropout_p"] else "",
        "" if call.tensors[0].shape[-1] in _USUAL_HEADS else "of odd heads ",
    ]
    return "".join(words)
