"""Outputs beside the loss, which lie in pieces: whole as soon as somebody computes with them.

A model may return scores beside its loss. Mostly nobody looks at them in training, so they stay where they were made.
To whoever gave the whole batch they are whole tensors all the same: the pieces are gathered when a function of torch is
first called on them, gradients go back to the pieces, and all ranks have to ask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from conjoin.ir import Graph, Value
from conjoin.ops import Layout
from conjoin.runtime.movement.carriers import carry_reshard
from conjoin.runtime.program.functions import Function
from conjoin.runtime.ranks.communicator import Communicator
from conjoin.runtime.torch_private import as_plain_tensors


class SplitOutput(Tensor):
    """This rank's piece of an output, which is used as the whole."""

    whole_shape: tuple[int, ...]
    gather: Function
    """From the piece to the whole."""
    whole: dict[bool, Tensor]
    """What was gathered, with gradients and without."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _OF_THE_PIECE or func in _OF_THE_SHAPE:
            with as_plain_tensors():
                piece = args[0]
                known = piece if func in _OF_THE_PIECE else torch.empty(piece.whole_shape, device="meta")
                return func(known, *args[1:], **(kwargs or {}))
        return func(*_gathered(args), **{key: _gathered(value) for key, value in (kwargs or {}).items()})

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _gathered(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _gathered(self).detach().clone()


_OF_THE_PIECE = {
    Tensor.as_subclass,
    *(getattr(Tensor, name).__get__ for name in ("dtype", "device", "requires_grad", "is_leaf", "grad_fn", "layout")),
}
_OF_THE_SHAPE = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "ndim")),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__),
}
"""What is known without the rest; `as_subclass(torch.Tensor)` is this rank's piece."""


def _gathered(value: Any) -> Any:
    if isinstance(value, list | tuple):
        made = [_gathered(each) for each in value]
        return made if type(value) is list else tuple(made) if type(value) is tuple else type(value)(*made)
    if not isinstance(value, SplitOutput):
        return value
    graded = torch.is_grad_enabled()
    if graded not in value.whole:
        with as_plain_tensors():
            value.whole[graded] = value.gather(value.as_subclass(Tensor))
    return value.whole[graded]


class SplitOutputs:
    """The outputs of a graph that lie in pieces, and how each is gathered."""

    def __init__(self, graph: Graph, communicator: Communicator) -> None:
        self._communicator = communicator
        self._split: dict[int, tuple[tuple[int, ...], Layout]] = {
            i: (value.type.shape, value.type.layout)
            for i, value in enumerate(graph.outputs)
            if i != graph.loss and isinstance(value, Value) and value.type.layout
        }

    def __bool__(self) -> bool:
        return bool(self._split)

    def mark(self, outputs: Sequence[Any]) -> list[Any]:
        """Outputs of a whole batch, to be used as wholes."""
        return [self._marked(i, x) if i in self._split else x for i, x in enumerate(outputs)]

    def _marked(self, i: int, x: Tensor) -> Tensor:
        shape, layout = self._split[i]
        made = x.as_subclass(SplitOutput)
        made.whole_shape, made.whole = shape, {}
        made.gather = carry_reshard(shape, layout, (), self._communicator)
        return made
