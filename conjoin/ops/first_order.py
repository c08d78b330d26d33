"""Gradients of gradients: what crosses ranks, and operators of our own, have none and say so where one is asked for.

Torch's own `once_differentiable` looks at the gradients that come in only. Where those are constants, as the one of the
loss is, what comes out would be taken for constants, too, and a penalty on gradients would do nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from conjoin.errors import UsageError


class _Refused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, asks: Tensor, x: Tensor) -> Tensor:
        return x.detach()  # no view: what is under way is yet written to

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise UsageError(
            "The gradient of a gradient was asked for, of the step of a plan. What goes between ranks or comes from "
            "the host, and operators of Conjoin's own, are differentiated once, so that a penalty on gradients would "
            "train on a part of itself. Write the inner gradient out as operations of the model, or train it without "
            "a plan."
        )


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """The backward of an autograd function, whose results may not be differentiated again."""

    @wraps(backward)
    def run(ctx: Any, *gradients: Tensor) -> Any:
        with torch.no_grad():
            found = backward(ctx, *gradients)
        if not torch.is_grad_enabled():
            return found
        made = found if isinstance(found, tuple) else (found,)
        asks = torch.empty(0, requires_grad=True)
        return tuple(_Refused.apply(asks, x) if isinstance(x, Tensor) else x for x in made)  # type: ignore[no-untyped-call]

    return run
