"""Images with a dim of one element, laid in memory so that nobody can take them for lying otherwise.

The stride of such a dim may be any number, and whether channels lie last is guessed from strides. In the backward pass
of batch norm torch's CPU kernels guess so of the images and of the gradient; where one guess is right and one is not,
the gradients that they make are wrong without a word (2.11, 2.13).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from conjoin.ops.first_order import first_order


def laid_plainly(x: Tensor) -> Tensor:
    """The same numbers, with channels first and the strides of a new tensor where those given could be misread.

    >>> laid_plainly(torch.empty_strided((1, 5, 8, 3), (5, 1, 15, 5))).stride()
    (120, 24, 3, 1)
    """
    return x.contiguous().flatten().view(x.shape) if _can_be_misread(x) else x


def with_gradient_laid_plainly(x: Tensor) -> Tensor:
    """A tensor to which no gradient comes back that could be misread."""
    return _Plainly.apply(x) if _can_be_misread(x) else x  # type: ignore[no-untyped-call]


def _can_be_misread(x: Tensor) -> bool:
    return x.is_cpu and x.dim() in (4, 5) and 1 in x.shape


class _Plainly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return laid_plainly(gradient)
