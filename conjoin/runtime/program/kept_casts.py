"""Parameters in the dtypes in which they are used, cast once in a step: all its micro-batches use the same copies.

A copy is made when it is first asked for, and stands as long as its parameter is not changed, at most until the step is
over. Gradients come back through the cast as they would, for every micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from conjoin.ir import Leaf, LeafKind, Node
from conjoin.ops import CAST
from conjoin.runtime.ranks.communicator import uncompiled


class Copies:
    """What some tensors were made into, as long as they are the same."""

    def __init__(self) -> None:
        self._state: tuple[tuple[int, int], ...] = ()
        self._made: tuple[Tensor, ...] = ()

    def of(self, held: Sequence[Tensor], make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """What was made of them, or is made now; without a gradient."""
        if any(x.is_inference() for x in held):  # nobody tells when such a tensor is changed
            return make()
        state = tuple((x.data_ptr(), x._version) for x in held)
        if state != self._state or not self._made:
            with torch.no_grad():
                self._state, self._made = state, make()
        return tuple(x.detach() for x in self._made)

    def forget(self) -> None:
        self._state = self._made = ()


class _Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, cast: Callable[[], Tensor], x: Tensor) -> Tensor:
        ctx.dtype = x.dtype
        return cast()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, gradients[0].to(ctx.dtype)


class KeptCasts:
    """All casts of parameters in a program that runs several times in a step."""

    def __init__(self) -> None:
        self._copies: list[Copies] = []

    def keep(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A cast that is made once in a step."""
        copies = Copies()
        self._copies.append(copies)

        def cast(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            return _Cast.apply(lambda: copies.of([x], lambda: (function(x, *args, **kwargs),))[0], x)  # type: ignore[no-untyped-call]

        return uncompiled(cast)

    def forget(self) -> None:
        """The step is over, or has failed."""
        for copies in self._copies:
            copies.forget()


def casts_parameter(node: Node) -> bool:
    """Whether a call casts a parameter as it is stored, to floating numbers."""
    source = node.inputs[0].owner if node.op == CAST else None
    is_parameter = isinstance(source, Leaf) and source.kind is LeafKind.PARAMETER
    return is_parameter and node.types[0].dtype.is_floating_point
