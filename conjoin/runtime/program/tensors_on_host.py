"""Tensors that lie on the host between the forward and the backward pass.

The program tells of a tensor when it is made (`note`). It is then copied to pinned host memory beside what is computed,
and leaves the device when some more were told of (`num_ahead`), or after its last reader: the compute stream waits for
its copy first, so that memory is free at the same place of the program in every step. Autograd keeps a note of it
instead (`pack`). When the backward pass first asks for a tensor (`unpack`) it is brought back, and those made before it
are started, which it will ask for next. The last of a forward pass have not left when the backward pass begins.

It is the memory that is copied, whatever views autograd keeps of it. Buffers on the host are used again. Where the
device is the host the same is done with plain copies.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from conjoin.comm import num_ahead
from conjoin.runtime.movement.host_copies import Engines


@dataclass(slots=True)
class _Buffer:
    """Memory of the host, and when it was last read."""

    memory: Tensor
    read: torch.cuda.Event | None = None


class _Stored:
    """The memory of a tensor that lies on the host."""

    def __init__(self, offloading: Offloading, source: Tensor, earlier: Sequence[_Ordered]) -> None:
        self._offloading = offloading
        self._earlier = earlier[: num_ahead(size for _, size in earlier)]
        self.storage = weakref.ref(source.untyped_storage())
        self._device: Tensor | None = _bytes_of(source)
        self._arrived: torch.cuda.Event | None = None
        self._buffer = offloading.buffer(self._device.numel())
        self._sent = offloading.engines.send([(self._buffer.memory, self._device)], self._buffer.read)
        self.handles: weakref.WeakSet[_Kept] = weakref.WeakSet()

    def __del__(self) -> None:
        """Nobody keeps it any more; what is on its way to the device must not come into memory that is free."""
        if self._device is not None:
            self._offloading.engines.wait(self._arrived)
        self._offloading.give_back(self._buffer)

    def leave(self) -> None:
        """Let go of what is on the device, when it was copied."""
        self._offloading.engines.wait(self._sent)
        self._device = None

    def start(self) -> None:
        """Begin to bring it back, unless it is there."""
        if self._device is None:
            engines, host = self._offloading.engines, self._buffer.memory
            self._device = torch.empty_like(host, device=engines.device, pin_memory=False)
            self._arrived = self._buffer.read = engines.bring([(self._device, host)], self._sent)

    def ask(self, handle: _Kept) -> Tensor:
        """The memory on the device; it stays there until all who keep it have asked."""
        self.start()
        for reference, _ in self._earlier:
            earlier = reference()
            if earlier is not None and any(not other.asked for other in earlier.handles):
                earlier.start()
        self._offloading.engines.wait(self._arrived)
        found, handle.asked = self._device, True
        assert found is not None
        if all(other.asked for other in self.handles):
            self._device = None
            for other in self.handles:  # a graph that is retained asks again
                other.asked = False
        return found


_Ordered = tuple[weakref.ref[_Stored], int]
"""What was told of, with its bytes."""


class _Kept:
    """What autograd keeps of a tensor: the tensor itself, until it is told of as one that lies on the host."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor: Tensor | None = tensor
        self._dtype, self._size, self._stride = tensor.dtype, tensor.size(), tensor.stride()
        self._offset = tensor.storage_offset()
        self._stored: _Stored | None = None
        self.asked = False

    def move(self, stored: _Stored) -> _Kept:
        """Keep a note of it instead."""
        stored.handles.add(self)
        self._tensor, self._stored = None, stored
        return self

    def tensor(self) -> Tensor:
        if self._stored is None:
            assert self._tensor is not None
            return self._tensor
        memory = self._stored.ask(self)
        made = torch.empty(0, dtype=self._dtype, device=memory.device)
        return made.set_(memory.untyped_storage(), self._offset, self._size, self._stride)


@dataclass
class _Pass:
    """One forward pass: what was told of, and what autograd keeps of memory that may yet be told of."""

    untouched: frozenset[int]
    stored: dict[int, _Stored] = field(default_factory=dict)
    waiting: defaultdict[int, list[weakref.ref[_Kept]]] = field(default_factory=lambda: defaultdict(list))
    order: list[_Ordered] = field(default_factory=list)

    def find(self, tensor: Tensor) -> _Stored | None:
        """What was told of a tensor's memory; an address may be another tensor's by now."""
        found = self.stored.get(tensor.untyped_storage().data_ptr())
        return None if found is None or found.storage() is None else found


class Offloading:
    """What lies on the host of the passes of one program."""

    def __init__(self, device: torch.device) -> None:
        self.engines = Engines(device)
        self._free: defaultdict[int, list[_Buffer]] = defaultdict(list)
        self._pass: _Pass | None = None
        self._leaving: list[_Ordered] = []

    def buffer(self, num_bytes: int) -> _Buffer:
        """Memory of the host, of an earlier step where there is some."""
        if self._free[num_bytes]:
            return self._free[num_bytes].pop()
        return _Buffer(torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self.engines.device.type == "cuda"))

    def give_back(self, buffer: _Buffer) -> None:
        self._free[buffer.memory.numel()].append(buffer)

    @contextmanager
    def running(self, state: Iterable[Tensor | None]) -> Iterator[None]:
        """For one forward pass over a state, which does not leave the device."""
        self._pass = _Pass(frozenset(x.untyped_storage().data_ptr() for x in state if x is not None))
        try:
            yield
        finally:
            self._pass = None

    def note(self, tensor: Tensor | None) -> None:
        """A tensor was made that is to lie on the host; None stands for one that nobody reads."""
        now, address = self._pass, 0 if tensor is None else tensor.untyped_storage().data_ptr()
        if now is None or tensor is None or not address or address in now.untouched or now.find(tensor) is not None:
            return
        stored = _Stored(self, tensor, now.order[::-1])
        now.stored[address] = stored
        now.order.append((weakref.ref(stored), tensor.untyped_storage().nbytes()))
        for reference in now.waiting.pop(address, ()):
            kept = reference()
            if kept is not None:  # it holds the memory, so that it is the same
                kept.move(stored)
        self._leaving.append(now.order[-1])
        while len(self._leaving) > num_ahead(size for _, size in reversed(self._leaving)):
            left = self._leaving.pop(0)[0]()
            if left is not None:
                left.leave()

    def pack(self, tensor: Tensor) -> Any:
        """What autograd keeps of a tensor."""
        now, address = self._pass, tensor.untyped_storage().data_ptr()
        if now is None or not address or address in now.untouched or _is_yet_to_be_done(tensor):
            return tensor
        stored, kept = now.find(tensor), _Kept(tensor)
        if stored is not None:
            return kept.move(stored)
        now.waiting[address] = [ref for ref in now.waiting[address] if ref() is not None]
        now.waiting[address].append(weakref.ref(kept))
        return kept

    def keep(self, given: Any) -> Any:
        """What a segment that is run again keeps of something it is given: a note of what lies on the host."""
        now = self._pass
        stored = now.find(given) if now is not None and isinstance(given, Tensor) else None
        if stored is None or _is_yet_to_be_done(given):
            return given
        return GivenAgain(_Kept(given).move(stored), given.requires_grad)

    def hooks(self) -> AbstractContextManager[Any]:
        """For one forward pass."""
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def unpack(self, kept: Any) -> Tensor:
        """The tensor again."""
        found: Tensor = kept.tensor() if isinstance(kept, _Kept) else kept
        return found


@dataclass(frozen=True, slots=True)
class GivenAgain:
    """What a segment was given and lies on the host."""

    kept: _Kept
    requires_grad: bool

    def tensor(self) -> Tensor:
        return self.kept.tensor().detach().requires_grad_(self.requires_grad)


def _is_yet_to_be_done(tensor: Tensor) -> bool:
    """Whether its memory holds the conjugate or the negative of what it says."""
    return tensor.is_conj() or tensor.is_neg()


def _bytes_of(tensor: Tensor) -> Tensor:
    """All memory that a tensor lies in, as bytes."""
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage())
