"""Batch norm in three operators, so that a batch may be split: moments, which are averages, and what follows.

    batch_moments(x) = [E[x], E[x^2]]                    for each channel, over the batch and space
    mean_and_variance(moments) = [mean, var]             the one thing that takes the moments whole
    normalize_channels(x) = (x - mean) / sqrt(var + eps) * weight + bias

The average over a batch is the sum of those over its parts, each weighed by its size; one all-reduce brings both.
The moments are float64, whatever x is: mean and variance are first found apart, as stock batch norm finds them, and
what the difference of the two moments loses of a float64 is nothing to a float32. Each pass over x is one of torch's
own kernels.

Where every piece of a batch is normalized by its own statistics nothing has to be added up: `batch_norm_by_pieces`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from conjoin.ops.first_order import first_order
from conjoin.ops.images_of_one import laid_plainly, with_gradient_laid_plainly


def batch_moments(x: Tensor) -> Tensor:
    """Mean and mean square of every channel, as two rows of float64.

    >>> batch_moments(torch.tensor([[1.0, 5.0], [3.0, 5.0]]))
    tensor([[ 2.,  5.],
            [ 5., 25.]], dtype=torch.float64)
    """
    return _Moments.apply(x)  # type: ignore[no-any-return, no-untyped-call]


def mean_and_variance(moments: Tensor) -> Tensor:
    """Mean and biased variance, from mean and mean square; one operator, so that moments are added up once for both.

    >>> mean_and_variance(torch.tensor([[2.0, 5.0], [5.0, 25.0]]))
    tensor([[2., 5.],
            [1., 0.]])
    """
    return _MeanAndVariance.apply(moments)  # type: ignore[no-any-return, no-untyped-call]


def normalize_channels(x: Tensor, known: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Every channel shifted and scaled by the mean and variance that are known of it, then by weight and bias."""
    return _Normalize.apply(x, known, weight, bias, eps)  # type: ignore[no-any-return, no-untyped-call]


def batch_norm_by_pieces(  # noqa: PLR0913 - what torch's own takes
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    pieces: int,
) -> tuple[Tensor, Tensor]:
    """Batch norm of each of some equal pieces of a batch by itself; and the running statistics after the first of them,
    mean and variance as two rows.

    >>> x, zeros = torch.tensor([[1.0], [3.0], [8.0], [8.0]]), torch.zeros(1)
    >>> y, moved = batch_norm_by_pieces(x, None, None, zeros, zeros, 1.0, 0.0, 2)
    >>> y[:2].T, moved.T
    (tensor([[-1.,  1.]]), tensor([[2., 2.]]))
    """
    mean, var = (None if old is None else old.clone() for old in (running_mean, running_var))
    attributes = True, momentum, eps, torch.backends.cudnn.enabled
    weight, bias = (None if each is None else each.contiguous() for each in (weight, bias))
    first, *others = (laid_plainly(piece) for piece in input.chunk(pieces))
    made = [torch.batch_norm(first, weight, bias, mean, var, *attributes)]
    made += [torch.batch_norm(piece, weight, bias, None, None, *attributes) for piece in others]
    made = [with_gradient_laid_plainly(y) for y in made]
    y = torch.cat(made) if others else made[0]
    if mean is None or var is None:
        last = next(each for each in (bias, weight, input) if each is not None)
        return y, last.new_zeros(2, input.shape[1])
    return y, torch.stack((mean, var))


def _wide(x: Tensor) -> torch.dtype:
    """What statistics of a tensor are computed in."""
    return torch.promote_types(x.dtype, torch.float32)


def _mean_and_variance(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of every channel, by the kernel that is the fastest for the tensor."""
    in_rows = x.is_contiguous() and x.dim() > 2 and x.dtype in (torch.float32, torch.float64)
    if x.device.type != "meta" and not (x.device.type == "cpu" and in_rows):
        # Without running statistics, here read by nobody, the kernel would round what it found to the dtype of x.
        unused = torch.empty(x.shape[1], dtype=_wide(x), device=x.device)
        return torch.batch_norm_update_stats(x, unused, unused, 0.0)
    dims = (0, *range(2, x.dim()))
    mean = x.mean(dims, keepdim=True, dtype=_wide(x))
    return mean.flatten(), (x - mean).square_().mean(dims)


def _scaled(x: Tensor, mean: Tensor, scale: Tensor, offset: Tensor | None) -> Tensor:
    """`(x - mean) * scale + offset` for every channel, in one pass: batch norm in evaluation."""
    if x.is_cuda:
        return torch.batch_norm_elemt(x, None, offset, mean, scale, 0.0)
    return torch.batch_norm(x, scale, offset, mean, torch.ones_like(mean), False, 0.0, 0.0, False)


def _scaled_backward(gradient: Tensor, x: Tensor, mean: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of a scaled x: of x, of the scale, of the offset."""
    if x.is_cuda:
        total, along, *_ = torch.batch_norm_backward_reduce(gradient, x, mean, scale, None, True, False, False)
        return _scaled(gradient, torch.zeros_like(mean), scale, None), along, total
    known = mean, torch.ones_like(mean)
    gradient, x = laid_plainly(gradient), laid_plainly(x)
    return torch.ops.aten.native_batch_norm_backward(gradient, x, scale, *known, *known, False, 0.0, [True] * 3)  # type: ignore[no-any-return]


class _Moments(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        mean, square = (rows := torch.stack(_mean_and_variance(x)).double()).unbind()
        square.addcmul_(mean, mean)
        ctx.save_for_backward(x, rows)
        return rows

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """`(g0 + 2 x g1) / count`, written around the mean, where nothing cancels."""
        x, (mean, _) = ctx.saved_tensors
        offset, slope = (rows := gradient * (x.shape[1] / x.numel())).unbind()
        offset.addcmul_(slope.mul_(2), mean)
        offset, slope = rows.to(_wide(x)).unbind()
        return _scaled(x, mean.to(_wide(x)), slope, offset)


class _MeanAndVariance(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, moments: Tensor) -> Tensor:
        mean, var = (rows := moments.clone()).unbind()
        var.addcmul_(mean, mean, value=-1).clamp_min_(0.0)
        ctx.save_for_backward(rows)
        return rows

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (known,) = ctx.saved_tensors
        g_mean, g_square = (rows := gradient.clone()).unbind()
        g_mean.addcmul_(known[0], g_square, value=-2)
        return rows


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, known: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        wide, (mean, var) = _wide(x), known.contiguous().unbind()  # torch's kernel reads them as if they lay so
        mean, inverse = mean.to(wide), (var + eps).rsqrt_().to(wide)
        scale = inverse if weight is None else inverse * weight.to(wide)
        ctx.save_for_backward(x, mean, inverse, scale)
        ctx.dtypes = [known.dtype, *(None if each is None else each.dtype for each in (weight, bias))]
        return _scaled(x, mean, scale, None if bias is None else bias.to(wide))

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """With D(.) for gradients: D(mean) = -D(offset) scale, D(var) = -D(scale) scale / (2 (var + eps))."""
        x, mean, inverse, scale = ctx.saved_tensors
        gx, along, total = _scaled_backward(gradient, x, mean, scale)
        rows = torch.stack((total, along)).to(ctx.dtypes[0]).mul_(scale).neg_()
        rows[1].mul_(inverse).mul_(inverse).mul_(0.5)
        _, _, needs_weight, needs_bias, _ = ctx.needs_input_grad
        g_weight = (along * inverse).to(ctx.dtypes[1]) if needs_weight else None
        return gx, rows, g_weight, total.to(ctx.dtypes[2]) if needs_bias else None, None
