"""What a GPU's own kernels keep and need, where torch on meta runs another form of the same operator.

Measured on an H200 with torch 2.11, CUDA 13.0 and cuDNN 9.19 (2026-11-15). What is kept is as measured but for some
hundred bytes a call.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch

from conjoin.cost import HALVES, MASK
from conjoin.ops import Call, KernelBytes, Shapes, find_spec

_ROWS_KEPT, _MASK_ALIGNMENT, _BLOCK, _HEADS = 32, 8, 64, (32, 64, 128)
"""Of CUTLASS' attention: what rows are padded to where it keeps a number for each, and columns of a mask; its blocks of
rows; the widths of heads there are kernels for, of which the first sums up twice (an H200, torch 2.11, 2026-11-19)."""


def kernel_bytes(call: Call, shapes: Shapes) -> KernelBytes | None:
    """The bytes of a kernel that meta does not know; None where meta tells the truth."""
    spec = find_spec(call.op)
    return spec.gpu_bytes(call, shapes) if spec and spec.gpu_bytes else None


class AttentionBytes(NamedTuple):
    """What a kernel of attention keeps besides operands and output, and needs for its gradients."""

    kept: int
    workspace: int
    keeps_mask: bool = True
    """Whether it is the mask as it was given that it keeps."""


def attention_bytes(call: Call, shapes: Shapes, needs: tuple[int, ...], kind: str) -> AttentionBytes:
    """Of fused attention: one number for each row; the gradient of the query is summed up in float32.

    A GPU makes numbers of a mask of truth values. In float32, and where a mask is trained, it is CUTLASS that goes by
    blocks of rows: it pads rows of a mask, and makes the gradient of one in full before it is summed up.
    """
    query, key = shapes[:2]
    dtype, rows = call.tensors[0].dtype, prod(query[:-1]) * torch.float32.itemsize
    if kind != "cuda":
        return AttentionBytes(rows, prod(query) * torch.float32.itemsize)
    mask = call.operand_names.index(MASK) if MASK in call.operand_names else None
    trained = mask is not None and mask in needs
    is_bool = mask is not None and call.tensors[mask].dtype is torch.bool
    if dtype in HALVES and not trained:
        made = prod(shapes[mask]) * dtype.itemsize if mask is not None and is_bool else 0
        return AttentionBytes(rows + made, prod(query) * torch.float32.itemsize, not is_bool)
    rows, columns = prod(query[:-2]) * _up(query[-2], _ROWS_KEPT), _up(key[-2], _MASK_ALIGNMENT)
    padded = mask is not None and (is_bool or columns != key[-2])
    made = prod(shapes[mask][:-1]) * columns * dtype.itemsize if mask is not None and padded else 0
    width = next((size for size in _HEADS if query[-1] <= size), query[-1])
    copies = 2 if width == _HEADS[0] else 1
    workspace = copies * prod(query[:-2]) * _up(query[-2], _BLOCK) * width * torch.float32.itemsize
    if mask is not None and trained:
        workspace += max(prod(query[:-1]) * columns - prod(shapes[mask]), 0) * dtype.itemsize
    return AttentionBytes(rows * torch.float32.itemsize + made, workspace, not padded)


def _up(size: int, to: int) -> int:
    return -(-size // to) * to


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
