"""The CUDA clock with a made-up device: what it times, what it keeps apart, and that launches are hidden."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor

from conjoin.cost import clocks
from conjoin.cost.clocks import Block, CpuClock, CudaClock

DEVICE = torch.device("cpu")
FORWARD, BACKWARD = 0.002, 0.004


class FakeEvent:
    """An event of a device that takes half the time the host does."""

    def record(self, stream: object) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: FakeEvent) -> float:
        return (other.at - self.at) * 1e3 / 2


class Sleepy(torch.autograd.Function):
    """Known seconds forward and backward."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        time.sleep(FORWARD)
        return x * 2

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:  # type: ignore[override]
        time.sleep(BACKWARD)
        return gradient * 2


def block(count: int, *, trained: bool = True) -> Block:
    leaves = [torch.ones(3, requires_grad=trained) for _ in range(count)]
    return Block([lambda leaf=leaf: Sleepy.apply(leaf) for leaf in leaves], leaves if trained else [])


@pytest.fixture
def occupied(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    seconds: list[float] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: None)
    monkeypatch.setattr(clocks, "_event", FakeEvent)
    monkeypatch.setattr(clocks, "_occupy", lambda device, wanted: seconds.append(wanted))
    return seconds


def test_device_and_host_are_timed_apart(occupied: list[float]) -> None:
    clock = CudaClock(block(2), DEVICE)
    times = [clock.time(lambda: None) for _ in range(3)]
    assert all(FORWARD / 2 <= each.forward < FORWARD * 20 for each in times)
    assert all(BACKWARD / 2 <= each.backward < BACKWARD * 20 for each in times)
    assert clock.host.forward >= FORWARD and clock.host.backward >= BACKWARD
    assert clock.host.forward > min(each.forward for each in times)


def test_the_device_is_occupied_for_longer_than_enqueuing_takes(occupied: list[float]) -> None:
    clock = CudaClock(block(3), DEVICE)
    clock.time(lambda: None)
    assert len(occupied) == 2 and occupied[0] > 3 * FORWARD and occupied[1] > 3 * BACKWARD


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_without_gradients_backward_takes_nothing(kind: str, occupied: list[float]) -> None:
    made = block(2, trained=False)
    clock = CudaClock(made, DEVICE) if kind == "cuda" else CpuClock(made)
    assert clock.time(lambda: None).backward == 0
    assert clock.host.backward == 0
    assert made.made == [] and made.ends == []


def test_the_cpu_clock() -> None:
    found = CpuClock(block(2)).time(lambda: None)
    assert FORWARD <= found.forward < FORWARD * 20 and BACKWARD <= found.backward < BACKWARD * 20
