"""Layers on the vertices of a whole graph: on a processor what they make lies in large pages.

Rows of all vertices are hundreds of megabytes, and in small pages they cost a processor twice: each page is made when
it is first written to, and whoever adds up neighbours, whose rows lie here and there, has to look up a page for almost
every row. Results are those of torch's own layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from conjoin.ops.compiled_kernels import is_compiled_for, new_in_large_pages
from conjoin.ops.first_order import first_order

_LEAST_BYTES = 8 << 20
"""A processor has the places of about 1,500 pages at hand, 6 MiB of small ones (Intel's and Arm's servers)."""


def linear_of_vertices(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear layer.

    >>> linear_of_vertices(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]])).tolist()
    [[11.0]]
    """
    if not _is_worth_it(x, weight, bias):
        return functional.linear(x, weight, bias)
    made: Tensor = _Linear.apply(x, weight, bias, False)  # type: ignore[no-untyped-call]
    return made


def linear_of_positive(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A ReLU, which writes over its input, and a linear layer; what the input gets back is written over, too."""
    if not _is_worth_it(x, weight, bias):
        return functional.linear(torch.relu_(x), weight, bias)
    made: Tensor = _Linear.apply(x, weight, bias, True)  # type: ignore[no-untyped-call]
    return made


def _is_worth_it(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    if x.dim() != 2 or x.shape[0] * weight.shape[0] * x.itemsize < _LEAST_BYTES or torch.compiler.is_compiling():
        return False
    return is_compiled_for(x, weight) if bias is None else is_compiled_for(x, weight, bias)


class _Linear(torch.autograd.Function):
    """x · weightᵀ + bias; of x its positive part, where that is asked for."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, positive: bool) -> Tensor:
        if positive:
            torch.relu_(x)  # nobody else reads it, nor does the gradient of what made it
        ctx.save_for_backward(x, weight)
        ctx.positive = positive
        made = new_in_large_pages(x, x.shape[0], weight.shape[0])
        return torch.ops.aten.linear.out(x, weight, bias, out=made)  # type: ignore[no-any-return]

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = torch.mm(gradient, weight, out=new_in_large_pages(x, *x.shape))
            if ctx.positive:
                torch.ops.aten.threshold_backward.grad_input(of_x, x, 0, grad_input=of_x)
        if ctx.needs_input_grad[1]:
            of_weight = gradient.t() @ x
        return of_x, of_weight, gradient.sum(0) if ctx.needs_input_grad[2] else None, None
