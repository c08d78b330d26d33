"""Linear layers in float8 as people write them with plain torch: scales found as tensors come, one a tensor or a row.

The recipe is torchao's (dynamic scaling, weights kept wide, the head left alone); the text is our own, so that a
benchmark needs no further package. Forward in e4m3; gradients in e5m2 with a scale for each tensor, e4m3 by rows.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

_MULTIPLE = 16


def in_float8(model: nn.Module, by_rows: bool, wide: Collection[str]) -> nn.Module:
    """The model with its linear layers in float8, but for those named and those of sizes that no kernel takes."""
    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.Linear) or name in wide:
            continue
        if module.in_features % _MULTIPLE == 0 and module.out_features % _MULTIPLE == 0:
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, Float8Linear(module, by_rows))
    return model


class Float8Linear(nn.Module):
    """A linear layer whose three products are in float8, over the weights of another."""

    def __init__(self, layer: nn.Linear, by_rows: bool) -> None:
        super().__init__()
        self.weight, self.bias, self.by_rows = layer.weight, layer.bias, by_rows

    def forward(self, x: Tensor) -> Tensor:
        rows, weight = x.to(torch.bfloat16).flatten(0, -2), self.weight.to(torch.bfloat16)
        made: Tensor = _Product.apply(rows, weight, self.by_rows)  # type: ignore[no-untyped-call]
        made = made if self.bias is None else made + self.bias.to(torch.bfloat16)
        return made.view(*x.shape[:-1], -1)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, by_rows: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.by_rows = by_rows
        return multiplied(x, weight.t(), by_rows, torch.float8_e4m3fn, fast=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        dtype = torch.float8_e4m3fn if ctx.by_rows else torch.float8_e5m2
        gradient = gradients[0].contiguous()
        g_x = multiplied(gradient, weight, ctx.by_rows, dtype, fast=False)
        return g_x, multiplied(gradient.t(), x, ctx.by_rows, dtype, fast=False), None


def multiplied(left: Tensor, right: Tensor, by_rows: bool, dtype: torch.dtype, *, fast: bool) -> Tensor:
    """The product of two wide matrices in float8, the left one in a dtype."""
    a, a_scale = rounded(left, dtype, 1 if by_rows else None)
    b, b_scale = rounded(right, torch.float8_e4m3fn, 0 if by_rows else None)
    if left.device.type == "cpu":
        return (a.float() @ b.float() * a_scale * b_scale).to(torch.bfloat16)
    a, b = a.contiguous(), b.t().contiguous().t()
    return torch._scaled_mm(a, b, scale_a=a_scale, scale_b=b_scale, out_dtype=torch.bfloat16, use_fast_accum=fast)


def rounded(x: Tensor, dtype: torch.dtype, dim: int | None) -> tuple[Tensor, Tensor]:
    """A matrix in float8, and what it is to be multiplied by: along a dim for each row, or once.

    >>> x, scale = rounded(torch.tensor([[1.0, 448.0]]), torch.float8_e4m3fn, None)
    >>> x.float(), scale
    (tensor([[  1., 448.]]), tensor(1.))
    """
    largest = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    limit = torch.finfo(dtype).max
    scale = limit / largest.float().clamp(min=1e-12)
    return (x.float() * scale).clamp(-limit, limit).to(dtype), scale.reciprocal()
