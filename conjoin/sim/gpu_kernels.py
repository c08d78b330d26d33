"""What a GPU's own kernels keep and need, where torch on meta runs another form of the same operator.

Measured on an H200 with torch 2.11, CUDA 13.0 and cuDNN 9.19 (2026-11-15). What is kept is as measured but for some
hundred bytes a call.
"""

from __future__ import annotations

from math import prod

import torch

from conjoin.ops import Call, KernelBytes, Shapes, find_spec


def kernel_bytes(call: Call, shapes: Shapes) -> KernelBytes | None:
    """The bytes of a kernel that meta does not know; None where meta tells the truth."""
    spec = find_spec(call.op)
    return spec.gpu_bytes(call, shapes) if spec and spec.gpu_bytes else None


def attention_workspace(shapes: Shapes) -> int:
    """The backward of fused attention sums up the gradient of the query in float32."""
    return prod(shapes[0]) * torch.float32.itemsize


def numbers_not_kept(call: Call, shapes: Shapes) -> int:
    """Bytes that meta would keep of dropout inside attention which is spelled out: a GPU keeps truth values.

    >>> from conjoin.ops import TensorType, bind_args
    >>> x = TensorType((2, 4, 8, 16), torch.bfloat16)
    >>> op = "scaled_dot_product_attention"
    >>> drops = Call(op, bind_args(op, (x, x, x, None, 0.1), {}))
    >>> numbers_not_kept(drops, (x.shape,) * 3) == 2 * 4 * 8 * 8 * 3
    True
    """
    if not 0 < (call["dropout_p"] or 0.0) < 1:
        return 0
    wide = max(call.tensors[0].dtype.itemsize, torch.float32.itemsize)
    return prod(shapes[0][:-1]) * shapes[1][-2] * (wide - torch.bool.itemsize)
