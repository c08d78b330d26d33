"""Clocks for blocks of calls: the host's on a CPU, events of the device and the host's on CUDA."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from math import inf
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from conjoin.cost.real_calls import Run, tensors_in

Barrier = Callable[[], None]
Slowest = Callable[..., list[float]]
"""For each of some numbers the largest that any rank has."""
_EDGES, _EDGE_ROUNDS = 16, 30
_LEAST_SHARE = 0.1


@dataclass
class Block:
    """Some calls that are timed together, and what their backward asks for."""

    runs: list[Run]
    wanted: list[Tensor]
    made: list[Any] = field(default_factory=list)
    ends: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)

    def forward(self) -> None:
        self.made = [run() for run in self.runs]

    def backward(self) -> None:
        torch.autograd.grad(self.ends, self.wanted, self.gradients, allow_unused=True)

    def join(self) -> None:
        """Between the two: which outputs carry gradients. The gradients themselves are made once."""
        self.ends = [tensor for tensor in tensors_in(self.made) if tensor.requires_grad] if self.wanted else []
        if len(self.gradients) != len(self.ends):
            ones: dict[Any, Tensor] = {}
            kinds = [(end.shape, end.dtype) for end in self.ends]
            self.gradients = [
                ones.setdefault(kind, torch.ones_like(end)) if kind not in ones else ones[kind]
                for kind, end in zip(kinds, self.ends, strict=True)
            ]

    def clear(self) -> None:
        self.made, self.ends = [], []


@dataclass(frozen=True, slots=True)
class Times:
    """One timed block, in seconds a call."""

    forward: float
    backward: float


class CpuClock:
    """Times a block by the host's clock."""

    def __init__(self, block: Block) -> None:
        self._block = block
        self.host = Times(0.0, 0.0)
        self.num_rounds = 1
        """How often the block is run, forward and backward in turn, between one barrier and the next."""
        self.warm_up()

    def warm_up(self) -> None:
        self._block.forward()
        self._block.join()
        if self._block.ends:
            self._block.backward()
        self._block.clear()

    def time(self, barrier: Barrier) -> Times:
        """The mean of all rounds: where ranks share cores, each is stopped in some rounds and not in others."""
        block = self._block
        count = len(block.runs) * self.num_rounds
        forward = backward = 0.0
        barrier()
        for _ in range(self.num_rounds):
            start = time.perf_counter()
            block.forward()
            forward += time.perf_counter() - start
            block.join()
            if block.ends:
                start = time.perf_counter()
                block.backward()
                backward += time.perf_counter() - start
            block.clear()
        return Times(forward / count, backward / count)


class CudaClock:
    """Times a block by events on the device, and by the host's clock: how long it takes to enqueue."""

    def __init__(self, block: Block, device: torch.device) -> None:
        self._block = block
        self._device = device
        self._stream = torch.cuda.current_stream(device)
        self._warm_up()
        idle = [self._time_idle() for _ in range(3)]
        self._idle = Times(median(t.forward for t in idle), median(t.backward for t in idle))
        self._busy: list[tuple[float, float]] = []

    @property
    def host(self) -> Times:
        """Seconds to enqueue each call: onto a busy device, as in training, unless the call waits for the device.

        Of a backward only what it costs in the middle of a model, where gradients come from one call and go to another.
        """
        forward, backward = (median(times) for times in zip(*self._busy, strict=True)) if self._busy else (inf, inf)
        seconds, count = min(backward, self._idle.backward), len(self._block.runs)
        ends, leaves = len(self._block.gradients) / count, len(self._block.wanted) / count
        return Times(min(forward, self._idle.forward), within_model(seconds, ends, leaves, _edges(self._device)))

    def _warm_up(self) -> None:
        for _ in range(2):
            self._time_idle()

    def _time_idle(self) -> Times:
        """Seconds to enqueue each call onto an idle device, without waiting for it."""
        block, count = self._block, len(self._block.runs)
        torch.cuda.synchronize(self._device)
        start = time.perf_counter()
        block.forward()
        forward = time.perf_counter() - start
        block.join()
        torch.cuda.synchronize(self._device)
        backward = 0.0
        if block.ends:
            start = time.perf_counter()
            block.backward()
            backward = time.perf_counter() - start
        torch.cuda.synchronize(self._device)
        block.clear()
        return Times(forward / count, backward / count)

    def time(self, barrier: Barrier) -> Times:
        block, count = self._block, len(self._block.runs)
        barrier()
        forward, host_forward = self._time_events(block.forward, self._idle.forward * count)
        block.join()
        barrier()
        backward = host_backward = 0.0
        if block.ends:
            backward, host_backward = self._time_events(block.backward, self._idle.backward * count)
        block.clear()
        self._busy.append((host_forward / count, host_backward / count))
        return Times(forward / count, backward / count)

    def _time_events(self, enqueue: Callable[[], None], host_seconds: float) -> tuple[float, float]:
        """Seconds of the device and of the host."""
        start, stop = _event(), _event()
        _occupy(self._device, 1.5 * host_seconds + 30e-6)
        start.record(self._stream)
        begun = time.perf_counter()
        enqueue()
        host = time.perf_counter() - begun
        stop.record(self._stream)
        stop.synchronize()
        return float(start.elapsed_time(stop)) / 1e3, host


class Edges(NamedTuple):
    """Seconds of the host for what only blocks have: a tensor that a backward starts from, and one that it ends in."""

    end: float
    leaf: float


def within_model(seconds: float, num_ends: float, num_leaves: float, edges: Edges) -> float:
    """What a backward takes of the host without its edges; no less than a tenth of what was measured.

    >>> round(within_model(40e-6, 1, 2, Edges(10e-6, 5e-6)) * 1e6)
    20
    """
    if not seconds:
        return 0.0
    return max(seconds - num_ends * edges.end - num_leaves * edges.leaf, _LEAST_SHARE * seconds)


@cache
def _edges(device: torch.device) -> Edges:
    """By backwards of next to nothing: of leaves as they are, and of sums of one leaf or two, which launch nothing."""
    leaves = [torch.zeros(1, device=device, requires_grad=True) for _ in range(2 * _EDGES)]
    other, gradient = torch.zeros(1, device=device), torch.ones(1, device=device)

    def seconds(make: Callable[[int], Tensor], wanted: list[Tensor]) -> float:
        found = []
        for _ in range(_EDGE_ROUNDS):
            ends = [make(i) for i in range(_EDGES)]
            torch.cuda.synchronize(device)
            start = time.perf_counter()
            torch.autograd.grad(ends, wanted, [gradient] * _EDGES)
            found.append(time.perf_counter() - start)
        return median(found) / _EDGES

    both = seconds(lambda i: leaves[i], leaves[:_EDGES])
    one = seconds(lambda i: leaves[i] + other, leaves[:_EDGES])
    two = seconds(lambda i: leaves[i] + leaves[i + _EDGES], leaves)
    leaf = min(max(two - one, 0.0), both)
    return Edges(both - leaf, leaf)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


_SCRATCH_BYTES = 2**28
_MAX_FILLS = 300


@cache
def _scratch(device: torch.device) -> tuple[Tensor, float]:
    """Memory larger than the device's caches, and the seconds that filling it takes."""
    scratch = torch.empty(_SCRATCH_BYTES, dtype=torch.uint8, device=device)
    start, stop = _event(), _event()
    for _ in range(3):
        scratch.zero_()
    start.record(torch.cuda.current_stream(device))
    for _ in range(10):
        scratch.zero_()
    stop.record(torch.cuda.current_stream(device))
    stop.synchronize()
    return scratch, start.elapsed_time(stop) / 1e4


def _occupy(device: torch.device, seconds: float) -> None:
    """Give the device something to do for about that long: fills of memory, which also empty its caches."""
    scratch, each = _scratch(device)
    for _ in range(min(_MAX_FILLS, int(seconds / each) + 1)):
        scratch.zero_()
