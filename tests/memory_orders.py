"""How the numbers of a tensor may lie in memory: turned, apart, within others, one for many; between them is poison."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from conjoin.ops import execute

Lay = Callable[[Tensor], Tensor]


def _poison(shape: tuple[int, ...], x: Tensor) -> Tensor:
    """Memory whose numbers spoil whatever they are taken into."""
    if x.dtype == torch.bool or x.is_floating_point() or x.is_complex():
        return torch.full(shape, True if x.dtype == torch.bool else torch.nan, dtype=x.dtype)
    return torch.full(shape, torch.iinfo(x.dtype).max, dtype=x.dtype)


def turned(x: Tensor) -> Tensor:
    """The last dim outermost in memory."""
    back = tuple(reversed(range(x.dim())))
    return x.permute(back).contiguous().permute(back)


def apart(x: Tensor) -> Tensor:
    """Every other place along every dim."""
    made = _poison(tuple(2 * n for n in x.shape) or (2,), x)
    made = made[(slice(None, None, 2),) * x.dim()] if x.dim() else made[1]
    return made.copy_(x)


def within(x: Tensor) -> Tensor:
    """Rows in one piece each, of longer ones, that begin where no vector does."""
    made = _poison(tuple(n + 3 for n in x.shape) or (2,), x)
    made = made[(slice(1, -2),) * x.dim()] if x.dim() else made[1]
    return made.copy_(x)


def in_one_place(x: Tensor) -> Tensor:
    """Whatever is the same along a dim there once."""
    one = x
    for dim in range(x.dim()):
        first = one.narrow(dim, 0, min(one.shape[dim], 1))
        if first.numel() and bool((one == first).all()):
            one = first
    return one.clone().expand(x.shape)


def ones_anywhere(x: Tensor) -> Tensor:
    """Channels last, and the stride of every dim of one element 1: how such a dim lies is nobody's business."""
    order = (0, *range(2, x.dim()), 1) if x.dim() > 2 else tuple(range(x.dim()))
    made = x.permute(order).contiguous().permute([order.index(dim) for dim in range(x.dim())])
    return made.as_strided(
        made.shape, [1 if n == 1 else step for n, step in zip(made.shape, made.stride(), strict=True)]
    )


def as_usual(x: Tensor) -> Tensor:
    """As torch lays new tensors."""
    return x.clone(memory_format=torch.contiguous_format)


ORDERS: tuple[Lay, ...] = (turned, apart, within, in_one_place)


class _Laid(torch.autograd.Function):
    """A tensor laid in some way; so is its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, lay: Lay) -> Tensor:
        ctx.lay = lay
        return lay(x.detach())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.lay(gradient), None


def laid(x: Any, lays: Iterator[Lay]) -> Any:
    """Tensors, also those of a list, each in memory of its own that is laid in the next way; and their gradients."""
    if isinstance(x, tuple | list):
        return type(x)(laid(item, lays) for item in x)
    return _Laid.apply(x, next(lays)) if isinstance(x, Tensor) else x  # type: ignore[no-untyped-call]


def execute_laid(*lays: Lay) -> Callable[..., Any]:
    """Operators by name, their operands and the gradients of their results laid in these ways, in turn."""
    turn = cycle(lays)
    return lambda op, *args: laid(execute(op, *laid(args, turn)), turn)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Memory that torch takes and does not write holds no numbers."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
