"""Peak memory of a rank in bytes of tensors, not of the process: what a prediction of memory speaks about."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes on one rank: what stays between steps, and the most that was there at once during one."""

    parameters: int
    """Parameters and buffers, this rank's pieces."""
    gradients: int
    optimizer_state: int
    peak: int
    """All of the above while they live, and activations, temporary tensors and buffers of communication."""


class LiveStorages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside this, every storage that a tensor operation makes is counted until it is freed, once for all its views.

    What was there before is not counted, nor are `outside` tensors (a batch, the whole model on the host) and what
    kernels and Gloo allocate for themselves.
    """

    def __init__(self, outside: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._outside = {tensor.untyped_storage()._cdata for tensor in outside}
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self._note(tensor.untyped_storage())
        self.peak = max(self.peak, self.now())
        return made

    def now(self) -> int:
        """Bytes that live now; a storage may have been resized since it was made."""
        total, ended = 0, []
        for key, reference in self._storages.items():
            storage = reference()
            if storage is None:
                ended.append(key)
            else:
                total += storage.nbytes()
        for key in ended:
            del self._storages[key]
        return total

    def start_anew(self) -> None:
        """Forget the peak so far, not what lives."""
        self.peak = self.now()

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        known = self._storages.get(key)
        if key not in self._outside and (known is None or known() is None):
            self._storages[key] = weakref.ref(storage)


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind some tensors, each once."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def rank_memory(module: nn.Module, optimizer: torch.optim.Optimizer, peak: int) -> RankMemory:
    """The parts of a rank's memory, after a step whose gradients are still there."""
    parameters = list(module.parameters())
    state = [x for entry in optimizer.state.values() for x in entry.values() if isinstance(x, Tensor)]
    return RankMemory(
        num_bytes([*parameters, *module.buffers()]),
        num_bytes(x.grad for x in parameters if x.grad is not None),
        num_bytes(state),
        peak,
    )
