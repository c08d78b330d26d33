"""Operators that nobody will ever declare: the first half of a tensor, and a copy made with a warning."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

NAME = "conjoin_tests::first_half"


@torch.library.custom_op(NAME, mutates_args=())
def first_half(x: Tensor) -> Tensor:
    return x[: x.shape[0] // 2].clone()


@first_half.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0] // 2, *x.shape[1:])


NOISY = "conjoin_tests::noisy"


@torch.library.custom_op(NOISY, mutates_args=())
def noisy(x: Tensor) -> Tensor:
    return x.clone()


@noisy.register_fake
def _(x: Tensor) -> Tensor:
    warnings.warn("this operator will go away", stacklevel=1)
    return torch.empty_like(x)
