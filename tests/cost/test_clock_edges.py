"""What a backward's edges cost the host, by a made-up engine whose prices for ends, leaves and nodes are known."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from conjoin.cost import clocks
from conjoin.cost.clocks import Block, CudaClock, Edges

DEVICE = torch.device("cpu")
MICRO = 1e-6


@dataclass
class Engine:
    """Autograd as it is, on a clock that stands still but for what each call is said to take."""

    end: float
    leaf: float
    node: float
    fixed: float = 0.0
    stumbles: bool = False
    """Whether every fifth call takes a second more."""
    now: float = 0.0
    calls: int = 0
    run: Any = field(default=torch.autograd.grad)

    def grad(self, ends: Sequence[Tensor], wanted: Sequence[Tensor], gradients: Sequence[Tensor], **how: Any) -> Any:
        nodes = {node for end in ends for node in _nodes(end.grad_fn)}
        self.calls += 1
        self.now += self.fixed + len(ends) * self.end + len(wanted) * self.leaf + len(nodes) * self.node
        self.now += float(self.stumbles and self.calls % 5 == 0)
        return self.run(ends, wanted, gradients, **how)


def _nodes(node: Any) -> Iterator[Any]:
    """Those that compute: what only keeps a gradient at a leaf is none."""
    if node is not None and not hasattr(node, "variable"):
        yield node
        for below, _ in node.next_functions:
            yield from _nodes(below)


def place(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: None)
    monkeypatch.setattr(torch.autograd, "grad", engine.grad)
    monkeypatch.setattr(time, "perf_counter", lambda: engine.now)
    clocks._edges.cache_clear()
    return engine


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    clocks._edges.cache_clear()


@pytest.mark.parametrize(("end", "leaf", "node"), [(11, 4, 9), (2, 7, 30), (5, 0, 3), (0, 6, 1)])
@pytest.mark.parametrize("stumbles", [False, True])
def test_ends_and_leaves_are_told_apart(
    end: float, leaf: float, node: float, stumbles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    place(Engine(end * MICRO, leaf * MICRO, node * MICRO, stumbles=stumbles), monkeypatch)
    assert clocks._edges(DEVICE) == pytest.approx(Edges(end * MICRO, leaf * MICRO), abs=1e-12)


def test_no_edge_costs_less_than_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    place(Engine(5 * MICRO, -1 * MICRO, 2 * MICRO), monkeypatch)
    found = clocks._edges(DEVICE)
    assert found.leaf == 0 and found.end == pytest.approx(4 * MICRO)


def test_a_device_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = place(Engine(MICRO, MICRO, MICRO), monkeypatch)
    clocks._edges(DEVICE)
    asked = engine.calls
    assert asked and clocks._edges(DEVICE) and engine.calls == asked


@pytest.mark.parametrize("fixed", [0.0, 40.0])
def test_of_a_block_only_its_nodes_are_left(fixed: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of two operands as they stand in a model: what starts and ends a backward is no part of them."""
    place(Engine(10 * MICRO, 4 * MICRO, 23 * MICRO, fixed * MICRO), monkeypatch)
    leaves = [torch.ones(3, requires_grad=True) for _ in range(32)]
    runs = [partial(torch.mul, leaves[i], leaves[i + 16]) for i in range(16)]
    clock = CudaClock(Block(runs, leaves), DEVICE)
    assert clock.host.backward == pytest.approx(23 * MICRO)
