"""Batch norm in two operators, so that a batch may be split: moments, which are averages, and what they normalize.

    moments(x) = [E[x], E[x^2]]                        for each channel, over the batch and space
    normalize(x) = (x - mean) / sqrt(E[x^2] - mean^2 + eps) * weight + bias

The average over a batch is the sum of those over its parts, each weighed by its size; one all-reduce brings both.
The moments are float64, whatever x is: mean and variance are first found apart, as stock batch norm finds them, and
what the difference of the two moments loses of a float64 is nothing to a float32. Each pass over x is one of torch's
own kernels.
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
        unused = torch.zeros(x.shape[1], dtype=_wide(x), device=x.device)
        return torch.batch_norm_update_stats(x, unused, unused, 0.0)
    dims = (0, *range(2, x.dim()))
    mean = x.mean(dims, keepdim=True, dtype=_wide(x))
    return mean.flatten(), (x - mean).square_().mean(dims)


def _scaled(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, eps: float) -> Tensor:
    """`(x - mean) / sqrt(var + eps) * weight + bias` in one pass: batch norm in evaluation."""
    columns = (None if each is None else each.to(_wide(x)) for each in (weight, bias, mean, var))
    return torch.batch_norm(x, *columns, False, 0.0, eps, False)


class _Moments(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        mean, square = (rows := torch.stack(_mean_and_variance(x)).double()).unbind()
        square.addcmul_(mean, mean)
        ctx.save_for_backward(x, rows)
        return rows

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """`(g0 + 2 x g1) / count`, written around the mean, where nothing cancels."""
        x, (mean, _) = ctx.saved_tensors
        offset, slope = (gradient * (x.shape[1] / x.numel())).unbind()
        offset.addcmul_(slope.mul_(2), mean)
        return _scaled(x, slope, offset, mean, mean.new_ones(mean.shape, dtype=_wide(x)), 0.0)


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, moments: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        mean, square = moments.unbind()
        mean, var = mean.to(_wide(x)), torch.addcmul(square, mean, mean, value=-1).clamp_min_(0.0).to(_wide(x))
        ctx.save_for_backward(x, mean, var, weight)
        ctx.eps, ctx.bias_dtype = eps, None if bias is None else bias.dtype
        return _scaled(x, weight, bias, mean, var, eps)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """All follows from the sums of g and of g times the normalized x, which the kernel finds on its way."""
        x, mean, var, weight = ctx.saved_tensors
        factor = torch.ones_like(mean) if weight is None else weight.to(mean.dtype)
        needs = ctx.needs_input_grad
        wanted = [needs[0], any(needs[1:3]), needs[1] or needs[3]]
        gx, along, total = torch.ops.aten.native_batch_norm_backward(
            gradient, x, factor, mean, var, None, None, False, ctx.eps, wanted
        )
        return (
            gx if needs[0] else None,
            _gradient_of_moments(along, total, mean, var + ctx.eps, factor) if needs[1] else None,
            along.to(weight.dtype) if needs[2] else None,
            total.to(ctx.bias_dtype) if needs[3] else None,
            None,
        )


def _gradient_of_moments(along: Tensor, total: Tensor, mean: Tensor, var: Tensor, weight: Tensor) -> Tensor:
    """From `along`, the sum of g times the normalized x, and `total`, that of g.

    To the variance, E[x^2] - mean^2, goes -along weight / (2 var), and to the mean itself -total weight / sqrt(var).
    """
    g_var = (along * weight / var).double().mul_(-0.5)
    g_mean = (total * weight * var.rsqrt()).double().neg_().addcmul_(mean.double(), g_var, value=-2)
    return torch.stack((g_mean, g_var))
