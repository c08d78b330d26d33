"""What is made of parameters alone, in a step that runs a program several times: made once, for all micro-batches.

Micro-batches read it as if it were stored. Their gradients are added up as it lies, and go back to the parameters once,
when all micro-batches are over: what is cut from a matrix, cast or sent is not sent back for each of them. They are
added up no narrower than float32; behind a cast, in the dtype before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Gradients = list[Tensor | None]


class _AsCast(torch.autograd.Function):
    """What a tensor was cast to, with its gradient in its own dtype."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, made: Tensor) -> Tensor:
        ctx.dtype = source.dtype
        return made.view_as(made)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0].to(ctx.dtype), None


class StepValues:
    """What was made for one step, and the gradients that have come to it."""

    def __init__(self, made: Sequence[Tensor] = (), sources: Mapping[int, Tensor] | None = None) -> None:
        """Some of it was cast from other tensors, by their places."""
        sources = sources or {}
        self._made = [x.detach() for x in made]
        ends = {i: sources.get(i, x) for i, x in enumerate(made) if x.requires_grad}
        self._cast = {i for i in ends if i in sources}
        self._leaves = {i: x.detach().requires_grad_() for i, x in ends.items()}
        self._ends = list(ends.values())
        self.trained = list(self._leaves.values())
        """What gradients are asked of."""
        self._gradients: Gradients = [None] * len(self.trained)

    def read(self) -> list[Tensor]:
        """As one micro-batch reads it."""
        return [
            _AsCast.apply(self._leaves[i], x) if i in self._cast else self._leaves.get(i, x)  # type: ignore[no-untyped-call]
            for i, x in enumerate(self._made)
        ]

    def add(self, found: Sequence[Tensor | None]) -> None:
        """Add gradients of a micro-batch up; what autograd gave out is not written to: others may see it."""
        for i, gradient in enumerate(found):
            if gradient is not None:
                wide, mine = torch.promote_types(gradient.dtype, torch.float32), self._gradients[i]
                self._gradients[i] = gradient.to(wide) if mine is None else mine + gradient

    def take_back(self, parameters: Sequence[Tensor]) -> Gradients:
        """The gradients that these give to parameters."""
        pairs = [(x, g.to(x.dtype)) for x, g in zip(self._ends, self._gradients, strict=True) if g is not None]
        self._ends, self._gradients = [], []
        if not pairs or not parameters:
            return [None] * len(parameters)
        ends, gradients = zip(*pairs, strict=True)
        return list(torch.autograd.grad(ends, list(parameters), gradients, allow_unused=True))
