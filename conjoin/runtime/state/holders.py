"""Modules that hold this rank's pieces under the names of the model's layers, and compute nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from conjoin.errors import UsageError


class PiecesOfLayer(nn.Module):
    """In the place of a layer or a list of them: its parameters and buffers, as far as this rank has them.

    >>> outer, inner = PiecesOfLayer(), PiecesOfLayer()
    >>> outer.add_module("0", inner)
    >>> outer[0] is inner, list(outer) == [inner]
    (True, True)
    """

    def __getitem__(self, key: int | str) -> nn.Module:
        found = self._modules.get(str(key))
        if found is None:
            raise UsageError(
                f"Layer {key!r} was asked for of the module of a plan, which has {', '.join(self._modules) or 'none'} "
                f"there. It holds this rank's pieces of parameters and buffers, under their names, and nothing of "
                f"layers without any. Ask the model that the plan was loaded with."
            )
        return found

    def __iter__(self) -> Iterator[nn.Module]:
        return (module for module in self._modules.values() if module is not None)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """A layer by itself is not there."""
        raise UsageError(
            "A layer of the module of a plan was called. It holds this rank's pieces of the layer's parameters; what "
            "computes with them is one program for the whole model. Call the module itself, or plan the layer."
        )

    def _no_hooks(self, *args: Any, **kwargs: Any) -> Any:
        raise UsageError(
            "A hook was to be registered on a layer of the module of a plan. Layers are not called one by one there, "
            "so that it would never run. Return what you want to see from the model's forward, or register it on the "
            "whole module."
        )

    register_forward_hook = register_forward_pre_hook = _no_hooks
    register_full_backward_hook = register_full_backward_pre_hook = register_backward_hook = _no_hooks
