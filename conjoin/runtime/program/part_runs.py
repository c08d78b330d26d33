"""Parts of a program that run in micro-batches while the rest takes the batch as a whole.

The forward pass runs a part for one micro-batch after the other and keeps what it was given; what is behind it runs on
what they made together. When the gradient comes back, each micro-batch is run again, with the numbers it drew before,
and its backward pass after it: so only one micro-batch is alive at a time. Gradients of what all micro-batches read are
added up, and go back once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from conjoin.ops import first_order
from conjoin.runtime.program.gradient_sums import add_gradients, take_gradients
from conjoin.runtime.program.randomness import Streams

Function = Callable[..., Any]


class InMicroBatches:
    """A part as a function of whole batches."""

    def __init__(
        self, function: Function, streams: Streams, count: int, cut: Sequence[int | None], joined: Sequence[int]
    ) -> None:
        self._function, self._streams, self._count = function, streams, count
        self._cut, self._joined = tuple(cut), tuple(joined)
        """The dims along which it is given micro-batches, and along which those it makes are joined."""

    def __call__(self, *args: Any) -> tuple[Tensor, ...]:
        if not torch.is_grad_enabled():
            return self.forward(args)[0]
        return _Part.apply(self, _autocast(args), *args)  # type: ignore[no-any-return, no-untyped-call]

    def forward(self, args: Sequence[Any]) -> tuple[tuple[Tensor, ...], list[Any]]:
        """What the part makes of all micro-batches, and where its draws stood before each."""
        drawn, wholes = [], list[Tensor]()
        for number in range(self._count):
            drawn.append(self._streams.states())
            made = self._function(*self._given(args, number))
            for i, (x, dim) in enumerate(zip(made, self._joined, strict=True)):
                if not number:
                    wholes.append(x.new_empty((*x.shape[:dim], self._count * x.shape[dim], *x.shape[dim + 1 :])))
                self._micro_batch(wholes[i], dim, number).copy_(x)
            del made
        return tuple(wholes), drawn

    def backward(self, args: Sequence[Any], drawn: Sequence[Any], gradients: Sequence[Tensor | None]) -> list[Any]:
        """The gradients of all that it was given and a gradient is asked of."""
        shared = {i: x for i, x in enumerate(args) if self._cut[i] is None and _learns(x)}
        own = {i: x.detach().requires_grad_() for i, x in shared.items()}
        found = {i: torch.zeros_like(x) for i, x in enumerate(args) if self._cut[i] is not None and _learns(x)}
        for number in range(self._count):
            given = self._given(args, number)
            parts = {i: given[i].detach().requires_grad_() for i in found}
            for i, x in (*own.items(), *parts.items()):
                given[i] = x
            made = self._streams.rerun(drawn[number], self._function, *given)
            ends = [
                (x, self._micro_batch(gradient, dim, number).to(x.dtype))
                for x, dim, gradient in zip(made, self._joined, gradients, strict=True)
                if gradient is not None and x.requires_grad
            ]
            if ends and (own or parts):
                outputs, coming = zip(*ends, strict=True)
                add_gradients(outputs, coming, list(own.values()), list(parts.values()))
            for (i, whole), gradient in zip(found.items(), take_gradients(parts.values()), strict=True):
                dim = self._cut[i]
                if gradient is not None and dim is not None:
                    self._micro_batch(whole, dim, number).copy_(gradient)
            del made, ends
        for i, gradient in zip(own, take_gradients(own.values()), strict=True):
            if gradient is not None:
                found[i] = gradient
        return [found.get(i) for i in range(len(args))]

    def _given(self, args: Sequence[Any], number: int) -> list[Any]:
        pairs = zip(args, self._cut, strict=True)
        return [x if dim is None else self._micro_batch(x, dim, number).contiguous() for x, dim in pairs]

    def _micro_batch(self, x: Tensor, dim: int, number: int) -> Tensor:
        """Every n-th entry of a dim."""
        return x[(slice(None),) * dim + (slice(number, None, self._count),)]


def _learns(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


def _autocast(args: Sequence[Any]) -> torch.autocast:
    kind = next((x.device.type for x in args if isinstance(x, Tensor)), "cpu")
    return torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))


class _Part(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: InMicroBatches, autocast: torch.autocast, *args: Any) -> tuple[Tensor, ...]:
        ctx.part, ctx.autocast = part, autocast
        ctx.others = [None if isinstance(x, Tensor) else x for x in args]
        ctx.places = [i for i, x in enumerate(args) if isinstance(x, Tensor)]
        ctx.save_for_backward(*(args[i] for i in ctx.places))
        ctx.set_materialize_grads(False)
        made, ctx.drawn = part.forward(args)
        ctx.mark_non_differentiable(*(x for x in made if not (x.is_floating_point() or x.is_complex())))
        return made

    @staticmethod
    @first_order
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        args = list(ctx.others)
        for i, x in zip(ctx.places, ctx.saved_tensors, strict=True):
            args[i] = x
        with torch.enable_grad(), ctx.autocast:
            return None, None, *ctx.part.backward(args, ctx.drawn, gradients)
