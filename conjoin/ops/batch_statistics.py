"""Batch norm in two operators, so that a batch may be split: moments, which are averages, and what they normalize.

    moments(x) = [E[x], E[x^2]]                        for each channel, over the batch and space
    normalize(x) = (x - mean) / sqrt(E[x^2] - mean^2 + eps) * weight + bias

The average over a batch is the sum of those over its parts, each weighed by its size; one all-reduce brings both. The
moments are float64, whatever x is: mean and variance are first found apart, as stock batch norm finds them, and what the
difference of the two moments loses of a float64 is nothing to a float32. Each pass over x is one of torch's own kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def batch_moments(x: Tensor) -> Tensor:
    """Mean and mean square of every channel, as two rows of float64.

    >>> batch_moments(torch.tensor([[1.0, 5.0], [3.0, 5.0]]))
    tensor([[ 2.,  5.],
            [ 5., 25.]], dtype=torch.float64)
    """
    return _Moments.apply(x)  # type: ignore[no-any-return, no-untyped-call]


def normalize_channels(x: Tensor, moments: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Every channel shifted and scaled to mean 0 and variance 1 by the moments given, then by weight and bias."""
    return _Normalize.apply(x, moments, weight, bias, eps)  # type: ignore[no-any-return, no-untyped-call]


def _wide(x: Tensor) -> torch.dtype:
    """What statistics of a tensor are computed in."""
    return torch.promote_types(x.dtype, torch.float32)


def _mean_and_variance(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of every channel, by the kernel that is the fastest for the tensor."""
    in_rows = x.is_contiguous() and x.dim() > 2 and x.dtype in (torch.float32, torch.float64)
    if x.device.type != "meta" and not (x.device.type == "cpu" and in_rows):
        # Without running statistics the kernel would round what it found to the dtype of x.
        unused = torch.zeros(2, x.shape[1], dtype=_wide(x), device=x.device)
        return torch.batch_norm_update_stats(x, unused[0], unused[1], 0.0)
    dims = (0, *range(2, x.dim()))
    mean = x.mean(dims, keepdim=True, dtype=_wide(x))
    return mean.flatten(), (x - mean).square_().mean(dims)


def _scaled(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, eps: float) -> Tensor:
    """`(x - mean) / sqrt(var + eps) * weight + bias` in one pass: batch norm in evaluation."""
    columns = (None if each is None else each.to(_wide(x)) for each in (weight, bias, mean, var))
    return torch.batch_norm(x, *columns, False, 0.0, eps, False)


def _variance(moments: Tensor) -> Tensor:
    return (moments[1] - moments[0].square()).clamp_min_(0.0)


class _Moments(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        mean, var = (each.double() for each in _mean_and_variance(x.detach()))
        ctx.save_for_backward(x, mean)
        return torch.stack((mean, var + mean.square()))

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """`(g0 + 2 x g1) / count`, written around the mean, where nothing cancels."""
        x, mean = ctx.saved_tensors
        slope = gradient[1] * (2 * x.shape[1] / x.numel())
        offset = gradient[0] * (x.shape[1] / x.numel()) + slope * mean
        return _scaled(x, slope, offset, mean, torch.ones_like(mean), 0.0)


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, moments: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        ctx.save_for_backward(x, moments, weight)
        ctx.eps, ctx.bias_dtype = eps, None if bias is None else bias.dtype
        return _scaled(x, weight, bias, moments[0], _variance(moments), eps)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """All follows from the sums of g and of g times the normalized x, which the kernel finds on its way."""
        x, moments, weight = ctx.saved_tensors
        mean, var = moments[0], _variance(moments)
        factor = torch.ones_like(mean) if weight is None else weight.double()
        needs = ctx.needs_input_grad
        gx, along, total = torch.ops.aten.native_batch_norm_backward(
            gradient, x, factor.to(_wide(x)), mean.to(_wide(x)), var.to(_wide(x)), None, None, False, ctx.eps,
            [needs[0], any(needs[1:3]), needs[1] or needs[3]],
        )  # fmt: skip
        g_weight = along.to(weight.dtype) if needs[2] else None
        g_bias = total.to(ctx.bias_dtype) if needs[3] else None
        if not needs[1]:
            return gx if needs[0] else None, None, g_weight, g_bias, None
        scale = factor * (var + ctx.eps).rsqrt()
        g_var = along.double() * scale * (var + ctx.eps).rsqrt() * -0.5
        g_mean = total.double() * -scale - 2 * mean * g_var
        return gx if needs[0] else None, torch.stack((g_mean, g_var)), g_weight, g_bias, None
