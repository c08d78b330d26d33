"""A linear layer and the function that follows it in one kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from conjoin.ops.dtypes import under_autocast
from conjoin.ops.first_order import first_order


def linear_relu(input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A linear layer and a ReLU at once: what is not positive is never written."""
    if under_autocast(input.device.type):  # which knows the two, not the one
        return functional.linear(input, weight, bias).relu()
    y: Tensor = _LinearRelu.apply(input, weight, bias)  # type: ignore[no-untyped-call]
    return y


class _LinearRelu(torch.autograd.Function):
    """On a GPU the product, the bias and the function are one kernel; elsewhere the function is applied in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        if x.is_cuda:
            rows = torch.ops.aten._addmm_activation(bias, x.reshape(-1, x.shape[-1]), weight.t())
            y: Tensor = rows.view(*x.shape[:-1], weight.shape[0])
        else:
            y = functional.linear(x, weight, bias).relu_()
        ctx.save_for_backward(x, weight, y)
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, y = ctx.saved_tensors
        needs = ctx.needs_input_grad
        g = torch.ops.aten.threshold_backward(gradient, y, 0)
        rows = g.reshape(-1, g.shape[-1])
        return (
            g @ weight if needs[0] else None,
            rows.t() @ x.reshape(-1, x.shape[-1]) if needs[1] else None,
            rows.sum(0) if needs[2] else None,
        )
