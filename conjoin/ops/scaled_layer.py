"""A linear layer whose products are computed in eight bits: float8 with one scale for each tensor, found as it comes.

    y = sum_k e4m3(x / s) e4m3(w / t) * s t + bias              s, t = powers of two such that all is below 256
    D(x) = sum_n e5m2(g / r) e4m3(w / t) * r t                  r likewise, below 32768
    D(w) = sum_m e5m2(g / r) e4m3(x / s) * r s

Products are summed in float32 and rounded to bfloat16. A scale is of the tensor that a device has: of a piece, where
the tensor is split. As scales are powers of two, a number is rounded alike whatever the scale, unless it is so small
beside the largest that float8 has fewer bits for it: below 2^-13 of it in e4m3, 2^-28 in e5m2. So pieces are rounded as
the whole is, but for such numbers, and nobody has to ask other devices for their largest.

Only bfloat16 is treated so. In float32 and float64 the operator is a plain linear layer, which is what plans are
compared in. On GPUs that compute in float8 the products are `torch._scaled_mm`; elsewhere the same numbers are rounded
alike and multiplied in float32. There is nothing to keep from step to step.
"""

from __future__ import annotations

from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from conjoin.ops.first_order import first_order

_EXPONENT = 0x7F800000
"""The bits of a float32 that are its exponent: with no others set it is the power of two below."""
_LEAST = 2.0**-126
"""The scale of zeros, and the least that has all its bits."""
_HEADROOM = {torch.float8_e4m3fn: 7, torch.float8_e5m2: 14, torch.float8_e4m3fnuz: 6, torch.float8_e5m2fnuz: 14}
"""Powers of two by which the largest number may exceed 1, so that it is no larger than the dtype can hold."""
_ALIGNED = 16
"""What sizes must be a multiple of in `torch._scaled_mm`."""
_NATIVE = (8, 9)
"""The first architecture of NVIDIA that computes in float8: Ada."""


def scaled_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear layer, in eight bits where its operands are bfloat16.

    >>> x = torch.tensor([[1.0, 2.0, 3.1]]).bfloat16()
    >>> scaled_linear(x, torch.eye(3).bfloat16())
    tensor([[1., 2., 3.]], dtype=torch.bfloat16)
    """
    if input.dtype != torch.bfloat16:
        return functional.linear(input, weight, bias)
    y: Tensor = _ScaledLinear.apply(input, weight, bias)  # type: ignore[no-untyped-call]
    return y


class _ScaledLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows, (narrow, _) = x.reshape(-1, x.shape[-1]), _formats(x)
        x_scale, w_scale = _scale(rows, narrow), _scale(weight, narrow)
        left, right = _cast(rows, x_scale, narrow), _cast(weight, w_scale, narrow).t()
        made = _product(left, right, x_scale, w_scale, bias, fast=True)
        ctx.save_for_backward(x, weight, x_scale, w_scale)
        return made.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, x_scale, w_scale = ctx.saved_tensors
        needs, (narrow, wide) = ctx.needs_input_grad, _formats(gradient)
        rows = gradient.reshape(-1, gradient.shape[-1])
        scale = _scale(rows, wide) if needs[0] or needs[1] else x_scale
        g_x = g_weight = None
        if needs[0]:
            right = _cast(weight, w_scale, narrow, by_columns=True)
            g_x = _product(_cast(rows, scale, wide), right, scale, w_scale).view(x.shape)
        if needs[1]:
            right = _cast(x.reshape(-1, x.shape[-1]), x_scale, narrow, by_columns=True)
            g_weight = _product(_cast(rows, scale, wide, by_columns=True).t(), right, scale, x_scale)
        return g_x, g_weight, rows.sum(0) if needs[2] else None


def _formats(x: Tensor) -> tuple[torch.dtype, torch.dtype]:
    """What numbers and gradients are rounded to: GPUs of CDNA 3 have their own kind of the two."""
    if torch.version.hip and x.is_cuda and "gfx94" in torch.cuda.get_device_properties(x.device).gcnArchName:
        return torch.float8_e4m3fnuz, torch.float8_e5m2fnuz
    return torch.float8_e4m3fn, torch.float8_e5m2


def _scale(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The power of two that a tensor is divided by, as a float32: three tiny kernels behind one that reads it all.

    Infinite where the tensor has what is no finite number: then nor has the product any.
    """
    if x.numel() == 0:
        return torch.ones((), dtype=torch.float32, device=x.device)
    largest = torch.linalg.vector_norm(x, inf, dtype=torch.float32)
    power: Tensor = largest.view(torch.int32).bitwise_and_(_EXPONENT).view(torch.float32)
    power = power.mul_(2.0 ** -_HEADROOM[dtype]).clamp_(min=_LEAST)
    return power


def _cast(x: Tensor, scale: Tensor, dtype: torch.dtype, *, by_columns: bool = False) -> Tensor:
    """A matrix over its scale, in float8; one kernel, which divides, rounds, and turns the order of memory.

    A compiler takes no `out=` in another order of memory, and makes one kernel of several by itself. Numbers are the
    same: division by a power of two is exact, so it does not matter which dtype the quotient has before it is rounded.
    """
    if torch.compiler.is_compiling():
        rounded = (x / scale).to(dtype)
        return rounded.t().contiguous().t() if by_columns else rounded
    shape = tuple(reversed(x.shape)) if by_columns else x.shape
    made = torch.empty(shape, dtype=dtype, device=x.device)
    made = made.t() if by_columns else made
    torch.div(x, scale, out=made)
    return made


def _product(
    left: Tensor,
    right: Tensor,
    left_scale: Tensor,
    right_scale: Tensor,
    bias: Tensor | None = None,
    *,
    fast: bool = False,
) -> Tensor:
    """Of a matrix by rows and one by columns; `fast` sums as torchao does forward, in fewer bits on Hopper."""
    if left.device.type == "meta":
        return torch.empty(left.shape[0], right.shape[1], dtype=torch.bfloat16, device="meta")
    if not _is_native(left.device) or 0 in (*left.shape, *right.shape):
        made = (left.float() @ right.float()) * (left_scale * right_scale)
        return (made if bias is None else made + bias).to(torch.bfloat16)
    columns = right.shape[1]
    left, right, bias = _padded(left, right, bias)
    made = torch._scaled_mm(
        left, right, scale_a=left_scale, scale_b=right_scale, bias=bias, out_dtype=torch.bfloat16, use_fast_accum=fast
    )
    return made if made.shape[1] == columns else made[:, :columns].contiguous()


def _is_native(device: torch.device) -> bool:
    """Whether a device computes in float8."""
    if device.type != "cuda":
        return False
    return bool(torch.version.hip) or torch.cuda.get_device_capability(device) >= _NATIVE


def _padded(left: Tensor, right: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """With zeros, where a size is no multiple of what the kernel takes."""
    inner, columns = -left.shape[1] % _ALIGNED, -right.shape[1] % _ALIGNED
    if inner:
        left = _with_zeros(left, inner, 0)
    if inner or columns:
        right = _with_zeros(right.t(), inner, columns).t()
    return left, right, functional.pad(bias, (0, columns)) if bias is not None and columns else bias


def _with_zeros(x: Tensor, columns: int, rows: int) -> Tensor:
    """By their bytes: float8 has no kernel for it."""
    return functional.pad(x.view(torch.uint8), (0, columns, 0, rows)).view(x.dtype)
