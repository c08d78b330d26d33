"""How long this rank computes for every layer that reads neighbours, forward and backward, without what it waits.

On a CPU seconds are those that its thread works, so that ranks may share cores; on a GPU it is waited for, and halo
exchanges are left out. A layer begins with its aggregation: what stands before the first counts with it. Backward, it
ends where the gradients of its rows have been sent.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

import torch


class LayerClock:
    """What one step takes; `turn` is called between its forward and its backward pass."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: dict[tuple[bool, int], float] = {}
        self._slot, self._began = (False, 0), 0.0
        self._widths: list[int] = []

    @property
    def layer(self) -> int:
        """The one that began last."""
        return max(len(self._widths) - 1, 0)

    @property
    def widths(self) -> tuple[int, ...]:
        """Of the rows that every layer aggregates."""
        return tuple(self._widths)

    def seconds(self) -> list[float]:
        """Of every layer forward, then of every layer backward."""
        slots = [(back, layer) for back in (False, True) for layer in range(len(self._widths))]
        return [self._seconds.get(slot, 0.0) for slot in slots]

    def start(self) -> None:
        """Go on counting."""
        self._began = self._now()

    def stop(self) -> None:
        """Add what was counted to the layer that is at work."""
        self._seconds[self._slot] = self._seconds.get(self._slot, 0.0) + self._now() - self._began

    def enter(self, width: int) -> None:
        """Another layer begins."""
        self.stop()
        self._widths.append(width)
        self._slot = False, self.layer
        self.start()

    def turn(self) -> None:
        """The backward pass begins, with the last layer."""
        self.stop()
        self._slot = True, self.layer
        self.start()

    def leave(self, layer: int) -> None:
        """A layer ends in the backward pass."""
        self.stop()
        self._slot = True, max(layer - 1, 0)
        self.start()

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            return time.perf_counter()
        return time.thread_time()


_CLOCK: ContextVar[LayerClock | None] = ContextVar("conjoin_layer_clock", default=None)


def clock_now() -> LayerClock | None:
    """The clock of the step that is being timed, if one is."""
    return _CLOCK.get()


@contextmanager
def timed_layers(device: torch.device) -> Iterator[LayerClock]:
    """Time the layers of the step inside."""
    clock = LayerClock(device)
    token = _CLOCK.set(clock)
    clock.start()
    try:
        yield clock
        clock.stop()
    finally:
        _CLOCK.reset(token)


@contextmanager
def _paused(clock: LayerClock) -> Iterator[None]:
    clock.stop()
    yield
    clock.start()


def paused(clock: LayerClock | None) -> AbstractContextManager[None]:
    """Count nothing inside."""
    return nullcontext() if clock is None else _paused(clock)
