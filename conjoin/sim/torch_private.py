"""What the simulator needs of torch beside its documented names, where it can be replaced."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def storage_of(tensor: Tensor) -> int:
    """What is equal for tensors that share their memory, also where they have none because they are on meta."""
    number: int = tensor.untyped_storage()._cdata
    return number


class NewStorages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the storages that operators make while it is active, as long as each is alive."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        """The most bytes alive after any operator."""
        self._known = {storage_of(x) for x in known}
        self._alive: WeakKeyDictionary[torch.UntypedStorage, int] = WeakKeyDictionary()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        before = {storage_of(x) for x in args if isinstance(x, Tensor)} - {storage._cdata for storage in self._alive}
        for item in result if isinstance(result, tuple | list) else (result,):
            if isinstance(item, Tensor) and storage_of(item) not in self._known | before:
                self._alive[item.untyped_storage()] = item.untyped_storage().nbytes()
        self.peak = max(self.peak, sum(self._alive.values()))
        return result
