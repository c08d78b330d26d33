"""Which calls reach like shares of what a device could do: classes from the general to the special."""

from __future__ import annotations

from conjoin.cost.work import ATTENTION, CONTRACTION, CONVOLUTION, LAUNCHES, CallWork
from conjoin.ops import Call, output_types, spec_for

_ALIGNED_BYTES = 16
"""Rows that begin at a multiple of it are what tensor cores read; a product with others runs without them."""
_FEW_CHANNELS = 4
_USUAL_HEADS = (32, 64, 128)
_LIKE = {"float16": "bfloat16"}
"""Dtypes that kernels treat alike."""


def classes_of(call: Call, work: CallWork, *, backward: bool, by_flops: bool) -> tuple[str, ...]:
    """The names of a call's classes; an operator of many kernels is like no other.

    >>> import torch
    >>> from conjoin.cost.work import work_of
    >>> from conjoin.ops import TensorType
    >>> x, w = TensorType((8, 64), torch.bfloat16), TensorType((50257, 64), torch.bfloat16)
    >>> call = Call("linear", (x, w, None))
    >>> classes_of(call, work_of(call, ()), backward=False, by_flops=True)[2:]
    ('contraction bfloat16 odd by flops', 'linear bfloat16 odd by flops')
    """
    family = call.op if call.op in LAUNCHES else work.family
    way = " backward" if backward else ""
    dtype = _LIKE.get(work.dtype, work.dtype)
    special = f"{dtype} {_shape_class(call, work.family)}{'by flops' if by_flops else 'by bytes'}"
    general = f"{family}{way}", f"{family}{way} {dtype}", f"{family}{way} {special}"
    return general if call.op in LAUNCHES else (*general, f"{call.op}{way} {special}")


def _shape_class(call: Call, family: str) -> str:
    if family == CONTRACTION:
        return "odd " if _is_odd(call) else ""
    if family == CONVOLUTION:
        return _convolution(call)
    return _attention(call) if family == ATTENTION else ""


def _is_odd(call: Call) -> bool:
    """Whether rows of a matrix product are no multiple of what tensor cores read."""
    spec = spec_for(call)
    matrices = [t for t in (*call.tensors, *(output_types(spec, call) if spec else ())) if len(t.shape) > 1]
    return any(t.shape[-1] * t.dtype.itemsize % _ALIGNED_BYTES for t in matrices)


def _convolution(call: Call) -> str:
    groups, channels, kernel = call["groups"] or 1, call.tensors[0].shape[1], call.tensors[1].shape[2:]
    if groups == channels > 1:
        return "depthwise "
    if groups > 1:
        return "grouped "
    if channels <= _FEW_CHANNELS:
        return "of few channels "
    return "pointwise " if all(n == 1 for n in kernel) else ""


def _attention(call: Call) -> str:
    """What decides which kernel runs, and how much of it."""
    words = [
        "masked " if call["attn_mask"] is not None else "",
        "causal " if call["is_causal"] else "",
        "dropped " if call["dropout_p"] else "",
        "" if call.tensors[0].shape[-1] in _USUAL_HEADS else "of odd heads ",
    ]
    return "".join(words)
